"""How many of a client's parameters its own rows decide, and what that says of the variance between clients.

The evidence approximation (MacKay, Neural Computation 1992): with the rows' information H, a prior of precision c on
every coordinate and the posterior mode at a distance d from the prior mean, gamma = tr H (H + c)^-1 parameters are
decided by the rows, and the precision under which the rows are most likely satisfies c = gamma / d^2; over several
clients, c = sum gamma_m / sum d_m^2.
"""

from __future__ import annotations

import torch
from torch import Tensor


def num_determined(gradients: Tensor, precision: Tensor) -> Tensor:
    """Number of parameters that rows determine, gamma = tr H (H + c)^-1 with H = sum_i j_i j_i^T: ``[...]``.

    From the rows' gradients j_i ``[..., R, P]`` and the prior's precision c ``[...]``; NaN where these are not finite.
    """
    num_rows, num_params = gradients.shape[-2:]
    few = gradients if num_rows <= num_params else gradients.mT  # both Gram matrices have the same spectrum
    gram = (few @ few.mT).double()
    is_finite = gram.isfinite().flatten(-2).all(-1)
    # Of a client that has diverged nothing is known; LAPACK would raise an error for all clients.
    spectrum = torch.linalg.eigvalsh(gram.where(is_finite[..., None, None], 0.0)).clamp(min=0.0)
    decided: Tensor = (spectrum / (spectrum + precision.double().unsqueeze(-1))).sum(-1)
    return decided.where(is_finite, torch.nan)


def effective_parameters(gradients: Tensor, num_rows: Tensor, num_examples: Tensor, precision: Tensor) -> Tensor:
    """gamma of all N of a client's rows, from the gradients of ``num_rows`` of them ``[..., R, P]``: ``[...]``.

    Further gradients are zeros.

    With no fewer rows than parameters, N rows have N/n times their information.  With fewer, that about directions in
    which no row seen so far has pointed cannot be read off: multiplied by N/n, n rows decide n parameters at most.
    Doubling the rows from n/2 to n multiplies gamma by 2^s, and N rows are taken to decide gamma_n (N/n)^s; with one
    row to look at, s = 1.  Never more than there are parameters.
    """
    share = num_examples.double() / num_rows.double()
    is_whole = gradients.shape[-2] >= gradients.shape[-1]
    # Less than 1 for a client with fewer rows than a minibatch, which meets some of them twice.
    scaled = gradients * (share if is_whole else share.clamp(max=1.0)).sqrt().to(gradients)[..., None, None]
    determined = num_determined(scaled, precision)
    if is_whole:
        return determined.to(gradients)
    growth = torch.ones_like(determined)
    if gradients.shape[-2] > 1:
        half = (num_determined(scaled[..., ::2, :], precision) + num_determined(scaled[..., 1::2, :], precision)) / 2
        growth = torch.log2(determined / half.clamp(min=torch.finfo(half.dtype).tiny)).clamp(0.0, 1.0)
    return (determined * share.clamp(min=1.0) ** growth).clamp(max=gradients.shape[-1]).to(gradients)
