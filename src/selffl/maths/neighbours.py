"""What the nearest of a client's own rows say of a class, and how far that is believed beside a model.

Marfoq, Neglia, Vidal and Kameni, Personalized Federated Learning through Local Memorization, ICML 2022 (kNN-Per).
"""

from __future__ import annotations

import torch
from torch import Tensor

NUM_SHARES = 100  # 0, 0.01, ... 0.99: of all but 1, since no class is impossible for not having been met


def squared_distances(rows: Tensor, known: Tensor) -> Tensor:
    """|a - b|^2 ``[..., q, n]`` of ``rows [..., q, D]`` and ``known [..., n, D]``."""
    sizes = rows.square().sum(-1).unsqueeze(-1) + known.square().sum(-1).unsqueeze(-2)
    return (sizes - 2.0 * rows @ known.transpose(-1, -2)).clamp_(min=0.0)


def neighbour_shares(distances: Tensor, targets: Tensor, num_neighbours: int, num_features: int) -> Tensor:
    """Share of each class among the k nearest ``[..., q, K]``, a neighbour at distance d counting as exp(-d^2/D).

    ``distances [..., q, n]`` are squared, and infinite for rows that do not count; ``targets [..., n, K]`` are 1 for a
    row's class.  Rows as far as the k-th count all.  Zeros where nobody counts.
    """
    nearest = distances.topk(min(num_neighbours, distances.shape[-1]), dim=-1, largest=False).values
    first = nearest[..., :1].nan_to_num(posinf=0.0)  # taken off everywhere, so that the nearest counts as 1
    weights = ((first - distances) / num_features).exp_().masked_fill_(distances > nearest[..., -1:], 0.0)
    found = weights @ targets
    return found / found.sum(-1, keepdim=True).clamp(min=torch.finfo(found.dtype).tiny)


def likeliest_share(shares: Tensor, probabilities: Tensor, targets: Tensor) -> Tensor:
    """The lambda ``[...]`` at which lambda shares + (1 - lambda) probabilities ``[..., n, K]`` make rows likeliest.

    Of 0, 0.01, ... 0.99 the smallest that none is better than; rows that do not count have no target.
    """
    shares, probabilities, targets = (each.double() for each in (shares, probabilities, targets))
    best = torch.full_like(shares[..., 0, 0], -torch.inf)
    found = torch.zeros_like(best)
    for number in range(NUM_SHARES):
        share = number / NUM_SHARES
        value = torch.xlogy(targets, torch.lerp(probabilities, shares, share)).sum((-2, -1))
        found = torch.where(value > best, share, found)
        best = torch.maximum(value, best)
    return found
