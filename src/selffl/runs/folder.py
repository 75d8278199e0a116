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
    memory/*.slots           what clients keep, where that lies on disk; the checkpoint says whose is where
    federation.safetensors   the rows, if they are the user's own
    preparation.json         how a user's table became numbers, and what its units and classes are
    start.safetensors        the model that training began with, where clients train alone from it as well (``gain``)
    module.safetensors       the user's own module, if torch's layers are all that it is made of
    module.pt                else that module, and the user's own loss, method and metrics, pickled
    trackers.json            the trackers that follow the run, if there are any; their files lie in folders beside it
"""

from __future__ import annotations

import csv
import io
import json
import math
import time
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from selffl.algorithms.records import tensors_of
from selffl.engines.cohort import RunState
from selffl.errors import CheckpointError, ConfigError, one_line
from selffl.models.layers import build_layers, describe_layers
from selffl.runs.environment import environment
from selffl.runs.evaluation import score_names
from selffl.runs.methods import Method
from selffl.runs.observers import Observer
from selffl.runs.recipe import Recipe
from selffl.state.checkpoint import fill_record, load_tensors, save_tensors
from selffl.state.disk import DiskMemory
from selffl.state.files import append_csv, atomic_write, read_csv, sweep, write_csv, write_json, write_parquet
from selffl.state.memory import whole_memory

VERSION = 1

CONFIG, SUMMARY, CHECKPOINT = "config.json", "summary.json", "checkpoint.safetensors"
HISTORY, PARTICIPATION, CLIENTS, PARTITION = "history.csv", "participation.csv", "clients.csv", "partition.csv"
ANSWERS = "answers.csv"  # of a run that has ended: which classes its clients' rows got
FEDERATION, START = "federation.safetensors", "start.safetensors"
LAYERS, MODULE = "module.safetensors", "module.pt"
PREPARATION = "preparation.json"
CLIENT_MEMORY = "memory"  # the folder of what clients keep on disk

# Columns that participation.csv always has: what clients report to methods here, and what the server makes of it.
REPORTED = ("num_local_steps", "wanted_steps", "intra_variance", "effective_params", "weight")

INTERVAL = ("inter_variance_low", "inter_variance_high")  # between what σ₀² lies, 95 % confidence; of the history

STRAY = ".tmp??????"  # what safetensors left of itself in folders of earlier versions, where it was killed
LOST_SECONDS = 60.0  # of training, at most, between two checkpoints

Row = dict[str, Any]


@dataclass
class Records:
    """What a run has found so far."""

    history: list[Row] = field(default_factory=list)
    participation: list[Row] = field(default_factory=list)
    clients: list[Row] = field(default_factory=list)
    summary: Row = field(default_factory=dict)
    answers: list[Row] = field(default_factory=list)  # of a run that has ended

    def up_to(self, round_number: int) -> Records:
        """Records without the rounds after that one."""
        kept = [[row for row in rows if row["round"] <= round_number] for rows in (self.history, self.participation)]
        return replace(self, history=kept[0], participation=kept[1])


def participation_columns(recorded: Iterable[str]) -> list[str]:
    """Columns of participation.csv, for a method that has these fields of its uploads recorded."""
    return list(dict.fromkeys(("round", "client", *REPORTED, *recorded)))


def history_columns(recipe: Recipe) -> list[str]:
    """Columns of a run's history."""
    first = ["round", "clients", "gradient_evaluations", "bytes_sent", "seconds"]
    spent = ["row_epsilon", "row_delta"] if recipe.row_noise_multiplier else []
    return [
        *first,
        "num_local_steps",
        "intra_variance",
        "inter_variance",
        *INTERVAL,
        *spent,
        *score_columns(recipe),
    ]


def score_columns(recipe: Recipe) -> list[str]:
    """Columns of a run's history that an evaluation fills in."""
    beside = [f"{part}_{metric}" for part in recipe.noted_beside for metric in recipe.metrics]
    return score_names(recipe.metrics, recipe.fine_tune, recipe.class_frequencies, recipe.neighbours) + beside


@dataclass
class RunFolder(Observer):
    """Writes a run into a folder as it goes."""

    path: Path
    _columns: Sequence[str] = field(default=(), init=False)  # of the history, as it was begun
    _participation_columns: Sequence[str] = field(default=(), init=False)

    def started(self, recipe: Recipe, records: Records) -> None:
        """Write what is known before the first round, or what an interrupted run had found until its checkpoint."""
        sweep(self.path.glob(STRAY))
        self._columns, self._participation_columns = history_columns(recipe), participation_columns(recipe.recorded)
        # Histories of earlier versions have columns for accuracies that a task may not have.
        history = [{name: row.get(name) for name in self._columns} for row in records.history]
        write_csv(self.path / HISTORY, history, self._columns)
        write_csv(self.path / PARTICIPATION, records.participation, self._participation_columns)
        write_json(self.path / CONFIG, {"version": VERSION, "config": recipe.to_json(), "environment": environment()})

    def round_ended(self, row: Row, participants: Sequence[Row]) -> None:
        """One more line of the history, and one for each participant."""
        append_csv(self.path / PARTICIPATION, participants, self._participation_columns)
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
        if records.answers:
            write_csv(self.path / ANSWERS, records.answers)
        elif (self.path / ANSWERS).is_file():  # of an earlier end, behind which the run has gone on
            (self.path / ANSWERS).unlink()
        if records.summary.get("status") != "running":
            tables = ((HISTORY, records.history), (PARTICIPATION, records.participation), (CLIENTS, records.clients))
            for name, rows in tables:
                write_parquet((self.path / name).with_suffix(".parquet"), rows)
        write_json(self.path / SUMMARY, records.summary)

    def add_checkpoint(self, state: RunState, seconds: float) -> None:
        """Everything training needs to go on from here."""
        about = {"round": state.round_number, "seconds": seconds}
        state = replace(state, memory=whole_memory(state.memory))
        if not isinstance(state.memory, DiskMemory):
            save_tensors(self.path / CHECKPOINT, tensors_of(state), about)
            return
        state = replace(state, memory=state.memory.stored_in(self.path / CLIENT_MEMORY))
        with state.memory.publishing():
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
    return read_description(path)[0]


def read_description(path: Path) -> tuple[Recipe, dict[str, str]]:
    """The recipe of a saved run, and what it was computed with; earlier versions did not say."""
    if not (path / CONFIG).is_file():
        raise CheckpointError(
            f"{path} holds no {CONFIG}; expected the folder of a run, as `selffl run` or train(out=) writes it."
        )
    try:
        content = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        if content["version"] != VERSION:
            raise CheckpointError(
                f"{path / CONFIG} has version {content['version']}; expected {VERSION}. Use the selffl that wrote it."
            )
        environment = {str(name): str(said) for name, said in content.get("environment", {}).items()}
        return Recipe.from_json(content["config"]), environment
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, ConfigError) as error:
        raise CheckpointError(f"{path / CONFIG} is not the configuration of a run ({one_line(error)}).") from None


def read_table(path: Path, texts: Sequence[str] = (), counts: Sequence[str] = ()) -> list[Row]:
    """A table of a run: text and counts in the columns named, numbers or nothing in all others."""
    try:
        rows = read_csv(path, texts)
        for number, row in enumerate(rows, start=1):
            if missing := {*texts, *counts} - set(row):
                raise ValueError(f"there is no column {min(missing)}")
            for name, cell in row.items():
                if name not in texts and not _is_number(cell, name in counts, name.startswith("num_")):
                    raise ValueError(f"row {number} has {cell!r} for {name}, which is no number")
    except (ValueError, OverflowError, csv.Error) as error:
        raise CheckpointError(f"{path} is damaged ({one_line(error)}); expected that of a run.") from None
    return rows


def _is_number(cell: Any, is_count: bool, is_finite: bool) -> bool:
    """Whether a cell is what a run writes: a count, or any number or nothing."""
    if is_count or cell is None:
        return isinstance(cell, int) or not is_count
    return not (isinstance(cell, str) or math.isnan(float(cell)) or (is_finite and math.isinf(float(cell))))


def read_records(path: Path, clients: Iterable[Hashable] = ()) -> Records:
    """What a run has left so far; an interrupted one may lack clients and a summary.

    Ids are as these ``clients`` have them: in a file they are text.
    """
    found = Records()
    if (path / HISTORY).is_file():
        found.history += read_table(path / HISTORY, counts=("round", "clients"))
    if (path / PARTICIPATION).is_file():
        found.participation += read_table(path / PARTICIPATION, ("client",), ("round",))
    if (path / CLIENTS).is_file():
        found.clients += read_table(path / CLIENTS, ("client",))
    if (path / ANSWERS).is_file():
        found.answers += read_table(path / ANSWERS, ("client", "class", "answer"), ("num_test",))
    if (path / SUMMARY).is_file():
        try:
            summary = json.loads((path / SUMMARY).read_text(encoding="utf-8"))
            found.summary.update(summary)
            if any(isinstance(value, list | dict) or value != value for value in summary.values()):
                raise ValueError("a number is something else")
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path / SUMMARY} is damaged ({one_line(error)}); expected that of a run.") from None
    ids = {str(client): client for client in clients}
    for row in (*found.clients, *found.participation):
        row["client"] = ids.get(row["client"], row["client"])
    return found


def check_complete(path: Path, records: Records, round_number: int, method: Method, ids: Collection[Any]) -> None:
    """Refuse records that lack rows of rounds before the checkpoint: a run that goes on would never have them again."""
    if [row["round"] for row in records.history] != list(range(1, round_number + 1)):
        raise _incomplete(path / HISTORY, f"rounds before the checkpoint of round {round_number}")
    told = Counter(row["round"] for row in records.participation)
    for row in records.history if method.fields_by_client() else ():
        if told[row["round"]] != row["clients"]:
            raise _incomplete(path / PARTICIPATION, f"clients of round {row['round']}")
    is_evaluated = any(row[name] is not None for row in records.history for name in row if name.startswith("weighted_"))
    if is_evaluated and {row["client"] for row in records.clients} != set(ids):
        raise _incomplete(path / CLIENTS, "clients of the run")


def _incomplete(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} lacks {what}; expected all. Put the file back, load the run for its models, or start it anew."
    )


def read_checkpoint(path: Path, template: RunState) -> tuple[RunState, float]:
    """The state a run goes on from, and the seconds spent until then; ``template`` is the state of its beginning."""
    tensors, about = load_tensors(path / CHECKPOINT)
    state = fill_record(template, tensors)
    try:
        return replace(state, round_number=int(about["round"])), float(about["seconds"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"{path / CHECKPOINT} does not say how far the run is ({one_line(error)}); expected a round and seconds. "
            "Train anew."
        ) from None


def save_layers(path: Path, module: nn.Module) -> bool:
    """Write a module as its layers and their numbers, which is no code, if that is all it is; whether it was."""
    if (layers := describe_layers(module)) is None:
        return False
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    save_tensors(path / LAYERS, module.state_dict(), {"layers": layers, "frozen": frozen})
    return True


def load_layers(path: Path) -> nn.Module:
    """What `save_layers` wrote."""
    tensors, about = load_tensors(path / LAYERS)
    module = build_layers(about.get("layers"))
    try:
        module.load_state_dict(tensors, assign=True)
        for name in about["frozen"]:
            module.get_parameter(name).requires_grad_(False)
    except (KeyError, RuntimeError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / LAYERS} is damaged ({one_line(error)}); pass the module to `load`.") from None
    return module


def save_module(path: Path, parts: Mapping[str, Any]) -> None:
    """Pickle what cannot be named: a user's own module, loss, method or metrics."""
    content = io.BytesIO()
    try:
        torch.save(dict(parts), content)
    except Exception as error:  # pickling fails in as many ways as there are objects
        raise CheckpointError(
            f"the module, loss, method or metrics cannot be pickled ({error}); expected ones defined at the top of a "
            "module. Define them there, or train without `out`."
        ) from None
    with atomic_write(path / MODULE) as partial:
        partial.write_bytes(content.getbuffer())


def load_module(path: Path) -> dict[str, Any]:
    """What `save_module` wrote.  This runs code from the file, as unpickling does: for folders that are trusted."""
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
