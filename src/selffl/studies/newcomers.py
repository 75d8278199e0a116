"""Beyond the paper: clients that come when training is over, and what they are given for their first k rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from selffl.algorithms.solver import descend
from selffl.data.federation import Federation, Rows
from selffl.runs.new_client import make_new_client_models
from selffl.runs.run import Run
from selffl.studies.arms import Arm, Outcomes, ratio_of, values
from selffl.studies.comparison import NUM_SEEDS, join_problems, points, run_each, seeds_of, shorten_for_look
from selffl.studies.problems import DIGITS, LETTERS, MNIST, Problem, femnist
from selffl.studies.result import (
    Chart,
    Claim,
    Estimate,
    Figure,
    Job,
    Series,
    Study,
    StudyResult,
    above_zero,
    in_parts,
    sign,
)
from selffl.training.evaluation import numbers_of_rows

SHARE = 0.2  # of the clients never take part in training
COUNTS = (0, 1, 2, 5, 10, 20, 50)  # k
LONGER_RATIO = 16  # times L, of the longer fine-tuning
MAX_GAP_POINTS = 0.5  # points of accuracy that may be missing where one is called at least as good as the other

OURS, FEDAVG, DITTO, LOCAL = "self-fl-auto", "fedavg", "ditto, λ = 1", "local"
SIZES = "rows"  # of each newcomer, among the scores


@dataclass(frozen=True)
class WithNewcomers(Problem):
    """A problem of which some clients come only when training is over."""

    keeps_rows: ClassVar[bool] = False  # a copy for each run would take hundreds of megabytes

    share: float = SHARE
    counts: tuple[int, ...] = COUNTS

    @classmethod
    def of(cls, problem: Problem, counts: tuple[int, ...] = COUNTS) -> WithNewcomers:
        """The problem with new clients beside it."""
        return cls(**{field.name: getattr(problem, field.name) for field in fields(problem)}, counts=counts)

    def federation(self, seed: int, validation_fraction: float = 0.0) -> Federation:
        """Clients that take part."""
        whole = super().federation(seed, validation_fraction)
        late = set(self._late(whole, seed))
        return whole.subset([client for client in whole.clients if client not in late])

    def newcomers(self, seed: int) -> Federation:
        """Clients that do not take part."""
        whole = super().federation(seed)
        return whole.subset(self._late(whole, seed))

    def _late(self, whole: Federation, seed: int) -> list[Any]:
        number = max(round(self.share * whole.num_clients), 1)
        chosen = np.random.default_rng(seed).choice(whole.num_clients, number, replace=False)
        return [whole.clients[place] for place in sorted(chosen.tolist())]

    def scores(self, run: Run, fine_tune: Sequence[int] = ()) -> dict[str, Tensor]:
        """Whether each held-out row of the newcomers is answered right, once they have been given k rows.

        By the model that they are given and, for each number of steps, by the global one fine-tuned.
        """
        training, state = run._session, run._state
        seed = run.config.seed
        late = self.newcomers(seed).to(run.config.device, training.model.dtype)
        shared = training.method.global_model(state.server)
        everyone = torch.arange(late.num_clients, device=shared.device)
        found = {SIZES: late.train.num_examples.cpu()}
        for count in self.counts:
            rows = first_rows(late.train, count, seed)
            models = {view("welcome", count): make_new_client_models(training, state, rows)}
            for steps in fine_tune:
                start = shared.expand(len(everyone), -1)
                tuned = self._fine_tune(run, rows, everyone, start, steps) if count else start
                models[view(f"{steps} steps", count)] = tuned
            for name, params in models.items():
                found[name] = numbers_of_rows(training.model, params, late.test, training.measure)[0].cpu()
        return found

    def _fine_tune(self, run: Run, rows: Rows, everyone: Tensor, start: Tensor, steps: int) -> Tensor:
        """The global model after some steps of each newcomer's own, in minibatches as in training."""
        own = Federation(everyone.tolist(), rows, rows)
        task = replace(run._session.source, federation=own).task(everyone, run._state.round_number + 1).at_home()
        return descend(task, start, steps)


def view(way: str, count: int) -> str:
    """What scores are called that newcomers with so many rows have one way."""
    return f"{way}, {count} rows"


def first_rows(rows: Rows, count: int, seed: int) -> Rows:
    """So many rows of each client, or all that it has, by lot: of a larger number, the first are those of a smaller."""
    owner, lot = rows.owner.cpu().numpy(), np.random.default_rng(seed).random(len(rows.labels))
    order = torch.from_numpy(np.lexsort((lot, owner))).to(rows.offset.device)
    rank = torch.arange(len(order), device=order.device) - rows.offset[rows.owner]  # rows lie client by client
    chosen = order[rank < count]
    sizes = rows.num_examples.clamp(max=count)
    return Rows(rows.features[chosen], rows.labels[chosen], torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]))


@dataclass(frozen=True)
class Line:
    """A line of the table: one arm's newcomers, one way."""

    arm: str
    way: str = "welcome"


def lines_of(problem: Problem) -> dict[str, Line]:
    """Lines of a problem, by what they are called; the first is compared with the others."""
    steps = problem.num_local_steps
    return {
        OURS: Line(OURS),
        "fedavg, as it is": Line(FEDAVG),
        f"fedavg, {steps} steps": Line(FEDAVG, f"{steps} steps"),
        f"fedavg, {LONGER_RATIO * steps} steps": Line(FEDAVG, f"{LONGER_RATIO * steps} steps"),
        DITTO: Line(DITTO),
        LOCAL: Line(LOCAL),
    }


def newcomers_study(whole: Sequence[Problem], job: Job, *, counts: tuple[int, ...] = COUNTS) -> StudyResult:
    """Accuracy of newcomers against the number of their rows."""
    problems, seeds = [shorten_for_look(problem, job) for problem in whole], seeds_of(job)
    caption = (
        "Accuracy on the held-out rows of clients that took no part in training, weighted by rows, against the number "
        f"of training rows that each is given; mean over {len(seeds)} seeds, bars ± s.e."
    )
    parts = {}
    total, done = len(problems) * 4 * len(seeds), 0
    for problem in (WithNewcomers.of(problem, counts) for problem in problems):
        longest = (problem.num_local_steps, LONGER_RATIO * problem.num_local_steps)
        arms = [
            Arm(OURS, "self-fl-auto", keep_scores=True),
            Arm(FEDAVG, "fedavg", fine_tune=longest, keep_scores=True),
            Arm(DITTO, "ditto", {"penalty": 1.0}, keep_scores=True),
        ]
        outcomes = run_each(problem, arms, seeds, job, done, total)
        done += len(arms) * len(seeds)
        # Who trains alone needs nobody else's rounds: the newcomer starts from the first model, whenever it comes.
        alone = Arm(LOCAL, "local", keep_scores=True)
        outcomes |= run_each(replace(problem, rounds=1), [alone], seeds, job, done, total)
        done += len(seeds)
        lines = lines_of(problem)
        found = {label: _by_count(outcomes, line, counts) for label, line in lines.items()}
        rows = [
            {"method": label, "seed": seed, "rows": count, "accuracy": float(accuracy)}
            for label, by_count in found.items()
            for count, accuracies in by_count.items()
            for seed, accuracy in zip(seeds, accuracies, strict=True)
        ]
        table = [
            {
                "method": label,
                **{f"k = {count}": points(Estimate.of(accuracies)) for count, accuracies in by_count.items()},
                "took part": _of_members(outcomes, lines[label]),
            }
            for label, by_count in found.items()
        ]
        sizes = torch.cat([outcome.scores[SIZES] for outcome in outcomes[OURS]])
        have = {f"k = {count}": f"{float((sizes >= count).double().mean()):.0%}" for count in counts}
        table.append({"method": "newcomers with as many rows", **have, "took part": "–"})
        everyone = [outcome for group in outcomes.values() for outcome in group]
        claims = _claims(problem, found, ratio_of(everyone))
        figure = Figure("newcomers", caption, [_chart(problem, found)])
        parts[problem.name] = StudyResult(rows, table, [figure], claims, asdict(problem))
    return join_problems(parts, {"counts": counts, "num_seeds": len(seeds)})


def _by_count(outcomes: Outcomes, line: Line, counts: Sequence[int]) -> dict[int, Tensor]:
    """Accuracy in percent over all held-out rows of the newcomers, a number for each seed."""
    return {
        count: torch.stack([100 * o.scores[view(line.way, count)].double().mean() for o in outcomes[line.arm]])
        for count in counts
    }


def _of_members(outcomes: Outcomes, line: Line) -> str:
    """Accuracy of clients that took part, on all their rows."""
    if line.arm == LOCAL:
        return "–"  # nobody trained for longer than a round
    way = line.way.removesuffix(" steps")
    name = "weighted_accuracy" if line.way == "welcome" else f"global_after_{way}_weighted_accuracy"
    return points(Estimate.of(values(outcomes[line.arm], name)))


def _chart(problem: Problem, found: Mapping[str, Mapping[int, Tensor]]) -> Chart:
    series = []
    some = [count for count in found[OURS] if count]
    for label, by_count in found.items():
        found_here = Series.of(label, some, [Estimate.of(by_count[count]) for count in some])
        is_flat = label == "fedavg, as it is"
        series.append(replace(found_here, error=None, is_reference=True) if is_flat else found_here)
    return Chart(problem.name, "rows of the newcomer, k", "accuracy, %", series, log_x=True, x_ticks=some)


def _claims(problem: Problem, found: Mapping[str, Mapping[int, Tensor]], test_per_train: float) -> list[Claim]:
    """Ours against each other way, paired over seeds, number of rows by number of rows."""
    nothing = "fedavg, as it is"
    gap = Estimate.of(found[OURS][0] - found[nothing][0], test_per_train=test_per_train)
    claims = [
        Claim(
            f"Before a newcomer has any row, {OURS}'s global model is at least as good as FedAvg's ({problem.name}).",
            sign(gap.shift_by(MAX_GAP_POINTS)),
            f"{gap.signed} points, paired over {gap.count} seeds; counts as long as less than "
            f"{MAX_GAP_POINTS:g} are missing.",
        )
    ]
    for other in found:
        if other == OURS:
            continue
        gaps = {
            count: Estimate.of(found[OURS][count] - found[other][count], test_per_train=test_per_train)
            for count in found[OURS]
            if count
        }
        said = ", ".join(f"{count}: {gap.signed}" for count, gap in gaps.items())
        claims.append(
            Claim(
                f"With {min(gaps)} to {max(gaps)} rows a newcomer's model by {OURS} is at least as good as by {other} "
                f"({problem.name}).",
                in_parts(above_zero([gap.shift_by(MAX_GAP_POINTS) for gap in gaps.values()])),
                f"Points by number of rows, paired over {gap.count} seeds: {said}; each counts as long as less than "
                f"{MAX_GAP_POINTS:g} are missing.",
            )
        )
    return claims


NEWCOMERS = Study.known(
    "newcomers",
    f"{LETTERS.setting}; and {MNIST.setting}; a fifth of the clients come after training, with up to "
    f"{max(COUNTS)} rows each; {NUM_SEEDS} seeds",
    lambda job: newcomers_study((DIGITS,) if job.quick else (femnist(), MNIST), job),
)
