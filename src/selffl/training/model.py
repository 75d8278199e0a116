"""Any torch module as a task for a whole cohort: one flat vector of parameters per client."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from selffl.algorithms.features import ClassMoments, FeatureTask, LossDerivatives, Objective
from selffl.algorithms.local_task import StepPart, Walk
from selffl.algorithms.optimisers import SGD, Optimiser
from selffl.algorithms.population import Population
from selffl.algorithms.suggestions import suggest
from selffl.algorithms.training_options import TrainingOptions
from selffl.budget import budget_of
from selffl.data.federation import Federation, Rows
from selffl.data.named import Features, row_size
from selffl.errors import ConfigError
from selffl.randomness import secret_normal
from selffl.training.augmentation import augment, check_images
from selffl.training.blocks import (
    Gradients,
    Loss,
    check_gradients,
    gradient_of,
    is_class,
    is_softmax_regression,
    is_walked_alone,
    outputs_of,
    quickest_way,
    rows_at,
    slopes_of,
    softmax_regression_slope_changes,
)
from selffl.training.classes import class_counts, class_targets, has_classes
from selffl.training.curvature import derivatives_of
from selffl.training.evaluation import blocks_of_clients
from selffl.training.features import features_of, objective_gradient
from selffl.training.few_rows import STEPS_AT_ONCE, KnownProducts, OwnRows, have_few_rows, walk_by_rows
from selffl.training.flat import FlatModel
from selffl.training.losses import is_squared_error
from selffl.training.minibatches import Minibatches
from selffl.training.row_gradients import DrawnRows, check_rows_apart, clipped_mean


class ModelTask(FeatureTask):
    """Minibatch gradients of a module for a cohort.

    A client's minibatches run through its rows in a random order, epoch after epoch: draw d holds positions
    d B … d B + B − 1 of that sequence.  A client with fewer than B rows meets some of them twice in one minibatch.

    Where noise hides rows (``row_clip``) every minibatch is drawn anew, min(B, N) rows without replacement, which is
    what its protection is counted by.  If it ``is_secret``, draws and noise come from the operating system, else from
    the seed.

    ``clients`` say whose rows, ``keys`` whose random order: they differ where a client has its rows to itself and is
    number 0 among them, but number m of the federation.
    """

    def __init__(
        self, model: FlatModel, loss: Loss, rows: Rows, clients: Tensor, learning_rate: float, batch_size: int,
        seed: int, round_number: int, gradients: Gradients = "auto", keys: Tensor | None = None,
        optimiser: Optimiser | None = None, options: TrainingOptions | None = None, is_secret: bool = False,
    ) -> None:  # fmt: skip
        clients, self.options = clients.to(rows.offset.device), options or TrainingOptions()
        rate = self.options.rate(learning_rate, round_number)
        super().__init__(clients.shape, rows.num_examples[clients], rate, batch_size)
        self._rows, self.clients, self._round = rows, clients, round_number
        self.row_clip, self._is_secret = self.options.row_clip, is_secret
        check_images(self.options.augmentation, rows.features)
        check_rows_apart(model, self.row_clip)
        # A seed that nobody is told: who knows the draws knows when a row was met.
        draw_seed = None if self.row_clip is None else secrets.randbits(62) if is_secret else seed
        begin = rows.offset[clients]
        self.minibatches = Minibatches(
            clients if keys is None else keys.to(clients), begin, self.num_examples, batch_size, seed, round_number,
            augmentation=self.options.augmentation, has_masks=model.leaves_out, draw_seed=draw_seed,
        )  # fmt: skip
        # What walks of few rows have taken for others of this visit: halves share it.
        self._first_row, self._known_products = begin, KnownProducts()
        self._gradient = gradient_of(model, loss, gradients)
        self._model, self._loss, self._gradients = model, loss, gradients
        self._is_softmax_regression = is_softmax_regression(model, loss, gradients)
        self.num_statistics = model.num_statistics
        self.class_bias, self.head = model.class_bias, model.head
        self.optimiser = optimiser or self.optimiser
        self.weight_decay, self.max_gradient_norm = self.options.weight_decay, self.options.max_gradient_norm
        self._last_draw = torch.full_like(self.num_gradients, -1)  # with noise, by slot

    def batch(self, draw: int, slots: Tensor) -> tuple[Any, ...] | DrawnRows:
        """Features ``[n, B, ...]`` and labels ``[n, B]``; where the model has dropout, keys of its masks ``[n, 1]``."""
        ahead = self.minibatches.look_ahead(draw)
        place = draw - ahead.draws.start
        features, labels = rows_at(self._rows, ahead.index[slots, place])  # [n, B]
        if ahead.moves is not None:
            assert isinstance(features, Tensor)
            features = augment(features, ahead.moves[slots, place])
        rows: tuple[Any, ...] = features, labels
        if ahead.mask_keys is not None:
            rows = *rows, ahead.mask_keys[slots, place, None]
        if self.row_clip is None:
            return rows
        is_own = torch.arange(self.batch_size, device=slots.device) < self.minibatches.size[slots].unsqueeze(-1)
        return DrawnRows(rows, is_own, draw)

    def noise(self, draw: int, slots: Tensor, params: Tensor) -> Tensor:
        """Standard normal numbers, keyed by seed, round, client and minibatch."""
        return self.minibatches.noise(draw, slots, params)

    def noisy_gradient(self, params: Tensor, batch: DrawnRows, slots: Tensor) -> Tensor:
        """Noise of z times 2R, as far as replacing a row moves the sum, over min(B, N) rows."""
        if bool((self._last_draw[slots] >= batch.draw).any()):
            raise ConfigError(
                "the method takes two gradients of one minibatch, which noise hides once; expected a minibatch for "
                f"each. Leave row_clip out, or use another method, such as {_row_private_methods()}."
            )
        assert self.row_clip is not None
        self._last_draw[slots] = batch.draw
        found = clipped_mean(self._gradient, params, batch, self.row_clip)
        multiplier = self.options.row_noise_multiplier
        if not multiplier:
            return found
        is_secret = self._is_secret
        noise = secret_normal(found.shape) if is_secret else self.minibatches.row_noise(batch.draw, slots, params)
        scale = 2.0 * self.row_clip * multiplier / batch.is_there.sum(-1, keepdim=True)
        return found.add_((scale * noise.to(params.device)).to(found))

    def at_home(self) -> Self:
        """This work on the usual minibatches, without noise for rows."""
        if self.row_clip is None:
            return self
        task = copy(self)
        task.row_clip, task.minibatches = None, self.minibatches.in_epochs()
        return task

    def _check_open(self, what: str) -> None:
        """Refuse to show a method what noise does not hide."""
        if self.row_clip is not None:
            raise ConfigError(
                f"row_clip is {self.row_clip:g}, and the method looks at {what} of its clients, which no noise hides; "
                f"expected a method that sends what is made of gradients alone, such as {_row_private_methods()}."
            )

    def halves(self, split: int = 0) -> Self:
        """Each client's rows in an order of their own, keyed by seed, client and split, and cut in the middle."""
        self._check_open("halves of the rows")
        task = self._copy_for_halves()
        task.minibatches = self.minibatches.halves(task.num_examples, split)
        return task

    def shorten(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        """The first half of its rows."""
        features, labels, *keys = batch
        size = (self.batch_size + 1) // 2
        return features[:, :size], labels[:, :size], *keys

    def temperature(self, params: Tensor, batch: tuple[Any, ...]) -> Tensor:
        """1; of squared errors twice their mean, over the number of outputs: normal noise of as large a variance."""
        self._check_open("errors")
        if not is_squared_error(self._loss):
            return super().temperature(params, batch)
        features, labels = batch[:2]
        outputs, labels = self._outputs(params, features), torch.as_tensor(labels)
        errors = (outputs.reshape(labels.shape) - labels).square()
        return (2.0 * errors.flatten(1).mean(1) / errors[0, 0].numel()).clamp(min=torch.finfo(errors.dtype).eps)

    def class_counts(self, num_classes: int) -> Tensor:
        """Training rows of each class, where the loss is that of classes."""
        self._check_open("class counts")
        bias = self._model.class_bias
        if bias is None or bias.num_classes != num_classes or not self.has_classes:
            return super().class_counts(num_classes)
        size = self.num_examples.reshape(-1)
        owner, place = self.minibatches.rows_in_turn(size)
        labels = self._rows.labels[self.minibatches.rows_at(self.minibatches.begin[owner] + place)]
        return class_counts(self._model, labels, owner, len(size)).reshape(*self.shape, num_classes)

    def class_scores(self, params: Tensor, draw: int) -> tuple[Tensor, Tensor] | None:
        """Scores of each class by the model as it is; a single score is the second of two, the first being 0."""
        self._check_open("class scores")
        if not self.has_classes:
            return None
        ahead = self.minibatches.look_ahead(draw)
        features, labels = rows_at(self._rows, ahead.index[:, draw - ahead.draws.start])
        targets = class_targets(self._model, labels.flatten(0, 1)).reshape(*labels.shape[:2], -1)
        scores = self._outputs(params, features)
        return (scores if scores.shape == targets.shape else torch.cat([0.0 * scores, scores], dim=-1)), targets

    @property
    def has_classes(self) -> bool:
        """Whether the loss is the log-likelihood of a class."""
        return has_classes(self._model, self._loss, self._rows.features, self._rows.labels)

    def _outputs(self, params: Tensor, features: Features) -> Tensor:
        with torch.no_grad():
            return outputs_of(self._model, params, features, quickest_way(self._model, params, features))

    def features(self, params: Tensor, batch: tuple[Any, ...]) -> Tensor:
        """The input of the last layer."""
        self._check_open("features")
        with torch.no_grad():
            return features_of(self._model, params, batch[0], quickest_way(self._model, params, batch[0]))

    def class_moments(self, params: Tensor) -> ClassMoments:
        """Clients of similar numbers of rows side by side."""
        self._check_open("features")
        assert self.head is not None
        assert self.class_bias is not None
        block, num_features = params.reshape(-1, params.shape[-1]), self.head.num_features
        width = max(row_size(self._rows.features), num_features)
        counts = block.new_zeros(len(block), self.class_bias.num_classes)
        sums, squares = counts.new_zeros(*counts.shape, num_features), torch.zeros_like(counts)
        for slots, rows, is_own in self._all_rows(block, width):
            z = self.features(block[slots], rows)
            of_class = class_targets(self._model, rows[1].flatten(0, 1)).reshape(*is_own.shape, -1).to(z)
            by_class = (of_class * is_own.unsqueeze(-1)).transpose(-1, -2)
            counts[slots] += by_class.sum(-1)
            sums[slots] += by_class @ z
            squares[slots] += (by_class @ z.square().sum(-1, keepdim=True)).squeeze(-1)
        some = counts.clamp(min=1.0)
        found = counts, sums / some.unsqueeze(-1), squares / some
        return ClassMoments(*(each.reshape(*self.shape, *each.shape[1:]) for each in found))

    def derivatives(self, params: Tensor) -> LossDerivatives:
        """Clients of similar numbers of rows side by side; a pass counts as a gradient of each row for each number."""
        self._check_open("errors")
        block = params.reshape(-1, params.shape[-1])
        loss, gradient = block.new_zeros(len(block)), torch.zeros_like(block)
        curvature = block.new_zeros(*block.shape, block.shape[1])
        for slots, places, is_own in self._all_rows(block, max(row_size(self._rows.features), block.shape[1] ** 2)):
            found = derivatives_of(self._model, self._loss, block[slots], *places, is_own)
            for total, part in zip((loss, gradient, curvature), found, strict=True):
                total[slots] += part
        number = self.num_examples.expand(self.shape).to(block)
        self.num_gradients.add_(self.steps_per_epoch.reshape(-1) * (1 + block.shape[1]))
        outputs = self._rows.labels[:1].numel() if is_squared_error(self._loss) else 0
        whole = LossDerivatives(loss, gradient, curvature, outputs * number.reshape(-1))
        return LossDerivatives(*(each.reshape(*self.shape, *each.shape[1:]) for each in whole))

    def _all_rows(self, params: Tensor, width: int) -> Iterator[tuple[Tensor, tuple[Features, Tensor], Tensor]]:
        """Rows of all slots, ``width`` numbers each, some slots at a time ``[s]``: rows ``[s, w]``, which are own."""
        budget, is_mixed = budget_of(params.device), self._model.mixes_rows
        alone = 0.0 if is_mixed else math.inf  # one by one where rows are seen with those beside them
        sizes, order = self.num_examples.expand(self.shape).reshape(-1).sort(descending=True, stable=True)
        for low, high in blocks_of_clients(sizes.tolist(), len(sizes), budget.rows_evaluated(width), alone):
            slots, size, widest = order[low:high], sizes[low:high].unsqueeze(-1), int(sizes[low])
            step = widest if is_mixed else budget.rows_evaluated(width, len(slots))
            for start in range(0, widest, step):
                column = torch.arange(start, min(start + step, widest), device=size.device)
                places = self.minibatches.begin[slots].unsqueeze(-1) + torch.minimum(column, size - 1)
                yield slots, rows_at(self._rows, self.minibatches.rows_at(places)), column < size

    def objective_gradient(
        self, objective: Objective, params: Tensor, num_extra: int, batch: Any, constants: Sequence[Tensor]
    ) -> Tensor:
        """Gradients of each client's objective, all clients at once."""
        return objective_gradient(
            self._model, self._loss, self._gradients, objective, params, num_extra, batch, constants
        )

    def walk(self, walk: Walk) -> tuple[Tensor, Tensor] | None:
        """Softmax regression on a CPU, of clients that have few rows for the steps they take; and a lone client."""
        features, labels = self._rows.features, self._rows.labels
        is_changed = self.weight_decay or self.max_gradient_norm is not None or self.row_clip is not None
        if is_changed or walk.num_steps.device.type != "cpu":
            return None
        if not self._is_softmax_regression:
            return self._walk_alone(walk)
        if not is_class(labels) or not isinstance(features, Tensor) or features.ndim != 2:
            return None
        params = walk.states[0]
        assert params is not None
        drawn, num_features = self.minibatches, features.shape[1]
        num_classes = params.shape[1] // (num_features + 1)
        of_parts = [num_classes * num_features, num_classes]
        if walk.group_sizes is not None and walk.group_sizes not in ([sum(of_parts)], of_parts):
            return None
        is_few = have_few_rows(drawn.size, walk.num_steps, self.batch_size, num_features, num_classes)
        # Whose rows have been multiplied needs little more.
        are_known = [slot // self.slots_per_client in self._known_products for slot in range(len(is_few))]
        is_few |= torch.tensor(are_known, device=is_few.device)
        is_few &= walk.num_steps > 0
        clients = is_few.nonzero().flatten()
        if not len(clients):
            return None
        most = int(walk.num_steps[clients].max())
        found = torch.empty_like(params)
        for first in range(0, most, STEPS_AT_ONCE):
            part = walk._replace(num_steps=(walk.num_steps - first).clamp(min=0, max=STEPS_AT_ONCE))
            some = clients[part.num_steps[clients] > 0]
            draws = range(walk.first_draw + first, walk.first_draw + first + int(part.num_steps[some].max()))
            ahead = [(drawn.look_ahead(draw), draw) for draw in draws]
            places = torch.stack([each.places[:, draw - each.draws.start] for each, draw in ahead], dim=1)
            own = OwnRows(
                features, labels, drawn.begin, drawn.size, drawn.order, places - drawn.begin[:, None, None],
                self.slots_per_client, self._first_row, self._known_products,
            )  # fmt: skip
            wanted = {walk.result: found}
            if first + STEPS_AT_ONCE < most:  # some go on from all of their states
                wanted |= {place: torch.empty_like(found) for place in range(len(walk.states)) if place not in wanted}
                walk_by_rows(part, own, some, first, wanted)
                wanted[walk.result] = found.clone()
                walk = walk._replace(states=tuple(wanted[place] for place in range(len(walk.states))))
            else:
                walk_by_rows(part, own, some, first, wanted)
        self.num_gradients.index_add_(0, clients // self.slots_per_client, walk.num_steps[clients])
        return is_few, found

    def _walk_alone(self, walk: Walk) -> tuple[Tensor, Tensor] | None:
        """A lone client of a module, parameter by parameter: putting its gradients in one row takes a third as long."""
        begin = walk.states[0]
        assert begin is not None
        num_steps = int(walk.num_steps.max())
        slots = torch.arange(len(walk.num_steps), device=walk.num_steps.device)
        if not num_steps or len(slots) != 1 or walk.group_sizes is not None:
            return None
        first = self.batch(walk.first_draw, slots)
        assert not isinstance(first, DrawnRows)
        if not is_walked_alone(self._model, self._loss, self._gradients, begin, first[0]):
            return None
        states = tuple(torch.zeros_like(begin) if state is None else state.clone() for state in walk.states)
        views = [self._model.parts_by_client(state).values() for state in states]
        parts = [tuple(part.flatten(1) for part in of_states) for of_states in zip(*views, strict=True)]
        for number in range(num_steps):
            rows = [given[0] for given in (first if number == 0 else self.batch(walk.first_draw + number, slots))]
            slopes, _ = slopes_of(self._model, self._loss, states[0][0], *rows)
            gradients = [slope.reshape(1, -1) for slope in slopes]
            walk.advance(number, slots, [StepPart(*each) for each in zip(parts, gradients, strict=True)])
        self.num_gradients.index_add_(0, slots // self.slots_per_client, walk.num_steps)
        return torch.ones_like(walk.num_steps, dtype=torch.bool), states[walk.result]

    def compare_halves(
        self, models: Tensor, deviations: Tensor, batch: tuple[Any, ...], sizes: list[int]
    ) -> tuple[Tensor, Tensor]:
        """What halves of softmax regression say of each other, by scores, for weights and biases."""
        self._check_open("gradients")
        (features, labels), size = batch[:2], models.shape[1]
        if self._is_softmax_regression and is_class(labels[0]) and isinstance(features, Tensor) and features.ndim == 3:
            num_classes = size // (features.shape[-1] + 1)
            if sizes in ([size], [size - num_classes, num_classes]):
                by_part = softmax_regression_slope_changes(models, deviations, features, labels)
                changes = by_part if len(sizes) > 1 else by_part.sum(-1, keepdim=True)
                return changes, self.temperature(models, batch)
        return super().compare_halves(models, deviations, batch, sizes)

    def batch_gradient(self, params: Tensor, batch: tuple[Any, ...]) -> Tensor:
        """Gradients of each client's loss, all clients at once."""
        self._check_open("gradients")
        return self._gradient(params, *batch)


@dataclass(frozen=True)
class ModelSource:
    """A federation and a model, as the engine sees them.

    Attributes:
        federation: The rows.
        model: The module, flat.
        loss: ``loss(outputs, labels)``, the mean over a minibatch.
        learning_rate: η, in the first round.
        batch_size: B.
        seed: Of the minibatches.
        gradients: How a block of clients is computed, by one of the ways of `selffl.training.blocks`;
            ``auto`` takes what was measured to be quickest.  The numbers are the same to rounding.
        optimiser: How local steps are made of gradients.
        options: How local training differs from plain steps on the loss.
    """

    federation: Federation
    model: FlatModel
    loss: Loss
    learning_rate: float
    batch_size: int
    seed: int = 0
    gradients: Gradients = "auto"
    optimiser: Optimiser = field(default_factory=SGD)
    options: TrainingOptions = field(default_factory=TrainingOptions)

    def __post_init__(self) -> None:
        check_gradients(self.gradients)
        check_rows_apart(self.model, self.options.row_clip)
        check_images(self.options.augmentation, self.federation.train.sample.features)

    @property
    def shape(self) -> torch.Size:
        """One federation."""
        return torch.Size()

    @property
    def population(self) -> Population:
        """How many clients there are, their clusters, and what the model is made of; variances are not known."""
        number, rows = self.federation.num_clients, self.federation.train.num_examples
        return self.model.describe(Population(number, cluster=self.federation.cluster, num_examples=rows))

    def task(self, clients: Tensor, round_number: int) -> ModelTask:
        """Training rows of the cohort ``clients [C]``; test rows are out of reach."""
        rows, places = self.federation.train.cohort(clients)
        return ModelTask(
            self.model, self.loss, rows, places, self.learning_rate, self.batch_size, self.seed, round_number,
            self.gradients, keys=clients, optimiser=self.optimiser, options=self.options,
        )  # fmt: skip


def _row_private_methods() -> str:
    """A few methods whose clients send nothing of rows but what is made of gradients."""
    return suggest(lambda method: method.no_row_privacy is None)
