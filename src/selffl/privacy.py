"""How much noise protects: (ε, δ) of whole clients and of single rows.  Needs ``selffl[privacy]``.

One client more or less known about: two federations are neighbours if they differ in one client, data and all
(*replace-one*).  Each round draws a fixed number of clients without replacement, in secret, and publishes sums with
normal noise of ``noise_multiplier`` times their joint sensitivity, whatever the method sends: `selffl.engines.limits`
counts all fields of an upload together, so that a round is one Gaussian mechanism.  The rounds are composed by Rényi's
divergence in Google's ``dp-accounting`` (Wang, Balle and Kasiviswanathan, AISTATS 2019, for the draw).

One row more or less known about (``row_noise_multiplier``): two clients are neighbours if they have as many rows and
differ in one.  Each noisy gradient draws min(B, N) of a client's N rows without replacement, in secret, and is a
Gaussian mechanism; whatever is sent is made of them, in all rounds that the client takes part in.  So ε is each
client's own.
docs/privacy.md says what the guarantee covers, and what it does not.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from selffl.algorithms.options import check_integer, check_number
from selffl.engines.cohort import cohort_size
from selffl.errors import ConfigError

LOG_NOISE_TOLERANCE = 1e-6
"""How near the least noise is found, in its logarithm."""

MOST_LOG_NOISE = math.log(1e9)
"""Where the search for noise ends, in its logarithm."""


def epsilon(noise_multiplier: float, *, num_clients: int, participation: float, rounds: int, delta: float) -> float:
    """ε at ``delta`` of a whole run, for replacing one client; infinite without noise.

    Args:
        noise_multiplier: z of the run, as `selffl.train` has it.
        num_clients: M.
        participation: C, the share of clients drawn in each round.
        rounds: how many.
        delta: δ, well below 1/M.
    """
    _check(num_clients, participation, rounds, delta)
    check_number("noise_multiplier", noise_multiplier, at_least=0.0)
    if noise_multiplier == 0:
        return math.inf
    _library()  # or say that it is not here
    return _epsilon(noise_multiplier, num_clients, participation, rounds, delta)


def noise_for(epsilon: float, *, num_clients: int, participation: float, rounds: int, delta: float) -> float:
    """The least noise multiplier that keeps a run within ``epsilon`` at ``delta``."""
    _check(num_clients, participation, rounds, delta)
    check_number("epsilon", epsilon, above=0.0)
    sizes = {"num_clients": num_clients, "participation": participation, "rounds": rounds}
    return _least_noise(lambda noise: _epsilon(noise, **sizes, delta=delta), epsilon, delta)


def row_epsilon(
    row_noise_multiplier: float, *, num_examples: int, batch_size: int, num_gradients: int, delta: float
) -> float:
    """ε at ``delta`` of all that a client sends, for replacing one of its rows; infinite without noise.

    Args:
        row_noise_multiplier: z of the run, as `selffl.train` has it.
        num_examples: N, the client's training rows.
        batch_size: B, of which a gradient is made, if the client has as many.
        num_gradients: Noisy gradients in all rounds that it takes part in: for most methods rounds times local steps.
        delta: δ, well below 1/N.
    """
    check_integer("num_examples", num_examples, 1)
    check_integer("batch_size", batch_size, 1)
    check_integer("num_gradients", num_gradients, 0)
    _check_delta(delta, "num_examples")
    check_number("row_noise_multiplier", row_noise_multiplier, at_least=0.0)
    if not num_gradients:
        return 0.0
    if row_noise_multiplier == 0:
        return math.inf
    orders, each = _divergences(float(row_noise_multiplier), num_examples, min(batch_size, num_examples))
    return float(_library().rdp.compute_epsilon(orders, num_gradients * each, delta)[0])


def row_noise_for(epsilon: float, *, num_examples: int, batch_size: int, num_gradients: int, delta: float) -> float:
    """The least ``row_noise_multiplier`` that keeps a client's rows within ``epsilon`` at ``delta``."""
    check_number("epsilon", epsilon, above=0.0)
    check_integer("num_gradients", num_gradients, 1)
    sizes = {"num_examples": num_examples, "batch_size": batch_size, "num_gradients": num_gradients}
    return _least_noise(lambda noise: row_epsilon(noise, **sizes, delta=delta), epsilon, delta)


def _least_noise(epsilon_of: Callable[[float], float], epsilon: float, delta: float) -> float:
    """The least multiplier, to a millionth of it, whose ε is at most ``epsilon``; ε falls as noise grows.

    ε is about a power of the noise, so that Brent's method needs few steps in logarithms.
    """
    from scipy.optimize import brentq  # here: as in `selffl.maths.intervals`

    excess: dict[float, float] = {}

    def excess_at(log_noise: float) -> float:
        excess[log_noise] = math.log(max(epsilon_of(math.exp(log_noise)), sys.float_info.min) / epsilon)
        return excess[log_noise]

    low = high = 0.0  # noise of 1
    while excess_at(high) > 0:
        low, high = high, high + max(excess[high], 1.0)
        if high > MOST_LOG_NOISE:
            raise ConfigError(
                f"epsilon is {epsilon!r}, and no noise gives so little at delta {delta!r}. Take a larger one of both."
            )
    while excess_at(low) <= 0:
        low, high = low + min(excess[low], -1.0), low

    brentq(excess_at, low, high, xtol=LOG_NOISE_TOLERANCE)  # has looked at both sides of the root, as near as that
    return math.exp(min(log_noise for log_noise, found in excess.items() if found <= 0))


@cache
def _divergences(multiplier: float, num_examples: int, sample_size: int) -> tuple[Any, Any]:
    """Rényi's divergences of one noisy gradient, and their orders.

    Both bounds hold, with the draw and without it: of few rows the latter may be the smaller.
    """
    library, found = _library(), []
    plain = library.GaussianDpEvent(multiplier)
    for event in (plain, library.SampledWithoutReplacementDpEvent(num_examples, sample_size, plain)):
        accountant = _accountant()
        accountant.compose(event)
        found.append(accountant.rdp)
    return accountant.orders, np.minimum(*found)


def usual_delta(number: int) -> float:
    """δ that a run's ε is stated at: 10⁻⁵, or a tenth of one client, or row, of more than ten thousand."""
    return min(1e-5, 0.1 / number)


def spent_privacy(noise_multiplier: float, num_clients: int, participation: float, rounds: int) -> dict[str, Any]:
    """What a run's summary says of its noise after so many rounds: nothing where there is none.

    ``epsilon`` is none where the accountant is not installed.
    """
    if not noise_multiplier or not rounds:
        return {}
    delta = usual_delta(num_clients)
    try:
        sizes = {"num_clients": num_clients, "participation": participation, "rounds": rounds}
        found = epsilon(noise_multiplier, **sizes, delta=delta)  # type: ignore[arg-type]
    except ConfigError:  # the library is not here
        found = None
    return {"epsilon": found, "delta": delta}


def spent_row_privacy(
    row_noise_multiplier: float, batch_size: int, num_examples: Sequence[int], num_gradients: Sequence[int]
) -> tuple[list[float | None], float]:
    """ε of each client with so many rows and noisy gradients, none where the accountant is not installed, and its δ."""
    delta = usual_delta(max(num_examples, default=1))
    try:
        _library()
    except ConfigError:
        return [None] * len(num_examples), delta
    found: list[float | None] = [
        row_epsilon(
            row_noise_multiplier, num_examples=max(rows, 1), batch_size=batch_size, num_gradients=count, delta=delta
        )
        for rows, count in zip(num_examples, num_gradients, strict=True)
    ]
    return found, delta


def _check(num_clients: int, participation: float, rounds: int, delta: float) -> None:
    check_integer("num_clients", num_clients, 1)
    check_number("participation", participation, above=0.0, at_most=1.0)
    check_integer("rounds", rounds, 1)
    _check_delta(delta, "num_clients")


def _check_delta(delta: float, number: str) -> None:
    check_number("delta", delta, above=0.0)
    if delta >= 1:
        raise ConfigError(f"delta is {delta!r}; expected a number below 1, and well below 1 / {number}.")


def _library() -> Any:
    try:
        import dp_accounting
    except ImportError:
        raise ConfigError(
            "dp-accounting is not here; expected it. Install it: pip install 'selffl[privacy]'."
        ) from None
    return dp_accounting


def _accountant() -> Any:
    library = _library()
    return library.rdp.RdpAccountant(neighboring_relation=library.NeighboringRelation.REPLACE_ONE)


@cache
def _epsilon(noise_multiplier: float, num_clients: int, participation: float, rounds: int, delta: float) -> float:
    library = _library()
    each = library.GaussianDpEvent(noise_multiplier)
    size = cohort_size(num_clients, participation)
    if size < num_clients:
        each = library.SampledWithoutReplacementDpEvent(num_clients, size, each)
    accountant = _accountant()
    accountant.compose(library.SelfComposedDpEvent(each, rounds))
    return float(accountant.get_epsilon(delta))
