"""`selffl.train`: a model, a federation and a method in; a `Run` with a personal model per client out."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from selffl.algorithms import ALGORITHMS, algorithm
from selffl.algorithms.optimisers import Optimiser, check_optimiser, optimiser_of
from selffl.algorithms.options import above, at_least, one_of
from selffl.data.federation import Federation, check_seed
from selffl.data.registry import load as load_data
from selffl.engines.cohort import RunState
from selffl.errors import CheckpointError, ConfigError
from selffl.models import build
from selffl.runs import folder as files
from selffl.runs.evaluation import Evaluation
from selffl.runs.export import Precision, client_about, position_of, save_state_dict, write_personal
from selffl.runs.folder import Records, Row, RunConfig, RunFolder
from selffl.runs.loop import Method, OnRound, Training, every_of, go_on, history_columns, partition_rows, summary
from selffl.runs.trackers import Choice, Tracker, followers, tracked, trackers_of
from selffl.state.checkpoint import load_tensors
from selffl.state.files import locked, write_csv
from selffl.training.blocks import Gradients, Loss
from selffl.training.metrics import own_metrics

Warm = Mapping[str, Tensor]  # a state_dict


@dataclass
class Run:
    """A trained federation: its records, and a model for everybody.

    Attributes:
        config: What was asked for.
        history: One row per round, as dictionaries (``pandas.DataFrame(run.history)`` makes a table).
        clients: One row per client.
        summary: The run in one row.
        participation: One row per client and round it took part in, for methods that choose their steps.
    """

    config: RunConfig
    history: list[Row]
    clients: list[Row]
    summary: Row
    participation: list[Row]
    _training: Training
    _state: RunState

    @property
    def federation(self) -> Federation:
        """The rows it was trained on."""
        return self._training.federation

    def global_model(self) -> nn.Module:
        """The shared model."""
        return self._training.model.load(self._state.server.params)

    def personal_model(self, client: Hashable) -> nn.Module:
        """The model of one client, by its id."""
        return self._training.model.load(self._personal(position_of(client, list(self.federation.clients))))

    def _personal(self, position: int) -> Tensor:
        """One at a time, so that a model has the same bits whoever asks for it."""
        where = torch.tensor([position], device=self._state.num_gradients.device)
        return self._training.engine.personal(self._state, where)[0]

    def export(
        self,
        path: str | Path,
        clients: Sequence[Hashable] | None = None,
        *,
        precision: Precision = "exact",
        full: bool = False,
    ) -> None:
        """Write personal models into one safetensors file: the global model, and of each client what differs from it.

        `selffl.PersonalModels` reads it, without unpickling anything.

        Args:
            path: the file.
            clients: whose models; none: everybody's.
            precision: ``exact`` keeps every bit.  ``float16`` and ``bfloat16`` halve what a client's float32 parameters
                take: differences to the global model are rounded to 11 or 8 significant bits, which no parameter feels
                by more than 2⁻¹¹ or 2⁻⁸ of the largest difference in its tensor (and the rounding of its own type); the
                largest error, as measured, is in the file.
            full: write the whole model of one client as a plain state_dict instead, for
                ``module.load_state_dict(safetensors.torch.load_file(path))`` where there is no selffl; a name that ends
                in ``.pt`` gives a file for ``torch.load``.
        """
        if isinstance(clients, str):
            raise ConfigError(f"clients is {clients!r}; expected a list of ids, such as [{clients!r}].")
        ids = list(self.federation.clients)
        chosen = ids if clients is None else list(dict.fromkeys(clients))
        places = [position_of(client, ids) for client in chosen]
        about = {"algorithm": self.config.algorithm, "data": self.config.data, "round": self._state.round_number}
        if full:
            if len(chosen) != 1 or precision != "exact":
                raise ConfigError(
                    f"full=True is given for {len(chosen)} clients in precision {precision!r}; expected one client, "
                    "exact. Name it in clients, or leave out full."
                )
            save_state_dict(Path(path), self.personal_model(chosen[0]).state_dict(), about | {"client": chosen[0]})
            return
        known = {row["client"]: client_about(row) for row in self.clients}
        variance = getattr(self._state.server, "inter_variance", None)
        write_personal(
            Path(path),
            self.global_model(),
            (self._training.model.parts(self._personal(place)) for place in places),
            [ids[place] for place in places],
            about
            | {
                "seed": self.config.seed,
                "inter_variance": None if variance is None else float(variance),
                "module": type(self._training.module).__name__,
                "model": self.config.model,
                "rows": [known.get(ids[place], {}) for place in places],
            },
            precision,
        )

    def evaluate(self, *, fine_tune: Sequence[int] = ()) -> Evaluation:
        """The final models on the rows that the run was evaluated on: one number per row and view.

        ``run.evaluate().numbers["personal"]`` is, row by row of ``run.federation.test``, whether the answer is right;
        for two classes the log-odds of class 1, for values the squared error (`selffl.training.metrics`).
        """
        return self._training.evaluation(self._state, fine_tune=fine_tune)

    def __repr__(self) -> str:
        """What it is and how it did, in a line."""
        names = ("algorithm", "data", "rounds", f"weighted_{self.config.metrics[0]}", "status")
        shown = {name: self.summary.get(name) for name in names}
        return f"Run({', '.join(f'{key}={value!r}' for key, value in shown.items())})"

    def save(self, path: str | Path) -> None:
        """Write the run into a folder of its own; `selffl.load` reads it."""
        target = Path(path)
        _refuse_if_taken(target)
        records = Records(self.history, self.participation, self.clients, self.summary)
        _begin(target, self._training, records, self._state, keep_rows=True)
        self.config = self._training.config


def train(
    model: nn.Module | str,
    federation: Federation,
    algorithm: str | Method = "self-fl",
    *,
    rounds: int = 200,
    participation: float = 0.1,
    learning_rate: float = 0.03,
    batch_size: int = 10,
    seed: int = 0,
    device: str = "cpu",
    out: str | Path | None = None,
    model_options: Mapping[str, Any] | None = None,
    loss: Loss = nn.functional.cross_entropy,
    start: Run | str | Path | nn.Module | Warm | None = None,
    evaluate_every: int | None = None,
    evaluate_on: Literal["test", "validation"] = "test",
    evaluate_train: bool = False,
    fine_tune: Sequence[int] = (),
    checkpoint_every: int | None = None,
    chunk_size: int | None = None,
    gradients: Gradients = "auto",
    dtype: torch.dtype = torch.float32,
    keep_rows: bool = True,
    on_round: OnRound | None = None,
    metrics: Mapping[str, Any] | None = None,
    optimiser: str | Optimiser = "sgd",
    tracker: Choice | None = None,
) -> Run:
    """Train one model per client.

    The same seed gives the same numbers, whatever else runs, and after a resume; the module given is left as it is.

    Args:
        model: a module without running statistics, or the name of one of `selffl.models.MODELS`.
        federation: whose rows.
        algorithm: a name, or a method with options: ``selffl.algorithm("ditto", penalty=0.1)``.
        rounds: how many.
        participation: C, the share of clients in a round.
        learning_rate: η.
        batch_size: B.
        seed: of cohorts, minibatches and, for a model given by name, its first weights.
        device: ``cpu``, ``cuda``, or another device of torch's.
        out: folder for the run's records and checkpoints, written as it goes; none: nothing is written.
        model_options: of a model given by name, such as ``{"hidden": 64}`` for ``lstm``.
        loss: ``loss(outputs, labels)``, the mean over a minibatch.  What is measured follows from it and from the
            labels: accuracy for classes, with AUC where there are two, error for values, else the loss itself
            (`selffl.training.metrics`).
        start: the first model, if not the module's own: a run, the folder of one, a module or a
            state_dict.
        evaluate_every: rounds between evaluations (the last round always has one); none: a twentieth of the rounds.
        evaluate_on: ``test`` rows, or ``validation`` rows for choosing options.
        evaluate_train: whether the same on training rows is noted beside it, as ``train_accuracy``.
        fine_tune: numbers of local steps after which the final models are evaluated once more, by names of their own.
        checkpoint_every: rounds between checkpoints; none: at every evaluation; 0: never.
        chunk_size: clients that train at once; none: as many as fit.
        gradients: how a cohort's gradients are computed: ``vmap``, ``loop`` or ``unfold``, or ``auto`` for a measured
            rule; they agree to rounding.
        dtype: of parameters and features.
        keep_rows: whether ``out`` gets a copy of the user's own rows, so that `resume` needs nothing else.
        on_round: called with each row of the history.
        metrics: more to measure, by name: functions ``(outputs, labels) -> number`` of all of a client's evaluated
            rows, metrics of torchmetrics, or a `selffl.Metric` that says whether higher is better.  A metric called f1
            is reported beside the others: ``f1`` and ``global_f1`` of each client, ``weighted_f1`` and so on of all.
        optimiser: of the clients' local steps: ``sgd``, ``momentum`` or ``adam``, or one with options such as
            ``selffl.algorithms.Adam(beta2=0.99)``; for methods that do not need plain gradient steps (self-fl does).
            It starts anew in every round.
        tracker: ``tensorboard``, ``mlflow`` or ``wandb``, which write files beside the run's (`selffl.runs.trackers`
            says where), an object with ``begin``, ``log`` and ``end``, or several of these in a list.

    Returns:
        The run.

    Raises:
        ConfigError: an option that cannot work, or a folder that already holds a run.
        DataError: rows that the model cannot take.
        DivergedError: training left the finite numbers; what was recorded until then is kept.
    """
    name, method = named_method(algorithm)
    if not isinstance(federation, Federation):
        raise ConfigError(
            f"federation is a {type(federation).__name__}; expected a Federation, such as "
            "selffl.Federation.from_arrays(x, y, client) or .from_frame(frame, client, label) makes."
        )
    if isinstance(loss, type):
        raise ConfigError(f"loss is the class {loss.__name__}; expected a function or an instance, {loss.__name__}().")
    if not isinstance(model_options or {}, Mapping):
        raise ConfigError(f"model_options is {model_options!r}; expected a dictionary, such as {{'hidden': 64}}.")
    if not callable(loss):
        raise ConfigError(f"loss is {loss!r}; expected a function, such as torch.nn.functional.cross_entropy.")
    check_seed(seed)
    measured, steps_by = own_metrics(metrics), optimiser_of(optimiser)
    check_optimiser(steps_by, method)
    module, recipe = _module(model, federation, seed, model_options or {})
    for option, value in (("rounds", rounds), ("batch_size", batch_size)):
        at_least(option, value, 1)
    above("learning_rate", learning_rate, 0.0)
    one_of("evaluate_on", evaluate_on, ("test", "validation"))
    for option, every in (("evaluate_every", evaluate_every), ("checkpoint_every", checkpoint_every)):
        if every is not None:
            at_least(option, every, 0)
    if isinstance(fine_tune, str) or not isinstance(fine_tune, Sequence):
        raise ConfigError(f"fine_tune is {fine_tune!r}; expected a list of numbers of steps, such as (20,).")
    for steps in fine_tune:
        at_least("fine_tune", steps, 1)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"dtype is {dtype!r}; expected a floating-point type of torch's, such as torch.float32.")
    if on_round is not None and not callable(on_round):
        raise ConfigError(f"on_round is {on_round!r}; expected a function of one row.")
    if out is not None and not isinstance(out, str | Path):
        raise ConfigError(f"out is {out!r}; expected the name of a folder.")
    if chunk_size is not None:
        at_least("chunk_size", chunk_size, 1)
    check_device(device)
    every = every_of(rounds, evaluate_every)
    config = RunConfig(
        algorithm=name,
        options=dataclasses.asdict(method) if dataclasses.is_dataclass(method) else {},
        rounds=rounds,
        participation=participation,
        learning_rate=learning_rate,
        batch_size=batch_size,
        seed=seed,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        chunk_size=chunk_size,
        gradients=gradients,
        evaluate_every=every,
        evaluate_on=evaluate_on,
        evaluate_train=evaluate_train,
        fine_tune=tuple(sorted(set(fine_tune))),
        checkpoint_every=(every or rounds) if checkpoint_every is None else checkpoint_every,
        data="arrays" if federation.source is None else str(federation.source["name"]),
        source=None if federation.source is None else dict(federation.source),
        fingerprint="",  # taken when the run is written
        model=recipe,
        loss=_name_of(loss),
        has_own_method=not is_named(name, method),
        own_metrics={own: bool(metric.higher_is_better) for own, metric in measured.items()},
        optimiser={"name": steps_by.name, **vars(steps_by)},
        is_warm=start is not None,
    )
    training = Training(config, method, module, loss, federation, measured)
    trackers = trackers_of(tracker)
    state = training.engine.start(_first(training, start))
    if out is None:
        return _trained(training, state, Records(), None, 0.0, on_round, trackers)
    _refuse_if_taken(Path(out))
    with locked(Path(out)):
        folder = _begin(Path(out), training, Records(), state, keep_rows)
        return _trained(training, state, Records(), folder, 0.0, on_round, trackers)


def resume(
    path: str | Path,
    *,
    model: nn.Module | None = None,
    loss: Loss | None = None,
    algorithm: Method | None = None,
    federation: Federation | None = None,
    rounds: int | None = None,
    device: str | None = None,
    on_round: OnRound | None = None,
    metrics: Mapping[str, Any] | None = None,
    tracker: Choice | None = None,
) -> Run:
    """Take an interrupted run up again, from its last checkpoint; one that is finished is returned as it is.

    Args:
        path: the run's folder.
        model: the module, if the one in the folder cannot or should not be unpickled; nothing is, then.
        loss: likewise, if it is not one of torch's.
        algorithm: likewise, if it is not one of the registry's.
        federation: the rows, if they are not in the folder.
        rounds: go on to this round instead of the one first asked for.
        device: another device; the numbers may then differ in their last bits.
        on_round: called with each further row of the history.
        metrics: the user's own metrics, likewise, by the names they have in the run.
        tracker: as in `train`; none: those by name that follow the run already, which go on where they were.
    """
    place = Path(path)
    trackers = followers(place) if tracker is None else trackers_of(tracker)
    training = _restored(place, _Given(model, loss, algorithm, federation, metrics), rounds, device)
    if not (place / files.CHECKPOINT).is_file():
        raise CheckpointError(f"{place} holds no checkpoint; expected a run with checkpoint_every above 0.")
    state, seconds = files.read_checkpoint(place, training.engine.start(training.model.params))
    if state.round_number > training.config.rounds:
        raise ConfigError(
            f"rounds is {training.config.rounds}, and the run is at round {state.round_number}; expected that or more."
        )
    found = _records(place, training.federation)
    records = found.up_to(state.round_number)
    if [row["round"] for row in records.history] != list(range(1, state.round_number + 1)):
        raise CheckpointError(
            f"{place / files.HISTORY} lacks rounds before the checkpoint of round {state.round_number}; expected all. "
            "Load the run for its models, or start it anew."
        )
    if state.round_number == training.config.rounds and found.summary.get("status") == "finished":
        return _run(training, state, found)
    with locked(place):
        folder = RunFolder(place, history_columns(training.config))
        folder.begin(training.config, records)
        return _trained(training, state, records, folder, seconds, on_round, trackers)


def load(
    path: str | Path,
    *,
    model: nn.Module | None = None,
    loss: Loss | None = None,
    algorithm: Method | None = None,
    federation: Federation | None = None,
    device: str | None = None,
    metrics: Mapping[str, Any] | None = None,
) -> Run:
    """A saved run, as of its last checkpoint.

    A user's own module is unpickled, which runs code from the file: open only what you trust, or pass ``model``, and
    nothing is unpickled (a loss, a method or metrics of the user's own have to be passed as well, then).
    """
    place = Path(path)
    training = _restored(place, _Given(model, loss, algorithm, federation, metrics), None, device)
    if not (place / files.CHECKPOINT).is_file():
        raise CheckpointError(f"{place} holds records but no models; expected a run with checkpoint_every above 0.")
    state, _ = files.read_checkpoint(place, training.engine.start(training.model.params))
    records = _records(place, training.federation)
    if records.summary.get("rounds") != state.round_number:  # it went on after the checkpoint, and was interrupted
        records = replace(records.up_to(state.round_number), clients=[])
        records.summary = summary(training.config, training.federation.num_clients, records, "running")
    return _run(training, state, records)


def _trained(
    training: Training,
    state: RunState,
    records: Records,
    folder: RunFolder | None,
    seconds: float,
    on_round: OnRound | None,
    trackers: Sequence[Tracker],
) -> Run:
    place = None if folder is None else folder.path
    with tracked(trackers, dataclasses.asdict(training.config), place, records, on_round) as note:
        return _run(training, go_on(training, state, records, folder, seconds, note), records)


def _run(training: Training, state: RunState, records: Records) -> Run:
    return Run(
        training.config, records.history, records.clients, records.summary, records.participation, training, state
    )


def _records(path: Path, federation: Federation) -> Records:
    """The records of a saved run, with ids as the federation has them: in a file they are text."""
    found = files.read_records(path)
    ids = {str(client): client for client in federation.clients}
    for row in (*found.clients, *found.participation):
        row["client"] = ids.get(row["client"], row["client"])
    return found


def _begin(path: Path, training: Training, records: Records, state: RunState, keep_rows: bool) -> RunFolder:
    """A new folder with everything that `resume` needs; its configuration, which makes it a run, comes last."""
    training.config = config = replace(training.config, fingerprint=training.federation.fingerprint())
    folder = RunFolder(path, history_columns(config))
    path.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Any] = {}
    if config.model is None:
        parts["module"] = training.module
    if config.loss is None:
        parts["loss"] = training.loss
    if config.has_own_method:
        parts["method"] = training.method
    if training.metrics:
        parts["metrics"] = training.metrics
    if parts:
        files.save_module(path, parts)
    if held := partition_rows(training.federation):
        write_csv(path / files.PARTITION, held)
    if config.source is None and keep_rows:
        training.federation.save(path / files.FEDERATION)
    if config.checkpoint_every or state.round_number:
        folder.add_checkpoint(state, records.summary.get("seconds", 0.0))
    if records.summary:
        folder.add_evaluation(records)
    folder.begin(config, records)
    return folder


@dataclass(frozen=True)
class _Given:
    """What the user hands over instead of what lies in a run's folder."""

    model: nn.Module | None
    loss: Loss | None
    method: Method | None
    federation: Federation | None
    metrics: Mapping[str, Any] | None = None


def _restored(path: Path, given: _Given, rounds: int | None, device: str | None) -> Training:
    """The machinery of a saved run."""
    config = files.read_config(path)
    if rounds is not None:
        at_least("rounds", rounds, 1)
        config = replace(config, rounds=rounds)
    config = replace(
        config, device=str(device or config.device), checkpoint_every=config.checkpoint_every or config.rounds
    )
    check_device(config.device)
    parts: dict[str, Any] = {}
    needed = {
        "model": config.model is None and given.model is None,
        "loss": config.loss is None and given.loss is None,
        "algorithm": config.has_own_method and given.method is None,
        "metrics": bool(config.own_metrics) and given.metrics is None,
    }
    if any(needed.values()):
        if given.model is not None:  # the user does not want anything unpickled
            missing = " and ".join(name for name, is_needed in needed.items() if is_needed)
            raise ConfigError(f"the run in {path} has its own {missing}; pass {missing} as well, or leave out model.")
        parts = files.load_module(path)
    try:
        method = given.method or parts.get("method") or algorithm(config.algorithm, **config.options)
        loss = given.loss or parts.get("loss") or getattr(nn.functional, str(config.loss))
        module = given.model or parts.get("module") or build(**(config.model or {}))
        getattr(torch, config.dtype)
        optimiser_of(**config.optimiser)
    except (AttributeError, TypeError) as error:
        raise CheckpointError(f"{path / files.CONFIG} is not the configuration of a run ({error}).") from None
    metrics = own_metrics(parts.get("metrics") if given.metrics is None else given.metrics)
    if list(metrics) != list(config.own_metrics):
        shown = [", ".join(names) or "none" for names in (metrics, config.own_metrics)]
        raise ConfigError(f"the metrics are {shown[0]}; expected {shown[1]}, as the run in {path} has them.")
    return Training(config, method, module, loss, _federation(path, config, given.federation), metrics)


def _federation(path: Path, config: RunConfig, given: Federation | None) -> Federation:
    """The rows of a saved run: those given, those saved with it, or the data set anew."""
    if given is None and config.source is not None:
        return load_data(**config.source)
    if given is None and not (path / files.FEDERATION).is_file():
        raise ConfigError(f"{path} holds no rows of its own; pass the federation that the run was trained on.")
    found = Federation.load(path / files.FEDERATION) if given is None else given
    if config.fingerprint and found.fingerprint() != config.fingerprint:
        raise ConfigError("the federation is not the one that the run was trained on; expected the same rows and ids.")
    return found


def named_method(chosen: str | Method) -> tuple[str, Method]:
    """A method and the name it is recorded by: the registry's, the most particular that fits."""
    if isinstance(chosen, str):
        return chosen, algorithm(chosen)
    if isinstance(chosen, type) or not hasattr(chosen, "client_round"):
        raise ConfigError(f"algorithm is {chosen!r}; expected a name such as 'self-fl', or a method with options.")
    presets = {name: getattr(make, "keywords", {}) for name, make in ALGORITHMS.items() if is_named(name, chosen)}
    fitting = [name for name, preset in presets.items() if all(getattr(chosen, key) == preset[key] for key in preset)]
    return max(fitting, key=lambda name: len(presets[name]), default=chosen.name), chosen


def is_named(name: str, method: Method) -> bool:
    """Whether the registry makes methods of that kind under that name."""
    return name in ALGORITHMS and type(ALGORITHMS[name]()) is type(method)


def _module(
    model: nn.Module | str, federation: Federation, seed: int, options: Mapping[str, Any]
) -> tuple[nn.Module, dict[str, Any] | None]:
    """The module, and how to build it again if it is one of ours."""
    if not isinstance(model, str):
        if options:
            raise ConfigError(f"model_options are for a model given by name; {type(model).__name__} has its own.")
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model is a {type(model).__name__}; expected a torch.nn.Module or the name of a model.")
        return model, None
    if federation.num_classes is None:
        raise ConfigError(f"model {model!r} classifies, but the labels are not whole numbers; pass a module.")
    if model == "lstm" and "embeddings" not in options:
        # Rows are numbers of words: in another table they would mean other words.
        if "embeddings" not in (federation.source or {}):
            raise ConfigError(
                "the federation does not say which words its numbers stand for; expected model_options={'embeddings': "
                "'glove100'}, or the table that the rows were made with."
            )
        options = {"embeddings": (federation.source or {})["embeddings"], **options}
    recipe: dict[str, Any] = {
        "name": model,
        "shape": list(federation.train.features.shape[1:]),
        "num_classes": federation.num_classes,
        "seed": seed,
        **options,
    }
    return build(**recipe), recipe


def _name_of(loss: Loss) -> str | None:
    name = getattr(loss, "__name__", "")
    return name if getattr(nn.functional, name or "?", None) is loss else None


def _first(training: Training, start: Run | str | Path | nn.Module | Warm | None) -> Tensor:
    """The model that training starts from."""
    if start is None:
        return training.model.params
    own = training.model.params
    if isinstance(start, nn.Module):
        start = start.state_dict()
    if isinstance(start, Run | str | Path):
        # Of a folder nothing but the checkpoint is opened.
        params: Tensor | None = (
            start._state.server.params
            if isinstance(start, Run)
            else load_tensors(Path(start) / files.CHECKPOINT)[0].get("server.params")
        )
        if params is None or params.shape != own.shape:
            found = "no" if params is None else params.shape[-1]
            raise ConfigError(
                f"the run to start from has {found} parameters, the model {len(own)}; expected a run of the same model."
            )
        return params.to(own)
    if not isinstance(start, Mapping):
        raise ConfigError(f"start is a {type(start).__name__}; expected a run, its folder, a module or a state_dict.")
    return training.model.flatten(start).to(own)


def check_device(device: str) -> None:
    """Refuse a device that torch does not know, or that is not here."""
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError):
        raise ConfigError(f"device is {device!r}; expected 'cpu', 'cuda' or another of torch's.") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch finds no GPU here; use 'cpu'.")
    try:
        torch.zeros(1, device=device).tolist()
    except (RuntimeError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(f"device is {device!r}, which cannot be used here ({reason}); use 'cpu'.") from None


def _refuse_if_taken(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file; expected a folder for the run.")
    if (path / files.CONFIG).exists():
        raise ConfigError(f"{path} already holds a run; resume it, or give another folder.")
