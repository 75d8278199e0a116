"""What lies in folders: runs, put together by what they can be compared on, and records of studies."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from selffl.algorithms import ALGORITHMS
from selffl.errors import DataError
from selffl.reports.record import RECORD, RUNS, StudyRecord, load_studies
from selffl.runs import folder as files
from selffl.runs.evaluation import leading_metric
from selffl.runs.folder import Records, Row
from selffl.runs.recipe import STUDY_SETTINGS, Recipe
from selffl.studies import STUDIES
from selffl.studies.arms import WARM
from selffl.studies.result import split_ratio
from selffl.training.metrics import HIGHER_IS_BETTER


@dataclass(frozen=True)
class RunData:
    """One run as its folder tells it."""

    folder: Path
    config: Recipe
    records: Records
    environment: Mapping[str, str] = field(default_factory=dict)
    partition: Sequence[Row] = ()  # client, class, num_train, num_test

    @property
    def status(self) -> str:
        """Running, finished or diverged."""
        return str(self.records.summary.get("status", "running"))

    @property
    def has_begun(self) -> bool:
        """Whether there is something to tell: a round, or that the first one diverged."""
        return bool(self.records.history) or self.status == "diverged"

    @property
    def round_number(self) -> int:
        """The last round that was finished."""
        return int(self.records.history[-1]["round"]) if self.records.history else 0

    def score(self, name: str) -> float | None:
        """A number of the summary, as of the last evaluation; none for a run that diverged."""
        if self.status == "diverged":
            return None
        value = self.records.summary.get(name)
        return None if value is None else float(value)


@dataclass(frozen=True)
class Method:
    """A method with its options, and its runs in the order of seeds."""

    label: str
    runs: tuple[RunData, ...]

    @property
    def algorithm(self) -> str:
        """The method's name in the registry."""
        return self.runs[0].config.algorithm

    @property
    def has_global_model(self) -> bool:
        """Whether it trains a model that is of use to anybody."""
        return self.runs[0].config.has_global_model


@dataclass(frozen=True)
class Group:
    """Runs that can be compared with each other: the same data, the same metric."""

    methods: tuple[Method, ...]  # the first is compared with the others
    record: StudyRecord | None = None  # the study that the runs belong to, if there is one

    @property
    def runs(self) -> list[RunData]:
        """All of them."""
        return [run for method in self.methods for run in method.runs]

    @property
    def config(self) -> Recipe:
        """Settings of the first run."""
        return self.methods[0].runs[0].config

    @property
    def metric(self) -> str:
        """What the methods are compared by."""
        return leading_metric([run.records.summary for run in self.runs]) or self.config.metrics[0]

    @property
    def client_metric(self) -> str:
        """What single clients are shown by, and gain: the task's first metric, which clients of one class have, too."""
        return self.config.metrics[0]

    @property
    def is_higher_better(self) -> bool:
        """Whether a higher number of the metric is better."""
        return HIGHER_IS_BETTER[self.metric]

    @property
    def seeds(self) -> list[int]:
        """All that there are."""
        return sorted({run.config.seed for run in self.runs})

    @cached_property
    def recorded_ratio(self) -> float | None:
        """Test rows per training row, as the runs have recorded it; none where they have not."""
        ratio = split_ratio(row for run in self.runs for row in run.records.clients)
        return None if math.isnan(ratio) else ratio

    @property
    def data(self) -> str:
        """What was trained on, in words."""
        named = {"remote": "rows of the sites", "arrays": "your own rows"}
        return named.get(self.config.data, self.config.data)

    @property
    def title(self) -> str:
        """A heading."""
        if self.record is not None:
            return self.record.title
        names = [method.label for method in self.methods]
        if len(names) > 3:
            return f"{names[0]} and {len(names) - 1} others on {self.data}"
        return f"{', '.join(names)} on {self.data}"


@dataclass(frozen=True)
class Collection:
    """Everything that a page shows."""

    groups: list[Group] = field(default_factory=list)
    studies: list[tuple[Path, StudyRecord]] = field(default_factory=list)
    waiting: list[Path] = field(default_factory=list)  # runs without a finished round


def is_run(folder: Path) -> bool:
    """Whether a run has been begun there."""
    return (folder / files.CONFIG).is_file() and (folder / files.HISTORY).is_file()


def read_run(folder: Path) -> RunData:
    """A run, which may still be going on."""
    path = folder / files.PARTITION
    partition = files.read_table(path, ("client", "class"), ("num_train", "num_test")) if path.is_file() else []
    config, environment = files.read_description(folder)
    return RunData(folder, config, files.read_records(folder), environment, partition)


def run_folders(folder: Path) -> list[Path]:
    """The folder itself if it is a run, else the runs below it: beside each other, or in the folder of a study."""
    if is_run(folder):
        return [folder]
    below = [path for pattern in ("*", f"{RUNS}/*", f"*/{RUNS}/*") for path in sorted(folder.glob(pattern))]
    # What every method started from is not one of the methods.
    return [path for path in below if is_run(path) and not path.name.startswith(f"{WARM}-")]


def collect(folders: Iterable[Path], *, may_wait: bool = False) -> Collection:
    """What the folders hold; runs of comparisons are looked into, studies of the paper keep their own figures.

    Args:
        folders: of runs, of studies, or folders of these.
        may_wait: whether a folder without any finished round is fine, because one may be on its way.
    """
    collection = Collection()
    loose: list[RunData] = []
    for folder in dict.fromkeys(folders):
        if not folder.is_dir():
            if may_wait and not folder.exists():
                continue
            raise DataError(f"{folder} is not a folder; expected one that `selffl` has written.")
        has_record = any(folder.glob(RECORD)) or any(folder.glob(f"*/{RECORD}"))
        studies = load_studies(folder) if has_record else []
        places = run_folders(folder)
        if not places and not studies and not may_wait:
            raise DataError(
                f"{folder} holds no {RECORD} and no run; expected what `selffl run`, `selffl compare`, `selffl demo` "
                "or `selffl paper run` has written."
            )
        spoken_for = {path / RUNS: (path / RECORD).stat().st_mtime for path, _ in studies}
        for path, record in studies:
            group = None if record.id in STUDIES else _of_record(path, record)
            if group is None:
                collection.studies.append((path, record))
            else:
                collection.groups.append(group)
        for path in places:
            # A study speaks for its runs, but not for those begun since.
            if (path / files.CONFIG).stat().st_mtime <= spoken_for.get(path.parent, 0.0):
                continue
            run = read_run(path)
            if run.has_begun:
                loose.append(run)
            else:
                collection.waiting.append(path)
    collection.groups.extend(_group_runs(loose))
    if not collection.groups and not collection.studies and not may_wait and collection.waiting:
        raise DataError(
            f"{collection.waiting[0] / files.HISTORY} has no rounds yet; expected at least one. Wait for the first, or "
            f"watch it: selffl serve {collection.waiting[0]}"
        )
    return collection


def _of_record(study_folder: Path, record: StudyRecord) -> Group | None:
    """The runs that a study names, under the names it gives them; none if they are not there (any more)."""
    methods: dict[str, list[RunData]] = {}
    for entry in record.runs:
        folder = study_folder / RUNS / str(entry["folder"])
        if not is_run(folder):
            return None
        run = read_run(folder)
        if run.has_begun:
            methods.setdefault(str(entry["method"]), []).append(run)
    return Group(_in_order(methods), record) if methods else None


def _in_order(methods: Mapping[str, Sequence[RunData]]) -> tuple[Method, ...]:
    return tuple(Method(label, tuple(sorted(runs, key=lambda run: run.config.seed))) for label, runs in methods.items())


def _group_runs(runs: Sequence[RunData]) -> list[Group]:
    """Runs on the same data by the same metric together, Self-FL first, then as they were found."""
    comparable: dict[str, list[RunData]] = {}
    for run in sorted(runs, key=lambda run: not run.records.clients):
        # A run that diverged at once has no clients to be known by, but rows that others may have, too.
        rows = {kind: {each.config.fingerprint for each in similar} for kind, similar in comparable.items()}
        twin = next((kind for kind, known in rows.items() if run.config.fingerprint in known), None)
        comparable.setdefault(twin if twin is not None and not run.records.clients else _kind(run), []).append(run)
    groups = []
    for members in comparable.values():
        labels = _labels(members)
        methods: dict[str, list[RunData]] = {}
        # As the registry lists methods; those of the user's own come last.
        places = {name: place for place, name in enumerate(ALGORITHMS)}
        pairs = zip(members, labels, strict=True)
        for run, label in sorted(pairs, key=lambda pair: places.get(pair[0].config.algorithm, len(places))):
            methods.setdefault(label, []).append(run)
        groups.append(Group(_in_order(methods)))
    return groups


def _kind(run: RunData) -> str:
    """A text that runs have in common if they can be compared; their seeds, and with them splits, may differ."""
    config = run.config
    source: Any = {key: value for key, value in (config.source or {}).items() if key != "seed"}
    if not source:  # rows without a name: those of the same clients
        source = sorted(str(row["client"]) for row in run.records.clients)
    return json.dumps([config.data, source, config.metrics[0], config.evaluate_on], sort_keys=True)


def _labels(runs: Sequence[RunData]) -> list[str]:
    """The method's name, with whatever differs between runs of the same method."""
    labels = []
    for run in runs:
        same = [other for other in runs if other.config.algorithm == run.config.algorithm]
        mine, others = _settings(run.config), [_settings(other.config) for other in same]
        differing = [key for key in mine if any(other.get(key) != mine[key] for other in others)]
        said = [f"{key.replace('_', ' ')} = {mine[key]}" for key in differing]
        twins = [other for other in same if _settings(other.config) == mine and other.config.seed == run.config.seed]
        said += [run.folder.resolve().name] if len(twins) > 1 else []
        labels.append(", ".join([run.config.algorithm, *said]))
    return labels


def _settings(config: Recipe) -> dict[str, Any]:
    return dict(config.options) | {name: getattr(config, name) for name in STUDY_SETTINGS}
