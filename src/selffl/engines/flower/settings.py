"""What a server over Flower is given: what all rounds have in common, how clients are dealt with, where reports go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from selffl.algorithms.optimisers import Optimiser
from selffl.algorithms.options import check_bool, check_choice, check_integer, check_number, check_options, option
from selffl.engines.cohort import RunState
from selffl.engines.flower.answers import Alone, EvaluationSums
from selffl.engines.rounds import RoundReport


class Rounds(Protocol):
    """What a server itself reads of a run's settings; `selffl.runs.recipe.Recipe` has it, and checks it.

    What clients do in local training, and what hides them, is read by `TrainingOptions` and `PrivacyOptions`.
    """

    @property
    def rounds(self) -> int:
        """How many there are."""

    @property
    def participation(self) -> float:
        """C, the share of clients in a round."""

    @property
    def learning_rate(self) -> float:
        """η."""

    @property
    def batch_size(self) -> int:
        """B."""

    @property
    def seed(self) -> int:
        """Seed of cohorts and minibatches."""

    @property
    def optimiser(self) -> str | Optimiser:
        """Optimiser of local steps."""

    @property
    def robust(self) -> str:
        """The defence against hostile clients."""

    @property
    def noise_multiplier(self) -> float:
        """z, of the noise on sums."""

    def is_evaluated(self, round_number: int) -> bool:
        """Whether a round is followed by an evaluation."""


@dataclass(frozen=True)
class Network:
    """How a server deals with clients that are slow, silent or wrong; see `selffl.flower.server_app` for each."""

    quorum: float = option(0.5, check_number, above=0.0, at_most=1.0)
    shortfall: Literal["raise", "skip"] = option("raise", check_choice, allowed=("raise", "skip"))
    round_seconds: float = option(3600.0, check_number, above=0.0)
    connect_seconds: float = option(60.0, check_number, at_least=0.0)
    max_examples: int = option(10**9, check_integer, least=1)
    secure_sums: bool = option(False, check_bool)

    def __post_init__(self) -> None:
        check_options(self)


class RunIdentity(NamedTuple):
    """What a run goes by, and has to go on by.

    Attributes:
        experiment: Name under which clients keep their memories.
        run: Tells two runs of that name apart.
        cohort_seed: Decides who takes part.
    """

    experiment: str
    run: str
    cohort_seed: int


Answers = (
    Mapping[int, EvaluationSums] | Mapping[int, Alone]
)  # what clients found, by their numbers; perhaps none has answered


class Records(Protocol):
    """Where the reports of a run go; `selffl.runs.flower.RemoteRecorder` writes them down."""

    @property
    def metrics(self) -> tuple[str, ...] | None:
        """What the run measures; none before its first evaluation."""

    @property
    def first(self) -> Tensor | None:
        """The model that the run began with, if clients have yet to train alone from it."""

    def has_scores(self, round_number: int) -> bool:
        """Whether that round's evaluation is in the records."""

    def take(self, state: RunState, report: RoundReport | Answers) -> None:
        """A round is over, without clients if too few have answered, or clients have said how they do."""
