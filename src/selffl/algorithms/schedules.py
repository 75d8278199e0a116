"""Learning rates that change from round to round: by which factor, in which round.

A schedule is a text, so that it can stand in a file, on a command line and in a message: a word, and numbers behind it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

from selffl.errors import ConfigError

EXPECTED = (
    "expected 'constant', 'cosine', 'exponential 0.99' (times that after each round) or 'step 0.1 0.5 0.75' (times the "
    "first number after each of these shares of the rounds), with numbers above 0 and below 1"
)
ROUNDING = 1e-9  # rounds: 0.7 * 10 is 7.000000000000001


class Schedule(ABC):
    """A factor of the learning rate for each round."""

    needs_rounds: ClassVar[bool] = False  # whether it depends on how many rounds there are

    @classmethod
    @abstractmethod
    def of(cls, numbers: tuple[float, ...]) -> Self | None:
        """The schedule with these numbers; None where they are too few or too many."""

    @abstractmethod
    def factor(self, done: int, rounds: int) -> float:
        """In the round that comes after ``done`` of ``rounds``."""


@dataclass(frozen=True)
class Constant(Schedule):
    """1 throughout."""

    @classmethod
    def of(cls, numbers: tuple[float, ...]) -> Self | None:
        """Without numbers."""
        return None if numbers else cls()

    def factor(self, done: int, rounds: int) -> float:
        """1."""
        return 1.0


@dataclass(frozen=True)
class Cosine(Schedule):
    """(1 + cos(pi t/T))/2 after t of T rounds, as ``CosineAnnealingLR`` of torch."""

    needs_rounds: ClassVar[bool] = True

    @classmethod
    def of(cls, numbers: tuple[float, ...]) -> Self | None:
        """Without numbers."""
        return None if numbers else cls()

    def factor(self, done: int, rounds: int) -> float:
        """From 1 down; it would be 0 after the last round."""
        return math.cos(math.pi / 2.0 * done / rounds) ** 2


@dataclass(frozen=True)
class Exponential(Schedule):
    """gamma^t after t rounds, as ``ExponentialLR`` of torch."""

    gamma: float

    @classmethod
    def of(cls, numbers: tuple[float, ...]) -> Self | None:
        """With one number, gamma; 0.99 unless it is given."""
        return cls(*(numbers or (0.99,))) if len(numbers) < 2 else None

    def factor(self, done: int, rounds: int) -> float:
        """It falls by the same share each round."""
        return self.gamma**done


@dataclass(frozen=True)
class Steps(Schedule):
    """One factor more after each of some shares of the rounds, as ``MultiStepLR`` of torch."""

    needs_rounds: ClassVar[bool] = True

    gamma: float
    shares: tuple[float, ...]

    @classmethod
    def of(cls, numbers: tuple[float, ...]) -> Self | None:
        """With the factor and shares that ascend; a tenth after a half and after three quarters unless given."""
        gamma, *shares = numbers or (0.1, 0.5, 0.75)
        return cls(gamma, tuple(shares)) if shares and shares == sorted(set(shares)) else None

    def factor(self, done: int, rounds: int) -> float:
        """By how many of the shares are behind."""
        return self.gamma ** sum(done >= share * rounds - ROUNDING for share in self.shares)


SCHEDULES: dict[str, type[Schedule]] = {
    "constant": Constant,
    "cosine": Cosine,
    "exponential": Exponential,
    "step": Steps,
}


def schedule_of(text: object) -> Schedule:
    """The schedule that a text describes."""
    found = None
    if isinstance(text, str) and text.split():
        word, *rest = text.split()
        try:
            numbers = tuple(float(number) for number in rest)
        except ValueError:
            numbers = (math.nan,)
        if word in SCHEDULES and all(0.0 < number < 1.0 for number in numbers):
            found = SCHEDULES[word].of(numbers)
    if found is None:
        raise ConfigError(f"learning_rate_schedule is {text!r}; {EXPECTED}.")
    return found


def rate_in_round(learning_rate: float, schedule: str, round_number: int, rounds: int) -> float:
    """The learning rate of a round, from 1 up.

    Where a schedule depends on the number of rounds, what comes after the last (fine-tuning, closing visit, new
    clients) has the first round's rate: of the last one there may be next to nothing left.
    """
    found = schedule_of(schedule)
    is_after = found.needs_rounds and round_number > rounds
    return learning_rate * (1.0 if is_after else found.factor(round_number - 1, rounds))
