"""FedBN: FedAvg, but for batch normalisation, which stays on the client.

Li, Jiang, Zhang, Kamp and Dou, FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021,
Algorithm 1.  Personalises scale, shift and statistics of every BatchNorm.  Nothing of these leaves a client; the
server's are the initial ones for ever.  A client that never took part has the global model (D10).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from selffl.algorithms.averaging import Weighting
from selffl.algorithms.fedper import SharedBody
from selffl.algorithms.grids import STEPS_AFTER, Grid
from selffl.algorithms.layers import Layer
from selffl.algorithms.norms import BatchNorm
from selffl.algorithms.population import Population


@dataclass(frozen=True)
class FedBN(SharedBody):
    """Options of FedBN.

    Attributes:
        num_local_steps: L, the steps a client takes in a round.
        weighting: Average all other layers by ``examples`` (n_k) or ``equal``.
    """

    name: ClassVar[str] = "fedbn"
    grid: ClassVar[Grid] = STEPS_AFTER
    source: ClassVar[str] = "Li et al., ICLR 2021"
    batch_norm: ClassVar[BatchNorm] = "kept"

    weighting: Weighting = "examples"

    def kept(self, population: Population) -> Sequence[Layer]:
        """No layers but those that the population says, which are BatchNorm's."""
        return ()
