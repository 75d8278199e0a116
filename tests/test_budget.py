"""The sizes of blocks and chunks that follow from the memory."""

import pytest
import torch

from selffl.budget import budget_of

CPU, CUDA, OTHER = (budget_of(torch.device(kind)) for kind in ("cpu", "cuda", "mps"))
SOFTMAX, CNN, LARGE = 4 * 7850, 4 * 62_006, 4 * 100_000_000  # bytes of their parameters


@pytest.mark.parametrize(
    ("budget", "model_bytes", "optimiser_states", "clients"),
    [
        (CPU, SOFTMAX, 0, 33),  # 4 MiB / (4 * 31,400)
        (CPU, CNN, 0, 32),  # no fewer, though they leave the cache
        (CPU, SOFTMAX // 10, 2, 222),  # 4 MiB / (6 * 3,140)
        (CPU, LARGE // 8, 0, 5),  # 1 GiB / (4 * 50,000,000)
        (CPU, LARGE, 0, 1),  # one client trains whatever it takes
        (CUDA, SOFTMAX, 0, 34_195),  # 4 GiB / (4 * 31,400)
        (CUDA, LARGE, 0, 2),
        (OTHER, SOFTMAX, 0, 8548),  # 1 GiB, no cache
    ],
)
def test_clients_that_train_at_once(budget, model_bytes, optimiser_states, clients):
    assert budget.clients_in_training(model_bytes, optimiser_states) == clients


@pytest.mark.parametrize(
    ("budget", "num_features", "num_clients", "rows"),
    [
        (CPU, 784, 1, 2674),  # 2^21 / 784
        (CPU, 25, 1, 32_768),  # few words count as 64 features
        (CPU, 3072, 100, 6),
        (CPU, 1 << 22, 1, 1),  # a row is evaluated whatever it takes
        (CUDA, 784, 1, 21_399),
        (OTHER, 784, 1, 2674),
    ],
)
def test_rows_that_are_evaluated_at_once(budget, num_features, num_clients, rows):
    assert budget.rows_evaluated(num_features, num_clients) == rows
