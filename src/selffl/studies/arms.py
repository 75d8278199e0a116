"""Arms of a comparison: every method with every seed, side by side, each recorded as soon as it is done."""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from selffl.errors import DivergedError
from selffl.runs.folder import Records, Row, read_records
from selffl.studies.problems import Problem
from selffl.studies.result import Estimate, Job


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


@dataclass(frozen=True)
class Outcome:
    """One arm with one seed."""

    seed: int
    summary: Row
    history: list[Row]  # the rounds that were evaluated
    participation: list[Row]
    rounds_taken: int  # client-rounds in all

    def score(self, name: str) -> float:
        """A number of the summary, in percent if it is an accuracy; NaN for a run that diverged."""
        value = self.summary.get(name)
        if value is None or self.summary["status"] == "diverged":
            return math.nan
        return 100 * float(value) if name.endswith("accuracy") else float(value)

    @property
    def num_gradients(self) -> float:
        """In training, per client and round it took part in; NaN for a run that left no records before it diverged."""
        return float(self.summary.get("gradient_evaluations", math.nan)) / self.rounds_taken

    def at(self, round_number: int) -> Outcome:
        """As of an evaluated round; as diverged if it did not get there."""
        row = next((row for row in self.history if row["round"] == round_number), None)
        return replace(self, summary={"status": "diverged"} if row is None else row | {"status": "running"})


Outcomes = dict[str, list[Outcome]]  # by label, in the order of seeds


def values(outcomes: Sequence[Outcome], name: str) -> Tensor:
    """A score of every seed."""
    return torch.tensor([outcome.score(name) for outcome in outcomes], dtype=torch.float64)


def estimate(outcomes: Sequence[Outcome], name: str) -> Estimate:
    """A score over seeds."""
    return Estimate.of(values(outcomes, name))


def run_arms(problem: Problem, work: Iterable[tuple[Arm, int]], job: Job, done: int, total: int) -> Outcomes:
    """Run every (arm, seed); what lies in the job's folder from the same code and options is read, not run.

    ``done`` of ``total`` runs came before, for the progress shown.
    """
    pairs = list(work)
    found: dict[tuple[str, int], Outcome] = {}
    waiting = []
    for arm, seed in pairs:
        place = job.folder and job.folder / _key(problem, arm, seed, job.device)
        if place is not None and (records := _finished(place)) is not None:
            found[arm.label, seed] = _outcome(records, seed)
        else:
            waiting.append((arm, seed, place))

    def note(arm: Arm, seed: int, outcome: Outcome) -> None:
        found[arm.label, seed] = outcome
        job.progress(done + len(found), total, f"{arm.label}, seed {seed}")

    job.progress(done + len(found), total, problem.name)
    if job.num_processes == 1:
        for arm, seed, place in waiting:
            note(arm, seed, run_arm(problem, arm, seed, place, job.device))
    elif waiting:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(job.num_processes, context, torch.set_num_threads, (1,)) as pool:
            futures: dict[Future[Outcome], tuple[Arm, int]] = {
                pool.submit(run_arm, problem, arm, seed, place, job.device): (arm, seed) for arm, seed, place in waiting
            }
            try:
                for future in as_completed(futures):
                    note(*futures[future], future.result())
            except BaseException:
                stop_workers(pool)
                raise
    outcomes: Outcomes = {}
    for arm, seed in pairs:
        outcomes.setdefault(arm.label, []).append(found[arm.label, seed])
    return outcomes


def stop_workers(pool: ProcessPoolExecutor) -> None:
    """End a pool's processes at once: a user who interrupts should not wait for them, and none may outlive the run."""
    for process in list((pool._processes or {}).values()):
        process.terminate()
    pool.shutdown(wait=True, cancel_futures=True)


def run_arm(problem: Problem, arm: Arm, seed: int, place: Path | None, device: str) -> Outcome:
    """One arm with one seed, recorded in ``place``."""
    if place is not None and place.exists():  # left by a run that was interrupted: no checkpoints are kept here
        for file in place.iterdir():
            file.unlink()
    try:
        run = problem.run(
            arm.algorithm,
            arm.options,
            seed,
            arm.validation_fraction,
            device=device,
            fine_tune=arm.fine_tune,
            evaluate_on=arm.evaluate_on,
            evaluate_train=arm.evaluate_train,
            evaluate_every=max(problem.rounds // 20, 1),
            checkpoint_every=0,
            out=place,
        )
    except DivergedError:
        records = read_records(place) if place is not None else Records(summary={"status": "diverged"})
        return _outcome(records, seed)
    return _outcome(Records(run.history, run.participation, run.clients, run.summary), seed)


def _outcome(records: Records, seed: int) -> Outcome:
    scored = [row for row in records.history if row.get("weighted_accuracy") is not None]
    taken = sum(int(row["clients"]) for row in records.history)
    return Outcome(seed, records.summary, scored, records.participation, max(taken, 1))


def _finished(place: Path) -> Records | None:
    if not (place / "summary.json").is_file():
        return None
    records = read_records(place)
    return records if records.summary.get("status") in ("finished", "diverged") else None


def _key(problem: Problem, arm: Arm, seed: int, device: str) -> str:
    """A folder name that is the same only for the same numbers."""
    asked = json.dumps([asdict(problem), asdict(arm), seed, device, _source(), torch.__version__], sort_keys=True)
    digest = hashlib.sha256(asked.encode()).hexdigest()[:12]
    plain = "".join(c if c.isalnum() else "-" for c in arm.label)
    return f"{plain}-{seed}-{digest}"


@cache
def _source() -> str:
    """A digest of the code that makes the numbers: results of other code are not taken for results of this one."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        is_of_studies = path.parent.name == "studies" and path.name not in ("arms.py", "problems.py")
        if not is_of_studies and path.relative_to(root).parts[0] not in ("reports", "cli"):
            digest.update(path.read_bytes())
    return digest.hexdigest()
