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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from selffl.algorithms import traits_recorded
from selffl.algorithms.records import tensors_of
from selffl.engines.cohort import RunState
from selffl.errors import CheckpointError
from selffl.runs.environment import environment
from selffl.state.checkpoint import fill_record, load_tensors, save_tensors
from selffl.state.files import append_csv, read_csv, write_csv, write_json, write_parquet
from selffl.training.blocks import Gradients

VERSION = 1

CONFIG, SUMMARY, CHECKPOINT = "config.json", "summary.json", "checkpoint.safetensors"
HISTORY, PARTICIPATION, CLIENTS, PARTITION = "history.csv", "participation.csv", "clients.csv", "partition.csv"
FEDERATION, START, MODULE = "federation.safetensors", "start.safetensors", "module.pt"
PREPARATION = "preparation.json"

# Of participation.csv, after the round and the client: what a client reported, and what the server makes of it.
REPORTED = ("num_local_steps", "wanted_steps", "intra_variance", "effective_params", "weight")

Row = dict[str, Any]


@dataclass(frozen=True)
class RunConfig:
    """What a run was asked to do; see `selffl.train` for what each means."""

    algorithm: str
    options: dict[str, Any]
    rounds: int
    participation: float
    learning_rate: float
    batch_size: int
    seed: int
    device: str
    dtype: str
    chunk_size: int | None
    gradients: Gradients
    evaluate_every: int
    evaluate_on: str
    evaluate_train: bool
    fine_tune: tuple[int, ...]
    checkpoint_every: int
    data: str
    source: dict[str, Any] | None  # the call that loads the data again
    fingerprint: str  # of the rows
    model: dict[str, Any] | None  # the call that builds the model again
    loss: str | None  # by its name in `selffl.training.losses`; none: one of the user's own
    has_own_method: bool  # one that is not in the registry
    metrics: tuple[str, ...] = ("accuracy",)  # that follow from the task, and the user's own
    own_metrics: dict[str, bool] = field(default_factory=dict)  # the user's own: whether higher is better
    optimiser: dict[str, Any] = field(default_factory=lambda: {"name": "sgd"})  # of local steps, with its options
    is_warm: bool = False  # began with weights that were given (`start`)
    gain: bool = False  # whether clients train alone as well, when the last round is done
    has_global_model: bool = True  # whether the method trains a model that is of use to anybody
    is_federated: bool = True  # whether clients learn from each other at all


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


@dataclass
class RunFolder:
    """Where a run is written.

    Attributes:
        path: The folder; made when the run begins.
        history_columns: Of history.csv, which is written line by line.
    """

    path: Path
    history_columns: Sequence[str]
    participation_columns: Sequence[str] = ("round", "client", *REPORTED)

    def begin(self, config: RunConfig, records: Records) -> None:
        """Write what is known before the first round, or what an interrupted run had found until its checkpoint."""
        # Histories of earlier versions have columns for accuracies that a task may not have.
        history = [{name: row.get(name) for name in self.history_columns} for row in records.history]
        write_csv(self.path / HISTORY, history, self.history_columns)
        write_csv(self.path / PARTICIPATION, records.participation, self.participation_columns)
        write_json(self.path / CONFIG, {"version": VERSION, "config": asdict(config), "environment": environment()})

    def add_round(self, row: Row, participation: Sequence[Row]) -> None:
        """One more round."""
        append_csv(self.path / PARTICIPATION, participation, self.participation_columns)
        append_csv(self.path / HISTORY, [row], self.history_columns)

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


def read_config(path: Path) -> RunConfig:
    """The configuration of a saved run."""
    if not (path / CONFIG).is_file():
        raise CheckpointError(
            f"{path} holds no {CONFIG}; expected the folder of a run, as `selffl run` or train(out=) writes it."
        )
    try:
        content = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        if content["version"] != VERSION:
            raise CheckpointError(f"{path / CONFIG} has version {content['version']}; expected {VERSION}.")
        config = content["config"]
        listed = {name: tuple(config[name]) for name in ("fine_tune", "metrics") if name in config}
        # Runs of earlier versions do not say what their method is like.
        return RunConfig(**traits_recorded(config["algorithm"]) | config | listed)
    except (ValueError, TypeError, KeyError) as error:
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
