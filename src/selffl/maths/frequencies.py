"""How often clients have each class: a two-level hierarchy of its own, beside that of their models.

Client m's frequencies are drawn around everybody's, pi_m ~ Dirichlet(alpha pi).  Between clients they vary by
pi (1 - pi) rho, rho = 1/(1 + alpha), from 0, where all have the same, to 1, where each has a single class.
"""

from __future__ import annotations

import torch
from torch import Tensor


def class_shift(counts: Tensor, frequencies: Tensor, skew: Tensor) -> Tensor:
    """log of a client's class frequencies over everybody's, of its ``counts [..., K]`` and rho ``[...]``: ``[..., K]``.

    (n_k + pi_k/rho) / (N + 1/rho) is the posterior mean after one row more from everybody's frequencies: next to no rows
    should make nobody sure that a class is never met.  Nothing where there are no rows, or rho = 0.
    """
    rho = skew.unsqueeze(-1)
    return torch.log1p(rho * counts / frequencies) - torch.log1p(rho * counts.sum(-1, keepdim=True))


def moved_concentration(concentration: Tensor, counts: Tensor, frequencies: Tensor) -> Tensor:
    """alpha ``[...]`` one step nearer to where the ``counts [..., M, K]`` of several clients are likeliest.

    Minka's fixed point (Estimating a Dirichlet distribution, 2000), with the mean ``frequencies [..., K]`` given.
    """
    alpha = concentration.double()
    prior = (alpha.unsqueeze(-1) * frequencies.double()).unsqueeze(-2)
    known = counts.double()
    by_class = (torch.digamma(known + prior) - torch.digamma(prior)) * frequencies.double().unsqueeze(-2)
    in_all = torch.digamma(known.sum(-1) + alpha.unsqueeze(-1)) - torch.digamma(alpha).unsqueeze(-1)
    found = alpha * by_class.sum((-2, -1)) / in_all.sum(-1)
    # No rows, or one a client, say nothing; nor is anything beyond these ends told apart.
    return torch.where(found.isfinite(), found, alpha).clamp(1e-3, 1e6).to(concentration)
