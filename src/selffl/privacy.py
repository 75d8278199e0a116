"""How much noise protects: the (ε, δ) of a run with ``noise_multiplier``.  Needs ``selffl[privacy]``.

One client more or less known about: two federations are neighbours if they differ in one client, data and all
(*replace-one*).  Each round draws a fixed number of clients without replacement, in secret, and publishes sums with
normal noise of ``noise_multiplier`` times their joint sensitivity, whatever the method sends: `selffl.engines.limits`
counts all fields of an upload together, so that a round is one Gaussian mechanism.  The rounds are composed by Rényi's
divergence in Google's ``dp-accounting`` (Wang, Balle and Kasiviswanathan, AISTATS 2019, for the draw).
docs/privacy.md says what the guarantee covers, and what it does not.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from selffl.algorithms.options import check_integer, check_number
from selffl.engines.cohort import cohort_size
from selffl.errors import ConfigError


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
    accountant = _accountant()
    accountant.compose(_event(noise_multiplier, num_clients, participation, rounds))
    return float(accountant.get_epsilon(delta))


def noise_for(epsilon: float, *, num_clients: int, participation: float, rounds: int, delta: float) -> float:
    """The least noise multiplier that keeps a run within ``epsilon`` at ``delta``."""
    _check(num_clients, participation, rounds, delta)
    check_number("epsilon", epsilon, above=0.0)
    library = _library()
    found = library.calibrate_dp_mechanism(
        _accountant,
        lambda noise: _event(noise, num_clients, participation, rounds),
        epsilon,
        delta,
        library.LowerEndpointAndGuess(1e-2, 1.0),
    )
    return float(found)


def usual_delta(num_clients: int) -> float:
    """δ that a run's ε is stated at: 10⁻⁵, or a tenth of one client where there are more than ten thousand."""
    return min(1e-5, 0.1 / num_clients)


def spent_privacy(noise_multiplier: float, num_clients: int, participation: float, rounds: int) -> dict[str, Any]:
    """What a run's summary says of its noise after so many rounds: nothing where there is none.

    ``epsilon`` is none where the accountant is not installed.
    """
    if not noise_multiplier or not rounds:
        return {}
    delta = usual_delta(num_clients)
    try:
        found = _cached_epsilon(noise_multiplier, num_clients, participation, rounds, delta)
    except ConfigError:  # the library is not here
        found = None
    return {"epsilon": found, "delta": delta}


@cache
def _cached_epsilon(
    noise_multiplier: float, num_clients: int, participation: float, rounds: int, delta: float
) -> float:
    return epsilon(noise_multiplier, num_clients=num_clients, participation=participation, rounds=rounds, delta=delta)


def _check(num_clients: int, participation: float, rounds: int, delta: float) -> None:
    check_integer("num_clients", num_clients, 1)
    check_number("participation", participation, above=0.0, at_most=1.0)
    check_integer("rounds", rounds, 1)
    check_number("delta", delta, above=0.0)
    if delta >= 1:
        raise ConfigError(f"delta is {delta!r}; expected a number below 1, and well below 1 / num_clients.")


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


def _event(noise_multiplier: float, num_clients: int, participation: float, rounds: int) -> Any:
    library = _library()
    each = library.GaussianDpEvent(noise_multiplier)
    size = cohort_size(num_clients, participation)
    if size < num_clients:
        each = library.SampledWithoutReplacementDpEvent(num_clients, size, each)
    return library.SelfComposedDpEvent(each, rounds)
