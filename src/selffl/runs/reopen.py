"""`selffl.load` and `selffl.resume`: a run from its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from selffl.algorithms import algorithm as method_of
from selffl.algorithms.optimisers import optimiser_of
from selffl.algorithms.options import at_least
from selffl.data.federation import Federation
from selffl.data.registry import load as load_data
from selffl.errors import CheckpointError, ConfigError
from selffl.models import build
from selffl.runs import folder as files
from selffl.runs.environment import check_device
from selffl.runs.folder import Records, RunConfig, RunFolder
from selffl.runs.loop import Method, OnRound, Training, history_columns, summary
from selffl.runs.run import Run, run_of, trained
from selffl.runs.trackers import Choice, followers, trackers_of
from selffl.state.checkpoint import load_tensors
from selffl.state.files import locked
from selffl.training.blocks import Loss
from selffl.training.losses import loss_named
from selffl.training.metrics import own_metrics


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
        loss: likewise, if it is neither torch's nor selffl's.
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
        return run_of(training, state, found)
    with locked(place):
        folder = RunFolder(place, history_columns(training.config))
        folder.begin(training.config, records)
        return trained(training, state, records, folder, seconds, on_round, trackers)


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
        raise CheckpointError(
            f"{place} holds records but no models, as runs of a comparison do; expected a run with checkpoint_every "
            "above 0. Train that method with `selffl run`, or with `selffl.train(..., out=...)`."
        )
    state, _ = files.read_checkpoint(place, training.engine.start(training.model.params))
    records = _records(place, training.federation)
    if records.summary.get("rounds") != state.round_number:  # it went on after the checkpoint, and was interrupted
        records = replace(records.up_to(state.round_number), clients=[])
        records.summary = summary(training.config, training.federation.num_clients, records, "running")
    return run_of(training, state, records)


def _records(path: Path, federation: Federation) -> Records:
    """The records of a saved run, with ids as the federation has them: in a file they are text."""
    found = files.read_records(path)
    ids = {str(client): client for client in federation.clients}
    for row in (*found.clients, *found.participation):
        row["client"] = ids.get(row["client"], row["client"])
    return found


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
        method = given.method or parts.get("method") or method_of(config.algorithm, **config.options)
        loss = given.loss or parts.get("loss") or loss_named(str(config.loss))
        module = given.model or parts.get("module") or build(**(config.model or {}))
        getattr(torch, config.dtype)
        optimiser_of(**config.optimiser)
    except (AttributeError, TypeError) as error:
        raise CheckpointError(f"{path / files.CONFIG} is not the configuration of a run ({error}).") from None
    metrics = own_metrics(parts.get("metrics") if given.metrics is None else given.metrics)
    if set(metrics) != set(config.own_metrics):
        shown = [", ".join(names) or "none" for names in (metrics, config.own_metrics)]
        raise ConfigError(f"the metrics are {shown[0]}; expected {shown[1]}, as the run in {path} has them.")
    for name, is_higher_better in config.own_metrics.items():
        if metrics[name].higher_is_better != is_higher_better:
            raise ConfigError(
                f"metric {name!r} has higher_is_better={not is_higher_better}; expected {is_higher_better}, as in the "
                f"run in {path}. Pass selffl.Metric(function, higher_is_better={is_higher_better})."
            )
    ordered = {name: metrics[name] for name in config.own_metrics}
    training = Training(config, method, module, loss, _federation(path, config, given.federation), ordered)
    if config.gain:
        training.first = load_tensors(path / files.START)[0]["params"].to(training.model.params)
    return training


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
