"""How much memory a computation may use at once, from which every size of a block or chunk follows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MODEL_COPIES = 4  # of its parameters that a client in training takes: start, model, gradient, next model
MIN_CLIENTS = 32  # that train at once, if the memory allows: with fewer the cost of each call shows
MIN_FEATURES = 64  # that a row counts as: of a few words, say, a model makes far more within itself


@dataclass(frozen=True)
class Budget:
    """What one device gives to a computation.

    Attributes:
        training_bytes: What clients that train at once may take.
        cache_bytes: What they should take where a block in the cache trains faster; None: all that they may.
        evaluated_numbers: Features, and parameters, that are evaluated at once.  What a network makes of them within
            itself can take ten times as much: 2^26 took 10 GB of a GPU with spectrograms and 16 channels.
        gradient_numbers: Of the gradients of single rows that are held at once.
        client_memory_bytes: What clients keep between rounds, all of them; where it is more it lies on disk.
        gate_numbers: Of the gates of a recurrent layer's steps that are computed at once where none are kept.
    """

    training_bytes: int = 1 << 30
    cache_bytes: int | None = None
    evaluated_numbers: int = 1 << 21
    gradient_numbers: int = 1 << 26
    client_memory_bytes: int = 4 << 30
    gate_numbers: int = 1 << 22

    def clients_in_training(self, model_bytes: int, optimiser_states: int = 0) -> int:
        """How many clients train at once, with models of that size and so many states of an optimiser each."""
        each = (MODEL_COPIES + optimiser_states) * model_bytes
        most = self.training_bytes // each
        wanted = most if self.cache_bytes is None else max(self.cache_bytes // each, MIN_CLIENTS)
        return max(min(wanted, most), 1)

    def rows_evaluated(self, num_features: int, num_clients: int = 1) -> int:
        """How many rows of each of so many clients are evaluated at once."""
        return max(self.evaluated_numbers // (max(num_features, MIN_FEATURES) * num_clients), 1)


BUDGETS = {
    "cpu": Budget(cache_bytes=4 << 20),
    "cuda": Budget(training_bytes=4 << 30, evaluated_numbers=1 << 24, client_memory_bytes=32 << 30),
}


def budget_of(device: torch.device) -> Budget:
    """The budget of a device."""
    return BUDGETS.get(device.type, Budget())
