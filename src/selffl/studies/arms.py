"""Arms of a comparison: every method with every seed, side by side, each recorded as soon as it is done."""

from __future__ import annotations

import ast
import gc
import hashlib
import json
import math
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from selffl.algorithms import traits_recorded
from selffl.errors import DivergedError
from selffl.runs.evaluation import leading_metric
from selffl.runs.folder import Records, Row, read_records
from selffl.state.checkpoint import load_tensors, save_tensors
from selffl.state.files import locked, write_json
from selffl.studies.problems import Problem
from selffl.studies.result import Estimate, Job, split_ratio

WARM = "warm-up"  # what its folder is called
SCORES = "scores.safetensors"
START = "start"  # the view of the model that a run starts from
FILES_WITH_NUMBERS = (
    "arms.py",
    "problems.py",
    "own.py",
    "newcomers.py",
    "regime_problem.py",
    "adapter_problem.py",
    "adapter_rows.py",
    "adapter_speech.py",
    "adapter_text.py",
    "adapter_images.py",
    "attacked_problem.py",
    "published_problems.py",
    "grouped_models.py",
    "grouped_runs.py",
    "lme4.R",
)  # of the studies, those that make numbers
CODE_ENDINGS = (".py", ".csv", ".toml", ".R")  # of files that numbers depend on
INDEX = ".arms.json"  # which runs a study is at, for those who watch it


@dataclass(frozen=True)
class Arm:
    """A method with options, and how it is looked at."""

    label: str
    algorithm: str
    options: Mapping[str, Any] = field(default_factory=dict)
    fine_tune: tuple[int, ...] = ()
    evaluate_on: Literal["test", "validation"] = "test"
    validation_fraction: float = 0.0
    evaluate_train: bool = False
    keep_scores: bool = False  # of every row evaluated, by view
    num_evaluations: int = 20  # over the rounds
    class_frequencies: bool = False  # whether the global model is also looked at with those of each client
    neighbours: int | None = None  # k, where it is also looked at with each client's nearest training rows
    evaluate_validation: bool = False  # whether validation rows choose a round, client by client
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the problem, where the method needs others


@dataclass(frozen=True)
class Outcome:
    """One arm with one seed."""

    seed: int
    summary: Row
    history: list[Row]  # the rounds that were evaluated
    participation: list[Row]
    rounds_taken: int  # client-rounds in all
    scores: Mapping[str, Tensor] = field(default_factory=dict)  # by view, where an arm keeps them
    folder: str | None = None  # name of the run's, among those of the study; none: not a run of its own
    clients: list[Row] = field(default_factory=list)  # one row each, as of the last evaluation

    def score(self, name: str) -> float:
        """A number of the summary, in percent if it is an accuracy; NaN for a run that diverged."""
        value = self.summary.get(name)
        if value is None or self.summary["status"] == "diverged":
            return math.nan
        return 100 * float(value) if name.endswith("accuracy") else float(value)

    @property
    def has_global_model(self) -> bool:
        """Whether its method trains a model that is of use to anybody."""
        return traits_recorded(self.summary.get("algorithm", ""))["has_global_model"]

    @property
    def num_gradients(self) -> float:
        """Gradients in training, per client and round it took part in; NaN for a run that diverged without records."""
        return float(self.summary.get("gradient_evaluations", math.nan)) / self.rounds_taken

    def at(self, round_number: int) -> Outcome:
        """The outcome as of an evaluated round; as diverged if it did not get there."""
        row = next((row for row in self.history if row["round"] == round_number), None)
        return replace(self, summary={"status": "diverged"} if row is None else row | {"status": "running"})


Outcomes = dict[str, list[Outcome]]  # by label, in the order of seeds


def values(outcomes: Sequence[Outcome], name: str) -> Tensor:
    """A score of every seed."""
    return torch.tensor([outcome.score(name) for outcome in outcomes], dtype=torch.float64)


def metric_of(outcomes: Outcomes) -> str:
    """What the runs are told by first: accuracy, unless their summaries say otherwise."""
    return leading_metric([outcome.summary for group in outcomes.values() for outcome in group]) or "accuracy"


def estimate(outcomes: Sequence[Outcome], name: str) -> Estimate:
    """A score over seeds."""
    return Estimate.of(values(outcomes, name))


def score_of_clients(rows: Sequence[Mapping[str, Any]], column: str) -> float:
    """Percent over all test rows of some clients, from the score that each has in a column."""
    total = sum(int(row["num_test"]) for row in rows)
    return 100 * sum(float(row[column]) * int(row["num_test"]) for row in rows) / total if total else math.nan


def ratio_of(outcomes: Iterable[Outcome]) -> float:
    """Test rows per training row over these runs; NaN where no run got as far as a test."""
    return split_ratio(row for outcome in outcomes for row in outcome.clients)


def difference(first: Sequence[Outcome], second: Sequence[Outcome], name: str, other: str | None = None) -> Estimate:
    """First minus second, paired over seeds, of a score (of the second, of ``other``), ready to be tested."""
    gaps = values(first, name) - values(second, other or name)
    return Estimate.of(gaps, test_per_train=ratio_of((*first, *second)))


def run_arms(problem: Problem, work: Iterable[tuple[Arm, int]], job: Job, done: int, total: int) -> Outcomes:
    """Run every (arm, seed); what lies in the job's folder from the same code and options is read, not run.

    Where the problem has a warm start, it is trained first, once for each seed.  ``done`` of ``total`` runs came
    before, for the progress shown.
    """
    pairs = list(work)
    found: dict[tuple[str, int], Outcome] = {}

    def note(piece: tuple[str, int], outcome: Outcome) -> None:
        found[piece] = outcome
        job.progress(done + len(found), total, f"{piece[0]}, seed {piece[1]}")

    with ExitStack() as stack:
        folder = job.folder or Path(stack.enter_context(TemporaryDirectory()))
        stack.enter_context(locked(folder))  # a second process would empty what this one is writing
        waiting = []
        places = {(arm.label, seed): folder / _key(problem, arm, seed, job.device) for arm, seed in pairs}
        _announce(folder, problem, {places[arm.label, seed]: (arm, seed) for arm, seed in pairs}, is_first=done == 0)
        for arm, seed in pairs:
            place = places[arm.label, seed]
            records = _read_finished(place)
            is_diverged = records is not None and records.summary["status"] == "diverged"
            is_whole = not arm.keep_scores or is_diverged or (place / SCORES).is_file()
            if records is not None and is_whole:
                found[arm.label, seed] = _outcome(place, records, seed)
            else:
                waiting.append((arm, seed, place))
        job.progress(done + len(found), total, problem.name)
        starts: dict[tuple[int, float], Path] = {}
        if problem.warm_up is not None:
            wanted = dict.fromkeys((seed, arm.validation_fraction) for arm, seed, _ in waiting)
            same = _for_warm_up(problem)
            starts = {piece: folder / _key(same, WARM, *piece, job.device) for piece in wanted}
            tasks = {piece: (problem, *piece, starts[piece], job.device) for piece in wanted}
            run_side_by_side(_warm_up, tasks, job.num_processes, lambda *_: None)
        arms = {
            (arm.label, seed): (problem, arm, seed, place, job.device, starts.get((seed, arm.validation_fraction)))
            for arm, seed, place in waiting
        }
        run_side_by_side(run_arm, arms, job.num_processes, note)
    outcomes: Outcomes = {}
    for arm, seed in pairs:
        outcomes.setdefault(arm.label, []).append(found[arm.label, seed])
    return outcomes


def _announce(folder: Path, problem: Problem, work: Mapping[Path, tuple[Arm, int]], *, is_first: bool) -> None:
    """Write down which runs are to come, behind those that the same study has announced before."""
    is_known = not is_first and (folder / INDEX).is_file()  # without a folder of its own each part has another
    before = json.loads((folder / INDEX).read_text(encoding="utf-8")) if is_known else []
    entries = [
        {
            "label": arm.label,
            "seed": seed,
            "place": place.name,
            "rounds": problem.rounds,
            "is_choosing": arm.evaluate_on == "validation",
            "has_global_model": traits_recorded(arm.algorithm)["has_global_model"],
        }
        for place, (arm, seed) in work.items()
    ]
    write_json(folder / INDEX, before + entries)


Piece = TypeVar("Piece")
Found = TypeVar("Found")


def run_side_by_side(
    function: Callable[..., Found],
    tasks: Mapping[Piece, tuple[Any, ...]],
    num_processes: int,
    note: Callable[[Piece, Found], None],
) -> None:
    """``function`` of every task's arguments, in processes of their own where there may be several.

    A task for which the GPU had no memory left, beside the others, is done again once they are done, by itself.
    """
    if num_processes == 1:
        for piece, arguments in tasks.items():
            note(piece, function(*arguments))
    elif tasks:
        with shared_workers(min(num_processes, len(tasks))) as pool:
            with sigint_blocked():
                futures: dict[Future[Found], Piece] = {
                    pool.submit(_run_and_give_back, function, *arguments): piece for piece, arguments in tasks.items()
                }
            postponed = []
            try:
                for future in as_completed(futures):
                    if isinstance(future.exception(), torch.OutOfMemoryError):
                        postponed.append(futures[future])
                    else:
                        note(futures[future], future.result())
                for piece in postponed:
                    note(piece, pool.submit(_run_and_give_back, function, *tasks[piece]).result())
            except BaseException:
                stop_workers(pool)
                raise


def _run_and_give_back(function: Callable[..., Found], *arguments: Any) -> Found:
    """``function`` of the arguments; what torch has kept of the GPU's memory is then free for other processes."""
    try:
        return function(*arguments)
    except torch.OutOfMemoryError as error:
        lacking = str(error)  # alone: the error itself holds on to the tensors of its frames
    finally:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            gc.collect()
            torch.cuda.empty_cache()
    raise torch.OutOfMemoryError(lacking)


_workers: ContextVar[ProcessPoolExecutor | None] = ContextVar("workers", default=None)


@contextmanager
def shared_workers(num_processes: int) -> Iterator[ProcessPoolExecutor]:
    """Processes for all runs within, and within what is called: starting them takes longer than a short run."""
    shared = _workers.get()
    if shared is not None:
        yield shared
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, context, torch.set_num_threads, (1,)) as pool:
        token = _workers.set(pool)
        try:
            yield pool
        finally:
            _workers.reset(token)


@contextmanager
def sigint_blocked() -> Iterator[None]:
    """Processes that are started meanwhile do not hear Ctrl-C, which goes to all: this one stops them, and says so."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stop_workers(pool: ProcessPoolExecutor) -> None:
    """End a pool's processes at once: a user who interrupts should not wait for them, and none may outlive the run."""
    for process in list((pool._processes or {}).values()):
        process.terminate()
    pool.shutdown(wait=True, cancel_futures=True)


def _for_warm_up(problem: Problem) -> Problem:
    """The problem without what its warm start does not depend on: problems that differ in no more share it."""
    assert problem.warm_up is not None
    share = 1.0 if problem.warm_up.is_pooled else problem.participation
    return replace(problem, name="", title="", rounds=0, num_local_steps=0, max_local_steps=0, participation=share)


def _warm_up(problem: Problem, seed: int, validation_fraction: float, place: Path, device: str) -> None:
    """The model that the arms of a seed start from, as a run in ``place``."""
    if _read_finished(place) is None or not (place / SCORES).is_file():
        _empty_folder(place)
        run = problem.train_warm_up(seed, validation_fraction, device=device, out=place, keep_rows=False)
        save_tensors(place / SCORES, run.evaluate().numbers, {})


def run_arm(
    problem: Problem, arm: Arm, seed: int, place: Path, device: str = "cpu", start: Path | None = None
) -> Outcome:
    """One arm with one seed, recorded in ``place``; it starts from the run in ``start``, if there is one."""
    _empty_folder(place)
    try:
        run = replace(problem, **arm.settings).run(
            arm.algorithm,
            arm.options,
            seed,
            arm.validation_fraction,
            device=device,
            start=start,
            fine_tune=arm.fine_tune,
            class_frequencies=arm.class_frequencies,
            neighbours=arm.neighbours,
            evaluate_validation=arm.evaluate_validation,
            evaluate_on=arm.evaluate_on,
            evaluate_train=arm.evaluate_train,
            evaluate_every=max(problem.rounds // arm.num_evaluations, 1),
            checkpoint_every=0,
            out=place,
        )
    except DivergedError:
        return _outcome(place, read_records(place), seed)
    if arm.keep_scores:
        scores = problem.scores(run, arm.fine_tune)
        if start is not None:
            scores = scores | {START: load_tensors(start / SCORES)[0]["global"]}
        save_tensors(place / SCORES, scores, {})
    return _outcome(place, read_records(place), seed)  # as it is found later


def _empty_folder(place: Path) -> None:
    """A folder without what an interrupted run has left: no checkpoints are kept here."""
    if place.exists():
        for file in place.iterdir():
            file.unlink()


def _outcome(place: Path, records: Records, seed: int) -> Outcome:
    weighted = [name for name in (records.history or [{}])[0] if name.startswith("weighted_")]
    scored = [row for row in records.history if any(row[name] is not None for name in weighted)]
    taken = sum(int(row["clients"]) for row in records.history)
    scores = load_tensors(place / SCORES)[0] if (place / SCORES).is_file() else {}
    return Outcome(
        seed, records.summary, scored, records.participation, max(taken, 1), scores, place.name, records.clients
    )


def _read_finished(place: Path) -> Records | None:
    if not (place / "summary.json").is_file():
        return None
    records = read_records(place)
    return records if records.summary.get("status") in ("finished", "diverged") else None


def _key(problem: Problem, arm: Arm | str, seed: int, *more: object) -> str:
    """A folder name that is the same only for the same numbers."""
    label, what = (arm, arm) if isinstance(arm, str) else (arm.label, asdict(arm))
    content = problem.content(seed, 0.0 if isinstance(arm, str) else arm.validation_fraction)
    asked = json.dumps([content, what, seed, *more, source_digest(), torch.__version__], sort_keys=True)
    digest = hashlib.sha256(asked.encode()).hexdigest()[:12]
    plain = "".join(c if c.isalnum() else "-" for c in label)
    return f"{plain}-{seed}-{digest}"


@cache
def source_digest() -> str:
    """A digest of the code that makes the numbers: results of other code are not taken for results of this one."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in CODE_ENDINGS):
        is_of_studies = path.parent.name == "studies" and path.name not in FILES_WITH_NUMBERS
        if not is_of_studies and path.relative_to(root).parts[0] not in ("reports", "cli"):
            text = path.read_text(encoding="utf-8")
            digest.update((ast.dump(_without_docstrings(text)) if path.suffix == ".py" else text).encode())
    return digest.hexdigest()


def _without_docstrings(source: str) -> ast.Module:
    """Code without what makes no number: comments, docstrings and where lines break."""
    tree, documented = ast.parse(source), (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return tree
