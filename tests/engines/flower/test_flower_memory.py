"""A client's memory on disk: whole or not there, one clock tick a round, and nobody else's."""

import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'selffl[flower]'")

from selffl.algorithms import ALGORITHMS, algorithm
from selffl.algorithms.contract import map_tensors, tensors_of
from selffl.engines.flower.memory import ClientMemory, file_name
from selffl.errors import CheckpointError, ConfigError


def memory_of(folder, client="anna", experiment="first", name="self-fl"):
    return ClientMemory(folder, experiment, client, algorithm(name).newcomer(torch.zeros(1, 4)))


def plus(memory, number):
    """A memory that can be told from others."""
    return map_tensors(lambda tensor: tensor + number, memory)


def same(one, other):
    return all(tensor.equal(tensors_of(other)[name]) for name, tensor in tensors_of(one).items())


def test_a_client_that_never_took_part_is_a_newcomer(tmp_path):
    memory = memory_of(tmp_path)
    assert memory.latest() == (memory.newcomer, 0)
    assert memory.before(1) is memory.newcomer
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - {"fedper", "fedrep"}))
def test_what_is_kept_is_found_by_another_process(name, tmp_path):
    first = memory_of(tmp_path, name=name)
    after = plus(first.newcomer, 1)
    first.keep(3, first.before(3), after)
    found, round_number = memory_of(tmp_path, name=name).latest()
    assert round_number == 3
    assert same(found, after)
    assert type(found) is type(after)


def test_a_round_asked_for_again_starts_where_it_started(tmp_path):
    memory = memory_of(tmp_path)
    one, two = plus(memory.newcomer, 1), plus(memory.newcomer, 2)
    memory.keep(1, memory.before(1), one)
    memory.keep(4, memory.before(4), two)
    for _ in range(3):
        assert same(memory.before(4), one)
        memory.keep(4, memory.before(4), two)
    assert same(memory.before(5), two)
    with pytest.raises(ConfigError, match="asked for round 3 of experiment first and has done round 4"):
        memory.before(3)


def test_clients_and_experiments_have_memories_of_their_own(tmp_path):
    names = ["anna", "Anna", "../anna", "a/b", "a\\b", "", ".", "..", "ä" * 300, "ä" * 301, "con:", "1"]
    for number, client in enumerate(names, start=1):
        for experiment in ("first", "../second"):
            memory = memory_of(tmp_path, client, experiment)
            assert memory.latest()[1] == 0
            memory.keep(number, memory.newcomer, plus(memory.newcomer, number))
    for number, client in enumerate(names, start=1):
        assert memory_of(tmp_path, client).latest()[1] == number
    assert {path.parent.parent for path in tmp_path.rglob("*.safetensors")} == {tmp_path}
    lowered = [file_name(name).lower() for name in names]
    assert len(set(lowered)) == len(names)
    assert max(map(len, lowered)) < 100


@pytest.mark.parametrize("harm", ["cut", "flipped", "emptied", "text"])
def test_a_damaged_memory_is_one_clear_error(harm, tmp_path):
    memory = memory_of(tmp_path)
    memory.keep(1, memory.newcomer, plus(memory.newcomer, 1))
    content = bytearray(memory.path.read_bytes())
    if harm == "flipped":
        content[-3] ^= 1
    harmed = {"cut": content[:-5], "flipped": content, "emptied": b"", "text": b"nothing of the kind"}[harm]
    memory.path.write_bytes(harmed)
    with pytest.raises(CheckpointError, match="damaged"):
        memory.before(2)


def test_the_memory_of_another_client_is_refused(tmp_path):
    anna, berta = memory_of(tmp_path), memory_of(tmp_path, "berta")
    anna.keep(1, anna.newcomer, anna.newcomer)
    anna.path.rename(berta.path)
    with pytest.raises(CheckpointError, match="is the memory of client anna in experiment first"):
        berta.latest()


def test_the_memory_of_another_model_or_method_is_refused(tmp_path):
    memory = memory_of(tmp_path)
    memory.keep(1, memory.newcomer, memory.newcomer)
    wider = ClientMemory(tmp_path, "first", "anna", algorithm("self-fl").newcomer(torch.zeros(1, 5)))
    with pytest.raises(CheckpointError, match=r"expected torch.float32 \(1, 5\)"):
        wider.latest()
    with pytest.raises(CheckpointError, match="lacks"):
        memory_of(tmp_path, name="ditto").latest()


def test_a_kill_while_writing_leaves_the_last_memory(tmp_path, monkeypatch):
    memory = memory_of(tmp_path)
    memory.keep(1, memory.newcomer, plus(memory.newcomer, 1))
    monkeypatch.setattr("selffl.state.files.os.fsync", lambda handle: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        memory.keep(2, memory.before(2), plus(memory.newcomer, 2))
    monkeypatch.undo()
    assert memory.latest()[1] == 1
