"""How large steps of gradient descent on a squared error may be."""

from __future__ import annotations

from torch import Tensor


def largest_step(curvature: Tensor, noise: Tensor, momentum: float = 0.0) -> Tensor:
    """Largest step size below which gradient descent on a squared error converges in the mean square.

    It is 2/(l/(1 + b) + n/(1 - b)) in each direction by itself.

    Args:
        curvature: l, the largest of the mean loss, ``[...]``.
        noise: n: that of a minibatch, drawn afresh for each step, has in each direction at most n times its mean as its
            variance, ``[...]``.
        momentum: b.
    """
    return 2.0 / (curvature / (1.0 + momentum) + noise / (1.0 - momentum))
