"""The store of client memories: read a cohort, write it back, and never touch what came in or went out."""

from dataclasses import dataclass

import pytest
import torch

from selffl.algorithms.records import map_tensors, tensors_of
from selffl.errors import ConfigError
from selffl.state.memory import AbsentMemory, MemoryStore, ShardMemory, SpreadMemory, store_of


@dataclass(frozen=True)
class Inner:
    count: torch.Tensor


@dataclass(frozen=True)
class Memory:
    params: torch.Tensor
    inner: Inner
    label: str = "kept"


@dataclass(frozen=True)
class Nothing:
    pass


def memory_of(shape, num_clients):
    size = torch.Size([*shape, num_clients])
    numbers = torch.arange(size.numel(), dtype=torch.float64).reshape(size)
    return Memory(
        numbers.unsqueeze(-1) * torch.tensor([1.0, 10.0], dtype=torch.float64), Inner(numbers.to(torch.int64))
    )


def assert_equal(record, other):
    for name, tensor in tensors_of(record).items():
        assert torch.equal(tensor, tensors_of(other)[name]), name


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_a_contents_is_what_was_stored(shape):
    memory = memory_of(shape, 5)
    store = MemoryStore(memory, shape)
    assert_equal(store.contents(), memory)
    assert store.contents().label == "kept"
    assert store.contents().inner.count.dtype == torch.int64


def test_a_cohort_is_read_and_written():
    store = MemoryStore(memory_of((), 5), ())
    rows = torch.tensor([1, 4])
    assert store.read(rows).params.tolist() == [[1.0, 10.0], [4.0, 40.0]]
    store.write(rows, Memory(-torch.ones(2, 2, dtype=torch.float64), Inner(torch.tensor([7, 8]))))
    assert store.read(torch.tensor([4, 1])).inner.count.tolist() == [8, 7]
    contents = store.contents()
    assert contents.params[:, 0].tolist() == [0.0, -1.0, 2.0, 3.0, -1.0]
    assert contents.inner.count.tolist() == [0, 7, 2, 3, 8]


def test_repeats_have_rows_of_their_own():
    """Three federations of five: client c of federation r is row 5r + c."""
    memory = memory_of((3,), 5)
    store = MemoryStore(memory, (3,))
    clients = torch.tensor([[0, 1], [2, 4], [3, 4]])
    rows = clients + 5 * torch.arange(3).unsqueeze(-1)
    read = store.read(rows)
    assert read.params.shape == (3, 2, 2)
    for r in range(3):
        assert torch.equal(read.params[r], memory.params[r, clients[r]])
    store.write(rows, map_tensors(torch.neg, read))
    contents = store.contents()
    for r in range(3):
        for c in range(5):
            sign = -1 if c in clients[r].tolist() else 1
            assert contents.params[r, c].tolist() == (sign * memory.params[r, c]).tolist()


def test_what_came_in_is_left_alone():
    memory = memory_of((), 4)
    store = MemoryStore(memory, ())
    store.write(torch.arange(4), map_tensors(torch.zeros_like, memory))
    assert_equal(memory, memory_of((), 4))


def test_what_was_read_is_left_alone():
    store = MemoryStore(memory_of((), 4), ())
    read = store.read(torch.tensor([0, 3]))
    store.write(torch.arange(4), map_tensors(torch.zeros_like, memory_of((), 4)))
    assert read.params.tolist() == [[0.0, 0.0], [3.0, 30.0]]
    read.params.fill_(5.0)
    assert store.contents().params.abs().sum() == 0


def test_a_bare_tensor_and_no_memory_at_all():
    store = MemoryStore(torch.tensor([[1, 2], [3, 4]]), (2,))
    rows = torch.tensor([[1], [2]])
    store.write(rows, store.read(rows) + 10)
    assert store.contents().tolist() == [[1, 12], [13, 4]]
    empty = MemoryStore(Nothing(), ())
    empty.write(torch.tensor([0]), empty.read(torch.tensor([0])))
    assert empty.contents() == Nothing()


def test_the_tensors_of_a_record_by_name():
    memory = memory_of((), 2)
    assert list(tensors_of(memory)) == ["params", "inner.count"]
    assert tensors_of(memory)["inner.count"] is memory.inner.count
    assert tensors_of(Nothing()) == tensors_of("label") == {}
    doubled = map_tensors(torch.add, memory, memory)
    assert doubled.inner.count.tolist() == [0, 2]
    assert map_tensors(torch.neg, 3) == 3
    assert map_tensors(torch.neg, Nothing) is Nothing


def minus(number):
    """The memory of as many clients, which differs from what `memory_of` says."""
    return map_tensors(lambda tensor: -tensor - 1, memory_of((), number))


def test_a_shard_reads_and_writes_its_own_clients_and_says_who_has_changed():
    store = MemoryStore(memory_of((), 4), ())  # of clients 10 to 13
    shard = ShardMemory(store, 10)
    assert shard.contents() is shard
    assert (shard.take_changed().tolist(), shard.take_changed().dtype) == ([], torch.int64)
    assert shard.read(torch.tensor([13, 11])).inner.count.tolist() == [3, 1]
    shard.write(torch.tensor([12, 10]), minus(2))
    shard.write(torch.tensor([12]), minus(1))
    assert store.contents().inner.count.tolist() == [-2, 1, -1, 3]
    assert [shard.take_changed().tolist() for _ in range(2)] == [[10, 12], []]


def test_what_changed_elsewhere_is_collected():
    store = MemoryStore(memory_of((), 4), ())
    spread = SpreadMemory(store, lambda: [(torch.tensor([3]), minus(1)), (torch.tensor([1]), minus(1))])
    assert spread.contents() is spread
    spread.write(torch.tensor([0]), minus(1))
    assert spread.read(torch.tensor([0, 3])).inner.count.tolist() == [-1, 3]
    assert spread.collect().inner.count.tolist() == [-1, -1, 2, -1]


def test_who_has_no_memories_says_who_has():
    absent = AbsentMemory()
    assert absent.contents() is absent
    for ask in (lambda: absent.read(torch.tensor([0])), lambda: absent.write(torch.tensor([0]), minus(1))):
        with pytest.raises(ConfigError, match="what clients keep is with rank 0"):
            ask()


def test_a_store_may_have_the_memory_itself_but_an_expanded_one():
    memory = memory_of((), 3)
    MemoryStore(memory, (), copied=False).write(torch.tensor([1]), minus(1))
    assert memory.inner.count.tolist() == [0, -1, 2]
    store_of(memory, (), copied=False).write(torch.tensor([2]), minus(1))
    assert memory.inner.count.tolist() == [0, -1, -1]
    store_of(memory, (), copied=True).write(torch.tensor([0]), minus(1))
    assert memory.inner.count.tolist() == [0, -1, -1]
    one = torch.zeros(1).expand(3)
    store = MemoryStore(one, (), copied=False)
    store.write(torch.tensor([1]), torch.ones(1))
    assert (store.contents().tolist(), one.tolist()) == ([0.0, 1.0, 0.0], [0.0, 0.0, 0.0])
