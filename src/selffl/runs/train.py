"""`selffl.train`: a model, a federation and a method in; a `Run` with a personal model per client out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from selffl.algorithms import DEFAULT_ALGORITHM
from selffl.algorithms.norms import BatchNorm
from selffl.algorithms.optimisers import Optimiser
from selffl.data.federation import Federation
from selffl.engines.defence import Robust
from selffl.engines.ranks import joined
from selffl.errors import ConfigError
from selffl.models import build
from selffl.runs import folder as files
from selffl.runs.environment import check_device
from selffl.runs.folder import Records
from selffl.runs.methods import Method, method_facts, named_method
from selffl.runs.observers import RoundCallback
from selffl.runs.ranks import follow, for_ranks, shared_module, train_over
from selffl.runs.recipe import SETTINGS, Recipe
from selffl.runs.run import Run, create_run_folder, refuse_if_taken
from selffl.runs.session import Session
from selffl.runs.trackers import Choice, observers_of, trackers_of
from selffl.state.checkpoint import load_tensors
from selffl.state.files import locked
from selffl.training.answers import trained_module
from selffl.training.blocks import Gradients, Loss
from selffl.training.flat import FlatModel, Precision
from selffl.training.losses import name_of
from selffl.training.metrics import own_metrics

Warm = Mapping[str, Tensor]  # a state_dict


def train(
    model: nn.Module | str,
    federation: Federation,
    algorithm: str | Method = DEFAULT_ALGORITHM,
    *,
    rounds: int = 200,
    participation: float = 0.1,
    learning_rate: float = 0.03,
    learning_rate_schedule: str = "constant",
    batch_size: int = 10,
    seed: int = 0,
    device: str = "cpu",
    out: str | Path | None = None,
    model_options: Mapping[str, Any] | None = None,
    loss: Loss | None = None,
    start: Run | str | Path | nn.Module | Warm | None = None,
    evaluate_every: int | None = None,
    evaluate_clients: int | None = None,
    evaluate_on: Literal["test", "validation"] = "test",
    evaluate_train: bool = False,
    evaluate_validation: bool = False,
    fine_tune: Sequence[int] = (),
    class_frequencies: bool = False,
    neighbours: int | None = None,
    checkpoint_every: int | None = None,
    chunk_size: int | None = None,
    client_memory: Literal["memory", "disk"] | None = None,
    gradients: Gradients = "auto",
    dtype: str | torch.dtype = "float32",
    precision: Precision = "full",
    keep_rows: bool = True,
    on_round: RoundCallback | None = None,
    metrics: Mapping[str, Any] | None = None,
    optimiser: str | Optimiser = "sgd",
    keep_optimiser: bool = False,
    weight_decay: float = 0.0,
    max_gradient_norm: float | None = None,
    augmentation: str = "none",
    tracker: Choice | None = None,
    batch_norm: BatchNorm | None = None,
    gain: bool = False,
    robust: Robust = "none",
    clip: float | None = None,
    max_weight: float | None = None,
    noise_multiplier: float = 0.0,
    row_clip: float | None = None,
    row_noise_multiplier: float = 0.0,
    engine: Literal["cohort", "serial"] = "cohort",
    shards: int | None = None,
) -> Run:
    """Train one model per client.

    The same seed gives the same numbers, whatever else runs, and after a resume; the module given is left as it is.

    Args:
        model: A module, or the name of one of `selffl.models.MODELS`.
        federation: Whose rows.
        algorithm: A name, or a method with options: ``selffl.algorithm("ditto", penalty=0.1)``; left out, that is
            ``self-fl-auto``, as everywhere.
        rounds: How many rounds are trained.
        participation: C, the share of clients in a round.
        learning_rate: η, the step size of local training.
        learning_rate_schedule: How η changes from round to round: ``constant``, ``cosine`` (down towards 0),
            ``exponential 0.99`` (times that after each round) or ``step 0.1 0.5 0.75`` (times 0.1 after half and three
            quarters of the rounds).  Rates that are a method's own options stay as they are.
        batch_size: B, the rows of a minibatch.
        seed: Of cohorts, minibatches and, for a model given by name, its first weights.
        device: ``cpu``, ``cuda``, or another device of torch's.
        out: Folder for the run's records and checkpoints, written as it goes; none: nothing is written.
        model_options: Of a model given by name, such as ``{"hidden": 64}`` for ``lstm``.
        loss: ``loss(outputs, labels)``, the mean over a minibatch.  None: it follows from the labels and the model's
            outputs (`selffl.training.losses`): cross-entropy for classes, the logistic loss for two classes and one
            output, the squared error for values.  What is measured follows from it and from the labels: accuracy for
            classes, with AUC where there are two, error for values, else the loss itself (`selffl.training.metrics`).
        start: The first model, if not the module's own: a run, the folder of one, a module or a
            state_dict.
        evaluate_every: Rounds between evaluations (the last round always has one); none: a twentieth of the rounds.
        evaluate_clients: How many clients are evaluated, by lot and the same every time; ``run.clients`` has a row for
            each of them.  None: all, or of rows on demand (`Federation.on_demand`) at most 1,000.
        evaluate_on: ``test`` rows, or ``validation`` rows for choosing options.
        evaluate_train: Whether the same on training rows is noted beside it, as ``train_accuracy``.
        evaluate_validation: Whether the same on validation rows is noted, too, as ``validation_accuracy``; they can
            then choose a round (`Run.best_round`).
        fine_tune: Numbers of local steps after which the final models are evaluated once more, by names of their own.
        class_frequencies: Whether the final global model is evaluated once more with each client's class frequencies in
            place of everybody's (log of one over the other on top of its scores), as ``global_with_classes``, and
            fine-tuned from there.
        neighbours: k of the view ``global_with_neighbours`` (kNN-Per): the final global model is evaluated once more,
            its probabilities mixed with the classes of the k nearest of each client's training rows; none: without.
        checkpoint_every: Rounds between checkpoints; none: at every evaluation; 0: never.
        chunk_size: Clients that train at once; none: as many as fit.
        client_memory: Where what clients keep between rounds lies.  ``memory``: all of it there; ``disk``: in files of
            ``out`` (of a temporary folder without it), where a client that has not taken part costs nothing; the
            numbers are the same.  None: in memory where all of it takes at most 4 GB (on a GPU 32 GB), else on disk.
        gradients: How a cohort's gradients are computed: ``vmap``, ``loop``, ``unfold``, ``stacked`` or ``recomputed``
            (`selffl.training.blocks`), or ``auto`` for a measured rule; they agree to rounding.
        dtype: Of parameters and features: a floating-point type of torch's, or its name.
        precision: Of products in training passes: ``full``, as ``dtype`` says, or ``bfloat16``, torch's autocast, for
            speed on a GPU; parameters, steps, averages and evaluations stay in float32.
        keep_rows: Whether ``out`` gets a copy of the user's own rows, so that `resume` needs nothing else.
        on_round: Called with each row of the history.
        metrics: More to measure, by name: functions ``(outputs, labels) -> number`` of all of a client's evaluated
            rows, metrics of torchmetrics, or a `selffl.Metric` that says whether higher is better.  A metric called f1
            is reported beside the others: ``f1`` and ``global_f1`` of each client, ``weighted_f1`` and so on of all.
        optimiser: Of the clients' local steps: ``sgd``, ``momentum`` or ``adam``, or one with options such as
            ``selffl.algorithms.Adam(beta2=0.99)``; for methods that do not need plain gradient steps (self-fl does).
        keep_optimiser: Whether what a client's optimiser remembers is kept by the client for its next round; if not, it
            starts anew in every round.
        weight_decay: λ, which adds the gradient of λ/2 |θ|² to each gradient of a minibatch, as ``torch.optim.SGD`` and
            ``torch.optim.Adam`` do (AdamW does not); for methods whose loss may have one more term (self-fl's may not).
        max_gradient_norm: The most that a client's gradient of a minibatch may measure; a longer one is shortened, as
            by ``torch.nn.utils.clip_grad_norm_``, before weight decay and a method's own pulls; none: no bound.
        augmentation: What becomes of an image each time a client trains on it: ``crop`` (four pixels of 0 on each side,
            then a random part of the image's size), ``flip`` (mirrored every other time) or ``crop flip``, by random
            numbers that have keys; ``none``: nothing.
        tracker: ``tensorboard``, ``mlflow`` or ``wandb``, which write files beside the run's (`selffl.runs.trackers`
            says where), an object with ``begin``, ``log`` and ``end``, or several of these in a list.
        batch_norm: What becomes of BatchNorm: running statistics are ``averaged`` with the model, or all of it is
            ``kept`` by each client (FedBN; for methods that keep layers), or it goes by each ``batch`` alone, also in
            evaluation; none: ``kept`` for fedbn, else ``averaged``.
        gain: Whether every client is also trained alone, by ``local`` with the same rounds, cohorts, minibatches and
            steps, when the last round is done: ``run.clients`` then has ``alone_accuracy`` and ``realised_gain``, and
            `Run.gains` says who loses by joining.  It takes about as long again; its gradients and seconds are not
            counted.
        robust: The defence against hostile clients: what they would move the model by is shortened to the median length
            (``clip``), its ``median`` is taken in each coordinate, its ends are ``trimmed`` there, or what is not
            plausible by σ₀² and σₘ² counts for less (``hierarchy``); ``none``: plain averages.
        clip: S, client-level privacy: the most that a client may move a model by; it shortens what it sends to that,
            not its own model.  Other numbers that it sends have limits, too.  None: no bound.
        max_weight: W₀, the most that a client may weigh beside ``clip``, for methods that do not weigh all alike:
            rows, where clients weigh by rows, 1 where an average client weighs 1.
        noise_multiplier: z, normal noise on every sum of a round by what one client can move all of them; the run's
            summary then has ``epsilon`` at ``delta``.  Over Flower the noise is secret, in a simulation it can be
            repeated.
        row_clip: R, row-level privacy: the most that the gradient of a single row may measure in local training; a
            longer one is shortened.  Each minibatch is then drawn by itself, without replacement.  None: no bound.
        row_noise_multiplier: z, normal noise on each gradient that what a client sends is made of, by what replacing
            one of its rows can move it; ``run.clients`` then has ``row_epsilon`` of each client, the summary the
            largest.
            Over Flower the client draws it in secret, in a simulation it can be repeated.
        engine: ``cohort`` trains many clients at once; ``serial`` one at a time, and an error says which client, in
            which round and at which stage: slow, for finding mistakes.
        shards: Parts of the clients that train and are summed apart.  The numbers have the same bits whoever trains
            them: one process, or several that torchrun has started, of which each takes some.  There are at least as
            many as processes; none: as many.

    Returns:
        The run.

    Raises:
        ConfigError: an option that cannot work, or a folder that already holds a run.
        DataError: rows that the model cannot take.
        DivergedError: training has diverged (NaN or infinity); what was recorded until then is kept.
    """
    settings = {name: value for name, value in locals().items() if name in SETTINGS}
    name, method = named_method(algorithm)
    _check_parts(federation, loss, model_options, on_round, out)
    measured, trackers = own_metrics(metrics), trackers_of(tracker)
    source = federation.source
    recipe = Recipe(
        **settings,
        **method_facts(name, method),
        data="arrays" if source is None else str(source["name"]),
        source=None if source is None else dict(source),
        loss=None if loss is None else name_of(loss),  # none given: named once it follows
        own_metrics={own: bool(metric.higher_is_better) for own, metric in measured.items()},
        is_warm=start is not None,
    )
    check_device(recipe.device)
    with joined() as ranks:
        recipe = for_ranks(recipe, ranks)
        module, built = _module(model, federation, seed, model_options or {})
        module, recipe = shared_module(module, ranks), replace(recipe, model=built)
        session = Session.open(recipe, method, module, loss, federation, measured, partial(first_model, start=start))
        if ranks.number:
            return follow(session, ranks)
        path = None if out is None else Path(out)
        state = session.start(None if path is None else path / files.CLIENT_MEMORY)  # which writes nothing yet
        observers = observers_of(trackers, on_round, path)
        if path is None:
            return train_over(ranks, session, state, Records(), None, 0.0, observers)
        refuse_if_taken(path)
        with locked(path):
            session = session.with_fingerprint()
            folder = create_run_folder(path, session, state, keep_rows=keep_rows)
            return train_over(ranks, session, state, Records(), folder, 0.0, observers)


def _check_parts(federation: Any, loss: Any, model_options: Any, on_round: Any, out: Any) -> None:
    """Refuse parts of a run that are not what they should be."""
    if not isinstance(federation, Federation):
        raise ConfigError(
            f"federation is a {type(federation).__name__}; expected a Federation, such as "
            "selffl.Federation.from_arrays(x, y, client) or .from_frame(frame, client, label) makes."
        )
    if isinstance(loss, type):
        raise ConfigError(f"loss is the class {loss.__name__}; expected a function or an instance, {loss.__name__}().")
    if loss is not None and not callable(loss):
        raise ConfigError(f"loss is {loss!r}; expected a function, such as torch.nn.functional.mse_loss, or none.")
    if not isinstance(model_options or {}, Mapping):
        raise ConfigError(f"model_options is {model_options!r}; expected a dictionary, such as {{'hidden': 64}}.")
    if on_round is not None and not callable(on_round):
        raise ConfigError(f"on_round is {on_round!r}; expected a function of one row.")
    if out is not None and not isinstance(out, str | Path):
        raise ConfigError(f"out is {out!r}; expected the name of a folder.")


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
    rows = federation.train.sample
    if not isinstance(rows.features, Tensor):
        raise ConfigError(
            f"model {model!r} takes one tensor, and rows are a dictionary of "
            f"{', '.join(rows.features.keys())}; expected a module whose forward takes these names."
        )
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
        "shape": list(rows.array.shape[1:]),
        "num_classes": federation.num_classes,
        "seed": seed,
        **options,
    }
    return build(**recipe), recipe


def first_model(model: FlatModel, start: Run | str | Path | nn.Module | Warm | None) -> Tensor:
    """The model that training starts from."""
    own = model.params
    if start is None:
        return own
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
    return model.flatten(start).to(own)
