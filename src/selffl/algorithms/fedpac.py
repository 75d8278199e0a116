"""FedPAC: features that mean the same everywhere, and for each client a head combined from those that suit it.

Xu, Tong and Huang, Personalized Federated Learning with Feature Alignment and Classifier Collaboration, ICLR 2023,
Algorithm 1.  Personalises the whole model.  Bodies are averaged and pulled towards the mean features of each class,
*prototypes*.  The server combines the heads of a cohort for each of its clients by a quadratic programme, for which it
needs single clients.  Evaluated is the client's model as its own training left it; a client that never took part has
the global model (D10), whose head is the average of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from selffl.algorithms.averaging import (
    FixedLocalSteps,
    ModelBroadcast,
    ModelServer,
    PersonalMemory,
    PersonalModels,
    move,
    row_count,
)
from selffl.algorithms.contract import Algorithm
from selffl.algorithms.features import FeatureRows, FeatureTask, OwnObjective, lacks_classes, require_head
from selffl.algorithms.grids import Grid
from selffl.algorithms.layers import mask_layers
from selffl.algorithms.options import check_integer, check_number, option
from selffl.algorithms.population import Population
from selffl.algorithms.safeguards import Bound
from selffl.algorithms.solver import descend
from selffl.errors import ConfigError
from selffl.maths.combination import combination_weights, feature_noise


@dataclass(frozen=True)
class PrototypeServer(ModelServer):
    """What the server knows: a model, where its head lies, prototypes, and the head that goes to each client next."""

    is_head: Tensor  # [..., P], true or false
    heads: Tensor  # [..., M, H]; of no meaning before the first visit
    visits: Tensor  # [..., M]
    prototypes: Tensor  # mean features of each class [..., K, D]
    class_examples: Tensor  # rows behind each [..., K]; 0: no prototype yet


@dataclass(frozen=True)
class PrototypeBroadcast(ModelBroadcast):
    """The global body with the client's head, and the prototypes."""

    prototypes: Tensor  # [..., C, K, D]
    class_examples: Tensor  # [..., C, K]


@dataclass(frozen=True)
class PrototypeUpload:
    """What a client sends back."""

    params: Tensor  # its model, trained [..., C, P]
    num_examples: Tensor  # N_m [..., C]
    class_counts: Tensor  # rows of each class [..., C, K]
    prototypes: Tensor  # mean features of each class after training [..., C, K, D]
    own_features: Tensor  # p_k mu_k, of the model as it came [..., C, K, D]
    noise: Tensor  # v_m, how noisy these are [..., C]


@dataclass(frozen=True)
class FedPAC(
    OwnObjective,
    PersonalModels,
    FixedLocalSteps,
    Algorithm[PrototypeServer, PrototypeBroadcast, PersonalMemory, PrototypeUpload],
):
    """Options of FedPAC.

    Attributes:
        num_local_steps: Of the body alone, after those of the head.
        head_steps: Of the head alone, under the body as it came.
        head_learning_rate: Of the head's steps; none: the learning rate of the run.
        alignment: λ, the pull of features towards the prototype of their class.
    """

    name: ClassVar[str] = "fedpac"
    grid: ClassVar[Grid] = {"alignment": (0.1, 1.0, 10.0)}  # the authors' value is 1
    source: ClassVar[str] = "Xu et al., ICLR 2023"
    only_sgd: ClassVar[str | None] = None
    needs_classes: ClassVar[bool] = True
    no_row_privacy: ClassVar[str | None] = (
        "its clients send how many rows of each class they have, and these rows' mean features"
    )
    no_statistics: ClassVar[str | None] = "prototypes of clients with other statistics are not of the same features"
    uploads_add: ClassVar[bool] = False
    averaged: ClassVar[Mapping[str, str | None]] = {}
    per_client: ClassVar[tuple[str, ...]] = ("heads", "visits")

    head_steps: int = option(20, check_integer, least=1)
    head_learning_rate: float | None = option(None, check_number, above=0.0)
    alignment: float = option(1.0, check_number, at_least=0.0)

    def start(self, params: Tensor, population: Population) -> PrototypeServer:
        """The initial model for everybody, and no prototype yet."""
        head = require_head(self.name, population)
        size = head.stop - head.start
        if size == params.shape[-1]:
            raise ConfigError(
                f"{self.name} shares a body and combines heads, but the model has one layer; expected two or more. Use "
                "a deeper model, or another method."
            )
        is_head = mask_layers(params, [head.layer])
        dots, num_classes = params.shape[:-1], max(head.num_outputs, 2)
        return PrototypeServer(
            params,
            is_head,
            params.new_zeros(*dots, population.num_clients, size),
            params.new_zeros(*dots, population.num_clients),
            params.new_zeros(*dots, num_classes, head.num_features),
            params.new_zeros(*dots, num_classes),
        )

    def broadcast(self, server: PrototypeServer, clients: Tensor) -> PrototypeBroadcast:
        """The body for everybody, and each client's own head; the global one if it never took part."""
        place = _place(server.is_head)
        params = server.params.unsqueeze(-2).expand(*clients.shape, -1).clone()
        index = clients.unsqueeze(-1).expand(*clients.shape, server.heads.shape[-1])
        is_known = (server.visits.gather(-1, clients) > 0).unsqueeze(-1)
        params[..., place] = torch.where(is_known, server.heads.gather(-2, index), params[..., place])
        prototypes = server.prototypes.unsqueeze(-3).expand(*clients.shape, -1, -1)
        return PrototypeBroadcast(params, prototypes, server.class_examples.unsqueeze(-2).expand(*clients.shape, -1))

    def client_round(
        self, broadcast: PrototypeBroadcast, memory: PersonalMemory, task: FeatureTask
    ) -> tuple[PrototypeUpload, PersonalMemory]:
        """Look at the features as they come; train the head, then the body; look at the features again.

        The body goes down CE + lambda (z - c_y)^2, the mean over rows and features, where class y has a prototype c_y.
        """
        if not task.has_classes:
            raise lacks_classes(self.name, "has a prototype for each class")
        assert task.head is not None
        is_head = mask_layers(broadcast.params[..., :1, :].flatten(0, -2)[0], [task.head.layer])
        before = task.class_moments(broadcast.params)
        num_examples = task.num_examples.expand(task.shape).to(before.counts)
        shares = before.counts / num_examples.unsqueeze(-1)

        def objective(rows: FeatureRows, _: Tensor, prototypes: Tensor, class_examples: Tensor) -> Tensor:
            classes = rows.labels.reshape(len(rows.labels)).round().long()
            gaps = (rows.features - prototypes[classes]).square().mean(-1)
            return rows.loss(rows.scores, rows.labels) + self.alignment * (gaps * (class_examples[classes] > 0)).mean()

        fitted = descend(
            task, broadcast.params, self.head_steps, learning_rate=self.head_learning_rate, frozen=~is_head
        )
        aligned = task.with_objective(objective, 0, [broadcast.prototypes, broadcast.class_examples])
        trained = descend(aligned, fitted, self.steps(task), frozen=is_head, first_draw=self.head_steps)
        upload = PrototypeUpload(
            trained,
            num_examples,
            before.counts,
            task.class_moments(trained).means,
            shares.unsqueeze(-1) * before.means,
            feature_noise(shares, before.means, before.squares, num_examples),
        )
        return upload, memory.keep(trained)

    def server_round(self, server: PrototypeServer, clients: Tensor, upload: PrototypeUpload) -> PrototypeServer:
        """Averages of models by rows and of prototypes by rows of their class; a head for each client of the cohort."""
        weight = upload.num_examples.unsqueeze(-1)
        change = ((upload.params - server.params.unsqueeze(-2)).double() * weight).sum(-2)
        counts = upload.class_counts.unsqueeze(-1)
        examples = counts.sum(-3).squeeze(-1)
        fresh = (counts * upload.prototypes).sum(-3) / examples.clamp(min=1.0).unsqueeze(-1)
        is_met = examples > 0

        sent = upload.params[..., _place(server.is_head)]
        features = upload.own_features.reshape(-1, *upload.own_features.shape[-3:])
        noise = upload.noise.reshape(-1, upload.noise.shape[-1])
        weights = torch.stack([combination_weights(own, v) for own, v in zip(features, noise, strict=True)])
        heads = weights.reshape(*clients.shape, -1) @ sent
        index = clients.unsqueeze(-1).expand_as(heads)
        return PrototypeServer(
            move(server.params, change, upload.num_examples.sum(-1)),
            server.is_head,
            server.heads.scatter(-2, index, heads.to(server.heads)),
            server.visits.scatter_add(-1, clients, torch.ones_like(upload.num_examples).to(server.visits)),
            torch.where(is_met.unsqueeze(-1), fresh, server.prototypes).to(server.prototypes),
            torch.where(is_met, examples, server.class_examples).to(server.class_examples),
        )

    def bounds(
        self, server: PrototypeServer, clients: Tensor, upload: PrototypeUpload, rows: Tensor
    ) -> Mapping[str, Bound]:
        """Rows are counted, those of all classes together, too; features may have either sign."""
        any_number = Bound(-torch.inf, torch.inf)
        return {
            "num_examples": row_count(rows),
            "the sum of class_counts": Bound(0.0, upload.num_examples, upload.class_counts.sum(-1)),
            "prototypes": any_number,
            "own_features": any_number,
        }


def _place(is_head: Tensor) -> Tensor:
    """Which numbers of a model are its head ``[P]``: the same in all federations side by side."""
    return is_head.reshape(-1, is_head.shape[-1])[0]
