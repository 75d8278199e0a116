"""Which clients' heads a client should take, and how much of each: FedPAC's classifier combination.

Xu, Tong and Huang, Personalized Federated Learning with Feature Alignment and Classifier Collaboration, ICLR 2023.  A
mixture alpha of heads errs by alpha' (diag(v) + D_i) alpha for client i: v_j is how noisy client j's features are, and
D_i how far the clients' own features, class by class, lie from those of client i.
"""

from __future__ import annotations

import torch
from torch import Tensor

MIN_WEIGHT = 1e-3  # what counts for less is left out
RIDGE = 1e-12  # on the diagonal, relative to its mean: a client with one row has no noise to be seen
TOLERANCE = 1e-9  # of conditions that hold exactly at the minimum, relative to 1
MAX_EXCHANGES = 1000  # of places; a few take as a rule
NUM_TRIES = 3  # of changing all at once, without progress, before one at a time


def feature_noise(shares: Tensor, means: Tensor, squares: Tensor, num_examples: Tensor) -> Tensor:
    """v ``[...]``: (sum_k p_k E_k|z|^2 - sum_k p_k^2 |mu_k|^2) / N of shares of classes ``[..., K]``.

    ``means [..., K, D]`` are those of features within a class, ``squares [..., K]`` of their squared lengths.
    """
    noise = (shares * squares).sum(-1) - (shares.square() * means.square().sum(-1)).sum(-1)
    return noise.clamp(min=0.0) / num_examples


def combination_weights(own: Tensor, noise: Tensor, max_numbers: int = 1 << 24) -> Tensor:
    """alpha ``[C, C]``: in row i how much client i takes of each, from 0 up and 1 together.

    ``own [C, ...]`` is p_k mu_k of each client's classes, ``noise [C]`` is v.  As many clients at a time as
    ``max_numbers`` allow.
    """
    features = own.flatten(1).double()
    products = features @ features.T
    found = []
    step = max(max_numbers // len(own) ** 2, 1)
    for start in range(0, len(own), step):
        some = slice(start, start + step)
        # (h_i - h_j)·(h_i - h_l), of products of all pairs
        here = products[some]
        distances = products.diagonal()[some].view(-1, 1, 1) - here.unsqueeze(-1) - here.unsqueeze(-2) + products
        found.append(least_on_simplex(distances + noise.double().diag()))
    weights = torch.cat(found)
    weights = weights.masked_fill(weights < MIN_WEIGHT, 0.0)
    return (weights / weights.sum(-1, keepdim=True)).to(own.dtype)


def least_on_simplex(matrices: Tensor) -> Tensor:
    """The a ``[n, C]``, from 0 up and 1 together, with the least a'Qa, of ``matrices [n, C, C]``.

    No Q has a negative eigenvalue.  a is b over its sum, where b >= 0, Qb >= 1, and one of both is an equality in every
    place (the conditions of Karush, Kuhn and Tucker).  Found by block principal pivoting (Portugal, Judice and Vicente,
    1994): solve for the places taken to be above 0, exchange those where a condition fails, all at once as long as that
    makes them fewer, else the last one alone.  That ends for certain but for rounding; after `MAX_EXCHANGES` it is left
    at what there is.
    """
    size = matrices.shape[-1]
    eye = torch.eye(size, dtype=matrices.dtype, device=matrices.device)
    scale = matrices.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=torch.finfo(matrices.dtype).tiny)
    scaled = matrices / scale.view(-1, 1, 1) + RIDGE * eye
    is_free = torch.ones_like(scaled[..., 0], dtype=torch.bool)
    fewest = torch.full_like(scaled[:, 0, 0], size + 1, dtype=torch.int64)
    tries = torch.full_like(fewest, NUM_TRIES)
    place = torch.arange(size, device=matrices.device)
    for number in range(MAX_EXCHANGES):
        inside = is_free.unsqueeze(-1) & is_free.unsqueeze(-2)
        solution = torch.linalg.solve(torch.where(inside, scaled, eye), is_free.to(scaled).unsqueeze(-1)).squeeze(-1)
        slack = (scaled @ solution.unsqueeze(-1)).squeeze(-1) - 1.0
        largest = solution.abs().amax(-1, keepdim=True)
        is_wrong = torch.where(is_free, solution < -TOLERANCE * largest, slack < -TOLERANCE)
        count = is_wrong.sum(-1)
        if not count.any() or number == MAX_EXCHANGES - 1:
            break
        is_fewer = count < fewest
        tries = torch.where(is_fewer, NUM_TRIES, tries - 1)
        fewest = torch.minimum(count, fewest)
        last = (is_wrong * (place + 1)).amax(-1, keepdim=True) == place + 1
        is_free = is_free ^ torch.where((tries > 0).unsqueeze(-1), is_wrong, is_wrong & last)
    found: Tensor = solution.clamp(min=0.0)
    return found / found.sum(-1, keepdim=True)
