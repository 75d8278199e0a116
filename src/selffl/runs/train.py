"""`selffl.train`: a model, a federation and a method in; a `Run` with a personal model per client out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from selffl.algorithms import ALGORITHMS, DEFAULT_ALGORITHM, Algorithm, algorithm
from selffl.algorithms.optimisers import Optimiser, check_optimiser, optimiser_of
from selffl.algorithms.options import above, at_least, one_of, true_or_false
from selffl.data.federation import Federation
from selffl.data.split import check_seed
from selffl.errors import ConfigError
from selffl.models import build
from selffl.runs import folder as files
from selffl.runs.environment import check_device
from selffl.runs.folder import Records, RunConfig
from selffl.runs.loop import Method, OnRound, Training, every_of
from selffl.runs.run import Run, begin, refuse_if_taken, trained
from selffl.runs.trackers import Choice, trackers_of
from selffl.state.checkpoint import load_tensors
from selffl.state.files import locked
from selffl.training.answers import trained_module
from selffl.training.blocks import Gradients, Loss, check_gradients
from selffl.training.losses import name_of
from selffl.training.metrics import own_metrics

MAX_BATCH_SIZE = (1 << 31) - 1  # rows

Warm = Mapping[str, Tensor]  # a state_dict


def train(
    model: nn.Module | str,
    federation: Federation,
    algorithm: str | Method = DEFAULT_ALGORITHM,
    *,
    rounds: int = 200,
    participation: float = 0.1,
    learning_rate: float = 0.03,
    batch_size: int = 10,
    seed: int = 0,
    device: str = "cpu",
    out: str | Path | None = None,
    model_options: Mapping[str, Any] | None = None,
    loss: Loss | None = None,
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
    gain: bool = False,
) -> Run:
    """Train one model per client.

    The same seed gives the same numbers, whatever else runs, and after a resume; the module given is left as it is.

    Args:
        model: a module without running statistics, or the name of one of `selffl.models.MODELS`.
        federation: whose rows.
        algorithm: a name, or a method with options: ``selffl.algorithm("ditto", penalty=0.1)``; left out, that is
            ``self-fl-auto``, as everywhere.
        rounds: how many.
        participation: C, the share of clients in a round.
        learning_rate: η.
        batch_size: B.
        seed: of cohorts, minibatches and, for a model given by name, its first weights.
        device: ``cpu``, ``cuda``, or another device of torch's.
        out: folder for the run's records and checkpoints, written as it goes; none: nothing is written.
        model_options: of a model given by name, such as ``{"hidden": 64}`` for ``lstm``.
        loss: ``loss(outputs, labels)``, the mean over a minibatch.  None: it follows from the labels and the model's
            outputs (`selffl.training.losses`): cross-entropy for classes, the logistic loss for two classes and one
            output, the squared error for values.  What is measured follows from it and from the labels: accuracy for
            classes, with AUC where there are two, error for values, else the loss itself (`selffl.training.metrics`).
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
        gain: whether every client is also trained alone, by ``local`` with the same rounds, cohorts, minibatches and
            steps, when the last round is done: ``run.clients`` then has ``alone_accuracy`` and ``realised_gain``, and
            `Run.gains` says who loses by joining.  It takes about as long again; its gradients and seconds are not
            counted.

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
    if loss is not None and not callable(loss):
        raise ConfigError(f"loss is {loss!r}; expected a function, such as torch.nn.functional.mse_loss, or none.")
    check_seed(seed)
    true_or_false("gain", gain)
    measured, steps_by = own_metrics(metrics), optimiser_of(optimiser)
    check_optimiser(steps_by, method)
    module, recipe = _module(model, federation, seed, model_options or {})
    at_least("rounds", rounds, 1)
    at_least("batch_size", batch_size, 1, at_most=MAX_BATCH_SIZE)
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
    above("learning_rate", learning_rate, 0.0, at_most=torch.finfo(dtype).max)
    check_gradients(gradients)
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
        learning_rate=float(learning_rate),
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
        loss=None if loss is None else name_of(loss),  # none given: named once it follows
        has_own_method=not is_named(name, method),
        own_metrics={own: bool(metric.higher_is_better) for own, metric in measured.items()},
        optimiser={"name": steps_by.name, **vars(steps_by)},
        is_warm=start is not None,
        gain=gain,
        has_global_model=method.has_global_model,
        is_federated=method.is_federated,
    )
    training = Training(config, method, module, loss, federation, measured)
    trackers = trackers_of(tracker)
    training.first = _first(training, start)
    state = training.engine.start(training.first)
    if out is None:
        return trained(training, state, Records(), None, 0.0, on_round, trackers)
    refuse_if_taken(Path(out))
    with locked(Path(out)):
        folder = begin(Path(out), training, Records(), state, keep_rows)
        return trained(training, state, Records(), folder, 0.0, on_round, trackers)


def named_method(chosen: str | Method) -> tuple[str, Method]:
    """A method and the name it is recorded by: the registry's, the most particular that fits."""
    if isinstance(chosen, str):
        return chosen, algorithm(chosen)
    if not isinstance(chosen, Algorithm):
        raise ConfigError(
            f"algorithm is {chosen!r}; expected a name such as {DEFAULT_ALGORITHM!r}, or a method with options, an "
            "instance of a subclass of selffl.algorithms.Algorithm."
        )
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


def _first(training: Training, start: Run | str | Path | nn.Module | Warm | None) -> Tensor:
    """The model that training starts from."""
    if start is None:
        return training.model.params
    own = training.model.params
    if isinstance(start, nn.Module):
        start = trained_module(start).state_dict()
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
