"""One client of a federation as a Flower app: a cohort of one that keeps its memory on its own disk.

What leaves a client is what the method sends (with most, the model it has just trained), the numbers of its rows, the
gradients it has spent, and of its test rows a sum per metric.  An error leaves it by its kind alone, unless its text is
known to hold no data: the client's own log has the rest.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import math
import os
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from selffl.algorithms import DEFAULT_ALGORITHM, Algorithm
from selffl.algorithms import algorithm as method_of
from selffl.algorithms.kept_optimisers import keeping_optimisers
from selffl.algorithms.local import training_alone
from selffl.algorithms.norms import BatchNorm, check_batch_norm, check_policy
from selffl.algorithms.optimisers import optimiser_of
from selffl.algorithms.options import check_bool
from selffl.algorithms.population import Population
from selffl.algorithms.records import tensors_of
from selffl.algorithms.training_options import TrainingOptions
from selffl.data.federation import Federation, Rows
from selffl.data.preparation import Preparation
from selffl.engines.cohort import check_noisy_gradients
from selffl.engines.flower.memory import ClientMemory, Start
from selffl.engines.flower.messages import (
    ABOUT,
    ARRAYS,
    METRICS,
    PROTOCOL,
    Answer,
    Introduction,
    Order,
    arrays_of,
    differing,
    fingerprint,
    options_of,
    read,
    write,
)
from selffl.engines.flower.records import (
    Templates,
    check_dtype,
    is_finite,
    lone_population,
    models_of,
    pack,
    templates,
    unpack,
)
from selffl.engines.flower.secure import SESSION, SecureSite, Session
from selffl.engines.limits import PrivacyOptions, SumLimits
from selffl.errors import ConfigError, DataError, DivergedError, RefusedError
from selffl.state.checkpoint import load_tensors, save_tensors
from selffl.training.answers import LabelScale, present_model
from selffl.training.blocks import Gradients, Loss, check_gradients, deterministic_cudnn
from selffl.training.evaluation import check_rows, loss_for, numbers_of_rows
from selffl.training.flat import FlatModel, check_parameters
from selffl.training.metrics import Measure, Metric, auc, by_loss, own_metrics
from selffl.training.model import ModelTask

Method = Algorithm[Any, Any, Any, Any]
Data = Federation | tuple[Any, Any, Any, Any]  # of one client, or (x_train, y_train, x_test, y_test)
VIEWS = ("personal", "global")

_log = logging.getLogger(__name__)

# Balanced accuracy over all clients is made of counts by class, which a client does not send; without the log loss the
# messages stay as they were, so that sites of several versions understand each other.
UNSENT = ("balanced_accuracy", "log_loss")


@dataclass(frozen=True)
class Shared:
    """What clients are sent to evaluate."""

    params: Tensor  # [P], the global model
    broadcast: Any = None  # what a closing visit needs, once training is over: all that a client is sent to train
    first: Tensor | None = None  # [P], the model that the run began with, to train alone from and to compare


def client_of(context: Context) -> Hashable:
    """The id of the client on a node: ``client-id`` of its node configuration, or else ``partition-id``."""
    for name in ("client-id", "partition-id"):
        if name in context.node_config:
            client: Hashable = context.node_config[name]
            return client
    raise RefusedError(
        "the node has neither client-id nor partition-id; expected one of them in its configuration. Start the node "
        "with --node-config 'client-id=\"…\"'."
    )


def memory_of(context: Context) -> Path:
    """Where a node keeps memories: its ``memory-dir``, or else ``$SELFFL_MEMORY``, or else ``~/.selffl/memory``."""
    stated = context.node_config.get("memory-dir") or os.environ.get("SELFFL_MEMORY")
    return Path(str(stated)) if stated else Path.home() / ".selffl" / "memory"


def algorithm_of(run_config: Mapping[str, Any], given: str | Method) -> str | Method:
    """The method: the one that the run configuration names, or else the app's own."""
    name = run_config.get("algorithm", given)
    if name is not given and not isinstance(name, str):
        raise ConfigError(f"algorithm is {name!r} in the run configuration; expected the name of a method.")
    return name


@dataclass(frozen=True)
class OwnRows:
    """What a client computes of: rows to train and to test on, the loss of the first, the measure of both."""

    train: Rows
    test: Rows
    loss: Loss
    measure: Measure
    preparation: Preparation | None = None
    label_scale: LabelScale = field(default_factory=LabelScale)


@dataclass(frozen=True)
class Site:
    """What a client computes with, whichever round it is.

    Attributes:
        model: The module, flat, on its device.
        algorithm: The method.
        load_data: The rows of a client, by its id.
        memory_dir: Where memories and personal models are kept.
        loss: ``loss(outputs, labels)``, the mean over a minibatch; none: it follows from labels and outputs.
        gradients: As in `selffl.train`.
        metrics: The user's own, by name.
        secure_sums: Whether the site refuses to send anything that is not masked.
    """

    model: FlatModel
    algorithm: Method
    load_data: Callable[[Any], Data]
    memory_dir: Path
    loss: Loss | None
    gradients: Gradients
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    secure_sums: bool = False

    def introduction(self, client: Hashable) -> Introduction:
        """Who is there."""
        own = self._rows(client)
        prepared = "" if own.preparation is None else own.preparation.digest()
        return Introduction(PROTOCOL, str(client), len(own.train.labels), fingerprint(self.model), prepared)

    def train(self, client: Hashable, order: Order, content: RecordDict) -> tuple[Answer, ArrayRecord]:
        """One round: what the method makes of what was received, of the memory and of the rows."""
        self._check(client, order)
        arrays, is_secure = arrays_of(content), SESSION in content.config_records
        if self.secure_sums and not is_secure:
            raise RefusedError(
                f"the server asks client {client} for a plain answer; expected a secure sum, as its site insists on "
                "(secure_sums=True). Have the server make secure sums, or the site not insist."
            )
        own = self._rows(client, is_tested=False)
        method = self._method_for(order)
        expected = templates(method, self.model)
        memory = self._memory(order, expected)
        number = order.round_number
        start = Start(memory.after(number - order.closing), 0) if order.closing else memory.before(number)
        task = self._task(own, order, order.round_number)
        upload, after = method.client_round(unpack(expected.broadcast, arrays), start.memory, task)
        check_noisy_gradients(method, task)
        privacy = PrivacyOptions(**json.loads(order.privacy))
        if privacy.clip is not None:
            upload = SumLimits(method, privacy).bound(upload)
        # Kept, they would spoil every round to come.  In an upload NaN may stand for what is not known yet.
        models = models_of(upload, self.model.num_numbers)
        for name, tensor in (*tensors_of(after).items(), *models.items()):
            if not is_finite(tensor):
                raise DivergedError(
                    f"{name} of client {order.client} is not finite after round {order.round_number}; expected finite "
                    "numbers. Lower the learning rate or the penalty."
                )
        if not order.closing:
            memory.keep(order.round_number, start, after)
        spent = int(task.num_gradients.sum())
        if is_secure:
            hidden = self.secure_site(client, order.experiment).mask_answer(content, method, upload, spent)
            return Answer(order.experiment, order.round_number, order.client, 0), hidden
        return Answer(order.experiment, order.round_number, order.client, spent), pack(upload)

    def secure_site(self, client: Hashable, experiment: str) -> SecureSite:
        """The client in secure sums of an experiment."""
        path = ClientMemory(self.memory_dir, experiment, str(client), None).path
        return SecureSite(str(client), path.with_suffix(""))

    def evaluate(self, client: Hashable, order: Order, arrays: ArrayRecord) -> tuple[Answer, MetricRecord]:
        """Sums over the test rows after a round, with the personal and with the global model."""
        self._check(client, order)
        own = self._rows(client)
        sent = unpack(self._read_shared(order), arrays)
        personal = self._personal(own, order, sent)
        self._keep_model(order, personal[0], own)
        found: dict[str, int | float] = {"num_train": len(own.train.labels), "num_test": len(own.test.labels)}
        for view, params in zip(VIEWS, (personal, sent.params), strict=True):
            found |= self._measure_model(client, own, view, params)[0]
        return Answer(order.experiment, order.round_number, order.client, 0), MetricRecord(found)  # type: ignore[arg-type]

    def train_alone(self, client: Hashable, order: Order, arrays: ArrayRecord) -> tuple[Answer, MetricRecord]:
        """The same sums after as many rounds by itself, and the rows that are won and lost by joining.

        From the model that the run began with; nothing of it is kept.
        """
        self._check(client, order)
        own, method = self._rows(client), self._keeping(order, training_alone(self.algorithm))
        sent = unpack(self._read_shared(order), arrays)
        assert sent.first is not None
        server = method.start(sent.first, Population(1))
        broadcast = method.broadcast(server, torch.zeros(1, dtype=torch.int64))
        memory = method.newcomer(sent.first.unsqueeze(0))
        for number in json.loads(order.alone):
            _, memory = method.client_round(broadcast, memory, self._task(own, order, number).at_home())
        params = method.personal(sent.first, memory, self._task(own, order, order.round_number + 1).at_home())
        is_lost = not is_finite(params)
        found, numbers = self._measure_model(client, own, "alone", torch.zeros_like(params) if is_lost else params)
        found = dict.fromkeys(found, math.nan) if is_lost else found
        found |= {"num_test": len(own.test.labels), "num_won": 0, "num_lost": 0}
        if own.measure.metrics[0] == "accuracy" and not is_lost:
            _, joined = self._measure_model(client, own, "personal", self._personal(own, order, sent))
            ours, theirs = (
                own.measure.averaged("accuracy", each, own.test.labels).bool() for each in (joined, numbers)
            )
            found |= {"num_won": int((ours & ~theirs).sum()), "num_lost": int((theirs & ~ours).sum())}
        return Answer(order.experiment, order.round_number, order.client, 0), MetricRecord(found)  # type: ignore[arg-type]

    def _personal(self, own: OwnRows, order: Order, sent: Shared) -> Tensor:
        """The client's model after a round, ``[1, P]``; once training is over, after its closing visit.

        That leaves its memory as it is: training may go on from it.
        """
        method = self._keeping(order, self.algorithm)
        number, memory = order.round_number, self._memory(order, templates(method, self.model))
        remembered = memory.after(number)
        if sent.broadcast is not None and memory.has_trained(number):  # who never took part has the global model (D10)
            task = self._task(own, order, number + 1).at_home()
            remembered = method.closing_visit(sent.broadcast, remembered, task, number)
        # The minibatches of a method that adapts before it is evaluated are those of the next round, as everywhere.
        task = self._task(own, order, number + 1).at_home()
        personal = method.personal(sent.params, remembered, task).expand(1, -1)
        if not is_finite(personal):
            raise DivergedError(
                f"the personal model of client {order.client} is not finite after round {order.round_number}; "
                "expected finite numbers. Lower the learning rate or the penalty."
            )
        return personal

    def _measure_model(
        self, client: Hashable, own: OwnRows, view: str, params: Tensor
    ) -> tuple[dict[str, int | float], tuple[Tensor, ...]]:
        """What a model comes to on the test rows: a number for each metric, and the numbers of each row."""
        test, measure = own.test, own.measure
        found: dict[str, int | float] = {f"{view}.{name}": math.nan for name in self.metrics}

        def measure_own(_: int, outputs: Tensor, labels: Tensor) -> None:
            for name, metric in self.metrics.items():
                found[f"{view}.{name}"] = metric.of_client(name, client, outputs, labels)

        on_client = own.label_scale.for_user(measure_own) if self.metrics else None
        numbers = numbers_of_rows(self.model, params, test, measure, self.gradients, on_client)
        of_task: dict[str, int | float] = {
            f"{view}.{metric}": auc(numbers[0], test.labels)
            if metric == "auc"
            else float(measure.averaged(metric, numbers, test.labels).double().sum())
            for metric in measure.metrics
            if metric not in UNSENT
        }
        return of_task | found, numbers

    def _method_for(self, order: Order) -> Method:
        """What is done in a round, or in a closing round after the last."""
        method = self._keeping(order, self.algorithm)
        if not order.closing:
            return method
        rounds = method.closing_rounds(order.round_number - order.closing, lone_population(self.model))
        if not 0 < order.closing <= len(rounds):
            raise RefusedError(
                f"the server asks client {order.client} for closing round {order.closing}, and {method.name} has "
                f"{len(rounds)} of them; expected a round of training. Give server and client the same method."
            )
        return rounds[order.closing - 1]

    def _read_shared(self, order: Order) -> Shared:
        """What comes with an order to evaluate: names, shapes and types."""
        has_visit = order.is_over and self.algorithm.has_closing_visit
        broadcast = templates(self.algorithm, self.model).broadcast if has_visit else None
        return Shared(self.model.params, broadcast, self.model.params if order.alone else None)

    def _keeping(self, order: Order, method: Method) -> Method:
        """The method, with a client that keeps its optimisers where the order says so."""
        keep = TrainingOptions(**json.loads(order.training)).keep_optimiser
        return keeping_optimisers(method, optimiser_of(**json.loads(order.optimiser)), keep=keep)

    def _memory(self, order: Order, expected: Templates) -> ClientMemory:
        return ClientMemory(self.memory_dir, order.experiment, order.client, expected.memory, order.run)

    def _keep_model(self, order: Order, params: Tensor, own: OwnRows) -> None:
        path = ClientMemory(self.memory_dir, order.experiment, order.client, None).model_path
        path.parent.mkdir(parents=True, exist_ok=True)
        about: dict[str, Any] = {"experiment": order.experiment, "client": order.client, "round": order.round_number}
        if own.preparation is not None:
            about |= {"preparation": own.preparation.to_dict(), "label_scale": asdict(own.label_scale)}
        about |= {"batch_norm": self.model.batch_norm}
        save_tensors(path, self.model.parts(params), about)

    def _task(self, own: OwnRows, order: Order, round_number: int) -> ModelTask:
        first = torch.zeros(1, dtype=torch.int64)
        return ModelTask(
            self.model, own.loss, own.train, first, order.learning_rate, order.batch_size, order.seed, round_number,
            self.gradients, keys=first + order.number, optimiser=optimiser_of(**json.loads(order.optimiser)),
            options=TrainingOptions(**json.loads(order.training)), is_secret=True,
        )  # fmt: skip

    def _rows(self, client: Hashable, *, is_tested: bool = True) -> OwnRows:
        """A client's rows, in the model's precision and on its device, their loss and their measure.

        Rows to test on are checked only where they are used: when a client says who it is, and where it evaluates.
        """
        data = self.load_data(client)
        if isinstance(data, Federation):
            if data.num_clients != 1:
                raise DataError(f"load_data({client!r}) gives {data.num_clients} clients; expected one.")
            preparation = data.preparation
        else:
            preparation = None
            x_train, y_train, x_test, y_test = data
            data = Federation([client], Rows.single_client(x_train, y_train), Rows.single_client(x_test, y_test))
        loss = self.loss or loss_for(self.model, data.train, preparation)
        label_scale = LabelScale.of(preparation, loss)
        scaled = label_scale.scale_rows(data)
        device, dtype = self.model.device, self.model.dtype
        train, test = (part.to(device, dtype) for part in (scaled.train, scaled.test))
        measures = [
            check_rows(self.model, loss, part, [client])
            for part in (train, test)
            if part is train or (is_tested and len(part.labels))
        ]
        measure = measures[0] if all(found == measures[0] for found in measures) else by_loss(loss)
        return OwnRows(train, test, loss, label_scale.in_user_units(measure), preparation, label_scale)

    def _check(self, client: Hashable, order: Order) -> None:
        """Refuse an order that is for another client, or for other settings than this site's."""
        own = {
            "protocol": PROTOCOL,
            "client": str(client),
            "algorithm": self.algorithm.name,
            "options": options_of(self.algorithm),
            "fingerprint": fingerprint(self.model),
        }
        for name, expected in own.items():
            found = getattr(order, name)
            if found != expected and name == "options":
                found, expected = differing(str(found), str(expected))
            if found != expected:
                raise RefusedError(
                    f"the server's {name} is {found!r}; expected {expected!r}, as client {client} has it. Give both "
                    "the same."
                )


def personal_model(model: nn.Module, memory_dir: str | Path, experiment: str, client: Hashable) -> nn.Module:
    """A client's own model, as of its last evaluation, read where it lies: on the client's own disk.

    Where its rows came from a table, it takes rows, and answers, in the table's own units (`selffl.PreparedModel`).
    """
    tensors, about = load_tensors(ClientMemory(Path(memory_dir), experiment, str(client), None).model_path)
    flat = FlatModel(copy.deepcopy(model), about.get("batch_norm", "averaged"))
    module = flat.load(flat.flatten(tensors).to(next(iter(tensors.values())).dtype))
    known = about.get("preparation")
    preparation = None if known is None else Preparation.from_dict(known)
    return present_model(module, preparation, LabelScale(**about.get("label_scale", {})))


def client_app(
    model: nn.Module,
    load_data: Callable[[Any], Data],
    algorithm: str | Method = DEFAULT_ALGORITHM,
    *,
    memory_dir: str | Path | None = None,
    loss: Loss | None = None,
    identify: Callable[[Context], Hashable] = client_of,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    gradients: Gradients = "auto",
    metrics: Mapping[str, Any] | None = None,
    batch_norm: BatchNorm | None = None,
    secure_sums: bool = False,
) -> ClientApp:
    """The app that a client runs.

    Args:
        model: the module; its trained values are the server's to send.
        load_data: the rows of a client by its id, as ``(x_train, y_train, x_test, y_test)``, each as
            `Federation.from_arrays` takes it, or as a `Federation` of that one client; called for every
            message, since Flower may start a process for each.
        algorithm: a name, or a method with options; the server has to have the same. A name in the run configuration
            (``algorithm``) takes its place.
        memory_dir: a folder that outlives the process: there the client's memory is kept. None: ``memory-dir`` of the
            node's configuration, or else ``$SELFFL_MEMORY``, or else ``~/.selffl/memory``.
        loss: ``loss(outputs, labels)``, the mean over a minibatch; none: it follows from the client's labels and the
            model's outputs, as in `selffl.train`.
        identify: the client's id, from Flower's context of the node.
        device: where it is computed.
        dtype: of parameters and features; the server has to have the same.
        gradients: as in `selffl.train`.
        metrics: more to measure, by name, as in `selffl.train`; the server has to know them by the same names. A client
            sends one number for each.
        batch_norm: as in `selffl.train`; the server has to have the same. ``batch-norm`` in the run configuration takes
            its place.
        secure_sums: whether the client refuses to answer a round without a secure sum. With one where the server makes
            it, it takes part anyway.
    """
    check_bool("secure_sums", secure_sums)
    check_gradients(gradients)
    measured = own_metrics(metrics)
    check_dtype(dtype)
    check_parameters(model)
    check_policy(batch_norm)

    @functools.cache
    def flat_of(policy: BatchNorm) -> FlatModel:
        return FlatModel(copy.deepcopy(model).to(torch.device(device), dtype), policy)

    def model_for(chosen: Method, asked: Any) -> FlatModel:
        check_policy(asked)
        policy = asked or chosen.batch_norm
        flat = flat_of(policy)
        check_batch_norm(policy, chosen, num_statistics=flat.num_statistics, num_kept=len(flat.kept_layers))
        return flat

    # A name that there is not, or a module that cannot be trained, should be said at once.
    flat_of(batch_norm or (method_of(algorithm) if isinstance(algorithm, str) else algorithm).batch_norm)

    def site_of(context: Context) -> Site:
        method = algorithm_of(context.run_config, algorithm)
        place = memory_of(context) if memory_dir is None else Path(memory_dir)
        chosen = method_of(method) if isinstance(method, str) else method
        flat = model_for(chosen, context.run_config.get("batch-norm") or batch_norm)
        return Site(flat, chosen, load_data, place, loss, gradients, measured, secure_sums)

    app = ClientApp()

    @app.query()
    @hide_error_details
    def query(message: Message, context: Context) -> Message:
        introduction = site_of(context).introduction(identify(context))
        return Message(RecordDict({ABOUT: write(introduction)}), reply_to=message)

    @app.train()
    @hide_error_details
    def train(message: Message, context: Context) -> Message:
        order = read(Order, message.content)
        answer, arrays = site_of(context).train(identify(context), order, message.content)
        return Message(RecordDict({ABOUT: write(answer), ARRAYS: arrays}), reply_to=message)

    for action in ("keys", "shares", "reveal"):

        @app.query(action)
        @hide_error_details
        def take_part(message: Message, context: Context, action: str = action) -> Message:
            experiment = read(Session, message.content).experiment
            site = site_of(context).secure_site(identify(context), experiment)
            return Message(getattr(site, action)(message.content), reply_to=message)

    @app.evaluate()
    @hide_error_details
    def evaluate(message: Message, context: Context) -> Message:
        order = read(Order, message.content)
        site = site_of(context)
        evaluated = site.train_alone if order.alone else site.evaluate
        answer, found = evaluated(identify(context), order, arrays_of(message.content))
        return Message(RecordDict({ABOUT: write(answer), METRICS: found}), reply_to=message)

    return app


def hide_error_details(handler: Callable[[Message, Context], Message]) -> Callable[[Message, Context], Message]:
    """The handler with errors that tell their kind alone: Flower sends the server their text, and it may hold rows."""

    @functools.wraps(handler)
    def handled(message: Message, context: Context) -> Message:
        try:
            with deterministic_cudnn():
                return handler(message, context)
        except (RefusedError, DivergedError):  # of our own words
            raise
        except Exception as error:
            _log.exception("this message could not be answered; the server is told the kind of error alone.")
            raise RuntimeError(f"{type(error).__name__}; the client's own log has the reason") from None

    return handled
