"""What an attacker finds out, with and without noise, on the demonstration's digits: attacks, measured.

``membership``: was a row in a client's training rows?  By the loss of the model alone, and by the likelihood ratio of
Carlini et al. (2022) from federations that had the row and federations that had not; on personal and global models.
``rows``: the same where noise hides rows, at three ε, beside the accuracy that it costs.
``many-rows``: that accuracy where clients have 3,000 rows of MNIST each.
``audit``: which of two clients took part?  The strongest attacker that the guarantee speaks of, who knows all but one
client's rows and sees every round's model; the ε that its hits prove (Clopper and Pearson, 95 %) beside the ε promised.
``inversion``: what did a row look like?  The rows of one client from what it sends after a single step (Zhu, Liu and
Han, 2019), from its own upload, from the sum with nine others, and from that sum with noise.

    python benchmarks/privacy_attacks.py --part all --json privacy.json
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from scipy.stats import beta, norm
from torch import Tensor, nn

import selffl
from selffl.algorithms import algorithm
from selffl.data.digits import images_and_labels
from selffl.data.federation import Federation, Rows
from selffl.data.mnist import images_and_labels as mnist_images
from selffl.data.mnist import standardise
from selffl.engines.cohort import CohortEngine
from selffl.engines.limits import PrivacyOptions
from selffl.privacy import epsilon, row_noise_for
from selffl.training.flat import FlatModel
from selffl.training.model import ModelSource

DELTA = 1e-5
CONFIDENCE = 0.95


def softmax_rows(seed: int, num_clients: int, rows_each: int) -> tuple[Tensor, Tensor]:
    """Images ``[M, n, 64]`` and labels ``[M, n]``, dealt at random: each client has classes as all have."""
    images, labels = images_and_labels()
    order = np.random.default_rng(seed).permutation(len(labels))[: num_clients * rows_each]
    x = torch.tensor(images[order] / 8.0 - 1.0, dtype=torch.float32).reshape(num_clients, rows_each, -1)
    return x, torch.tensor(labels[order]).reshape(num_clients, rows_each)


def federation_of(x: Tensor, y: Tensor, is_in: Tensor) -> Federation:
    """Clients whose training rows are those ``is_in [M, n]``, and whose test rows are the others."""
    parts = []
    for chosen in (is_in, ~is_in):
        offset = torch.cat([torch.zeros(1, dtype=torch.int64), chosen.sum(1).cumsum(0)])
        parts.append(Rows(x[chosen], y[chosen], offset))
    return Federation(list(range(len(x))), *parts)


# --------------------------------------------------------------------------------------------------------- membership


def logits(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """log p/(1 − p) of the right class of each row ``[n]``."""
    chances = module(x).detach().double().log_softmax(-1)
    right = chances.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    rest = chances.scatter(-1, y.unsqueeze(-1), -math.inf).logsumexp(-1)
    return right - rest


def auc_and_hits(scores: Tensor, is_member: Tensor) -> tuple[float, float]:
    """Area under the curve, and the share of members found while one in a hundred others is taken for one."""
    inside, outside = (scores[side & ~scores.isnan()] for side in (is_member, ~is_member))
    ranks = torch.cat([inside, outside]).argsort().argsort().double() + 1
    area = (ranks[: len(inside)].sum() - len(inside) * (len(inside) + 1) / 2) / (len(inside) * len(outside))
    return float(area), float((inside > outside.quantile(0.99)).double().mean())


def membership(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Both attacks on rows, for each method, with and without noise that hides clients."""
    x, y = softmax_rows(0, 40, 40)
    settings = {"rounds": 40, "participation": 0.5, "learning_rate": 0.1}
    bounds = {"clip": 0.5, "max_weight": 20.0}
    found = []
    for name in ("local", "fedavg", "ditto", "self-fl-auto"):
        for multiplier in (None,) if name == "local" else (None, 2.0):
            private, spent = {}, None
            if multiplier is not None:
                private = bounds | {"noise_multiplier": multiplier}
                spent = epsilon(multiplier, num_clients=40, participation=0.5, rounds=40, delta=DELTA)
            about = {"method": name, "z": multiplier, "epsilon": spent}
            found += attacked(x, y, name, arguments.federations, settings | private, about)
    return found


def rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The same attacks with noise that hides rows: ten clients of about 85, one step on all rows in each of 40 rounds.

    What protects is counted for the client with the fewest rows; as each gradient is of all rows, it is everybody's ε.
    """
    x, y = softmax_rows(0, 10, 170)
    settings = {"rounds": 40, "participation": 1.0, "learning_rate": 0.3, "batch_size": 170}
    found = []
    for name in ("fedavg", "ditto", "self-fl-sums"):
        for wanted in (None, 8.0, 3.0, 1.0):
            options = {"initial_steps": 1, "max_local_steps": 1} if name == "self-fl-sums" else {"num_local_steps": 1}
            private, multiplier = {}, None
            if wanted is not None:
                sizes = {"num_examples": 1, "batch_size": 1, "num_gradients": settings["rounds"]}
                multiplier = row_noise_for(wanted, **sizes, delta=DELTA)  # type: ignore[arg-type]
                private = {"row_clip": 2.0, "row_noise_multiplier": multiplier}
            about = {"method": name, "z": multiplier, "row epsilon": wanted}
            found += attacked(x, y, algorithm(name, **options), arguments.federations, settings | private, about)
    return found


def many_rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """What noise on rows costs clients that have many: ten with 3,000 of MNIST each, a step on 300 of them a round.

    MNIST has to be there (`selffl data fetch mnist`).  No attack: the noise is the same at the same ε.
    """
    settings = {"rounds": 40, "participation": 1.0, "learning_rate": 0.3, "batch_size": 300}
    sizes = {"num_examples": 3000, "batch_size": 300, "num_gradients": 40}
    images, labels = mnist_images()
    found = []
    for wanted in (1.0, 3.0, 8.0, None):
        multiplier = None if wanted is None else row_noise_for(wanted, **sizes, delta=DELTA)
        private = {} if multiplier is None else {"row_clip": 2.0, "row_noise_multiplier": multiplier}
        accuracy = []
        for seed in range(arguments.seeds):
            order = np.random.default_rng(seed).permutation(len(labels))[:36_000]  # a sixth of them to test on
            x = standardise(images[order].reshape(len(order), -1).astype(np.float32))
            rows = Federation.from_arrays(x, labels[order].astype(int), np.arange(len(order)) % 10, 1 / 6, seed)
            method = algorithm("fedavg", num_local_steps=1)
            run = selffl.train("softmax", rows, method, evaluate_every=0, seed=seed, **settings, **private)
            accuracy.append(run.summary["weighted_accuracy"])
        line = {"method": "fedavg", "z": multiplier, "row epsilon": wanted, "accuracy": mean_and_error(accuracy)}
        found.append(line)
        print(line, flush=True)
    return found


def attacked(
    x: Tensor, y: Tensor, method: Any, federations: int, settings: dict[str, Any], about: dict[str, Any]
) -> list[dict[str, Any]]:
    """Both attacks on the personal and the global models of federations that each row is in or out of, by lot."""
    generator = torch.Generator().manual_seed(1)
    ways = torch.stack([torch.rand(x.shape[:2], generator=generator) < 0.5 for _ in range(federations)])
    views: dict[str, list[Tensor]] = {"personal": [], "global": []}
    accuracy: dict[str, list[float]] = {"personal": [], "global": []}
    for number, is_in in enumerate(ways):
        run = selffl.train("softmax", federation_of(x, y, is_in), method, evaluate_every=0, seed=number, **settings)
        own = torch.stack([logits(run.personal_model(m), x[m], y[m]) for m in range(len(x))])
        views["personal"].append(own)
        accuracy["personal"].append(run.summary["weighted_accuracy"])
        if run.config.has_global_model:
            views["global"].append(logits(run.global_model(), x.flatten(0, 1), y.flatten()).view_as(own))
            accuracy["global"].append(run.summary["global_accuracy"])
    found = []
    for view, parts in views.items():
        if not parts or (view == "personal" and about["method"] == "fedavg"):
            continue
        each = torch.stack(parts)  # [K, M, n]
        by_loss = [auc_and_hits(each[k].flatten(), ways[k].flatten()) for k in range(len(ways))]
        by_ratio = [auc_and_hits(ratio(each, ways, k).flatten(), ways[k].flatten()) for k in range(len(ways))]
        line = about | {"model": view, "accuracy": mean_and_error(accuracy[view])}
        line |= {f"{attack} {what}": mean_and_error([pair[place] for pair in pairs])
                 for attack, pairs in (("loss", by_loss), ("ratio", by_ratio))
                 for place, what in enumerate(("AUC", "hits at 1 %"))}  # fmt: skip
        found.append(line)
        print(line, flush=True)
    return found


def ratio(each: Tensor, ways: Tensor, target: int) -> Tensor:
    """The log-likelihood ratio of having been trained on, by all federations but the ``target``, ``[M, n]``.

    NaN of a row that fewer than two of them had, or fewer than two had not.
    """
    rest = torch.arange(len(each)) != target
    sides = []
    for is_in in (ways[rest], ~ways[rest]):
        weight = is_in.double()
        count = weight.sum(0)
        mean = (each[rest] * weight).sum(0) / count.masked_fill(count < 2, math.nan)
        # Of few federations, one spread for all rows.
        spread = ((each[rest] - mean).square() * weight).nansum().div(weight.sum()).sqrt()
        sides.append(-0.5 * ((each[target] - mean) / spread).square() - spread.log())
    return sides[0] - sides[1]


def mean_and_error(numbers: list[float]) -> list[float]:
    """Mean and its standard error over federations."""
    values = np.asarray(numbers, dtype=float)
    return [round(float(values.mean()), 4), round(float(values.std(ddof=1) / math.sqrt(len(values))), 4)]


# -------------------------------------------------------------------------------------------------------------- audit


def proven_epsilon(false: int, missed: int, number: int) -> float:
    """The ε that so many false alarms and misses of ``number`` each prove, with 95 % confidence; 0 if none."""
    level = 1.0 - CONFIDENCE
    most = [1.0 if k == number else float(beta.ppf(1 - level / 2, k + 1, number - k)) for k in (false, missed)]
    return max(0.0, *(math.log(max(1.0 - one - DELTA, 1e-300) / other) for one, other in (most, most[::-1])))


def audit(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Which of two clients took part, from the models of three rounds of `fedavg-equal`, all clients in each."""
    rounds, num_clients, clip = 3, 10, 0.2
    x, y = softmax_rows(2, num_clients, 12)
    x[0] = x[0, :1]  # one image, over and over: whose labels are of one class, or of another
    worlds = []
    for label in (3, 8):
        y[0] = label
        worlds.append((x.clone(), y.clone()))
    found = []
    for multiplier in (1.0, 2.0, 4.0):
        scores: list[list[float]] = [[], []]
        apart = []
        for world in (0, 1):
            for number in range(arguments.repeats):
                score, distance = one_trial(worlds, world, rounds, clip, multiplier, 1_000_000 * world + number)
                scores[world].append(score)
                apart.append(distance)
        half = arguments.repeats // 2
        line_at = float(np.mean([np.mean(each[:half]) for each in scores]))  # chosen on one half, counted on the other
        false, missed = sum(s > line_at for s in scores[1][half:]), sum(s <= line_at for s in scores[0][half:])
        # The ends tell more than the middle where ε is large: chosen on one half, too, so that it is one test.
        end = chosen_line(scores, half)
        best = proven_epsilon(sum(s > end for s in scores[1][half:]), sum(s <= end for s in scores[0][half:]), half)
        promised = epsilon(multiplier, num_clients=num_clients, participation=1.0, rounds=rounds, delta=DELTA)
        line = {
            "z": multiplier, "promised epsilon": round(promised, 2), "proven epsilon": round(best, 2),
            "right": round(1 - (false + missed) / (2 * half), 3), "of the furthest": round(float(np.mean(apart)), 3),
            "best possible right": round(float(norm.cdf(math.sqrt(rounds) / (2 * multiplier))), 3), "trials": 2 * half,
        }  # fmt: skip
        found.append(line)
        print(line, flush=True)
    return found


def chosen_line(scores: list[list[float]], half: int) -> float:
    """The threshold that proves most on the first half of the trials."""
    tried = np.quantile(np.concatenate([each[:half] for each in scores]), np.linspace(0.02, 0.98, 49))
    proven = [proven_epsilon(sum(s > t for s in scores[1][:half]), sum(s <= t for s in scores[0][:half]), half)
              for t in tried]  # fmt: skip
    return float(tried[int(np.argmax(proven))])


def one_trial(
    worlds: list[tuple[Tensor, Tensor]], world: int, rounds: int, clip: float, multiplier: float, seed: int
) -> tuple[float, float]:
    """How much the models of a noisy run look like the first world's, and how far apart both worlds could be seen."""
    method = algorithm("fedavg-equal", num_local_steps=2)
    engines = [engine_of(*each, method, PrivacyOptions(clip), 0) for each in worlds]
    noisy = engine_of(*worlds[world], method, PrivacyOptions(clip, None, multiplier), seed)
    state, score, distance = noisy.start(noisy.source.model.params), 0.0, 0.0  # type: ignore[attr-defined]
    for _ in range(rounds):
        first, second = (engine.advance(state, 1).server.params.double() for engine in engines)
        state = noisy.advance(state, 1)
        way = first - second
        score += float((state.server.params.double() - (first + second) / 2) @ way / way.norm())
        distance += float(way.norm()) / (2 * clip / len(worlds[0][0])) / rounds
    return score, distance


def engine_of(x: Tensor, y: Tensor, method: Any, privacy: PrivacyOptions, seed: int) -> CohortEngine:
    """The cohort engine on these rows: minibatches are the same in every trial, noise is not."""
    rows = federation_of(x, y, torch.ones(y.shape, dtype=torch.bool))
    torch.manual_seed(0)
    model = FlatModel(nn.Linear(64, 10))
    source = ModelSource(rows, model, nn.functional.cross_entropy, 0.1, 12, 0, "auto")
    return CohortEngine(method, source, seed=seed, privacy=privacy)


# ---------------------------------------------------------------------------------------------------------- inversion


def inversion(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """How like its rows are the images that are rebuilt from what a client of few rows sends."""
    found = []
    for rows_each in (1, 4, 8):
        for seen in ("its own upload", "the sum of 10", "the sum of 10, clipped, z = 1"):
            alike = [rebuilt(seed, rows_each, seen) for seed in range(arguments.images)]
            line = {"rows": rows_each, "seen": seen, "correlation": mean_and_error(alike)}
            found.append(line)
            print(line, flush=True)
    alike = []
    for seed in range(arguments.images):  # what two images of the data have in common anyway
        x, _ = softmax_rows(seed, 2, 8)
        alike.append(matched(x[0], x[1]))
    found.append({"rows": 8, "seen": "nothing: images of somebody else", "correlation": mean_and_error(alike)})
    print(found[-1], flush=True)
    return found


def rebuilt(seed: int, rows_each: int, seen: str) -> float:
    """Correlation of the first client's rows with images whose gradient is what was seen; labels are known."""
    x, y = softmax_rows(seed, 10, rows_each)
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(64, 32), nn.Sigmoid(), nn.Linear(32, 10))

    def gradient(images: Tensor, labels: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(module(images), labels)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, module.parameters(), create_graph=True)])

    each = torch.stack([gradient(x[m], y[m]).detach() for m in range(len(x))])
    if seen == "its own upload":
        target = each[0]
    else:
        target = each.mean(0)
        if "z = 1" in seen:  # S is the median length, the noise that of the library for equal weights
            clip = each.norm(dim=1).median()
            bounded = each * (clip / each.norm(dim=1).clamp(min=clip)).unsqueeze(1)
            target = (bounded.sum(0) + 2 * clip * torch.randn(each.shape[1])) / len(each)
    dummy = torch.zeros(rows_each, 64) + 0.1 * torch.randn(rows_each, 64)
    dummy.requires_grad_()
    optimiser = torch.optim.LBFGS([dummy], lr=0.5, max_iter=200, history_size=50, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        apart = 1e3 * (gradient(dummy, y[0]) - target).square().sum()
        apart.backward()  # type: ignore[no-untyped-call]
        return apart

    optimiser.step(closure)  # type: ignore[arg-type]
    return matched(dummy.detach(), x[0])


def matched(ours: Tensor, theirs: Tensor) -> float:
    """Mean correlation of images, each with the one that suits it best, none used twice."""
    both = [(part - part.mean(1, keepdim=True)) for part in (ours, theirs)]
    unit = [part / part.norm(dim=1, keepdim=True).clamp(min=1e-12) for part in both]
    table = (unit[0] @ unit[1].T).numpy()
    rows, columns = linear_sum_assignment(-table)
    return float(table[rows, columns].mean())


def main() -> None:
    """Measure what is asked for, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"membership": membership, "rows": rows, "many-rows": many_rows, "audit": audit, "inversion": inversion}
    parser.add_argument("--part", choices=[*parts, "all"], default="all")
    parser.add_argument("--federations", type=int, default=16, help="that rows are in or out of, for membership")
    parser.add_argument("--seeds", type=int, default=3, help="of runs on many rows")
    parser.add_argument("--repeats", type=int, default=1000, help="noisy runs of each world, for the audit")
    parser.add_argument("--images", type=int, default=20, help="clients whose rows are rebuilt")
    parser.add_argument("--json", type=Path, help="where the numbers go")
    arguments = parser.parse_args()
    found = {name: measure(arguments) for name, measure in parts.items() if arguments.part in (name, "all")}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
