"""Client memory on disk: what was written is read, a checkpoint's slots are left alone, and damage is told."""

import errno
import os
from dataclasses import dataclass

import pytest
import torch

from selffl.algorithms.records import map_tensors, tensors_of
from selffl.errors import CheckpointError, ConfigError
from selffl.state.checkpoint import fill_record
from selffl.state.disk import MIN_GROWTH, DiskMemory, SlotFile, bytes_of_client
from selffl.state.memory import MemoryStore, memories_of, store_of


@dataclass(frozen=True)
class Kept:
    params: torch.Tensor  # [C, 5]
    clock: torch.Tensor  # [C]
    flags: torch.Tensor  # [C, 3], one byte each


FRESH = Kept(torch.full((1, 5), 0.5), torch.ones(1), torch.tensor([[True, False, True]]))


def kept(*numbers):
    """A memory that says whose it is."""
    tensor = torch.tensor(numbers, dtype=torch.float32)
    return Kept(tensor[:, None] + torch.arange(5) / 8, tensor, (tensor[:, None].int() + torch.arange(3)) % 2 == 0)


def same(first, second):
    return all(torch.equal(tensor, tensors_of(second)[name]) for name, tensor in tensors_of(first).items())


def reopened(memory, path):
    """As another process finds it: the tensors from a checkpoint, the files from a folder."""
    saved = {name: tensor.clone() for name, tensor in tensors_of(memory).items()}
    return fill_record(DiskMemory.begin(FRESH, len(memory.slots), path), saved)


def publish(memory):
    with memory.publishing():
        pass


def test_it_is_the_store_in_memory_whatever_is_read_and_written(tmp_path):
    disk = DiskMemory.begin(FRESH, 40, tmp_path)
    plain = MemoryStore(map_tensors(lambda each: each.expand(40, *each.shape[1:]), FRESH), ())
    torch.manual_seed(0)
    for number in range(60):
        clients = torch.randperm(40)[: int(torch.randint(1, 9, ()))]
        new = kept(*torch.randint(100, (len(clients),)).tolist())
        for store in (disk, plain):
            store.write(clients, new)
        asked = torch.randperm(40)[:7]
        assert same(disk.read(asked), plain.read(asked))
        if number % 7 == 0:
            publish(disk)
        if number % 20 == 19:
            publish(disk)
            disk = reopened(disk, tmp_path)
    assert same(disk.read(torch.arange(40)), plain.contents())


def test_who_has_not_taken_part_costs_nothing(tmp_path):
    memory = DiskMemory.begin(FRESH, 1_000_000, tmp_path)
    assert same(
        memory.read(torch.tensor([3, 999_999])), map_tensors(lambda each: each.expand(2, *each.shape[1:]), FRESH)
    )
    assert not list(tmp_path.iterdir())
    memory.write(torch.tensor([7, 999_999]), kept(1, 2))
    assert (tmp_path / "params.slots").stat().st_size == MIN_GROWTH * 5 * 4
    assert memory.slots[[7, 999_999]].tolist() == [0, 1]
    assert bytes_of_client(FRESH) == 5 * 4 + 4 + 3


def test_what_a_checkpoint_refers_to_is_not_written_into(tmp_path):
    memory = DiskMemory.begin(FRESH, 10, tmp_path)
    memory.write(torch.tensor([1, 2, 3]), kept(1, 2, 3))
    publish(memory)
    earlier = reopened(memory, tmp_path)
    memory.write(torch.tensor([2, 5]), kept(20, 50))
    memory.write(torch.tensor([2]), kept(200))  # not published yet: in place
    assert memory.slots[[1, 2, 3, 5]].tolist() == [0, 3, 2, 4]
    assert same(earlier.read(torch.tensor([1, 2, 3])), kept(1, 2, 3))
    assert same(memory.read(torch.tensor([2, 5])), kept(200, 50))
    # What is killed here goes on from the checkpoint, and fills the same slots.
    earlier.write(torch.tensor([2, 5]), kept(20, 50))
    assert torch.equal(earlier.slots, memory.slots)
    publish(memory)
    memory.write(torch.tensor([9]), kept(9))  # the slot that client 2 had
    assert memory.slots[9] == 1


def test_a_checkpoint_that_could_not_be_written_frees_nothing(tmp_path):
    memory = DiskMemory.begin(FRESH, 4, tmp_path)
    memory.write(torch.tensor([0]), kept(1))
    publish(memory)
    earlier = reopened(memory, tmp_path)
    memory.write(torch.tensor([0]), kept(2))
    with pytest.raises(OSError, match="full"), memory.publishing():
        raise OSError("full")
    memory.write(torch.tensor([0, 1]), kept(3, 4))
    assert same(earlier.read(torch.tensor([0])), kept(1))
    assert same(memory.read(torch.tensor([0, 1])), kept(3, 4))


@pytest.mark.parametrize("name", ["params", "clock", "flags"])
def test_a_changed_byte_is_told_by_whoever_reads_it(tmp_path, name):
    memory = DiskMemory.begin(FRESH, 4, tmp_path)
    memory.write(torch.tensor([0, 1]), kept(1, 2))
    publish(memory)
    content = bytearray((tmp_path / f"{name}.slots").read_bytes())
    content[1] ^= 1
    (tmp_path / f"{name}.slots").write_bytes(content)
    found = reopened(memory, tmp_path)
    with pytest.raises(CheckpointError, match="their sums differ"):
        found.read(torch.tensor([1, 0]))
    assert same(found.read(torch.tensor([1])), kept(2))


def test_a_file_that_is_gone_is_told(tmp_path):
    memory = DiskMemory.begin(FRESH, 4, tmp_path)
    memory.write(torch.tensor([0, 1]), kept(1, 2))
    publish(memory)
    (tmp_path / "clock.slots").unlink()
    with pytest.raises(CheckpointError, match="has 0 slots, and the checkpoint refers to slot 1"):
        reopened(memory, tmp_path).read(torch.tensor([1]))


def test_a_full_disk_is_an_error_with_the_name_of_the_file(tmp_path, monkeypatch):
    def refuse(handle, start, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse, raising=False)
    with pytest.raises(OSError, match=r"No space left on device.*params\.slots"):
        DiskMemory.begin(FRESH, 4, tmp_path).write(torch.tensor([0]), kept(1))


def test_a_folder_may_be_copied_and_a_temporary_one_goes(tmp_path):
    memory = DiskMemory.begin(FRESH, 300, None)
    clients = torch.arange(0, 300, 2)
    memory.write(clients, kept(*clients.tolist()))
    place = memory.folder.path
    is_itself = memory.stored_in(place) is memory
    assert is_itself
    copy = memory.stored_in(tmp_path / "copy")
    assert same(copy.read(clients), kept(*clients.tolist()))
    assert place.is_dir()
    del memory
    assert not place.exists()


def test_pages_are_given_back(tmp_path, monkeypatch):
    monkeypatch.setattr("selffl.state.disk.MAPPED_BYTES", 100)
    file = SlotFile(tmp_path / "a.slots", torch.zeros(50))
    file.write(torch.arange(4), torch.arange(200.0).view(4, 50))
    assert file._touched == 0
    assert torch.equal(file.read(torch.tensor([2])), torch.arange(100.0, 150.0)[None])


def test_a_state_with_memories_on_disk_is_consumed(tmp_path):
    memory = DiskMemory.begin(FRESH, 4, tmp_path)
    assert store_of(memory, (), copied=False) is memory
    with pytest.raises(ConfigError, match="expected consume=True"):
        store_of(memory, ())
    assert same(memories_of(memory, torch.tensor([0])), FRESH)


def test_slots_are_taken_again_and_in_order(tmp_path):
    """Before a checkpoint refers to it a slot is written again; what is free is taken before the file grows."""
    memory = DiskMemory.begin(FRESH, 4, tmp_path / "a" / "b")
    assert (memory.slots.tolist(), memory.slots.dtype, memory.sums.tolist()) == ([-1] * 4, torch.int32, [0] * 4)
    for number in range(3):
        memory.write(torch.tensor([2, 0]), kept(number, number + 1))
        assert memory.slots.tolist() == [1, -1, 0, -1]
    publish(memory)
    memory.write(torch.tensor([2]), kept(7))
    assert memory.slots.tolist() == [1, -1, 2, -1]
    publish(memory)
    memory.write(torch.tensor([0, 3]), kept(8, 9))
    assert memory.slots.tolist() == [0, -1, 2, 3]
    assert same(memory.read(torch.tensor([2, 0, 3])), kept(7, 8, 9))


def test_nobody_may_be_read_and_written(tmp_path):
    file, nobody = SlotFile(tmp_path / "a.slots", torch.zeros(3)), torch.zeros(0, dtype=torch.int64)
    assert file.read(nobody).shape == (0, 3)
    file.write(nobody, torch.zeros(0, 3))
    file.write(torch.tensor([2, 0]), torch.arange(6.0).view(2, 3))
    again = SlotFile(tmp_path / "a.slots", torch.zeros(3))
    assert again.read(torch.tensor([2, 0])).tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    last = SlotFile(tmp_path / "a.slots", torch.zeros(3)).read(torch.tensor([MIN_GROWTH - 1, 0]))
    assert last.tolist() == [[0.0, 0.0, 0.0], [3.0, 4.0, 5.0]]
    with pytest.raises(CheckpointError, match=f"has {MIN_GROWTH} slots, and the checkpoint refers to slot"):
        again.read(torch.tensor([MIN_GROWTH, 0]))


@pytest.mark.parametrize("row", [torch.zeros(3), torch.zeros(3, dtype=torch.bool), torch.zeros(2, 3).half()])
def test_every_word_counts_in_a_sum_and_where_it_stands(row, tmp_path):
    file = SlotFile(tmp_path / "a.slots", row)
    number = row.numel()
    file.write(torch.arange(number + 1), torch.cat([torch.eye(number), torch.zeros(1, number)]).view(-1, *row.shape))
    sums = file.sums(torch.arange(number + 1))
    assert len(set(sums.tolist())) == number + 1
    assert file.sums(torch.tensor([number])).tolist() == [0]
    assert torch.equal(file.sums(torch.tensor([1, 0])), sums[[1, 0]])


def test_sums_stay_the_same_from_version_to_version(tmp_path):
    """What an earlier process has summed is compared with what this one sums."""
    memory = DiskMemory.begin(FRESH, 1, tmp_path)
    memory.write(torch.tensor([0]), kept(3))
    publish(memory)
    assert memory.sums.tolist() == [292610980100993667]


def test_what_is_published_is_on_the_disk(tmp_path, monkeypatch):
    memory, waited = DiskMemory.begin(FRESH, 2, tmp_path), []
    monkeypatch.setattr("selffl.state.disk.sync_file", lambda path: waited.append(path.name))
    memory.write(torch.tensor([1]), kept(3))
    with memory.publishing():
        assert waited == ["params.slots", "clock.slots", "flags.slots", tmp_path.name]
