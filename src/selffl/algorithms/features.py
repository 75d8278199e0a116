"""What a method is given that sees into a model: the features that its last layer takes, and other objectives.

A model is a body and a head: features z = φ(x), and scores W z + c of a last layer that is linear.  A method that
trains on something else than the model's own loss writes it as an *objective* of one client's minibatch, which may also
depend on numbers that are not in the model: trained ones (*extra*) and constants.  `FeatureTask.with_objective` makes a
task of it that the solver takes as any other.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from selffl.algorithms.layers import Head
from selffl.algorithms.local_task import LocalTask
from selffl.algorithms.population import Population
from selffl.algorithms.rowwise import RowwiseTask
from selffl.algorithms.suggestions import suggest
from selffl.errors import ConfigError

OWN_OBJECTIVE = "it trains on an objective of its own, with numbers that are not in the model"


class OwnObjective:
    """A method that trains on an objective of its own."""

    num_optimisers: ClassVar[int] = 0  # that can be kept
    no_weight_decay: ClassVar[str | None] = OWN_OBJECTIVE
    no_clipping: ClassVar[str | None] = OWN_OBJECTIVE


class FeatureRows(NamedTuple):
    """What a training pass over a minibatch of one client shows."""

    params: Tensor  # the model [P]
    features: Tensor  # z, the input of the last layer [B, D]
    scores: Tensor  # W z + c, the model's outputs [B, K]
    labels: Tensor  # [B, ...]
    loss: Callable[[Tensor, Tensor], Tensor]  # the model's own, of scores and labels: a mean over rows


class ClassMoments(NamedTuple):
    """Features of each client's rows, class by class; zeros where it has none."""

    counts: Tensor  # rows [..., clients, K]
    means: Tensor  # of features [..., clients, K, D]
    squares: Tensor  # of their squared lengths, the mean [..., clients, K]


class LossDerivatives(NamedTuple):
    """The sum of the losses of each client's rows and how it changes with the model, in double precision."""

    loss: Tensor  # [..., clients]
    gradient: Tensor  # [..., clients, P]
    curvature: Tensor  # [..., clients, P, P]
    num_errors: Tensor  # of how many squared errors the loss is the sum [..., clients]; 0 of other losses


# (rows, extra [E], constants of the client) -> a number to be made small; for one client, vmap adds the others
Objective = Callable[..., Tensor]


class FeatureTask(RowwiseTask):
    """The local work of a cohort whose models have features."""

    head: Head | None = None  # the last layer, where it is linear

    @abstractmethod
    def features(self, params: Tensor, batch: Any) -> Tensor:
        """z ``[n, B, D]`` of a minibatch, of models ``params [n, P]`` as they answer."""

    @abstractmethod
    def class_moments(self, params: Tensor) -> ClassMoments:
        """Moments of each class's features over all training rows, at models ``params [..., clients, P]``."""

    @abstractmethod
    def derivatives(self, params: Tensor) -> LossDerivatives:
        """Derivatives of the loss of all rows of each client, at ``params [..., clients, P]`` in double precision."""

    @abstractmethod
    def objective_gradient(
        self, objective: Objective, params: Tensor, num_extra: int, batch: Any, constants: Sequence[Tensor]
    ) -> Tensor:
        """Gradient ``[n, E + P]`` of each client's objective at ``params [n, E + P]``: extra numbers, then the model.

        ``constants`` are ``[n, ...]``.  Statistics are as in `LocalTask.batch_gradient`.
        """

    def with_objective(
        self, objective: Objective, num_extra: int = 0, constants: Sequence[Tensor] = ()
    ) -> ObjectiveTask:
        """A task of these rows with another objective, for models with ``num_extra`` numbers in front of their own.

        ``constants`` are ``[..., clients, ...]``.  Gradients count as those of this task.
        """
        return ObjectiveTask(self, objective, num_extra, constants)


class ObjectiveTask(LocalTask):
    """The local work of a cohort on an objective of its features; a model is ``[..., clients, E + P]``."""

    def __init__(self, task: FeatureTask, objective: Objective, num_extra: int, constants: Sequence[Tensor]) -> None:
        super().__init__(task.shape, task.num_examples, task.learning_rate, task.batch_size)
        self.is_full_batch, self.optimiser = task.is_full_batch, task.optimiser
        self.num_statistics, self.spent = task.num_statistics, task.spent
        self._task, self._objective, self._num_extra = task, objective, num_extra
        options = (task.max_gradient_norm, task.row_clip, task.remembered)
        if task.weight_decay or any(option is not None for option in options):
            raise ConfigError(
                "the method trains on an objective of its own, beside which there is no weight_decay, no "
                "max_gradient_norm, no row_clip and no keep_optimiser yet; expected none of them. Leave them out."
            )
        self._constants = [each.flatten(0, len(task.shape) - 1) for each in constants]  # by slot

    def batch(self, draw: int, slots: Tensor) -> tuple[Any, list[Tensor]]:
        """The minibatch, and the clients' constants."""
        return self._task.batch(draw, slots), [each[slots] for each in self._constants]

    def batch_gradient(self, params: Tensor, batch: tuple[Any, list[Tensor]]) -> Tensor:
        """Gradient of the objective."""
        return self._task.objective_gradient(self._objective, params, self._num_extra, *batch)


def join_extra(extra: Tensor, params: Tensor) -> Tensor:
    """``[..., E + P]`` of extra numbers and models: as an `ObjectiveTask` has them."""
    return torch.cat([extra, params], dim=-1)


def require_head(name: str, population: Population) -> Head:
    """The head of the model, or one line that says why the method called ``name`` cannot train it."""
    if population.head is not None:
        return population.head
    last = f" ({population.layers[-1].name})" if population.layers and population.layers[-1].name else ""
    raise ConfigError(
        f"{name} needs the input of the last layer, and that of the model{last} is not an nn.Linear that is trained as "
        "a whole; expected one. End the model with nn.Linear, or use another method."
    )


def lacks_classes(name: str, why: str) -> ConfigError:
    """The error of rows without classes, for the method called ``name``, which needs them for what ``why`` says."""
    return ConfigError(
        f"{name} {why}, and these rows have none: expected cross-entropy without weights, whole numbers as labels and "
        "a last layer whose bias is added to the scores. Change loss or model, or use another method, such as "
        f"{suggest(lambda other: not other.needs_classes)}."
    )
