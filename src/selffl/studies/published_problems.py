"""Problems of tables that others published, where data, model and settings have no names that say it all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from selffl.data.federation import Federation
from selffl.errors import ConfigError
from selffl.randomness import draw_network
from selffl.runs.methods import Method
from selffl.runs.run import Run
from selffl.studies.problems import Problem
from selffl.training.class_shares import ShareWeightedAccuracy

CLIENTS_AT_ONCE = 8  # that train a MobileNet: of each the activations of a minibatch are held
SHARE_ACCURACY = "share_accuracy"  # of the same test rows for everybody, by each client's shares of the classes


@dataclass(frozen=True)
class SharedTestProblem(Problem):
    """A problem whose clients are tested on the same rows, each by its own shares of the classes."""

    def _train(self, method: Method, seed: int, validation_fraction: float, **training: Any) -> Run:
        weighted = {SHARE_ACCURACY: ShareWeightedAccuracy.of(self.federation(seed, validation_fraction))}
        return super()._train(method, seed, validation_fraction, metrics=weighted, **training)


@dataclass(frozen=True)
class MobileNetProblem(Problem):
    """A problem of torchvision's MobileNet-v2 from random weights; ``model`` is a name for readers."""

    def _training(self) -> dict[str, Any]:
        return super()._training() | {"chunk_size": CLIENTS_AT_ONCE}

    def module(self, federation: Federation, seed: int) -> nn.Module:
        """The network for as many classes, its weights drawn from the seed."""
        try:
            from torchvision.models import mobilenet_v2
        except ImportError:
            raise ConfigError(
                "torchvision is not installed; expected it for MobileNet-v2. Install it: "
                "pip install 'selffl[known-modules]'."
            ) from None
        network: nn.Module = draw_network(lambda: mobilenet_v2(weights=None, num_classes=federation.num_classes), seed)
        return network
