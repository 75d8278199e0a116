"""FedRoD: two heads on one body: a generic one, trained as if classes were balanced, and a personal one beside it.

Chen and Chao, On Bridging Generic and Personalized Federated Learning for Image Classification, ICLR 2022, with
balanced softmax (Ren et al., NeurIPS 2020) and linear personal heads.  Personalises the head.  Both heads are linear on
the same features, so that their sum, by which a client answers, is one head: a personal model is the global one plus
what the client keeps.  That begins at 0, so that a client that never took part has the global model (D10).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from selffl.algorithms.averaging import (
    FixedLocalSteps,
    ModelBroadcast,
    ModelServer,
    ModelUpload,
    SharedModel,
    Weighting,
)
from selffl.algorithms.contract import Personalises
from selffl.algorithms.features import FeatureRows, FeatureTask, OwnObjective, join_extra, lacks_classes, require_head
from selffl.algorithms.grids import LOCAL_STEPS, Grid
from selffl.algorithms.population import Population
from selffl.algorithms.solver import descend

ABSENT = -1e4  # log n of a class that a client has no rows of: no score makes up for it


@dataclass(frozen=True)
class OffsetMemory:
    """A client that keeps what it adds to the global model."""

    offset: Tensor  # [..., C, P]; 0 before the first round


@dataclass(frozen=True)
class FedRoD(OwnObjective, FixedLocalSteps, SharedModel[OffsetMemory]):
    """Options of FedRoD.

    Attributes:
        num_local_steps: L, of body, generic head and personal head together.
        weighting: Average body and generic head by ``examples`` (n_k) or ``equal``.
    """

    name: ClassVar[str] = "fedrod"
    grid: ClassVar[Grid] = LOCAL_STEPS
    source: ClassVar[str] = "Chen and Chao, ICLR 2022"
    personalises: ClassVar[Personalises] = "layers"
    only_sgd: ClassVar[str | None] = None
    needs_classes: ClassVar[bool] = True
    no_row_privacy: ClassVar[str | None] = (
        "its clients train on an objective made of their class frequencies, which no noise hides"
    )
    no_statistics: ClassVar[str | None] = None

    weighting: Weighting = "examples"

    def start(self, params: Tensor, population: Population) -> ModelServer:
        """The initial model, which has to end in a linear layer."""
        require_head(self.name, population)
        return super().start(params, population)

    def newcomer(self, params: Tensor) -> OffsetMemory:
        """A personal head of zeros."""
        return OffsetMemory(torch.zeros_like(params))

    def client_round(
        self, broadcast: ModelBroadcast, memory: OffsetMemory, task: FeatureTask
    ) -> tuple[ModelUpload, OffsetMemory]:
        """L steps of both: what is shared by CE(g + log n_m), the personal head by CE(g + h_m), with g as it is."""
        head, bias = task.head, task.class_bias
        assert head is not None
        if not task.has_classes or bias is None:
            raise lacks_classes(self.name, "balances classes by how often a client has them")
        size, place, own_head = head.stop - head.start, slice(head.start, head.stop), head._replace(start=0)
        log_counts = bias.to_scores(task.class_counts(bias.num_classes).to(broadcast.params).log().clamp(min=ABSENT))

        def objective(rows: FeatureRows, own: Tensor, log_counts: Tensor) -> Tensor:
            generic, own_scores = rows.scores, own_head.scores(own, rows.features.detach())
            balanced = rows.loss(generic + log_counts, rows.labels)
            return balanced + rows.loss(generic.detach() + own_scores, rows.labels)

        both = task.with_objective(objective, size, [log_counts])
        trained = descend(both, join_extra(memory.offset[..., place], broadcast.params), self.steps(task))
        offset = torch.zeros_like(memory.offset)
        offset[..., place] = trained[..., :size]
        return self.upload(trained[..., size:], broadcast.params, task), OffsetMemory(offset)

    def personal(self, global_params: Tensor, memory: OffsetMemory, task: FeatureTask) -> Tensor:
        """The global model with the sum of both heads."""
        return global_params.unsqueeze(-2) + memory.offset
