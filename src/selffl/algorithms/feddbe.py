"""FedDBE: a vector of each client's own takes up what is peculiar to its features, so that those of all stay alike.

Zhang, Hua, Cao, Wang, Song, Xue, Ma and Guan, Eliminating Domain Bias for Federated Learning in Representation Space,
NeurIPS 2023: a personalised representation bias memory b_m, and a mean regularisation of what is shared.  Personalises
what the head is given, z + b_m.  As the head is linear, that is a bias of its own, c + W b_m: a personal model is a
module as any other.  b_m begins at 0, so that a client that never took part has the global model (D10).

The mean feature of everybody, towards which features are pulled, is that of the first round, which is one of FedAvg.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from selffl.algorithms.averaging import (
    AveragedModel,
    FixedLocalSteps,
    ModelBroadcast,
    ModelServer,
    ModelUpload,
    Weighting,
)
from selffl.algorithms.contract import Personalises
from selffl.algorithms.features import FeatureRows, FeatureTask, OwnObjective, join_extra, require_head
from selffl.algorithms.grids import Grid
from selffl.algorithms.layers import names_of
from selffl.algorithms.options import check_number, option
from selffl.algorithms.population import Population
from selffl.algorithms.safeguards import Bound, Limit
from selffl.algorithms.solver import descend, iterate
from selffl.errors import ConfigError


@dataclass(frozen=True)
class CentreServer(ModelServer):
    """What the server knows."""

    centre: Tensor  # the mean feature of everybody [..., D]
    is_known: Tensor  # whether it is known, true or false [...]


@dataclass(frozen=True)
class CentreBroadcast(ModelBroadcast):
    """The global model, and the mean feature of everybody."""

    centre: Tensor  # [..., C, D]
    is_known: Tensor  # true or false [..., C]


@dataclass(frozen=True)
class ShiftMemory:
    """A client that keeps what it adds to features."""

    # b_m [..., C, P], in the first D places, 0 behind: a new client knows no more of the model than its size.
    shift: Tensor


@dataclass(frozen=True)
class CentreUpload(ModelUpload):
    """What a client adds to the sums: its change of the model, and its mean feature as long as it is asked for."""

    features: Tensor  # n_k times its mean feature [..., C, D]; 0 once everybody's is known


@dataclass(frozen=True)
class FedDBE(OwnObjective, FixedLocalSteps, AveragedModel[CentreServer, CentreBroadcast, ShiftMemory, CentreUpload]):
    """Options of FedDBE.

    Attributes:
        num_local_steps: L, of the model and the client's own vector together.
        penalty: κ, how strongly the mean feature of a minibatch is pulled towards that of everybody.
        weighting: Average models and mean features by ``examples`` (n_k) or ``equal``.
    """

    name: ClassVar[str] = "feddbe"
    grid: ClassVar[Grid] = {"penalty": (0.1, 1.0, 10.0, 50.0)}  # the authors' value is 50
    source: ClassVar[str] = "Zhang et al., NeurIPS 2023"
    personalises: ClassVar[Personalises] = "layers"
    sends: ClassVar[type[ModelBroadcast]] = CentreBroadcast
    only_sgd: ClassVar[str | None] = None
    no_row_privacy: ClassVar[str | None] = (
        "its clients send the mean feature of their rows, and train on an objective of its own"
    )
    no_statistics: ClassVar[str | None] = None

    averaged: ClassVar[Mapping[str, str | None]] = {"change": "weight", "features": "weight"}

    penalty: float = option(50.0, check_number, at_least=0.0)
    weighting: Weighting = "examples"

    def start(self, params: Tensor, population: Population) -> CentreServer:
        """The initial model, which has to have a body and a linear head; nobody's features are known."""
        head, names = require_head(self.name, population), names_of(population.layers)
        if len(names) < 2 or not head.has_bias:
            found = f"{len(names)} layer" if len(names) < 2 else "a last layer without a bias"
            raise ConfigError(
                f"{self.name} shifts the features of a body that is trained, and the model has {found}; expected two "
                "layers or more, and a bias in the last. Change the model, or use another method."
            )
        centre = params.new_zeros(*params.shape[:-1], head.num_features)
        return CentreServer(params, centre, torch.zeros_like(params[..., 0], dtype=torch.bool))

    def newcomer(self, params: Tensor) -> ShiftMemory:
        """Features as they are."""
        return ShiftMemory(torch.zeros_like(params))

    def client_round(
        self, broadcast: CentreBroadcast, memory: ShiftMemory, task: FeatureTask
    ) -> tuple[CentreUpload, ShiftMemory]:
        """L steps of the model and of b_m by CE(W(z + b_m) + c) + κ/2 mean((mean z − centre)²); at first as FedAvg."""
        if not bool(broadcast.is_known.all()):
            trained = descend(task, broadcast.params, self.steps(task))
            return self._upload(trained, broadcast, task, self.mean_features(trained, task)), memory
        head, penalty = task.head, self.penalty
        assert head is not None

        def objective(rows: FeatureRows, shift: Tensor, centre: Tensor) -> Tensor:
            loss = rows.loss(rows.scores + head.weight(rows.params) @ shift, rows.labels)
            return loss + 0.5 * penalty * (rows.features.mean(0) - centre).square().mean()

        size = head.num_features
        own_task = task.with_objective(objective, size, [broadcast.centre])
        both = descend(own_task, join_extra(memory.shift[..., :size], broadcast.params), self.steps(task))
        shift = torch.zeros_like(memory.shift)
        shift[..., :size] = both[..., :size]
        nothing = torch.zeros_like(broadcast.centre)
        return self._upload(both[..., size:], broadcast, task, nothing), ShiftMemory(shift)

    def mean_features(self, params: Tensor, task: FeatureTask) -> Tensor:
        """Mean over an epoch of minibatches of features ``[..., C, D]`` at ``params [..., C, P]``, as they answer."""
        assert task.head is not None
        block = params.reshape(-1, params.shape[-1])

        def step(number: int, slots: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            models, total = states
            return models, total + task.features(models, task.batch(number, slots)).mean(1)

        total = iterate(task, task.steps_per_epoch, step, block, block.new_zeros(len(block), task.head.num_features))[1]
        return total.reshape(*task.shape, -1) / task.steps_per_epoch.unsqueeze(-1)

    def _upload(self, trained: Tensor, broadcast: CentreBroadcast, task: FeatureTask, features: Tensor) -> CentreUpload:
        change = self.upload(trained, broadcast.params, task)
        return CentreUpload(change.change, change.weight, features * change.weight.unsqueeze(-1))

    def server_round(self, server: CentreServer, clients: Tensor, upload: CentreUpload) -> CentreServer:
        """The weighted average of the clients' models; after the first round that of their mean features, for good."""
        mean = (upload.features / upload.weight.unsqueeze(-1)).to(server.centre)
        centre = torch.where(server.is_known.unsqueeze(-1), server.centre, mean)
        return CentreServer(
            super().server_round(server, clients, upload).params, centre, torch.ones_like(server.is_known)
        )

    def bounds(self, server: CentreServer, clients: Tensor, upload: CentreUpload, rows: Tensor) -> Mapping[str, Bound]:
        """A client weighs as one, or as many rows as it has; features have any sign."""
        return {**super().bounds(server, clients, upload, rows), "features": Bound(-torch.inf, torch.inf)}

    def limits(self, clip: float, max_weight: float, upload: CentreUpload) -> Mapping[str, Limit]:
        """Mean features are no change of a model: they may measure as much as features of 1 each do."""
        most = math.sqrt(upload.features.shape[-1])
        return {**super().limits(clip, max_weight, upload), "features": Limit(most, "weight")}

    def personal(self, global_params: Tensor, memory: ShiftMemory, task: FeatureTask) -> Tensor:
        """The global model with c + W b_m for its last bias c."""
        head = task.head
        assert head is not None
        found = global_params.unsqueeze(-2).expand_as(memory.shift).clone()
        shift = memory.shift[..., : head.num_features].unsqueeze(-1)
        found[..., head.bias_start : head.stop] += (head.weight(found) @ shift).squeeze(-1)
        return found
