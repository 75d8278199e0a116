"""The LSTM over frozen word vectors."""

import hashlib

import numpy as np
import pytest
import torch
from torch import nn

from selffl.data import text
from selffl.errors import ConfigError, DataError
from selffl.models.text import lstm
from selffl.training.flat import FlatModel


@pytest.fixture(autouse=True)
def table(tmp_path, monkeypatch):
    """Four words of three dimensions; with padding and the unknown word, numbers 0 to 5."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SELFFL_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "glove100").mkdir()
    vectors, words = (tmp_path / "glove100" / name for name in text.COMPACT)
    np.savez(vectors, vectors=np.random.default_rng(0).normal(size=(4, 3)).astype(np.float16))
    words.write_text("the\ngood\nbad\nnot\n", encoding="utf-8")
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (vectors, words)}
    monkeypatch.setattr(text, "COMPACT", digests)
    return text.read_embeddings()


def test_outputs_by_hand(table):
    """The equations of torch's documentation, written out: a layer after the other, a word after the other."""
    module = lstm((5,), 3, hidden=4).double()
    ids = torch.tensor([[0, 0, 2, 3, 1], [5, 4, 3, 2, 2]])
    layers = [[getattr(module.lstm, f"{name}_l{k}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
              for k in range(2)]  # fmt: skip
    inputs = torch.tensor(table.vectors).double()[ids].unbind(1)
    for of_input, of_state, input_bias, state_bias in layers:
        state = cell = torch.zeros(2, 4, dtype=torch.float64)
        outputs = []
        for word in inputs:
            gates = word @ of_input.T + input_bias + state @ of_state.T + state_bias
            enter, forget, new, leave = gates.chunk(4, dim=1)
            cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(new)
            state = torch.sigmoid(leave) * torch.tanh(cell)
            outputs.append(state)
        inputs = outputs
    expected = inputs[-1] @ module.output.weight.T + module.output.bias
    torch.testing.assert_close(module(ids), expected)


def test_word_vectors_are_frozen_and_no_part_of_what_is_trained(table):
    module = lstm((25,), 2)
    assert not module.embedding.weight.requires_grad
    assert torch.equal(module.embedding.weight, torch.tensor(table.vectors))
    assert not list(module.buffers())
    trained = 4 * 256 * (3 + 256 + 2) + 4 * 256 * (256 + 256 + 2) + 2 * 257
    assert len(FlatModel(module).params) == trained
    assert [layer.name for layer in FlatModel(module).layers] == ["lstm", "output"]
    with torch.no_grad():
        module.embedding.weight.zero_()  # its own copy
    assert text.read_embeddings().vectors.any()


def test_gradients_reach_every_trained_parameter(table):
    module = lstm((5,), 2, hidden=4)
    nn.functional.cross_entropy(module(torch.tensor([[0, 1, 2, 3, 4]])), torch.tensor([1])).backward()
    for name, part in module.named_parameters():
        assert (part.grad is None) == (name == "embedding.weight")
        if part.grad is not None:
            assert part.grad.abs().sum() > 0


def test_the_options():
    module = lstm((7,), 5, hidden=6, num_layers=3)
    assert module(torch.zeros(2, 7, dtype=torch.int64)).shape == (2, 5)
    assert (module.lstm.hidden_size, module.lstm.num_layers, module.lstm.dropout) == (6, 3, 0.0)


def test_a_word_number_beyond_the_table_is_one_clear_line():
    import selffl

    fed = selffl.Federation.from_arrays(np.full((8, 3), 6), [0, 1] * 4, [0, 0, 0, 0, 1, 1, 1, 1], 0.25)
    with pytest.raises(
        DataError, match=r"^rows hold the number 6, and LSTMClassifier has embeddings of 6; expected 0 to 5"
    ):
        selffl.train(lstm((3,), 2, hidden=4), fed, "fedavg", rounds=1, participation=1.0, gradients="loop")


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (((3, 32, 32), 2), {}, r"rows have shape \(3, 32, 32\); expected word numbers \(num_tokens,\)"),
        (((), 2), {}, r"rows have shape \(\); expected word numbers"),
        (((25,), 2), {"hidden": 0}, r"hidden is 0; expected a whole number, 1 or more\."),
        (((25,), 2), {"num_layers": 1.5}, r"num_layers is 1\.5; expected"),
        (((25,), 2), {"embeddings": "glove10"}, r"unknown embeddings 'glove10'; did you mean 'glove100'\?"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(arguments, options, message):
    with pytest.raises(ConfigError, match=f"^{message}") as caught:
        lstm(*arguments, **options)
    assert "\n" not in str(caught.value)


def test_missing_vectors_are_a_data_error():
    with pytest.raises(DataError, match=r"^glove\.6B\.300d\.txt of glove was not found"):
        lstm((25,), 2, embeddings="glove300")


def test_the_real_table_gives_the_number_of_parameters_of_the_docstring(monkeypatch):
    monkeypatch.undo()
    try:
        module = lstm((25,), 2)
    except DataError as error:
        pytest.skip(str(error))
    assert module.embedding.weight.shape == (30_002, 100)
    assert len(FlatModel(module).params) == 893_442
