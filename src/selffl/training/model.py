"""Any torch module as a task for a whole cohort: one flat vector of parameters per client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from selffl.algorithms.contract import Layer, LocalTask, Population
from selffl.data.federation import Federation, Rows
from selffl.errors import ConfigError
from selffl.randomness import uniform

Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs, labels) of a minibatch -> its mean loss

AHEAD = 16  # minibatches whose rows are looked up at once


class FlatModel:
    """A module seen as a function of one flat vector of the parameters that it trains."""

    def __init__(self, module: nn.Module) -> None:
        running = [name for name, part in module.named_modules() if hasattr(part, "running_mean")]
        if any(True for _ in module.buffers()):
            where = f" ({running[0]})" if running else ""
            raise ConfigError(
                f"{type(module).__name__} has buffers{where}, which averaging over clients does not define; expected a "
                "module of parameters alone. Use GroupNorm in place of BatchNorm."
            )
        self.module = module
        # Frozen parameters stay what they are in the module: they are no part of what clients train and send.
        self._trained = {name: part for name, part in module.named_parameters() if part.requires_grad}
        self._shapes = {name: part.shape for name, part in self._trained.items()}
        if not self._shapes:
            raise ConfigError(
                f"{type(module).__name__} has no parameters to train; expected some that require a gradient."
            )
        self._sizes = [shape.numel() for shape in self._shapes.values()]

    @property
    def params(self) -> Tensor:
        """The module's own trained parameters, ``[P]``."""
        return torch.cat([part.detach().reshape(-1) for part in self._trained.values()])

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Trained parameters by the module that owns them (weight and bias together), in the order they lie."""
        found: list[Layer] = []
        start = 0
        for name, size in zip(self._shapes, self._sizes, strict=True):
            owner = name.rpartition(".")[0]
            if found and found[-1].name == owner:
                found[-1] = found[-1]._replace(stop=start + size)
            else:
                found.append(Layer(owner, start, start + size))
            start += size
        return tuple(found)

    def __call__(self, params: Tensor, features: Tensor) -> Tensor:
        """Outputs for ``features`` at ``params [P]``."""
        parts = params.split(self._sizes)  # type: ignore[no-untyped-call]
        named = {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}
        outputs: Tensor = torch.func.functional_call(self.module, named, (features,))
        return outputs


Gradient = Callable[[Tensor, Tensor, Tensor], Tensor]  # (params [n, P], features [n, B, ...], labels [n, B]) -> [n, P]


def gradient_of(model: FlatModel, loss: Loss) -> Gradient:
    """Gradients of the mean loss for a block of clients, each with its own parameters and minibatch.

    A linear layer under cross-entropy has them in closed form, several times faster than autograd on small blocks.
    """
    module = model.module
    is_linear = type(module) is nn.Linear and all(part.requires_grad for part in module.parameters())
    if is_linear and module.bias is not None and loss is nn.functional.cross_entropy:
        return softmax_regression_gradient

    def mean_loss(params: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        return loss(model(params, features), labels)

    gradient: Gradient = torch.func.vmap(torch.func.grad(mean_loss), randomness="error")
    return gradient


def softmax_regression_gradient(params: Tensor, features: Tensor, labels: Tensor) -> Tensor:
    """Gradient of cross-entropy for ``nn.Linear``: (softmax(logits) - onehot(label)) x^T, mean over the minibatch."""
    num_clients, batch_size, num_features = features.shape
    num_classes = params.shape[1] // (num_features + 1)
    weight = params[:, :-num_classes].view(num_clients, num_classes, num_features)
    logits = torch.baddbmm(params[:, None, -num_classes:], features, weight.transpose(1, 2))  # [n, B, classes]
    error = logits.softmax(-1)
    error.scatter_add_(-1, labels.unsqueeze(-1), error.new_full((1, 1, 1), -1.0).expand(num_clients, batch_size, 1))
    error /= batch_size
    slope = torch.bmm(error.transpose(1, 2), features)
    return torch.cat([slope.flatten(1), error.sum(1)], dim=1)


class ModelTask(LocalTask):
    """Minibatch gradients of a module for a cohort.

    A client's minibatches run through its rows in a random order, epoch after epoch: draw d holds positions
    d B … d B + B − 1 of that sequence.  A client with fewer than B rows meets some of them twice in one minibatch.
    """

    def __init__(
        self, model: FlatModel, loss: Loss, rows: Rows, clients: Tensor, learning_rate: float, batch_size: int,
        seed: int, round_number: int,
    ) -> None:  # fmt: skip
        super().__init__(clients.shape, rows.num_examples[clients], learning_rate, batch_size)
        self._rows, self._clients, self._seed, self._round = rows, clients, seed, round_number
        self._ahead: tuple[int, Tensor] | None = None

        self._gradient = gradient_of(model, loss)

    def batch(self, draw: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Features ``[n, B, ...]`` and labels ``[n, B]``."""
        block = draw // AHEAD
        if self._ahead is None or self._ahead[0] != block:
            self._ahead = block, self._index(block)
        index = self._ahead[1][rows, draw % AHEAD]  # [n, B]
        return self._rows.features[index], self._rows.labels[index]

    def _index(self, block: int) -> Tensor:
        """Row numbers of ``AHEAD`` minibatches of every client: ``[clients, AHEAD, B]``."""
        width = AHEAD * self.batch_size
        size, begin = self.num_examples, self._rows.offset[self._clients]
        # Only the epochs that these minibatches touch are shuffled: first .. last of each client.
        first, last = block * width // size, (block * width + width - 1) // size
        total = (last - first + 1) * size  # rows to shuffle, by client
        start = total.cumsum(0) - total
        owner = torch.arange(len(size), device=size.device).repeat_interleave(total)
        place = torch.arange(len(owner), device=size.device) - start[owner]
        epoch, row = first[owner] + place // size[owner], place % size[owner]
        lots = uniform(self._seed, "batch", self._round, self._clients[owner], epoch, row)
        # Sorted by lot, then by client and epoch: every epoch of every client is shuffled at once.
        turn = place // size[owner] + ((last - first + 1).cumsum(0) - (last - first + 1))[owner]
        by_lot = lots.argsort()
        shuffled = (begin[owner] + row)[by_lot[turn[by_lot].argsort(stable=True)]]
        wanted = torch.arange(width, device=size.device) + (start + block * width - first * size).unsqueeze(-1)
        return shuffled[wanted].reshape(len(size), AHEAD, self.batch_size)

    def batch_gradient(self, params: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        """By autograd, all clients at once."""
        gradient: Tensor = self._gradient(params, *batch)
        return gradient


@dataclass(frozen=True)
class ModelSource:
    """A federation and a model, as the engine sees them.

    Attributes:
        federation: The rows.
        model: The module, flat.
        loss: ``loss(outputs, labels)``, the mean over a minibatch.
        learning_rate: η.
        batch_size: B.
        seed: Of the minibatches.
    """

    federation: Federation
    model: FlatModel
    loss: Loss
    learning_rate: float
    batch_size: int
    seed: int = 0

    @property
    def shape(self) -> torch.Size:
        """One federation."""
        return torch.Size()

    @property
    def population(self) -> Population:
        """How many clients there are, their clusters and the model's layers; their variances are not known."""
        return Population(self.federation.num_clients, cluster=self.federation.cluster, layers=self.model.layers)

    def task(self, clients: Tensor, round_number: int) -> ModelTask:
        """Training rows of the cohort ``clients [C]``; test rows are out of reach."""
        return ModelTask(
            self.model, self.loss, self.federation.train, clients, self.learning_rate, self.batch_size,
            self.seed, round_number,
        )  # fmt: skip


def correct_predictions(model: FlatModel, params: Tensor, rows: Rows) -> Tensor:
    """How many of its rows each client classifies correctly, with ``params [clients, P]`` or one ``[P]`` for all."""
    found = []
    for client, (low, high) in enumerate(rows.offset.unfold(0, 2, 1).tolist()):
        own = params if params.ndim == 1 else params[client]
        with torch.no_grad():
            guess = model(own, rows.features[low:high]).argmax(-1)
        found.append((guess == rows.labels[low:high]).sum())
    return torch.stack(found)
