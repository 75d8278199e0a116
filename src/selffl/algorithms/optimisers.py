"""How a local step is made of a gradient: plainly, with momentum, or by Adam; for all clients of a block at once.

Steps are theta <- theta - eta d with a direction d that depends on the gradients so far.  What is remembered of them
has a row per client, and begins anew with every call of the solver, unless clients keep it (`RememberedSteps`): none of
it is sent or averaged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from selffl.algorithms.options import check_bool, check_number, check_options, option
from selffl.errors import ConfigError, check_known


def check_below_one(name: str, value: object) -> None:
    """Refuse anything but a number from 0 up to, not including, 1."""
    check_number(name, value, at_least=0.0)
    if value >= 1:  # type: ignore[operator]
        raise ConfigError(f"{name} is {value!r}; expected a number from 0 up to, not including, 1.")


class Optimiser(ABC):
    """A rule for local steps: a frozen dataclass of options."""

    name: ClassVar[str]
    num_states: ClassVar[int] = 0  # tensors like the parameters that it remembers

    def __post_init__(self) -> None:
        check_options(self)

    @abstractmethod
    def direction(self, gradient: Tensor, states: tuple[Tensor, ...], number: int | Tensor) -> Tensor:
        """d ``[n, P]`` of step ``number``, from 0 up; ``states``, zeros at first, are written into.

        Clients that have kept their states may be at different numbers ``[n, 1]``.
        """


@dataclass(frozen=True)
class SGD(Optimiser):
    """Plain gradient steps: d = g."""

    name: ClassVar[str] = "sgd"

    def direction(self, gradient: Tensor, states: tuple[Tensor, ...], number: int | Tensor) -> Tensor:
        """The gradient."""
        return gradient


@dataclass(frozen=True)
class Momentum(Optimiser):
    """Heavy ball, as in ``torch.optim.SGD``: v <- mu v + g; d = v, or g + mu v with ``nesterov``.

    Attributes:
        momentum: μ, from 0 up to, not including, 1.
        nesterov: Whether to look ahead.
    """

    name: ClassVar[str] = "momentum"
    num_states: ClassVar[int] = 1

    momentum: float = option(0.9, check_below_one)
    nesterov: bool = option(False, check_bool)

    def direction(self, gradient: Tensor, states: tuple[Tensor, ...], number: int | Tensor) -> Tensor:
        """The velocity."""
        (velocity,) = states
        velocity.mul_(self.momentum).add_(gradient)
        return torch.add(gradient, velocity, alpha=self.momentum) if self.nesterov else velocity


@dataclass(frozen=True)
class Adam(Optimiser):
    """Kingma and Ba, ICLR 2015, Algorithm 1: d = m' / (sqrt(v') + eps), with both means freed of their bias to 0.

    Attributes:
        beta1: Of m, the mean of the gradients.
        beta2: Of v, the mean of their squares.
        eps: ε.
    """

    name: ClassVar[str] = "adam"
    num_states: ClassVar[int] = 2

    beta1: float = option(0.9, check_below_one)
    beta2: float = option(0.999, check_below_one)
    eps: float = option(1e-8, check_number, above=0.0)

    def direction(self, gradient: Tensor, states: tuple[Tensor, ...], number: int | Tensor) -> Tensor:
        """The mean gradient over the root of the mean square."""
        mean, square = states
        mean.lerp_(gradient, 1 - self.beta1)
        square.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        bias, square_bias = _bias(self.beta1, number, gradient), _bias(self.beta2, number, gradient)
        size = square.sqrt().div_(square_bias**0.5).add_(self.eps)
        return torch.div(mean, size.mul_(bias), out=size)


def _bias(beta: float, number: int | Tensor, like: Tensor) -> Any:
    """1 - beta^(s+1) after step s: how far a mean that began at 0 has come; ``[n, 1]`` where steps differ."""
    return (1 - beta ** (number.double() + 1)).to(like) if isinstance(number, Tensor) else 1 - beta ** (number + 1)


class RememberedSteps:
    """What the optimisers of clients remember of earlier rounds, in the order in which a round asks for them.

    Attributes:
        num_steps: That each has made so far, ``[slots, K]``.
        states: ``[slots, K, S, P]``.
        num_asked: How many of the K were asked for in this round.
    """

    def __init__(self, num_steps: Tensor, states: Tensor) -> None:
        self.num_steps, self.states, self.num_asked = num_steps, states, 0

    def take(self) -> tuple[int, Tensor, list[Tensor]]:
        """The next optimiser: which it is, the steps it has made ``[slots, 1]``, and its states; made up beyond K."""
        place = self.num_asked
        self.num_asked += 1
        known = min(place, self.num_steps.shape[1] - 1)  # too many are refused when the round is over
        return known, self.num_steps[:, known, None].clone(), list(self.states[:, known].unbind(1))

    def put(self, place: int, num_steps: int | Tensor, states: tuple[Tensor, ...]) -> None:
        """Remember what an optimiser is after ``num_steps [slots]`` more."""
        self.num_steps[:, place] += num_steps
        self.states[:, place] = torch.stack(states, dim=1)


OPTIMISERS: dict[str, type[Optimiser]] = {kind.name: kind for kind in (SGD, Momentum, Adam)}


def optimiser_of(name: str | Optimiser, **options: Any) -> Optimiser:
    """An optimiser by name, with options; one that is given stays what it is."""
    if isinstance(name, Optimiser) and type(name) in OPTIMISERS.values():
        return name
    if not isinstance(name, str):
        raise ConfigError(
            f"optimiser is {name!r}; expected {', '.join(map(repr, OPTIMISERS))}, or one with options such as "
            "selffl.algorithms.Momentum(0.9). Those of torch.optim train one model at a time."
        )
    check_known("optimiser", name, OPTIMISERS)
    return OPTIMISERS[name](**options)


def check_optimiser(optimiser: Optimiser, method: Any) -> None:
    """Refuse another than plain steps where the method makes its own.

    ``only_sgd`` of a method says why it cannot, or is None where its local steps may be of any kind.
    """
    why = method.only_sgd
    if why is not None and not isinstance(optimiser, SGD):
        raise ConfigError(
            f"optimiser is {optimiser.name!r}, and {method.name} cannot use it: {why}. Expected 'sgd', or a method "
            "whose steps may be of any kind."
        )
