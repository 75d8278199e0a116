r"""The posterior of the two-level Gaussian model, in the paper's form and in the exact one.

Self-FL, section 2.1: theta_m ~ N(theta_0, sigma_0^2), z_m ~ N(theta_m, sigma_m^2), flat prior on theta_0.

Every quantity is written with *variances*, never with precisions, and every weight relative to the largest one, so
that nothing overflows when a variance is zero.  With V_m the variance of theta_0 given everybody but client m
(1/S_m in the paper's terms), both forms are one formula: the prior of theta_m before its own data is
N(mu_m, A_m), where A_m = V_m ("paper", which postulates theta_m = theta_0) or A_m = V_m + sigma_0^2 ("exact").

Tensors in this file have the clients on axis -2 and the coordinates on axis -1, with any number of independent
federations before them: ``[..., clients, params]``; a variance that all coordinates share is ``[..., clients, 1]``.
`posterior` is the border where other shapes and NumPy arrays are taken in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from selffl.errors import ConfigError, DataError
from selffl.maths.inputs import finite_number, finite_tensor, variance_tensor

Form = Literal["paper", "exact"]
FORMS: tuple[Form, ...] = ("paper", "exact")

CLIENTS = -2  # the client axis of every tensor here


def relative_precision(total_variance: Tensor) -> tuple[Tensor, Tensor]:
    """Aggregation weights 1/(sigma_0^2 + sigma_m^2), scaled so that the largest is 1, and the scale.

    Self-FL, Eq. (2): w_m = weight_m / scale.  Returns ``(weight, scale)`` with scale = min(total_variance), so that
    clients of zero total variance share all the weight equally and nothing is infinite.
    """
    scale = total_variance.amin(CLIENTS, keepdim=True)
    # Where both are zero, or both infinite, the ratio is 1 by the limit of equal variances.
    is_limit = (total_variance == scale) & ((total_variance == 0) | total_variance.isinf())
    ratio = scale.masked_fill(is_limit, 1.0) / total_variance.masked_fill(is_limit, 1.0)
    return ratio, scale


def weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    """Mean of ``values [..., clients, params]`` over the clients, with ``weight [..., clients, 1 or params]``."""
    return (weight / weight.sum(CLIENTS, keepdim=True) * values).sum(CLIENTS)


def global_posterior(estimate: Tensor, total_variance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of the shared parameter theta_0 given every client.

    Self-FL, Eq. (2): mean = sum_m w_m z_m / sum_m w_m and variance = 1 / sum_m w_m, w_m = 1/(sigma_0^2 + sigma_m^2).
    ``total_variance`` is sigma_0^2 + sigma_m^2.
    """
    weight, scale = relative_precision(total_variance)
    return weighted_mean(estimate, weight), (scale / weight.sum(CLIENTS, keepdim=True)).squeeze(CLIENTS)


def others_variance(total_variance: Tensor) -> Tensor:
    """Variance of theta_0 given everybody *but* each client, 1/S_m with S_m = sum_{k != m} w_k; inf for a lone client.

    Self-FL, the sums over k != m of Eqs. (3), (7) and (8).
    """
    weight, scale = relative_precision(total_variance)
    alone_weight, alone_scale, is_heaviest = _without_heaviest(total_variance, weight)
    # Any but the heaviest holds at most half of the total, so that subtracting it costs at most one bit.
    rest = weight.sum(CLIENTS, keepdim=True) - weight
    variance = scale / torch.where(is_heaviest, 1.0, rest)
    return torch.where(is_heaviest, alone_scale / alone_weight.sum(CLIENTS, keepdim=True), variance)


def others_posterior(estimate: Tensor, total_variance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of theta_0 given everybody but each client; the mean is where local training starts.

    Self-FL, Eq. (7): mu_m = sum_{k != m} w_k z_k / S_m.  A lone client has no others: its own estimate, with infinite
    variance.
    """
    weight, _ = relative_precision(total_variance)
    alone_weight, _, is_heaviest = _without_heaviest(total_variance, weight)
    mean = _sum_of_others(weight * estimate) / torch.where(is_heaviest, 1.0, _sum_of_others(weight))
    heaviest_mean = weighted_mean(estimate, alone_weight).unsqueeze(CLIENTS)
    return torch.where(is_heaviest, heaviest_mean, mean), others_variance(total_variance)


def _sum_of_others(values: Tensor) -> Tensor:
    """Sum over all clients but each one: those before it plus those behind it.

    Numbers of either sign cancel in a total, and a large one hides the others in it: nothing may be subtracted here.
    """
    wide = values.to(torch.float64)  # a running sum of a million float32 numbers would lose half of its digits
    before = wide.cumsum(CLIENTS).roll(1, CLIENTS)
    behind = wide.flip(CLIENTS).cumsum(CLIENTS).flip(CLIENTS).roll(-1, CLIENTS)
    position = torch.arange(values.shape[CLIENTS], device=values.device).unsqueeze(-1)
    before = before.masked_fill(position == 0, 0.0)
    behind = behind.masked_fill(position == values.shape[CLIENTS] - 1, 0.0)
    return (before + behind).to(values.dtype)


def _without_heaviest(total_variance: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Relative precisions and their scale with the heaviest client taken out, and a mask that says which one it is.

    Beside a client of zero variance the others weigh nothing; without it they need a scale of their own.
    """
    heaviest = weight.argmax(CLIENTS, keepdim=True)
    is_heaviest = torch.arange(weight.shape[CLIENTS], device=weight.device).unsqueeze(-1) == heaviest
    alone_weight, alone_scale = relative_precision(total_variance.masked_fill(is_heaviest, torch.inf))
    return alone_weight, alone_scale, is_heaviest


def prior_variance(others_variance: Tensor, inter_variance: Tensor, form: Form) -> Tensor:
    """A_m, the variance of theta_m before client m looks at its own data.

    Decision D11: "paper" is the postulated model theta_m = theta_0, A_m = V_m; "exact" adds the spread of the clients
    around theta_0, A_m = V_m + sigma_0^2, which is 1/P_m in ``docs/equations.md``.
    """
    return others_variance if form == "paper" else others_variance + inter_variance


def local_weight(intra_variance: Tensor, prior_variance: Tensor) -> Tensor:
    """How far a client trusts its own estimate, A_m / (A_m + sigma_m^2), between 0 and 1.

    Self-FL, Eq. (3).  One minus it is the right side of the step equation, Eq. (8), and one over it is the gain.
    Where both variances are zero it has no limit of its own; `personal_posterior` knows the one that applies.
    """
    is_alone = prior_variance.isinf()
    prior = prior_variance.masked_fill(is_alone, 1.0)
    return torch.where(is_alone, 1.0, prior / (prior + intra_variance))


def personal_posterior(
    estimate: Tensor, intra_variance: Tensor, inter_variance: Tensor, form: Form
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Posterior of each client's own parameter.

    Self-FL, Eq. (3), and its exact counterpart (D11): mean = mu_m + k_m (z_m - mu_m) and variance = k_m sigma_m^2.
    Returns ``(mean, variance, k_m, mu_m, A_m)``.
    """
    total = inter_variance + intra_variance
    start, variance = others_posterior(estimate, total)
    prior = prior_variance(variance, inter_variance, form)
    # Clients without any uncertainty, in a federation without spread, all claim the same theta_0: equal shares.
    num_certain = (total == 0).sum(CLIENTS, keepdim=True).clamp(min=1)
    is_limit = prior + intra_variance == 0
    own = intra_variance.masked_fill(is_limit, 1.0)  # keeps 0 / 0 out of the branch that is not taken
    weight = torch.where(is_limit, 1.0 / num_certain, local_weight(own, prior))
    rest = torch.where(is_limit, 1.0 - 1.0 / num_certain, own / (own + prior))  # not 1 - weight: that rounds to 0 first
    return weight * estimate + rest * start, weight * intra_variance, weight, start, prior


def initial_params(
    global_params: Tensor, personal_params: Tensor, total_variance: Tensor, others_variance: Tensor
) -> Tensor:
    """Where a client's local training starts: the global model with the client's own part taken out.

    Self-FL, Eqs. (13) and (18): theta - (w_m / S_m)(theta_m - theta), with w_m / S_m = V_m / (sigma_0^2 + sigma_m^2).
    A lone client (V_m infinite) starts from the global model: there are no others to start from.  So does a client of
    zero total variance, for which the ratio has no limit that it could know.
    """
    is_defined = (total_variance > 0) & others_variance.isfinite()
    ratio = torch.where(is_defined, others_variance / total_variance.masked_fill(~is_defined, 1.0), 0.0)
    return global_params - ratio * (personal_params - global_params)


def local_steps(
    intra_variance: Tensor, prior_variance: Tensor, learning_rate: float | Tensor, batch_size: float = 1
) -> Tensor:
    """Number of gradient steps, as a real number, after which local training has reached the posterior mean.

    Self-FL, Eqs. (8), (10) and (19): (1 - eta/(B sigma_m^2))^l = sigma_m^2 / (sigma_m^2 + A_m), so that
    l = log(1 + A_m / sigma_m^2) / -log(1 - eta/(B sigma_m^2)).  Infinite for a lone client.
    Decision D7: where eta/(B sigma_m^2) >= 1 a single step already overshoots, and the answer is 1.
    """
    contraction = learning_rate / (batch_size * intra_variance)
    decay, needed = -torch.log1p(-contraction.clamp(max=1.0)), torch.log1p(prior_variance / intra_variance)
    # Where both are too small for a float their quotient is known: sigma_m^2 cancels.
    is_tiny = (decay == 0) & (needed == 0)
    steps = torch.where(is_tiny, prior_variance * batch_size / learning_rate, needed / decay.masked_fill(is_tiny, 1.0))
    return torch.where(contraction >= 1.0, 1.0, steps)


def rounded_steps(steps: Tensor, max_local_steps: int) -> Tensor:
    """Steps that can be taken: the nearest whole number, at least 1, at most ``max_local_steps`` (D7), as int64."""
    return steps.clamp(1, max_local_steps).round().to(torch.int64)


@dataclass(frozen=True)
class Posterior:
    """What is known of every client's parameter, and of the shared one, once all clients have spoken.

    Arrays are NumPy or torch, whichever came in; ``[M]`` or ``[M, P]`` per client, scalar or ``[P]`` for the whole.

    Attributes:
        global_mean: θ⁽ᴳ⁾, the mean of the shared parameter.
        global_variance: v⁽ᴳ⁾, its variance.
        personal_mean: θₘ⁽ᶠᴸ⁾, each client's parameter given all clients.
        personal_variance: vₘ⁽ᶠᴸ⁾, its variance.
        gain: σₘ²/vₘ⁽ᶠᴸ⁾, the factor by which a client's variance shrinks; infinite where others know θₘ exactly.
        initial: θₘ^INIT, the mean given everybody else: where local training starts.
        local_weight: k_m, the share of the client's own estimate in its personal mean.
        prior_variance: A_m, the variance of θₘ before the client's own data.
        intra_variance: σₘ², as given.
        form: ``paper`` or ``exact``.
    """

    global_mean: Any
    global_variance: Any
    personal_mean: Any
    personal_variance: Any
    gain: Any
    initial: Any
    local_weight: Any
    prior_variance: Any
    intra_variance: Any
    form: Form

    def num_local_steps(self, learning_rate: float, batch_size: int = 1) -> Any:
        """Steps of gradient descent from ``initial`` that end at ``personal_mean``, as real numbers (Eq. (8)).

        Examples:
            >>> import selffl
            >>> p = selffl.posterior([0.0, 1.0, 2.0], [0.1, 0.1, 0.1], inter_variance=1.0)
            >>> steps = p.num_local_steps(learning_rate=0.01)
            >>> start, target = p.initial[0], 0.0                          # client 0's own estimate is 0
            >>> bool(abs((1 - 0.01 / 0.1) ** steps[0] * start - p.personal_mean[0]) < 1e-12)
            True
        """
        rate = finite_number("learning_rate", learning_rate, expected := "a number above 0")
        if not rate > 0:
            raise ConfigError(f"learning_rate is {learning_rate}; expected {expected}.")
        size = finite_number("batch_size", batch_size, expected := "a whole number, 1 or more")
        if not (size >= 1 and size.is_integer()):
            raise ConfigError(f"batch_size is {batch_size}; expected {expected}.")
        steps = local_steps(torch.as_tensor(self.intra_variance), torch.as_tensor(self.prior_variance), rate, size)
        return steps.numpy() if isinstance(self.intra_variance, np.ndarray) else steps


def posterior(
    local_estimate: npt.ArrayLike, intra_variance: npt.ArrayLike, inter_variance: npt.ArrayLike, form: Form = "exact"
) -> Posterior:
    """Posterior of the two-level Gaussian model, with the spread between clients taken as known.

    The default is the exact posterior: random-effects shrinkage as statisticians know it.  The paper's form leaves the
    spread of the clients out of a client's own prior and promises too much where clients differ.  Where the spread is
    itself estimated, `selffl.meta_analysis` gives intervals that account for that.

    Args:
        local_estimate: what each client's own data say, ``[M]`` or ``[M, P]``; list, NumPy array or torch tensor.
        intra_variance: the uncertainty of each of those, a scalar, ``[M]``, or ``[M, P]``.
        inter_variance: the spread between clients, a scalar, or ``[P]``.
        form: "exact" for the two-level model itself, "paper" for the paper's postulated model (D11).

    Returns:
        A `Posterior` of the same kind of arrays.

    Examples:
        >>> import selffl
        >>> p = selffl.posterior([1.0, 2.0, 6.0], [0.5, 0.5, 0.5], inter_variance=1.0)
        >>> float(p.global_mean), p.personal_mean.round(3).tolist(), p.gain.round(3).tolist()
        (3.0, [1.667, 2.333, 5.0], [1.286, 1.286, 1.286])
    """
    if form not in FORMS:
        raise ConfigError(f"form is {form!r}; expected 'paper' or 'exact'.")
    is_torch = any(isinstance(value, Tensor) for value in (local_estimate, intra_variance, inter_variance))
    estimate, intra, inter = _checked(local_estimate, intra_variance, inter_variance)
    is_scalar = estimate.ndim == 1
    block = estimate.unsqueeze(-1) if is_scalar else estimate  # [clients, params]
    is_shared = is_scalar or (intra.ndim < 2 and inter.ndim == 0)  # one variance for all coordinates of a client
    spread = intra if intra.ndim == 2 else intra.reshape(-1, 1).expand(block.shape[0], 1)
    spread = spread.expand(block.shape[0], 1 if is_shared else block.shape[1])
    unit, square = _power_below_overflow(block), _power_below_overflow(spread, inter)
    global_mean, global_variance = global_posterior(block / unit, inter / square + spread / square)
    mean, _, weight, start, prior = personal_posterior(block / unit, spread / square, inter / square, form)

    def out(value: Tensor, scale: float, drop_params: bool) -> Any:
        value = value.squeeze(-1) if drop_params else value
        if scale != 1.0:  # what rounding has made larger than the largest float is that
            largest = torch.finfo(value.dtype).max
            value = torch.where(value.isinf(), value, (value * scale).clamp(-largest, largest))
        return value if is_torch else value.numpy()

    return Posterior(
        global_mean=out(global_mean, unit, is_scalar),
        global_variance=out(global_variance, square, is_shared),
        personal_mean=out(mean, unit, is_scalar),
        personal_variance=out(weight * spread, 1.0, is_shared),
        gain=out(1.0 / weight, 1.0, is_shared),
        initial=out(start, unit, is_scalar),
        local_weight=out(weight, 1.0, is_shared),
        prior_variance=out(prior, square, is_shared),
        intra_variance=out(spread, 1.0, is_shared),
        form=form,
    )


def _checked(local_estimate: Any, intra_variance: Any, inter_variance: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Estimates, intra-client variances and inter-client variances as tensors whose shapes fit together."""
    estimate = finite_tensor("local_estimate", local_estimate)
    if estimate.ndim not in (1, 2) or estimate.shape[0] == 0:
        raise DataError(
            f"local_estimate has shape {tuple(estimate.shape)}; expected [clients] or [clients, params], "
            "with at least one client."
        )
    intra = variance_tensor("intra_variance", intra_variance, like=estimate)
    inter = variance_tensor("inter_variance", inter_variance, like=estimate)
    if tuple(intra.shape) not in {(), (estimate.shape[0],), tuple(estimate.shape)}:
        raise DataError(
            f"intra_variance has shape {tuple(intra.shape)}; expected a scalar, [{estimate.shape[0]}], "
            f"or that of local_estimate, {list(estimate.shape)}."
        )
    if tuple(inter.shape) not in ({()} if estimate.ndim == 1 else {(), (estimate.shape[1],)}):
        raise DataError(f"inter_variance has shape {tuple(inter.shape)}; expected a scalar or one value per parameter.")
    return estimate, intra, inter


def _power_below_overflow(*values: Tensor) -> float:
    """Power of two to divide by, so that sums of numbers near the largest float stay finite; 1 for all others.

    Means are linear in the estimates, and depend on the variances by their ratios alone.
    """
    headroom = 2.0**40  # more clients than any federation has
    largest = max(float(value.detach().abs().max()) for value in values if value.numel())
    return headroom if largest > torch.finfo(values[0].dtype).max / headroom else 1.0
