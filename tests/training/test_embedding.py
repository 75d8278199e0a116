"""Numbers that an embedding does not have: refused, and never another client's."""

import numpy as np
import pytest
import torch
from torch import nn

import selffl
from selffl.errors import ConfigError, DataError, DivergedError
from selffl.training.blocks import gradient_of, outputs_of
from selffl.training.flat import FlatModel


class Words(nn.Module):
    """The mean of a row's words, or of its first column's and its second's from a smaller table."""

    def __init__(self, size=10, second=None):
        super().__init__()
        self.table = nn.Embedding(size, 4)
        self.second = nn.Embedding(second, 4) if second else None
        self.output = nn.Linear(4, 2)

    def forward(self, rows):
        if self.second is None:
            return self.output(self.table(rows).mean(1))
        return self.output(self.table(rows[:, 0]) + self.second(rows[:, 1]))


def federation(columns=5, high=10):
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(6), 10)
    return selffl.Federation.from_arrays(rng.integers(0, high, (60, columns)), rng.integers(0, 2, 60), client, 0.3)


@pytest.mark.parametrize("wrong", [10, 12, 25, -1, -15])
def test_a_number_beyond_the_table_is_refused_in_one_line(wrong):
    fed = federation()
    fed.train.features[int(fed.train.offset[3]), 0] = wrong
    with pytest.raises(
        DataError, match=rf"^rows hold the number {wrong}, and Words has embeddings of 10; .*0 to 9"
    ) as caught:
        selffl.train(Words(), fed, "local", rounds=2, participation=1.0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("gradients", ["auto", "vmap"])
def test_a_number_beyond_the_smaller_of_two_tables_stops_training_and_reaches_nobody_else(gradients):
    fed = federation(columns=2, high=5)
    fed.train.features[int(fed.train.offset[3]), 1] = 7  # the first table has it, the second has not
    with pytest.raises(DivergedError):
        selffl.train(Words(10, second=5), fed, "local", rounds=2, participation=1.0, gradients=gradients)


def test_gradients_and_outputs_of_other_clients_do_not_depend_on_it():
    torch.manual_seed(0)
    model = FlatModel(Words(10, second=5))
    params = model.params + 0.1 * torch.randn(4, len(model.params))
    features, labels = torch.randint(0, 5, (4, 6, 2)), torch.randint(0, 2, (4, 6))
    gradient = gradient_of(model, nn.functional.cross_entropy, "vmap")
    found, outputs = gradient(params, features, labels), outputs_of(model, params, features, "vmap")
    loop = gradient_of(model, nn.functional.cross_entropy, "loop")(params, features, labels)
    torch.testing.assert_close(found, loop)
    features[2, 0, 1] = 8
    after, changed = gradient(params, features, labels), outputs_of(model, params, features, "vmap")
    others = [0, 1, 3]
    assert torch.equal(after[others], found[others])
    assert torch.equal(changed[others], outputs[others])
    assert after[2].isnan().any()
    assert changed[2, 0].isnan().all()


def test_a_layer_without_a_rule_for_many_clients_is_named_with_the_way_out():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.output = nn.LSTMCell(3, 4), nn.Linear(4, 2)

        def forward(self, rows):
            return self.output(self.cell(rows)[0])

    rng = np.random.default_rng(0)
    fed = selffl.Federation.from_arrays(
        rng.normal(size=(40, 3)).astype(np.float32), rng.integers(0, 2, 40), np.repeat(range(4), 10)
    )
    with pytest.raises(ConfigError, match=r"gradients='loop'"):
        selffl.train(Cell(), fed, "fedavg", rounds=1, participation=1.0, gradients="vmap")
    module = Cell()
    by_itself, by_loop = (
        selffl.train(module, fed, "fedavg", rounds=1, participation=1.0, gradients=way) for way in ("auto", "loop")
    )
    assert torch.equal(by_itself.global_model().output.weight, by_loop.global_model().output.weight)
