"""How often the intervals of `selffl.meta_analysis` hold what they say, by simulation.

Clients differ with variance sigma_0^2 around one mean; their own variances are drawn between 0.1 and 10, evenly on the
log scale, anew in every repeat.  For a new client of variance 1 the probability of gain is held against how often it
gained.  Every line gives the mean over repeats and its standard error; nothing is chosen by it.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import norm

import selffl

MEAN = 1.6
NEW_VARIANCE = 1.0
NAMES = {
    "personal_plug_in": "personal, σ₀² taken as known",
    "personal": "personal, integrated over σ₀²",
    "mean_normal": "mean, normal, σ₀² taken as known",
    "mean": "mean, Hartung–Knapp",
    "spread_q": "σ₀², Q-profile",
    "spread_reml": "σ₀², profile likelihood, REML",
    "spread_ml": "σ₀², profile likelihood, ML",
    "prediction": "next client, Higgins–Thompson–Spiegelhalter",
    "gain_said": "probability that the next client gains, as stated",
    "gain_seen": "share of next clients that gained",
}


def is_inside(interval: Any, truth: float) -> bool:
    """Whether an interval holds the truth."""
    return bool(interval[0] <= truth <= interval[1])


def one_repeat(rng: np.random.Generator, num_clients: int, inter_variance: float, level: float) -> dict[str, float]:
    """Draw a federation and say which intervals hold."""
    variance = np.exp(rng.uniform(math.log(0.1), math.log(10.0), num_clients))
    truth = rng.normal(MEAN, math.sqrt(inter_variance), num_clients)
    estimate = rng.normal(truth, np.sqrt(variance))
    m = selffl.meta_analysis(estimate, variance, new_variance=NEW_VARIANCE, level=level)
    ml = selffl.meta_analysis(estimate, variance, method="ml", level=level)
    reach = norm.ppf(0.5 + level / 2)
    low, high = m.personal_interval.T
    new_truth = rng.normal(MEAN, math.sqrt(inter_variance))
    error = rng.normal(0.0, math.sqrt(NEW_VARIANCE))
    prior = m.inter_variance + m.mean_variance
    trust = prior / (prior + NEW_VARIANCE)
    offered = trust * error - (1 - trust) * (new_truth - m.mean)
    return {
        "personal_plug_in": float(np.mean(np.abs(m.personal_mean - truth) <= reach * np.sqrt(m.personal_variance))),
        "personal": float(np.mean((low <= truth) & (truth <= high))),
        "mean_normal": abs(m.mean - MEAN) <= reach * math.sqrt(m.mean_variance),
        "mean": is_inside(m.mean_interval, MEAN),
        "spread_q": is_inside(m.inter_variance_interval, inter_variance),
        "spread_reml": is_inside(m.inter_variance_profile, inter_variance),
        "spread_ml": is_inside(ml.inter_variance_profile, inter_variance),
        "prediction": is_inside(m.prediction_interval, new_truth),
        "gain_said": float(m.gain_probability or 0.0),
        "gain_seen": abs(offered) < abs(error),
    }


def main() -> None:
    """Simulate and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", nargs="+", type=int, default=[5, 20, 200])
    parser.add_argument("--inter-variances", nargs="+", type=float, default=[0.1, 1.0])
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument("--level", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write every mean and standard error to this file")
    args = parser.parse_args()
    record = []
    for inter in args.inter_variances:
        for num_clients in args.clients:
            rng = np.random.default_rng([args.seed, num_clients, round(1e6 * inter)])
            repeats = [one_repeat(rng, num_clients, inter, args.level) for _ in range(args.repeats)]
            for name in NAMES:
                values = np.array([repeat[name] for repeat in repeats], dtype=float)
                error = values.std(ddof=1) / math.sqrt(len(values))
                record.append([inter, num_clients, name, float(values.mean()), float(error)])
    found = {(inter, num_clients, name): (mean, error) for inter, num_clients, name, mean, error in record}
    cases = [(inter, num_clients) for inter in args.inter_variances for num_clients in args.clients]
    print("| % | " + " | ".join(f"σ₀² {inter:g}, M {num_clients}" for inter, num_clients in cases) + " |")
    print("|---" * (1 + len(cases)) + "|")
    for name, words in NAMES.items():
        cells = ("{:.1f} ± {:.1f}".format(*(100 * number for number in found[*case, name])) for case in cases)
        print(f"| {words} | {' | '.join(cells)} |")
    if args.json is not None:
        args.json.write_text(json.dumps({"coverage": record}), encoding="utf-8")


if __name__ == "__main__":
    main()
