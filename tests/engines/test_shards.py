"""Shards: who belongs to which, who takes which, and messages that hold what was sent."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from selffl.engines.messages import pack, unpack
from selffl.engines.ranks import Ranks
from selffl.engines.shards import Shards
from selffl.engines.spread import clients_of
from selffl.errors import ConfigError
from selffl.state.memory import AbsentMemory, MemoryStore, ShardMemory, SpreadMemory, store_of, whole_memory

CPU = torch.device("cpu")


@pytest.mark.parametrize(("number", "num_clients"), [(1, 5), (2, 5), (3, 10), (7, 7), (4, 3)])
def test_every_client_is_in_one_shard(number, num_clients):
    shards = Shards(number)
    clients = torch.arange(num_clients)[::2]
    parts = [clients[part] for part in shards.slices(clients, num_clients)]
    assert len(parts) == number
    assert torch.equal(torch.cat(parts), clients)
    bounds = shards.bounds(num_clients)
    for shard, part in enumerate(parts):
        assert number == 1 or all(bounds[shard] <= client < bounds[shard + 1] for client in part.tolist())
    sizes = [high - low for low, high in pairwise(bounds)]
    assert sum(sizes) == num_clients
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("size", "number"), [(1, 1), (2, 2), (2, 3), (3, 8), (4, 2)])
def test_ranks_share_out_all_shards_in_their_order(size, number):
    taken = [list(Ranks(rank, size).own_shards(number)) for rank in range(size)]
    assert [shard for each in taken for shard in each] == list(range(number))
    edges = [clients_of(Shards(number), Ranks(0, size), rank, 20) for rank in range(size)]
    assert (edges[0][0], edges[-1][1]) == (0, 20)
    assert all(before[1] == after[0] for before, after in pairwise(edges))


@dataclass
class Sent:
    first: torch.Tensor
    rest: dict[str, list[torch.Tensor]]
    text: str


def test_a_message_holds_what_was_sent():
    whole = torch.arange(12, dtype=torch.float64).reshape(3, 4)
    sent = Sent(
        whole.T,  # which jumps through memory
        {"odd": [torch.tensor([True, False, True]), torch.tensor(3, dtype=torch.int8), whole[:0]]},
        "σ₀²",
    )
    one = torch.ones(1).expand(5)
    found, spread = unpack(*pack((sent, one), CPU), CPU)
    assert found.text == sent.text
    assert torch.equal(spread, one)
    assert torch.equal(found.first, sent.first)
    for mine, other in zip(sent.rest["odd"], found.rest["odd"], strict=True):
        assert torch.equal(mine, other)
        assert mine.dtype == other.dtype


def test_a_shard_says_once_whose_memories_have_changed():
    memory = ShardMemory(MemoryStore(torch.zeros(3, 2), ()), first=4)
    memory.write(torch.tensor([6, 4]), torch.tensor([[1.0, 1.0], [2.0, 2.0]]))
    memory.write(torch.tensor([4]), torch.tensor([[3.0, 3.0]]))
    assert memory.read(torch.tensor([4, 5, 6])).tolist() == [[3.0, 3.0], [0.0, 0.0], [1.0, 1.0]]
    assert memory.take_changed().tolist() == [4, 6]
    assert memory.take_changed().tolist() == []


def test_spread_memories_are_whole_once_they_are_collected():
    elsewhere = [(torch.tensor([2]), torch.tensor([[5.0]]))]
    memory = SpreadMemory(MemoryStore(torch.zeros(3, 1), ()), lambda: elsewhere)
    memory.write(torch.tensor([0]), torch.tensor([[1.0]]))
    assert memory.contents() is memory
    assert memory.read(torch.tensor([0])).tolist() == [[1.0]]
    assert whole_memory(memory).tolist() == [[1.0], [0.0], [5.0]]
    with pytest.raises(ConfigError, match="lie with several processes, and are written into; expected consume=True"):
        store_of(memory, ())


def test_memories_of_another_process_cannot_be_read_or_written():
    absent = AbsentMemory()
    assert absent.contents() is absent
    for ask in (lambda: absent.read(torch.tensor([0])), lambda: absent.write(torch.tensor([0]), None)):
        with pytest.raises(ConfigError, match="what clients keep is with rank 0"):
            ask()
