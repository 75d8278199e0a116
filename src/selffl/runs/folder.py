"""A run on disk, written as the run goes, so that one that was interrupted can be read and taken up again.

::

    config.json              what was asked for, and what it was computed with
    history.csv              one line per round
    participation.csv        one line per client and round it took part in
    clients.csv              one line per client, as of the last evaluation
    partition.csv            one line per client and class that it holds, where labels are classes
    *.parquet                the first three of these tables once more, with their types, when the run has ended
    summary.json             the numbers of the run, as of the last evaluation
    checkpoint.safetensors   everything training needs to go on
    federation.safetensors   the rows, if they are the user's own
    preparation.json         how a user's table became numbers, and what its units and classes are
    start.safetensors        the model that training began with, where clients train alone from it as well (``gain``)
    module.pt                the user's own module, loss, method and metrics, pickled
    trackers.json            the trackers that follow the run, if there are any; their files lie in folders beside it
"""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from selffl.algorithms.records import tensors_of
from selffl.engines.cohort import RunState
from selffl.errors import CheckpointError, ConfigError
from selffl.runs.environment import environment
from selffl.runs.evaluation import score_names
from selffl.runs.observers import Observer
from selffl.runs.recipe import Recipe
from selffl.state.checkpoint import fill_record, load_tensors, save_tensors
from selffl.state.files import append_csv, read_csv, write_csv, write_json, write_parquet

VERSION = 1

CONFIG, SUMMARY, CHECKPOINT = "config.json", "summary.json", "checkpoint.safetensors"
HISTORY, PARTICIPATION, CLIENTS, PARTITION = "history.csv", "participation.csv", "clients.csv", "partition.csv"
FEDERATION, START, MODULE = "federation.safetensors", "start.safetensors", "module.pt"
PREPARATION = "preparation.json"

# Of participation.csv, after the round and the client: what a client reported, and what the server makes of it.
REPORTED = ("num_local_steps", "wanted_steps", "intra_variance", "effective_params", "weight")
PARTICIPATION_COLUMNS = ("round", "client", *REPORTED)

INTERVAL = ("inter_variance_low", "inter_variance_high")  # between what σ₀² lies, 95 % confidence; of the history

LOST_SECONDS = 60.0  # of training, at most, between two checkpoints

Row = dict[str, Any]


@dataclass
class Records:
    """What a run has found so far."""

    history: list[Row] = field(default_factory=list)
    participation: list[Row] = field(default_factory=list)
    clients: list[Row] = field(default_factory=list)
    summary: Row = field(default_factory=dict)

    def up_to(self, round_number: int) -> Records:
        """Without the rounds after that one."""
        kept = [[row for row in rows if row["round"] <= round_number] for rows in (self.history, self.participation)]
        return replace(self, history=kept[0], participation=kept[1])


def history_columns(recipe: Recipe) -> list[str]:
    """Columns of a run's history."""
    first = ["round", "clients", "gradient_evaluations", "seconds"]
    return [*first, "num_local_steps", "intra_variance", "inter_variance", *INTERVAL, *score_columns(recipe)]


def score_columns(recipe: Recipe) -> list[str]:
    """Those of them that an evaluation fills in."""
    beside = [f"{part}_{metric}" for part in recipe.noted_beside for metric in recipe.metrics]
    return score_names(recipe.metrics, recipe.fine_tune, recipe.class_frequencies, recipe.neighbours) + beside


@dataclass
class RunFolder(Observer):
    """Writes a run into a folder as it goes."""

    path: Path
    _columns: Sequence[str] = field(default=(), init=False)  # of the history, as it was begun

    def started(self, recipe: Recipe, records: Records) -> None:
        """Write what is known before the first round, or what an interrupted run had found until its checkpoint."""
        self._columns = history_columns(recipe)
        # Histories of earlier versions have columns for accuracies that a task may not have.
        history = [{name: row.get(name) for name in self._columns} for row in records.history]
        write_csv(self.path / HISTORY, history, self._columns)
        write_csv(self.path / PARTICIPATION, records.participation, PARTICIPATION_COLUMNS)
        write_json(self.path / CONFIG, {"version": VERSION, "config": recipe.to_json(), "environment": environment()})

    def round_ended(self, row: Row, participants: Sequence[Row]) -> None:
        """One more line of the history, and one for each participant."""
        append_csv(self.path / PARTICIPATION, participants, PARTICIPATION_COLUMNS)
        append_csv(self.path / HISTORY, [row], self._columns)

    def updated(self, records: Records, state: RunState) -> None:
        """Write clients and summary."""
        self.add_evaluation(records)

    def ended(self, records: Records) -> None:
        """Write what a run that diverged has found; one that was stopped is left as it is."""
        if records.summary["status"] == "diverged":
            self.add_evaluation(records)

    def add_evaluation(self, records: Records) -> None:
        """The clients and the summary, as of now; of a run that has ended, all tables once more as Parquet."""
        write_csv(self.path / CLIENTS, records.clients)
        if records.summary.get("status") != "running":
            tables = ((HISTORY, records.history), (PARTICIPATION, records.participation), (CLIENTS, records.clients))
            for name, rows in tables:
                write_parquet((self.path / name).with_suffix(".parquet"), rows)
        write_json(self.path / SUMMARY, records.summary)

    def add_checkpoint(self, state: RunState, seconds: float) -> None:
        """Everything training needs to go on from here."""
        about = {"round": state.round_number, "seconds": seconds}
        save_tensors(self.path / CHECKPOINT, tensors_of(state), about)


class Checkpoints(Observer):
    """Keeps where training stands, every so many rounds and after a minute at the latest."""

    def __init__(self, folder: RunFolder, recipe: Recipe, seconds: float) -> None:
        self._folder, self._recipe = folder, recipe
        self._saved = time.perf_counter()
        self._began = self._saved - seconds

    def updated(self, records: Records, state: RunState) -> None:
        """Save the state, if it is time."""
        now = time.perf_counter()
        is_late = bool(self._recipe.checkpoint_every) and now - self._saved > LOST_SECONDS
        if self._recipe.is_checkpointed(state.round_number) or is_late:
            self._folder.add_checkpoint(state, now - self._began)
            self._saved = now


def read_config(path: Path) -> Recipe:
    """The recipe of a saved run."""
    if not (path / CONFIG).is_file():
        raise CheckpointError(
            f"{path} holds no {CONFIG}; expected the folder of a run, as `selffl run` or train(out=) writes it."
        )
    try:
        content = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        if content["version"] != VERSION:
            raise CheckpointError(f"{path / CONFIG} has version {content['version']}; expected {VERSION}.")
        return Recipe.from_json(content["config"])
    except (ValueError, TypeError, KeyError, ConfigError) as error:
        raise CheckpointError(f"{path / CONFIG} is not the configuration of a run ({error!r}).") from None


def read_records(path: Path) -> Records:
    """What a run has left so far; an interrupted one may lack clients and a summary."""
    found = Records()
    try:
        for name, rows in ((HISTORY, found.history), (PARTICIPATION, found.participation), (CLIENTS, found.clients)):
            if (path / name).is_file():
                rows += read_csv(path / name, as_text=("client",))
        if (path / SUMMARY).is_file():
            summary = json.loads((path / SUMMARY).read_text(encoding="utf-8"))
            if not isinstance(summary, dict):
                raise ValueError(f"{SUMMARY} is no JSON object")
            found.summary.update(summary)
        for row in (*found.history, *found.participation):
            row["round"] = int(row["round"])
        if not all("client" in row for row in (*found.clients, *found.participation)):
            raise ValueError("there is no column client")
    except (ValueError, TypeError, KeyError, csv.Error) as error:
        raise CheckpointError(f"the records in {path} are damaged ({error!r}); expected those of a run.") from None
    return found


def read_checkpoint(path: Path, template: RunState) -> tuple[RunState, float]:
    """The state a run goes on from, and the seconds spent until then; ``template`` is the state of its beginning."""
    tensors, about = load_tensors(path / CHECKPOINT)
    state = fill_record(template, tensors)
    return replace(state, round_number=int(about["round"])), float(about["seconds"])


def save_module(path: Path, parts: Mapping[str, Any]) -> None:
    """Pickle what cannot be named: a user's own module, loss, method or metrics."""
    try:
        torch.save(dict(parts), path / MODULE)
    except Exception as error:  # pickling fails in as many ways as there are objects
        (path / MODULE).unlink(missing_ok=True)
        raise CheckpointError(
            f"the module, loss, method or metrics cannot be pickled ({error}); expected ones defined at the top of a "
            "module. Define them there, or train without `out`."
        ) from None


def load_module(path: Path) -> dict[str, Any]:
    """What `save_module` wrote.  This runs code from the file, as unpickling does: open only what you trust."""
    try:
        # What was on a GPU there may be wanted where there is none.
        place = None if torch.cuda.is_available() else "cpu"
        found: dict[str, Any] = torch.load(path / MODULE, map_location=place, weights_only=False)
    except FileNotFoundError:
        raise CheckpointError(f"{path} holds no {MODULE}; pass the module to `load` or `resume`.") from None
    except Exception as error:  # likewise
        raise CheckpointError(
            f"{path / MODULE} cannot be read ({error}); pass the module to `load` or `resume`."
        ) from None
    return found
