"""How sure a classifier may be of its answers: the variance of their log-odds, and what rows left out say of it.

A client's parameters are normal around the mode, with precision A = sum_i h_i u_i u_i^T + c: c of the prior, u_i the
gradient of the log-odds of row i's class (against the rest) and h_i the information in its label.  All that follows is
in terms of the products u_i . u_j alone (Gram form), of which there are few where parameters are many.

Two things come of it.  A log-odds f has the variance s^2 = u^T A^-1 u, and the answer averaged over it is about that of
f / sqrt(1 + pi s^2/8): MacKay's moderated output (Neural Computation 1992, "The evidence framework applied to
classification networks").  And the mode without row i is known without training again, and with it what would be
answered to a row never seen.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

PROBIT = math.pi / 8  # sigmoid(f) is about the normal distribution function of f sqrt(pi/8)
OUTLIER_SHARE = 1e-4  # share of rows that may be anything: for one far off its fellows, linear is not good enough
SCALES = tuple(2.0 ** (step / 8) for step in range(-32, 65))  # 1/16 to 256
COARSE_STEPS = 8  # steps between scales that are tried first: in the scale there is one best
VARIANCE_SHARES = (0.0, *(10.0 ** (-step / 2) for step in range(8, -1, -1)))  # 0, and 0.0001 to 1
SMALLEST_REST = 1e-12  # what is left, at least, of a variance


class Moderation(NamedTuple):
    """How log-odds with a variance s^2 become probabilities: times ``scale`` / sqrt(1 + ``share`` pi s^2/8).

    The normal posterior as it stands has both at 1; neither changes which class is the likeliest.
    """

    scale: float = 1.0
    share: float = 1.0


AS_IT_STANDS = Moderation()


class LeftOut(NamedTuple):
    """What the mode without a row would say of that row."""

    shift: Tensor  # by how much the log-odds of its class would be lower [n]
    variance: Tensor  # s^2 of these log-odds [n]


def information(chance: Tensor, balance: float) -> Tensor:
    """h of a label that the model gives ``chance``: between the empirical (1-p)^2 and the expected p(1-p).

    ``balance`` 0 is the former, 1/2 the latter, between them is their geometric mean.
    """
    return chance ** (2.0 * balance) * (1.0 - chance) ** (2.0 - 2.0 * balance)


def log_odds_variance(squares: Tensor, cross: Tensor, gram: Tensor, weights: Tensor, precision: float) -> Tensor:
    """s^2 = u^T A^-1 u of other rows ``[m]``, by the matrix inversion lemma.

    Args:
        squares: u . u of these rows ``[m]``.
        cross: u_i . u ``[n, m]``.
        gram: u_i . u_j of the client's rows ``[n, n]``.
        weights: h_i ``[n]``.
        precision: c.
    """
    root = weights.sqrt()
    seen = root[:, None] * gram * root + precision * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    towards = root[:, None] * cross
    half = torch.linalg.solve_triangular(torch.linalg.cholesky(seen), towards, upper=False)
    left: Tensor = squares - half.square().sum(0)
    return (left / precision).clamp(min=0.0)


def left_out(gram: Tensor, weights: Tensor, chance: Tensor, precision: float) -> LeftOut:
    """Each of the client's rows as the mode without it sees it.

    At the mode a row with chance p pulls its log-odds up by (1-p) s^2, s^2 without it: v/(1 - h v) with v = u^T A^-1 u.
    """
    variance = log_odds_variance(gram.diagonal(), gram, gram, weights, precision)
    without = variance / (1.0 - weights * variance).clamp(min=SMALLEST_REST)
    return LeftOut((1.0 - chance) * without, without)


def moderate(logits: Tensor, variance: Tensor, moderation: Moderation = AS_IT_STANDS) -> Tensor:
    """Logits ``[..., K]`` of probabilities that allow for the variance s^2 ``[...]``; the order of classes is kept.

    >>> import torch
    >>> moderate(torch.tensor([0.0, 4.0]), torch.tensor(8.0 / torch.pi * 3.0)).tolist()
    [0.0, 2.0]
    """
    factor = moderation.scale / (1.0 + moderation.share * PROBIT * variance).sqrt()
    return logits * factor.unsqueeze(-1)


def learned_moderation(logits: Tensor, labels: Tensor, variance: Tensor) -> Moderation:
    """The one under which labels of rows left out are likeliest: ``logits [n, K]``, ``labels [n]``, ``variance [n]``.

    The logarithm of the scale is taken to be standard normal beforehand, which nothing is left of after a few hundred
    rows; a few rows change little.
    """
    row = torch.arange(len(labels), device=labels.device)
    likeliest, smallest_loss = AS_IT_STANDS, math.inf
    for share in VARIANCE_SHARES:
        held = moderate(logits, variance, Moderation(share=share))

        def loss(step: int, held: Tensor = held) -> float:
            chance = (held * SCALES[step]).softmax(-1)[row, labels]
            nats = -((1.0 - OUTLIER_SHARE) * chance + OUTLIER_SHARE / logits.shape[-1]).log().sum()
            return float(nats) + math.log(SCALES[step]) ** 2 / 2.0

        near = min(range(0, len(SCALES), COARSE_STEPS), key=loss)
        best = min(range(max(near - COARSE_STEPS, 0), min(near + COARSE_STEPS + 1, len(SCALES))), key=loss)
        if loss(best) < smallest_loss:
            likeliest, smallest_loss = Moderation(SCALES[best], share), loss(best)
    return likeliest


def log_odds(logits: Tensor, classes: Tensor) -> Tensor:
    """Log-odds of the named class against all others, ``[...]``: ``logits [..., K]``, ``classes [...]``."""
    is_named = torch.arange(logits.shape[-1], device=logits.device) == classes.unsqueeze(-1)
    named = torch.where(is_named, logits, 0.0).sum(-1)
    return named - torch.where(is_named, -math.inf, logits).logsumexp(-1)
