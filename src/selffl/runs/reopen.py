"""`selffl.load` and `selffl.resume`: a run from its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from selffl.algorithms import algorithm as method_of
from selffl.algorithms.training_options import TrainingOptions
from selffl.data.federation import Federation
from selffl.data.registry import load as load_data
from selffl.engines.cohort import RunState
from selffl.engines.ranks import Ranks, joined
from selffl.errors import CheckpointError, ConfigError
from selffl.models import build
from selffl.runs import folder as files
from selffl.runs.environment import check_device
from selffl.runs.folder import Records, Row, RunFolder
from selffl.runs.methods import Method
from selffl.runs.observers import Observer, RoundCallback
from selffl.runs.ranks import dismiss, follow, for_ranks, shared_module, train_over
from selffl.runs.recipe import Recipe
from selffl.runs.records import forget_closing_scores, score_cells, summary_row
from selffl.runs.run import Run, make_run, write_facts
from selffl.runs.session import Session, single_thread
from selffl.runs.trackers import Choice, observers_of, remembered_trackers, trackers_of
from selffl.state.checkpoint import load_tensors
from selffl.state.files import locked
from selffl.training.blocks import Loss, deterministic_cudnn
from selffl.training.flat import FlatModel
from selffl.training.losses import loss_named
from selffl.training.metrics import Metric, own_metrics


def resume(
    path: str | Path,
    *,
    model: nn.Module | None = None,
    loss: Loss | None = None,
    algorithm: Method | None = None,
    federation: Federation | None = None,
    rounds: int | None = None,
    device: str | None = None,
    on_round: RoundCallback | None = None,
    metrics: Mapping[str, Any] | None = None,
    tracker: Choice | None = None,
    trusted: bool = False,
) -> Run:
    """Take an interrupted run up again, from its last checkpoint; one that is finished is returned as it is.

    Args:
        path: the run's folder.
        model: the module, if the one in the folder cannot or should not be unpickled; nothing is, then.
        loss: likewise, if it is neither torch's nor selffl's.
        algorithm: likewise, if it is not one of the registry's.
        federation: the rows, if they are not in the folder.
        rounds: go on to this round instead of the one first asked for.
        device: another device; the numbers may then differ in their last bits.
        on_round: called with each further row of the history.
        metrics: the user's own metrics, likewise, by the names they have in the run.
        tracker: as in `train`; none: those by name that follow the run already, which go on where they were.
        trusted: whether a module, loss, method or metrics of the user's own may be unpickled, as in `load`.
    """
    place = Path(path)
    trackers = remembered_trackers(place) if tracker is None else trackers_of(tracker)
    given = _Given(model, loss, algorithm, federation, metrics, trusted)
    with joined() as ranks:
        session = _restore_session(place, given, rounds, device, ranks)
        if ranks.number:
            return follow(session, ranks)
        return _go_on(place, session, ranks, observers_of(trackers, on_round, place))


def _go_on(place: Path, session: Session, ranks: Ranks, observers: Sequence[Observer]) -> Run:
    """The run in a folder, from its checkpoint to its last round."""
    recipe = session.recipe
    if not (place / files.CHECKPOINT).is_file():
        raise CheckpointError(f"{place} holds no checkpoint; expected a run with checkpoint_every above 0.")
    state, seconds = files.read_checkpoint(place, session.start(place / files.CLIENT_MEMORY))
    if state.round_number > recipe.rounds:
        raise ConfigError(
            f"rounds is {recipe.rounds}, and the run is at round {state.round_number}; expected that or more."
        )
    found = files.read_records(place, session.federation.clients)
    records = found.up_to(state.round_number)
    files.check_complete(place, records, state.round_number, session.method, session.evaluated_ids)
    if state.round_number == recipe.rounds and found.summary.get("status") == "finished":
        return dismiss(ranks, make_run(session, state, found))
    if not session.is_over(state):
        state = replace(state, server=session.method.reopen(state.server))
    with locked(place):
        write_facts(place, session)
        if session.is_over(state) and not recipe.gain:  # and its summary is not there, which nothing else makes again
            records.summary = _summarise(session, records, "finished", state)
            RunFolder(place).add_evaluation(records)
        is_reopened = forget_closing_scores(records, files.read_config(place), recipe, session.method)
        if is_reopened and recipe.is_evaluated(state.round_number):
            with single_thread(session), deterministic_cudnn():
                records.history[-1] |= score_cells(recipe, session.evaluate_round(state))
        return train_over(ranks, session, state, records, RunFolder(place), seconds, observers)


def load(
    path: str | Path,
    *,
    model: nn.Module | None = None,
    loss: Loss | None = None,
    algorithm: Method | None = None,
    federation: Federation | None = None,
    device: str | None = None,
    metrics: Mapping[str, Any] | None = None,
    trusted: bool = False,
) -> Run:
    """A saved run, as of its last checkpoint.

    A user's own module lies in the folder as a pickle, and reading one runs whatever code it names.  So it is read only
    if the folder is ``trusted``; or pass ``model``, and nothing is unpickled (a loss, a method or metrics of the user's
    own have to be passed as well, then).  Models by name, and those that torch's own layers are all of, are no pickles.
    """
    place = Path(path)
    given = _Given(model, loss, algorithm, federation, metrics, trusted)
    session = _restore_session(place, given, None, device)
    if not (place / files.CHECKPOINT).is_file():
        raise CheckpointError(
            f"{place} holds records but no models, as runs of a comparison do; expected a run with checkpoint_every "
            "above 0. Train that method with `selffl run`, or with `selffl.train(..., out=...)`."
        )
    state, _ = files.read_checkpoint(place, session.start(place / files.CLIENT_MEMORY))
    records = files.read_records(place, session.federation.clients)
    if records.summary.get("rounds") != state.round_number:  # it went on after the checkpoint, and was interrupted
        records = replace(records.up_to(state.round_number), clients=[])
        records.summary = _summarise(session, records, "running", state)
    return make_run(session, state, records)


def _summarise(session: Session, records: Records, status: str, state: RunState) -> Row:
    return summary_row(session.recipe, session.method, session.federation.num_clients, records, status, state)


@dataclass(frozen=True)
class _Given:
    """What the user hands over instead of what lies in a run's folder."""

    model: nn.Module | None
    loss: Loss | None
    method: Method | None
    federation: Federation | None
    metrics: Mapping[str, Any] | None = None
    trusted: bool = False


def _restore_session(
    path: Path, given: _Given, rounds: int | None, device: str | None, ranks: Ranks | None = None
) -> Session:
    """The session of a saved run; where it is to go on, for these ranks."""
    recipe = files.read_config(path)
    if rounds is not None:
        TrainingOptions.of(recipe).check_rounds(rounds)
    recipe = replace(
        recipe,
        rounds=recipe.rounds if rounds is None else rounds,
        device=device or recipe.device,
        checkpoint_every=recipe.checkpoint_every or rounds or recipe.rounds,
        client_memory=recipe.client_memory or "memory",  # where it was in earlier versions, which did not say
    )
    check_device(recipe.device)
    if ranks is not None:
        recipe = for_ranks(recipe, ranks)
    parts: dict[str, Any] = {}
    has_layers = (path / files.LAYERS).is_file()
    needed = {
        "model": recipe.model is None and given.model is None and not has_layers,
        "loss": recipe.loss is None and given.loss is None,
        "algorithm": recipe.has_own_method and given.method is None,
        "metrics": bool(recipe.own_metrics) and given.metrics is None,
    }
    if missing := " and ".join(name for name, is_needed in needed.items() if is_needed):
        if given.model is not None:  # the user does not want anything unpickled
            raise ConfigError(f"the run in {path} has its own {missing}; pass {missing} as well, or leave out model.")
        if not given.trusted:
            raise ConfigError(
                f"{path} has its own {missing} as a pickle, which can run code when it is read; expected a folder that "
                f"you trust. Pass trusted=True if you have made it, or know who has, or pass {missing}."
            )
        parts = files.load_module(path)
    try:
        method = given.method or parts.get("method") or method_of(recipe.algorithm, **recipe.options)
        loss = given.loss or parts.get("loss") or loss_named(str(recipe.loss))
        own = files.load_layers(path) if has_layers and given.model is None else parts.get("module")
        module = given.model or own or build(**(recipe.model or {}))
    except (AttributeError, TypeError) as error:
        raise CheckpointError(f"{path / files.CONFIG} is not the configuration of a run ({error}).") from None
    recipe = replace(recipe, recorded=method.recorded)  # runs of earlier versions do not say
    metrics = _metrics(path, recipe, parts.get("metrics") if given.metrics is None else given.metrics)
    federation = _federation(path, recipe, given.federation)
    first = partial(_first_model, path=path) if recipe.gain else None
    module = module if ranks is None else shared_module(module, ranks)
    return Session.open(recipe, method, module, loss, federation, metrics, first)


def _first_model(model: FlatModel, path: Path) -> Tensor:
    """The model that a saved run began with, which clients train alone from."""
    return load_tensors(path / files.START)[0]["params"].to(model.params)


def _metrics(path: Path, recipe: Recipe, given: Mapping[str, Any] | None) -> dict[str, Metric]:
    """The user's own metrics of a saved run, in its order; they have to be the ones it was begun with."""
    metrics = own_metrics(given)
    if set(metrics) != set(recipe.own_metrics):
        shown = [", ".join(names) or "none" for names in (metrics, recipe.own_metrics)]
        raise ConfigError(f"the metrics are {shown[0]}; expected {shown[1]}, as the run in {path} has them.")
    for name, is_higher_better in recipe.own_metrics.items():
        if metrics[name].higher_is_better != is_higher_better:
            raise ConfigError(
                f"metric {name!r} has higher_is_better={not is_higher_better}; expected {is_higher_better}, as in the "
                f"run in {path}. Pass selffl.Metric(function, higher_is_better={is_higher_better})."
            )
    return {name: metrics[name] for name in recipe.own_metrics}


def _federation(path: Path, recipe: Recipe, given: Federation | None) -> Federation:
    """The rows of a saved run: those given, those saved with it, or the data set anew."""
    if given is None and recipe.source is not None:
        return load_data(**recipe.source)
    if given is None and not (path / files.FEDERATION).is_file():
        raise ConfigError(f"{path} holds no rows of its own; pass the federation that the run was trained on.")
    found = Federation.load(path / files.FEDERATION) if given is None else given
    if recipe.fingerprint and found.fingerprint() != recipe.fingerprint:
        raise ConfigError("the federation is not the one that the run was trained on; expected the same rows and ids.")
    return found
