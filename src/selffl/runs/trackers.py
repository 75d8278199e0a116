"""Trackers: TensorBoard, MLflow and Weights & Biases, told of a run as it goes; or an object of the user's own.

A tracker is an onlooker.  One that fails is left out for the rest of the run, with a warning; training goes on.  All
three write files and ask no network, unless the user's environment names a server (``MLFLOW_TRACKING_URI``,
``WANDB_MODE``)::

    tensorboard   OUT/tensorboard, or runs/ here       tensorboard --logdir OUT/tensorboard
    mlflow        OUT/mlflow, or mlruns/ here          mlflow ui --backend-store-uri OUT/mlflow (see `MLflow`)
    wandb         OUT/wandb, or wandb/ here            wandb sync OUT/wandb/offline-run-*

A run that is taken up again goes on in the same tracked run, whose id lies in ``trackers.json`` in the run's folder.
"""

from __future__ import annotations

import csv
import io
import json
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from selffl.errors import CheckpointError, ConfigError, check_known, one_line
from selffl.runs.folder import Records, Row
from selffl.runs.observers import EachRound, Observer, RoundCallback
from selffl.runs.recipe import Recipe
from selffl.state.files import write_json

FILE = "trackers.json"  # in a run's folder: which trackers follow it, and what they call it
NAME = "selffl"  # of the experiment or project, unless the environment has another


@runtime_checkable
class Tracker(Protocol):
    """What is told of a run as it goes."""

    def begin(self, config: Mapping[str, Any], folder: Path | None) -> None:
        """A run begins, or is taken up again; ``folder`` is where it is written, if anywhere."""
        ...

    def log(self, row: Mapping[str, Any]) -> None:
        """One more round: a row of the history."""
        ...

    def end(self, summary: Mapping[str, Any], clients: Sequence[Mapping[str, Any]]) -> None:
        """The run has ended: ``summary["status"]`` says ``finished``, ``diverged`` or ``stopped``."""
        ...


Choice = str | Tracker | Sequence[str | Tracker]


class TensorBoard:
    """Event files: a curve for each column of the history, histograms over the clients at the end."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._writer: Any = None
        self._about = ""

    def begin(self, config: Mapping[str, Any], folder: Path | None) -> None:
        """Note what was asked for; the file is made with the first round."""
        self._folder = folder
        self._about = json.dumps(dict(config), indent=1, ensure_ascii=False, default=str)
        _remember(folder, "tensorboard", {})

    def log(self, row: Mapping[str, Any]) -> None:
        """Add a point to each curve."""
        if self._writer is None:
            # Rounds that were trained again after an interruption take the place of those of the first time.
            again = row["round"] if row["round"] > 1 else None
            place = None if self._folder is None else str(self._folder / "tensorboard")
            self._writer = import_module("torch.utils.tensorboard").SummaryWriter(place, purge_step=again)
            self._writer.add_text("config", f"```\n{self._about}\n```", row["round"])
        for name, value in _numbers(row).items():
            self._writer.add_scalar(name, value, row["round"])
        self._writer.flush()

    def end(self, summary: Mapping[str, Any], clients: Sequence[Mapping[str, Any]]) -> None:
        """Add the summary, and how the clients are spread."""
        if self._writer is None:
            return
        step = summary.get("rounds")
        self._writer.add_text("summary", f"```\n{json.dumps(dict(summary), indent=1, ensure_ascii=False)}\n```", step)
        columns: dict[str, list[float]] = {}
        for row in clients:
            for name, value in _numbers(row).items():
                columns.setdefault(name, []).append(value)
        columns.pop("client", None)  # an id that happens to be a number
        for name, values in columns.items():
            self._writer.add_histogram(f"clients/{name}", import_module("numpy").array(values), step)
        self._writer.close()


class MLflow:
    """A run of MLflow's: options as parameters, the history as metrics by round, clients and summary as artefacts.

    Without a server it writes MLflow's files: its database needs packages that mlflow-skinny leaves out.  MLflow calls
    its files "in maintenance mode" and wants to be told that they are meant: ``MLFLOW_ALLOW_FILE_STORE=true``, which is
    set here, and has to be for ``mlflow ui``.
    """

    STATUS: ClassVar[dict[str, str]] = {"finished": "FINISHED", "diverged": "FAILED"}

    def __init__(self) -> None:
        self._client: Any = None
        self._run = ""
        self._last = 0

    def begin(self, config: Mapping[str, Any], folder: Path | None) -> None:
        """Make a run, or find the one of before."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        place = os.environ.get("MLFLOW_TRACKING_URI")
        if place is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            place = (Path("mlruns") if folder is None else folder / "mlflow").resolve().as_uri()
        self._client = import_module("mlflow.tracking").MlflowClient(tracking_uri=place)
        earlier = _read_remembered(folder).get("mlflow", {})
        if earlier:
            self._run = earlier["run"]
            self._client.update_run(self._run, status="RUNNING")
            known = self._client.get_metric_history(self._run, "clients")  # which every round has
            self._last = max((point.step for point in known), default=0)
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", NAME)
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        self._run = self._client.create_run(experiment, run_name=_title(config)).info.run_id
        param = import_module("mlflow.entities").Param
        self._client.log_batch(self._run, params=[param(key, value[:500]) for key, value in _flat(config).items()])
        _remember(folder, "mlflow", {"run": self._run})

    def log(self, row: Mapping[str, Any]) -> None:
        """Add the row, unless it was there before an interruption: the same numbers, since they are keyed."""
        if row["round"] <= self._last:
            return
        metric, now = import_module("mlflow.entities").Metric, int(1000 * time.time())
        values = _numbers(row).items()
        self._client.log_batch(self._run, metrics=[metric(name, value, now, row["round"]) for name, value in values])

    def end(self, summary: Mapping[str, Any], clients: Sequence[Mapping[str, Any]]) -> None:
        """Add clients and summary, and close the run."""
        self._client.log_dict(self._run, dict(summary), "summary.json")
        if clients:
            text = io.StringIO()
            writer = csv.DictWriter(text, list(clients[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(clients)
            self._client.log_text(self._run, text.getvalue(), "clients.csv")
        self._client.set_terminated(self._run, self.STATUS.get(str(summary.get("status")), "KILLED"))


class WandB:
    """A run of Weights & Biases', offline unless ``WANDB_MODE`` says otherwise; ``wandb sync`` sends it later.

    Taken up again it writes a second file for the same run.  Nothing of the machine is noted.
    """

    def __init__(self) -> None:
        self._run: Any = None

    def begin(self, config: Mapping[str, Any], folder: Path | None) -> None:
        """Make a run, or another part of the one of before."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        wandb = import_module("wandb")
        earlier = _read_remembered(folder).get("wandb", {})
        settings = wandb.Settings(
            mode=os.environ.get("WANDB_MODE", "offline"),
            root_dir=str(Path.cwd() if folder is None else folder.resolve()),
            reinit="create_new",  # beside a run that the user may have going
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        )
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", NAME),
            name=_title(config),
            config=dict(config),
            id=earlier.get("run"),
            resume="allow" if earlier else None,
            settings=settings,
        )
        _remember(folder, "wandb", {"run": self._run.id})

    def log(self, row: Mapping[str, Any]) -> None:
        """Add the row at its round."""
        self._run.log(_numbers(row), step=row["round"])

    def end(self, summary: Mapping[str, Any], clients: Sequence[Mapping[str, Any]]) -> None:
        """Add clients and summary, and close the run."""
        if clients:
            names = list(clients[0])
            data = [[str(row["client"]), *(row[name] for name in names if name != "client")] for row in clients]
            columns = ["client", *(name for name in names if name != "client")]
            self._run.log({"clients_table": import_module("wandb").Table(columns=columns, data=data)})
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=0 if summary.get("status") == "finished" else 1)


TRACKERS: dict[str, Callable[[], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


def trackers_of(choice: Choice | None) -> list[Tracker]:
    """The trackers that were asked for, by name or as objects; refused while there is nothing to lose."""
    chosen: Sequence[Any] = [] if choice is None else choice if isinstance(choice, list | tuple) else [choice]
    return [_find_tracker(each) if isinstance(each, str) else _check_tracker(each) for each in chosen]


def remembered_trackers(folder: Path) -> list[Tracker]:
    """The trackers that follow the run in a folder already; one whose package has gone is left out, with a warning."""
    found: list[Tracker] = []
    for name in _read_remembered(folder):
        try:
            found.append(_find_tracker(name))
        except ConfigError as error:
            warnings.warn(f"{error} The run continues without it.", stacklevel=3)
    return found


def observers_of(trackers: Sequence[Tracker], on_round: RoundCallback | None, folder: Path | None) -> list[Observer]:
    """Who watches a run besides its folder: trackers first, then the user's own function."""
    callback: list[Observer] = [] if on_round is None else [EachRound(on_round)]
    return [*(TrackerObserver(tracker, folder) for tracker in trackers), *callback]


class TrackerObserver(Observer):
    """Tells a tracker of a run; one that fails is left out from then on, with a warning."""

    def __init__(self, tracker: Tracker, folder: Path | None) -> None:
        self._tracker, self._folder, self._has_failed = tracker, folder, False

    def started(self, recipe: Recipe, records: Records) -> None:
        """Say what was asked for."""
        self._tell("begin", recipe.to_json(), self._folder)

    def round_ended(self, row: Row, participants: Sequence[Row]) -> None:
        """Hand on a copy of the row."""
        self._tell("log", dict(row))

    def ended(self, records: Records) -> None:
        """Hand on summary and clients."""
        self._tell("end", records.summary, records.clients)

    def _tell(self, what: str, *news: Any) -> None:
        if self._has_failed:
            return
        try:
            getattr(self._tracker, what)(*news)
        except Exception as error:  # a tracker is somebody else's code
            self._has_failed = True
            name = type(self._tracker).__name__
            warnings.warn(
                f"the tracker {name} failed in {what} ({one_line(error)}); the run continues without it.", stacklevel=2
            )


def _find_tracker(name: str) -> Tracker:
    check_known("tracker", name, TRACKERS)
    if find_spec(name) is None:
        raise ConfigError(
            f"tracker {name!r} wants the package {name}, which is not here: pip install 'selffl[{name}]'."
        )
    return TRACKERS[name]()


def _check_tracker(given: Any) -> Tracker:
    if isinstance(given, type) or not isinstance(given, Tracker):
        raise ConfigError(
            f"tracker is {given!r}; expected {', '.join(map(repr, TRACKERS))}, or an object with begin, log and end."
        )
    return given


def _read_remembered(folder: Path | None) -> dict[str, Any]:
    if folder is None or not (folder / FILE).is_file():
        return {}
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{folder / FILE} is damaged ({error}); delete it to go on without trackers.") from None
    return found if isinstance(found, dict) else {}


def _remember(folder: Path | None, name: str, about: Row) -> None:
    if folder is not None:
        write_json(folder / FILE, _read_remembered(folder) | {name: about})


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """What can be drawn over rounds."""
    return {name: value for name, value in row.items() if name != "round" and isinstance(value, int | float)}


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Options by their dotted names."""
    found: dict[str, str] = {}
    for name, value in config.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": str(value)}
    return found


def _title(config: Mapping[str, Any]) -> str:
    return f"{config['algorithm']} on {config['data']}, seed {config['seed']}"
