"""Within-client variance of a parametric model: the inverse of the information its rows hold.

Self-FL, section 2.2: sqrt(N_m)(z_m - theta_m) tends to N(0, v_m^2) with v_m^2 the inverse Fisher information of one
row, so that sigma_m^2 = v_m^2 / N_m.  The *observed* information, the Hessian of the negative log-likelihood of all
N_m rows at its minimum, estimates N_m / v_m^2 directly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from selffl.errors import ConfigError, DataError

NegativeLogLikelihood = Callable[..., Tensor]


@dataclass(frozen=True)
class LocalFit:
    """One client's estimate and how sure it is: what `selffl.posterior` needs of a client.

    Attributes:
        estimate: z_m ``[P]``.
        variance: σₘ² ``[P]``, the diagonal of the covariance.
        covariance: ``[P, P]``, the inverse of the observed information.
    """

    estimate: Tensor
    variance: Tensor
    covariance: Tensor


def observed_information(loss: NegativeLogLikelihood, params: Tensor, *rows: Tensor) -> Tensor:
    """Hessian of ``loss(params, *rows)``, the summed negative log-likelihood, at ``params``: ``[P, P]``."""
    # Reverse over reverse: torch.func.hessian's forward mode lacks rules for some losses and warns on import.
    hessian: Tensor = torch.func.jacrev(torch.func.grad(loss))(params, *rows)
    return hessian


def local_fit(loss: NegativeLogLikelihood, start: npt.ArrayLike, *rows: npt.ArrayLike) -> LocalFit:
    """Minimise a client's negative log-likelihood and read its variance off the curvature there.

    Args:
        loss: ``loss(params, *rows)``, the negative log-likelihood *summed* over rows, twice differentiable in torch.
        start: first guess ``[P]``.
        rows: the client's data, array-likes handed on to ``loss`` as float64 tensors.

    Examples:
        A Poisson rate, on the log scale, from four counts:

        >>> import torch, selffl
        >>> def poisson(log_rate, counts):
        ...     return (log_rate.exp() - counts * log_rate).sum()
        >>> fit = selffl.local_fit(poisson, [0.0], [2.0, 4.0, 3.0, 3.0])
        >>> round(float(fit.estimate.exp()), 6), round(float(fit.variance), 6)      # mean 3, variance 1 / (4 * 3)
        (3.0, 0.083333)
    """
    try:
        guess = np.asarray(start, dtype=np.float64)
    except (TypeError, ValueError):
        raise ConfigError(f"start is {start!r}; expected one finite number per parameter, [P].") from None
    if guess.ndim != 1 or guess.size == 0:
        raise ConfigError(f"start has shape {guess.shape}; expected one number per parameter, [P].")
    if not np.isfinite(guess).all():
        raise ConfigError(f"start is {guess.tolist()}; expected finite numbers.")
    tensors = tuple(torch.as_tensor(value, dtype=torch.float64) for value in rows)
    for index, tensor in enumerate(tensors):
        if not torch.isfinite(tensor).all():
            raise DataError(f"data array {index} holds NaN or infinity; expected finite numbers. Drop those rows.")
    num_rows = max((tensor.shape[0] for tensor in tensors if tensor.ndim), default=1)
    if num_rows == 0:
        raise DataError("the client has no rows; expected at least one. Leave it out of the federation.")

    def value_and_gradient(point: np.ndarray) -> tuple[float, np.ndarray]:
        gradient, value = torch.func.grad_and_value(loss)(torch.from_numpy(point), *tensors)
        return float(value), gradient.numpy()

    def hessian(point: np.ndarray) -> np.ndarray:
        return observed_information(loss, torch.from_numpy(point), *tensors).numpy()

    from scipy.optimize import minimize  # here: it takes a third of a second

    # A trust region finds the valley from anywhere; Newton's steps then find its bottom to the last digit.
    minimum = minimize(
        value_and_gradient, guess, jac=True, hess=hessian, method="trust-exact", options={"gtol": 1e-6 * num_rows}
    )
    estimate = np.asarray(minimum.x, dtype=np.float64)
    for _ in range(10):
        covariance = _covariance(hessian(estimate))
        step = covariance @ value_and_gradient(estimate)[1]
        estimate = estimate - step
        error = np.sqrt(covariance.diagonal())
        # Where there is a minimum the steps vanish beside the standard error and the estimate.  Where there is none
        # (separable classes, no events) each step goes as far as the last, beside an ever larger standard error.
        if (np.abs(step) <= np.maximum(1e-6 * np.minimum(error, np.abs(estimate)), 1e-10 * error)).all():
            matrix = torch.from_numpy(_covariance(hessian(estimate)))
            return LocalFit(torch.from_numpy(estimate), matrix.diagonal().clone(), matrix)
    raise _no_minimum("the search runs away")


def _covariance(information: np.ndarray) -> np.ndarray:
    """The inverse of the information, which has to be positive definite whatever the units of the parameters."""
    information = (information + information.T) / 2
    diagonal = information.diagonal()
    scale = np.where(diagonal > 0, 1 / np.sqrt(np.where(diagonal > 0, diagonal, 1.0)), 1.0)
    scaled = scale[:, None] * information * scale
    if not np.isfinite(scaled).all():
        raise _no_minimum("the information is not finite")
    eigenvalues = np.linalg.eigvalsh(scaled)
    if eigenvalues[0] <= 1e-10 * abs(eigenvalues[-1]):
        raise _no_minimum(
            f"smallest eigenvalue of the information {eigenvalues[0]:.3g}, largest {eigenvalues[-1]:.3g}, each "
            "parameter in its own unit"
        )
    inverse: np.ndarray = scale[:, None] * np.linalg.inv(scaled) * scale
    return inverse


def _no_minimum(reason: str) -> DataError:
    return DataError(
        f"the likelihood has no curved minimum ({reason}); expected a positive definite information. The rows do not "
        "determine the parameters: add a penalty to the loss or drop columns."
    )
