"""Learning rates that change from round to round: by which factor, in which round.

A schedule is a text, so that it can stand in a file, on a command line and in a message: a word, and numbers behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from selffl.errors import ConfigError

EXPECTED = (
    "expected 'constant', 'cosine', 'exponential 0.99' (times that after each round) or 'step 0.1 0.5 0.75' (times the "
    "first number after each of these shares of the rounds), with numbers above 0 and below 1"
)
ROUNDING = 1e-9  # rounds: 0.7 * 10 is 7.000000000000001


@dataclass(frozen=True)
class Schedule:
    """A factor of the learning rate for each round.

    Attributes:
        factor_of: Of the rounds that are done, the rounds in all and the numbers.
        numbers: Behind the word.
        needs_rounds: Whether it depends on how many rounds there are.
    """

    factor_of: Callable[..., float]
    numbers: tuple[float, ...] = ()
    needs_rounds: bool = False

    def factor(self, done: int, rounds: int) -> float:
        """The rate's factor in the round that comes after ``done`` of ``rounds``."""
        return self.factor_of(done, rounds, *self.numbers)


def stay(done: int, rounds: int) -> float:
    """1 throughout."""
    return 1.0


def fall_as_cosine(done: int, rounds: int) -> float:
    """(1 + cos(pi t/T))/2 after t of T rounds, as ``CosineAnnealingLR`` of torch; it would be 0 after the last."""
    return math.cos(math.pi / 2.0 * done / rounds) ** 2


def fall_each_round(done: int, rounds: int, gamma: float) -> float:
    """gamma^t after t rounds, as ``ExponentialLR`` of torch."""
    return float(gamma**done)


def fall_in_steps(done: int, rounds: int, gamma: float, *shares: float) -> float:
    """One factor more after each of some shares of the rounds, as ``MultiStepLR`` of torch."""
    return float(gamma ** sum(done >= share * rounds - ROUNDING for share in shares))


SCHEDULES = {  # with their numbers where none are given
    "constant": Schedule(stay),
    "cosine": Schedule(fall_as_cosine, needs_rounds=True),
    "exponential": Schedule(fall_each_round, (0.99,)),
    "step": Schedule(fall_in_steps, (0.1, 0.5, 0.75), needs_rounds=True),
}


def schedule_of(text: object) -> Schedule:
    """The schedule that a text describes."""
    word, *rest = text.split() if isinstance(text, str) and text.split() else [""]
    try:
        numbers = tuple(float(number) for number in rest)
    except ValueError:
        numbers = (math.nan,)
    if word not in SCHEDULES or not all(0.0 < number < 1.0 for number in numbers):
        raise ConfigError(f"learning_rate_schedule is {text!r}; {EXPECTED}.")
    found = replace(SCHEDULES[word], numbers=numbers or SCHEDULES[word].numbers)
    shares = found.numbers[1:]  # which ascend
    fits = bool(shares) if word == "step" else len(found.numbers) == len(SCHEDULES[word].numbers)
    if not fits or list(shares) != sorted(set(shares)):
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
