"""What one client computes, whichever message asks for it: a cohort of one that keeps its memory on its own disk.

What leaves a client is what the method sends (with most, the model it has just trained), the numbers of its rows, the
gradients it has spent, and of its test rows a sum per metric.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from torch import Tensor

from selffl.algorithms import Algorithm
from selffl.algorithms.kept_optimisers import keeping_optimisers
from selffl.algorithms.local import training_alone
from selffl.algorithms.optimisers import optimiser_of
from selffl.algorithms.population import Population
from selffl.algorithms.records import tensors_of
from selffl.algorithms.training_options import TrainingOptions
from selffl.data.federation import Federation, Rows
from selffl.data.preparation import Preparation
from selffl.engines.cohort import check_noisy_gradients
from selffl.engines.flower.memory import ClientMemory, Start
from selffl.engines.flower.messages import (
    PROTOCOL,
    Answer,
    Introduction,
    Order,
    arrays_of,
    differing,
    fingerprint,
    options_of,
)
from selffl.engines.flower.records import (
    Templates,
    is_finite,
    lone_population,
    models_of,
    pack,
    templates,
    unpack,
    withheld_by,
)
from selffl.engines.flower.secure import SESSION, SecureSite
from selffl.engines.limits import PrivacyOptions, SumLimits
from selffl.errors import DataError, DivergedError, RefusedError
from selffl.state.checkpoint import save_tensors
from selffl.training.answers import LabelScale
from selffl.training.blocks import Gradients, Loss
from selffl.training.evaluation import check_rows, loss_for, numbers_of_rows
from selffl.training.flat import FlatModel
from selffl.training.metrics import Measure, Metric, auc, by_loss
from selffl.training.model import ModelTask

Method = Algorithm[Any, Any, Any, Any]
Data = Federation | tuple[Any, Any, Any, Any]  # of one client, or (x_train, y_train, x_test, y_test)
VIEWS = ("personal", "global")

# Balanced accuracy over all clients is made of counts by class, which a client does not send; without the log loss the
# messages stay as they were, so that sites of several versions understand each other.
UNSENT = ("balanced_accuracy", "log_loss")


@dataclass(frozen=True)
class Shared:
    """What clients are sent to evaluate."""

    params: Tensor  # [P], the global model
    broadcast: Any = None  # what a closing visit needs, once training is over: all that a client is sent to train
    first: Tensor | None = None  # [P], the model that the run began with, to train alone from and to compare


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
class ClientSite:
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
        return Answer(order.experiment, order.round_number, order.client, spent), pack(
            upload, withheld_by(method, self.model)
        )

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
        """Sums over the test rows after as many rounds by itself, and the rows that are won and lost by joining.

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
