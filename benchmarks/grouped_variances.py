"""Whether self-fl-auto learns the variance between groups that maximum likelihood finds in the same rows.

Groups of lognormal sizes whose intercept and slope vary by one known variance, with residuals of variance 1 or with a
binary outcome.  The estimators of selffl as they come, whole runs, and how often their interval holds it; maximum
likelihood with one variance for both coefficients, of the linear model exactly, of the logistic one by adaptive
Gauss-Hermite quadrature.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize
from scipy.special import expit

from selffl.estimator import SelfFLClassifier, SelfFLRegressor

Array = npt.NDArray[Any]

CENTRE = (0.0, 0.5)  # of intercept and slope
SIZE_SPREAD = 1.0  # standard deviation of the logarithm of a group's rows
NUM_NODES = 5  # of the quadrature, in each direction
BOUNDS = (-14.0, 6.0)  # of the logarithm of a variance
STARTS = (-5.0, -1.5)  # of that logarithm


class Rows(NamedTuple):
    """Rows of groups that are numbered from 0."""

    design: Array  # 1 and the feature [rows, 2]
    outcome: Array  # numbers, or 0 and 1 [rows]
    group: Array  # [rows]


def simulate(kind: str, variance: float, median: int, seed: int, num_groups: int) -> Rows:
    """Groups whose coefficients vary by ``variance``."""
    rng = np.random.default_rng([seed, round(1e6 * variance), median, kind == "linear", len(CENTRE)])
    sizes = np.maximum(np.rint(rng.lognormal(math.log(median), SIZE_SPREAD, num_groups)), 2).astype(int)
    group = np.repeat(np.arange(num_groups), sizes)
    design = np.column_stack([np.ones(len(group)), rng.normal(size=(len(group), 1))])
    mean = (design * (CENTRE + rng.normal(0.0, variance**0.5, (num_groups, len(CENTRE))))[group]).sum(1)
    if kind == "linear":
        return Rows(design, mean + rng.normal(size=len(group)), group)
    return Rows(design, (rng.random(len(group)) < 1.0 / (1.0 + np.exp(-mean))).astype(int), group)


def by_group(values: Array, group: Array) -> Array:
    """Sums ``[groups, ...]`` of ``values [rows, ...]``."""
    total = np.zeros((int(group.max()) + 1, *values.shape[1:]))
    np.add.at(total, group, values)
    return total


def linear_variances(rows: Rows) -> tuple[float, float]:
    """The variance between groups and that of residuals, by maximum likelihood; the centre and the latter profiled."""
    design, outcome, group = rows
    gram = by_group(design[:, :, None] * design[:, None, :], group)
    cross, square = by_group(design * outcome[:, None], group), float(outcome @ outcome)

    def fit(logarithm: float) -> tuple[float, float]:
        ratio = math.exp(logarithm)
        factor = np.eye(gram.shape[-1]) + ratio * gram
        inverse = np.linalg.inv(factor)
        precision = (inverse @ gram).sum(0)
        pull = (inverse @ cross[..., None])[..., 0].sum(0)
        centre = np.linalg.solve(precision, pull)
        within = square - ratio * np.einsum("gi,gij,gj->", cross, inverse, cross)
        noise = float(within - centre @ pull) / len(outcome)
        return len(outcome) * math.log(noise) + float(np.linalg.slogdet(factor)[1].sum()), noise

    tries = [minimize(lambda at: fit(at[0])[0], [start], method="L-BFGS-B", bounds=[BOUNDS]) for start in STARTS]
    best = float(min(tries, key=lambda found: found.fun).x[0])
    noise = fit(best)[1]
    return math.exp(best) * noise, noise


def logistic_variance(rows: Rows) -> float:
    """The variance between groups by maximum likelihood; the centre is found beside it."""
    design, outcome, group = rows
    width, sign = design.shape[1], 2 * outcome - 1
    nodes, weights = np.polynomial.hermite.hermgauss(NUM_NODES)
    grid = np.sqrt(2.0) * np.array(np.meshgrid(*[nodes] * width)).reshape(width, -1).T
    weight = np.log(np.array(np.meshgrid(*[weights] * width)).reshape(width, -1).prod(0)) + np.square(grid).sum(1) / 2

    def surprise(at: Array) -> float:
        deviation, centre = math.exp(at[0] / 2), at[1:]
        effect = np.zeros((int(group.max()) + 1, width))  # of each group, in standard deviations: its mode
        for _ in range(30):
            chance = expit((design * (centre + deviation * effect[group])).sum(1))
            slope = deviation * by_group(design * (outcome - chance)[:, None], group) - effect
            bend = design[:, :, None] * design[:, None, :] * (chance * (1.0 - chance))[:, None, None]
            curvature = deviation**2 * by_group(bend, group) + np.eye(width)
            step = np.linalg.solve(curvature, slope[..., None])[..., 0]
            effect = effect + step
            if np.abs(step).max() < 1e-8:
                break
        root = np.linalg.cholesky(np.linalg.inv(curvature))
        points = effect[:, None] + np.einsum("gij,qj->gqi", root, grid)
        scores = np.einsum("ni,nqi->nq", design, centre + deviation * points[group])
        logs = by_group(-np.logaddexp(0.0, -sign[:, None] * scores), group) - np.square(points).sum(-1) / 2 + weight
        most = logs.max(1, keepdims=True)
        area = np.log(np.diagonal(root, axis1=1, axis2=2)).sum(1)
        return -float((np.log(np.exp(logs - most).sum(1)) + most[:, 0] + area).sum())

    bounds = [BOUNDS, *[(-5.0, 5.0)] * width]
    tries = [minimize(surprise, [start, *[0.0] * width], method="L-BFGS-B", bounds=bounds) for start in STARTS]
    return math.exp(float(min(tries, key=lambda found: found.fun).x[0]))


class Found(NamedTuple):
    """Of one simulated data set, in the unit of the outcome or of log-odds."""

    likeliest: float  # σ₀² by maximum likelihood
    learned: float  # as a run learns it
    low: float  # its interval
    high: float


def measure(kind: str, rows: Rows, rounds: int) -> Found:
    """σ₀² by maximum likelihood, and as a run learns it."""
    estimator: Any = (SelfFLRegressor if kind == "linear" else SelfFLClassifier)(rounds=rounds)
    estimator.fit(rows.design[:, 1:], rows.outcome, client=rows.group)
    likeliest, noise = linear_variances(rows) if kind == "linear" else (logistic_variance(rows), 1.0)
    names = ("inter_variance", "inter_variance_low", "inter_variance_high")
    # Of two scores, or over twice the residuals'.
    return Found(likeliest, *(2.0 * noise * float(estimator.run_.summary[name]) for name in names))


def main() -> None:
    """Simulate, fit and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=["linear", "logistic"], choices=["linear", "logistic"])
    parser.add_argument("--medians", nargs="+", type=int, default=[5, 50], help="rows of a group")
    parser.add_argument("--variances", nargs="+", type=float, default=[0.0, 0.01, 0.06, 0.3])
    parser.add_argument("--groups", type=int, default=85)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(6)))
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", type=Path, help="also write every single variance to this file")
    args = parser.parse_args()
    record = []
    print("| | median rows | σ₀² | maximum likelihood | self-fl-auto | difference | interval holds σ₀² |")
    print("|---|---|---|---|---|---|---|")
    for kind in args.kinds:
        for median in args.medians:
            for variance in args.variances:
                drawn = [simulate(kind, variance, median, seed, args.groups) for seed in args.seeds]
                found = [measure(kind, rows, args.rounds) for rows in drawn]
                record.append([kind, median, variance, found])
                columns = np.array([(each.likeliest, each.learned, each.learned - each.likeliest) for each in found]).T
                cells = [f"{c.mean():.4f} ± {c.std(ddof=1) / math.sqrt(len(c)):.4f}" for c in columns]
                held = sum(each.low <= variance <= each.high for each in found)
                print(
                    f"| {kind} | {median} | {variance:g} | {' | '.join(cells)} | {held} of {len(found)} |", flush=True
                )
    if args.json is not None:
        args.json.write_text(json.dumps({"variances": record}), encoding="utf-8")


if __name__ == "__main__":
    main()
