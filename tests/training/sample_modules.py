"""Modules of several kinds with rows to feed them, and the gradient of one client as anybody would compute it."""

import copy

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from selffl.training.flat import FlatModel

CROSS_ENTROPY = nn.functional.cross_entropy
NUM_CLIENTS, BATCH, CLASSES = 4, 6, 5


def seeded(make, seed=0, dtype=torch.float32):
    """A module with parameters that depend on the seed alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make().to(dtype)


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class BagOfWords(nn.Module):
    """Embedding and linear layer, on rows of seven words."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(11, 4), nn.Linear(4, CLASSES)

    def forward(self, rows):
        return self.head(self.words(rows).mean(-2))


class Recurrent(nn.Module):
    """The last state of an LSTM over rows of three steps."""

    def __init__(self):
        super().__init__()
        self.memory, self.head = nn.LSTM(4, 3, batch_first=True), nn.Linear(3, CLASSES)

    def forward(self, rows):
        return self.head(self.memory(rows)[0][..., -1, :])


class Tied(nn.Module):
    """The same weights there and back."""

    def __init__(self):
        super().__init__()
        self.there, self.back = nn.Linear(CLASSES, CLASSES), nn.Linear(CLASSES, CLASSES)
        self.back.weight = self.there.weight

    def forward(self, rows):
        return self.back(torch.tanh(self.there(rows)))


MODULES = {
    "linear": (lambda: nn.Linear(12, 5), (12,)),
    "linear without bias": (lambda: nn.Linear(12, 5, bias=False), (12,)),
    "linear in a sequence": (lambda: nn.Sequential(nn.Linear(12, 5)), (12,)),
    "mlp": (lambda: nn.Sequential(nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 5)), (12,)),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 5)
        ),
        (1, 8, 8),
    ),
    "other convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 2), bias=False),
            nn.Tanh(),
            nn.Conv2d(3, 4, 2, dilation=(1, 2)),
            nn.Conv2d(4, 4, 3, padding="same", groups=2),
            nn.Flatten(),
            nn.Linear(120, 5),
        ),
        (2, 7, 9),
    ),
    "one-dimensional convolution": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(15, 5)),
        (2, 7),
    ),
    "group norm": (
        lambda: nn.Sequential(nn.Linear(12, 8), nn.GroupNorm(2, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 5)),
        (12,),
    ),
    "embedding": (BagOfWords, (7,)),
    "lstm": (Recurrent, (3, 4)),
    "tied": (Tied, (5,)),
}


def features_of(name, *leading, seed=2, dtype=torch.float64):
    """Rows for the module of that name."""
    if name == "embedding":
        return torch.randint(11, (*leading, 7), generator=torch.Generator().manual_seed(seed))
    return random(*leading, *MODULES[name][1], seed=seed, dtype=dtype)


def gradient_by_autograd(module, params, features, labels, loss=CROSS_ENTROPY):
    """One client, with loss.backward()."""
    module = copy.deepcopy(module)
    vector_to_parameters(params, module.parameters())
    loss(module(features), labels).backward()
    return parameters_to_vector([parameter.grad for parameter in module.parameters()])


def cohort_of(name, scale=1.0, dtype=torch.float64, num_clients=NUM_CLIENTS):
    """A module, its flat view, and a block of clients that each have their own parameters and minibatch."""
    module = seeded(MODULES[name][0], dtype=dtype)
    model = FlatModel(module)
    params = model.params + scale * random(num_clients, len(model.params), seed=1, dtype=dtype)
    labels = torch.randint(CLASSES, (num_clients, BATCH), generator=torch.Generator().manual_seed(3))
    return module, model, params, features_of(name, num_clients, BATCH, dtype=dtype), labels
