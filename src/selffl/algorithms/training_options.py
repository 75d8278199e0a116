"""How local training differs from plain steps on the loss, whatever the method: one value, which a task is given."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Self

import torch

from selffl.algorithms.options import SettingsPart, check_bool, check_number, option
from selffl.algorithms.schedules import rate_in_round, schedule_of
from selffl.algorithms.suggestions import suggest
from selffl.errors import ConfigError

LARGEST = torch.finfo(torch.float32).max  # that an option may be: parameters are float32
AUGMENTATIONS = ("crop", "flip")


def augmentations_of(text: object) -> tuple[str, ...]:
    """What is done to images, from a text such as ``crop flip``; nothing where it is ``none``."""
    words = text.split() if isinstance(text, str) else []
    if text == "none":
        return ()
    if not words or len(set(words)) != len(words) or not set(words) <= set(AUGMENTATIONS):
        raise ConfigError(f"augmentation is {text!r}; expected 'none', 'crop', 'flip' or 'crop flip'.")
    return tuple(words)


@dataclass(frozen=True)
class TrainingOptions(SettingsPart):
    """How local training differs from plain steps on the loss; the defaults change nothing.

    Attributes:
        rounds: Of the run, where its learning rates depend on how many there are; else 1.
        learning_rate_schedule: By which factor the learning rate changes from round to round.
        keep_optimiser: Whether a client's optimisers go on in its next round where they were.
        weight_decay: λ, the gradient of λ/2 |θ|², added to each gradient of a minibatch.
        max_gradient_norm: The most that the gradient of a minibatch may measure; none: no bound.
        augmentation: What becomes of an image each time it is trained on, in words.
        row_clip: R, the most that the gradient of a single row may measure; none: no bound.
        row_noise_multiplier: z, the noise on a minibatch's sum of row gradients by what replacing a row can move it.
    """

    rounds: int = 1
    learning_rate_schedule: str = option("constant", lambda _, text: schedule_of(text))
    keep_optimiser: bool = option(False, check_bool)
    weight_decay: float = option(0.0, check_number, at_least=0.0, at_most=LARGEST)
    max_gradient_norm: float | None = option(None, check_number, above=0.0, at_most=LARGEST, alternative=", or none")
    augmentation: str = option("none", lambda _, text: augmentations_of(text))
    row_clip: float | None = option(None, check_number, above=0.0, at_most=LARGEST, alternative=", or none")
    row_noise_multiplier: float = option(0.0, check_number, at_least=0.0, at_most=LARGEST)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not schedule_of(self.learning_rate_schedule).needs_rounds:
            object.__setattr__(self, "rounds", 1)  # a longer run is trained alike
        if self.row_noise_multiplier and self.row_clip is None:
            raise ConfigError(
                f"row_noise_multiplier is {self.row_noise_multiplier:g} without row_clip; expected row_clip, too: "
                "noise hides only what is bounded."
            )

    def rate(self, learning_rate: float, round_number: int) -> float:
        """The learning rate of a round, from 1 up, of one that is ``learning_rate`` in the first."""
        return rate_in_round(learning_rate, self.learning_rate_schedule, round_number, self.rounds)

    def check_rounds(self, rounds: int) -> None:
        """Refuse to go on to another last round where learning rates were laid out over these rounds."""
        if schedule_of(self.learning_rate_schedule).needs_rounds and rounds != self.rounds:
            raise ConfigError(
                f"rounds is {rounds}, and the run's learning rates were laid out over {self.rounds} rounds "
                f"(learning_rate_schedule={self.learning_rate_schedule!r}); expected {self.rounds}. Train anew, or "
                "begin another run with this one's model (start=)."
            )

    def at_home(self) -> Self:
        """These options without noise for rows: for training whose outcome stays with the client."""
        return replace(self, row_clip=None, row_noise_multiplier=0.0)

    def check_method(self, method: Any) -> None:
        """Refuse what a method has no room for, by its ``no_weight_decay``, ``no_clipping`` and ``no_row_privacy``."""
        wanted = {
            "row_clip": (self.row_clip is not None, "no_row_privacy", "none"),
            "weight_decay": (self.weight_decay != 0.0, "no_weight_decay", "0"),
            "max_gradient_norm": (self.max_gradient_norm is not None, "no_clipping", "none"),
        }
        for name, (is_asked, trait, usual) in wanted.items():
            why = getattr(method, trait)
            if is_asked and why is not None:
                others = suggest(partial(_has_room, trait))
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}, and {method.name} cannot have it: {why}. Expected {usual}, or "
                    f"another method, such as {others}."
                )


def _has_room(trait: str, method: Any) -> bool:
    """Whether a method says of this trait that nothing is against it."""
    return getattr(method, trait) is None


TRAINING_OPTIONS = tuple(each.name for each in fields(TrainingOptions))
