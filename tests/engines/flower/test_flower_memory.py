"""A client's memory on disk: whole or not there, one clock tick a round, and nobody else's."""

import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

from selffl.algorithms import ALGORITHMS, algorithm
from selffl.algorithms.records import map_tensors, tensors_of
from selffl.engines.flower import memory as module
from selffl.engines.flower.memory import ClientMemory, Start, file_name, memories
from selffl.errors import CheckpointError, RefusedError
from selffl.state.files import exclusive_lock

LATER = 99  # a round that nobody has done


def memory_of(folder, client="anna", experiment="first", name="self-fl", run=""):
    return ClientMemory(folder, experiment, client, algorithm(name).newcomer(torch.zeros(1, 4)), run)


def plus(memory, number):
    """A memory that can be told from others."""
    return map_tensors(lambda tensor: (tensor + number).to(tensor), memory)


def same(one, other):
    return all(tensor.equal(tensors_of(other)[name]) for name, tensor in tensors_of(one).items())


def test_a_client_that_never_took_part_is_a_newcomer(tmp_path):
    memory = memory_of(tmp_path)
    assert memory.before(LATER) == (memory.newcomer, 0)
    assert memory.before(1) == (memory.newcomer, 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_what_is_kept_is_found_by_another_process(name, tmp_path):
    first = memory_of(tmp_path, name=name)
    after = plus(first.newcomer, 1)
    first.keep(3, first.before(3), after)
    found, round_number = memory_of(tmp_path, name=name).before(LATER)
    assert round_number == 3
    assert same(found, after)
    assert type(found) is type(after)


def test_a_round_asked_for_again_starts_where_it_started(tmp_path):
    memory = memory_of(tmp_path)
    one, two = plus(memory.newcomer, 1), plus(memory.newcomer, 2)
    memory.keep(1, memory.before(1), one)
    memory.keep(4, memory.before(4), two)
    for _ in range(3):
        assert same(memory.before(4).memory, one)
        memory.keep(4, memory.before(4), two)
    assert same(memory.before(5).memory, two)
    with pytest.raises(RefusedError, match="asked for round 3 of experiment first and has done round 4"):
        memory.before(3)


@pytest.mark.parametrize("name", ["self-fl", "self-fl-auto"])
def test_whether_a_client_has_trained_by_a_round(name, tmp_path):
    memory = memory_of(tmp_path, name=name)
    assert not memory.has_trained(5)
    memory.keep(3, memory.before(3), plus(memory.newcomer, 1))
    assert [memory.has_trained(number) for number in (2, 3, 4)] == [False, True, True]
    memory.keep(6, memory.before(6), plus(memory.newcomer, 2))
    assert [memory.has_trained(number) for number in (5, 6)] == [True, True]


def test_clients_and_experiments_have_memories_of_their_own(tmp_path):
    names = ["anna", "Anna", "../anna", "a/b", "a\\b", "", ".", "..", "ä" * 300, "ä" * 301, "con:", "1"]
    for number, client in enumerate(names, start=1):
        for experiment in ("first", "../second"):
            memory = memory_of(tmp_path, client, experiment)
            assert memory.before(LATER)[1] == 0
            memory.keep(number, Start(memory.newcomer, 0), plus(memory.newcomer, number))
    for number, client in enumerate(names, start=1):
        assert memory_of(tmp_path, client).before(LATER)[1] == number
    assert {path.parent.parent for path in tmp_path.rglob("*.safetensors")} == {tmp_path}
    lowered = [file_name(name).lower() for name in names]
    assert len(set(lowered)) == len(names)
    assert max(map(len, lowered)) < 100


@pytest.mark.parametrize("harm", ["cut", "flipped", "emptied", "text"])
def test_a_damaged_memory_is_one_clear_error(harm, tmp_path):
    memory = memory_of(tmp_path)
    memory.keep(1, Start(memory.newcomer, 0), plus(memory.newcomer, 1))
    content = bytearray(memory.path.read_bytes())
    if harm == "flipped":
        content[-3] ^= 1
    harmed = {"cut": content[:-5], "flipped": content, "emptied": b"", "text": b"nothing of the kind"}[harm]
    memory.path.write_bytes(harmed)
    with pytest.raises(CheckpointError, match="damaged"):
        memory.before(2)


def test_the_memory_of_another_client_is_refused(tmp_path):
    anna, berta = memory_of(tmp_path), memory_of(tmp_path, "berta")
    anna.keep(1, Start(anna.newcomer, 0), anna.newcomer)
    anna.path.rename(berta.path)
    with pytest.raises(CheckpointError, match="is the memory of client anna in experiment first"):
        berta.before(LATER)


def test_the_memory_of_another_model_or_method_is_refused(tmp_path):
    memory = memory_of(tmp_path)
    memory.keep(1, Start(memory.newcomer, 0), memory.newcomer)
    wider = ClientMemory(tmp_path, "first", "anna", algorithm("self-fl").newcomer(torch.zeros(1, 5)))
    with pytest.raises(CheckpointError, match=r"expected torch.float32 \(1, 5\)"):
        wider.before(LATER)
    with pytest.raises(CheckpointError, match="lacks"):
        memory_of(tmp_path, name="ditto").before(LATER)


def test_a_kill_while_writing_leaves_the_last_memory(tmp_path, monkeypatch):
    memory = memory_of(tmp_path)
    memory.keep(1, Start(memory.newcomer, 0), plus(memory.newcomer, 1))
    monkeypatch.setattr("selffl.state.files.os.fsync", lambda handle: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        memory.keep(2, memory.before(2), plus(memory.newcomer, 2))
    monkeypatch.undo()
    assert memory.before(LATER)[1] == 1


# ------------------------------------------------------------------------------------------------- several processes


def test_a_stale_process_does_not_write_over_a_later_round(tmp_path):
    stale, fresh = memory_of(tmp_path), memory_of(tmp_path)
    stale.keep(2, Start(stale.newcomer, 0), plus(stale.newcomer, 2))
    before = stale.before(3)  # the server gives it up, and the node is started anew
    fresh.keep(4, fresh.before(4), plus(fresh.newcomer, 4))
    with pytest.raises(RefusedError, match="client anna has done round 4 of experiment first while it was still busy"):
        stale.keep(3, before, plus(stale.newcomer, 3))
    found, last = fresh.before(LATER)
    assert last == 4
    assert same(found, plus(fresh.newcomer, 4))
    assert same(fresh.before(4).memory, plus(fresh.newcomer, 2))


def test_a_process_that_waits_for_its_turn_sees_what_was_kept_before_it(tmp_path, monkeypatch):
    """The stale one comes while the later round is being written: it has to look once it is its turn, not before."""
    stale, fresh, plain, errors = memory_of(tmp_path), memory_of(tmp_path), module.save_tensors, []
    fresh.keep(2, Start(fresh.newcomer, 0), plus(fresh.newcomer, 2))

    def ends():
        try:
            stale.keep(3, Start(stale.newcomer, 0), plus(stale.newcomer, 3))
        except RefusedError as error:
            errors.append(error)

    other = threading.Thread(target=ends)

    def slow(path, tensors, about):
        if about["round"] == 4:
            other.start()
            other.join(0.2)
            assert other.is_alive()
        plain(path, tensors, about)

    monkeypatch.setattr(module, "save_tensors", slow)
    fresh.keep(4, fresh.before(4), plus(fresh.newcomer, 4))
    other.join()
    assert len(errors) == 1
    assert fresh.before(LATER)[1] == 4


def test_processes_that_keep_at_once_leave_a_whole_file(tmp_path):
    found, end = [], time.monotonic() + 0.5

    def busy(number):
        memory = memory_of(tmp_path)
        try:
            while time.monotonic() < end:
                memory.keep(5, Start(memory.newcomer, 0), plus(memory.newcomer, number))
                first = tensors_of(memory.before(LATER)[0])["params"]
                found.append(float(first[0, 0]))
        except BaseException as error:
            found.append(error)

    threads = [threading.Thread(target=busy, args=(number,)) for number in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) <= {1.0, 2.0, 3.0}
    memory = memory_of(tmp_path)
    assert memory.before(LATER)[1] == 5
    assert {path.suffix for path in memory.path.parent.iterdir()} == {".safetensors", ".lock"}


def test_an_evaluation_of_an_earlier_round_has_the_memory_before_the_later_one(tmp_path):
    memory = memory_of(tmp_path)
    assert memory.after(1) is memory.newcomer
    memory.keep(1, Start(memory.newcomer, 0), plus(memory.newcomer, 1))
    memory.keep(3, memory.before(3), plus(memory.newcomer, 3))
    for round_number, number in ((1, 1), (2, 1), (3, 3), (4, 3)):
        assert same(memory.after(round_number), plus(memory.newcomer, number))


def test_another_run_of_the_same_name_is_refused(tmp_path):
    first, second = memory_of(tmp_path, run="a"), memory_of(tmp_path, run="b")
    first.keep(1, Start(first.newcomer, 0), plus(first.newcomer, 1))
    content = first.path.read_bytes()
    for asked in (lambda: second.before(2), lambda: second.after(2)):
        with pytest.raises(RefusedError) as found:
            asked()
        assert str(found.value) == (
            "client anna remembers another run of experiment first; expected the one that it began with. Give the "
            "experiment another name, go on with that run, or remove the client's memory."
        )
    with pytest.raises(RefusedError):
        second.keep(2, Start(second.newcomer, 0), second.newcomer)
    assert first.path.read_bytes() == content
    assert memory_of(tmp_path, run="a").before(LATER)[1] == 1


def test_a_folder_of_memories_is_listed_with_what_is_damaged(tmp_path):
    for client, number in (("anna", 1), ("berta/2", 7)):
        memory = memory_of(tmp_path, client, run="a")
        memory.keep(number, Start(memory.newcomer, 0), memory.newcomer)
    memory = memory_of(tmp_path, "käthe", "../second")
    memory.keep(3, Start(memory.newcomer, 0), memory.newcomer)
    memory.path.write_bytes(memory.path.read_bytes()[:-1])
    found = {(own.experiment, own.client): (own.path, last, model, why) for own, last, model, why in memories(tmp_path)}
    assert found.keys() == {("first", "anna"), ("first", "berta/2"), ("../second", "käthe")}
    assert found["first", "berta/2"] == (memory_of(tmp_path, "berta/2").path, 7, None, None)
    assert found["../second", "käthe"][:3] == (memory.path, None, None)
    assert "damaged" in found["../second", "käthe"][3]


# ---------------------------------------------------------------------------------------------------------- two files


def test_a_round_is_written_over_the_one_before_the_last(tmp_path):
    """Half as much as both memories, and the one that the round starts from is never written over."""
    memory, single = memory_of(tmp_path), None
    for number in range(1, 6):
        contents = {path: path.read_bytes() for path in memory.paths if path.exists()}
        start = memory.before(number)
        memory.keep(number, start, plus(memory.newcomer, number))
        changed = [path for path in memory.paths if path.exists() and path.read_bytes() != contents.get(path)]
        assert changed == [memory.paths[(number + 1) % 2]]
        assert same(memory.before(number).memory, start.memory)
        single = single or memory.path.stat().st_size
        assert abs(changed[0].stat().st_size - single) < 16


def test_what_a_late_process_kept_is_not_what_a_round_started_from(tmp_path):
    """Round 3 began before round 2, long given up by the server, was kept: asked for again, it starts from round 1."""
    memory = memory_of(tmp_path)
    memory.keep(1, memory.before(1), plus(memory.newcomer, 1))
    late, start = memory.before(2), memory.before(3)
    memory.keep(2, late, plus(memory.newcomer, 2))
    memory.keep(3, start, plus(memory.newcomer, 3))
    assert memory.before(3).round_number == 1
    assert same(memory.before(3).memory, plus(memory.newcomer, 1))
    assert same(memory.before(LATER)[0], plus(memory.newcomer, 3))


def test_a_round_whose_start_has_been_written_over_is_not_kept(tmp_path):
    memory = memory_of(tmp_path)
    memory.keep(1, memory.before(1), plus(memory.newcomer, 1))
    start = memory.before(4)
    for number in (2, 3):
        memory.keep(number, memory.before(number), plus(memory.newcomer, number))
    with pytest.raises(RefusedError, match="client anna has done other rounds of experiment first while it was busy"):
        memory.keep(4, start, plus(memory.newcomer, 4))
    assert memory.before(LATER)[1] == 3


def test_a_newcomer_that_was_slow_is_asked_again_as_a_newcomer(tmp_path):
    memory = memory_of(tmp_path)
    slow = memory.before(3)
    for number in (1, 2):
        memory.keep(number, memory.before(number), plus(memory.newcomer, number))
    memory.keep(3, slow, plus(memory.newcomer, 3))
    assert memory.before(3) == slow
    assert same(memory.before(4).memory, plus(memory.newcomer, 3))


def test_a_memory_whose_earlier_file_is_gone_says_so_where_it_is_needed(tmp_path):
    memory = memory_of(tmp_path)
    for number in (1, 2):
        memory.keep(number, memory.before(number), plus(memory.newcomer, number))
    memory.path.unlink()
    with pytest.raises(CheckpointError, match="is not there, or not that of the round before"):
        memory.before(2)
    assert same(memory.before(3).memory, plus(memory.newcomer, 2))


@pytest.mark.parametrize("damaged", [0, 1])
def test_a_damaged_round_in_a_header_is_noticed(damaged, tmp_path):
    """Which file is the later one, its header says: one that looks earlier is not to be gone on from."""
    memory = memory_of(tmp_path)
    for number in (1, 2):
        memory.keep(number, memory.before(number), plus(memory.newcomer, number))
    path = memory.paths[damaged]
    content = path.read_bytes()
    said = f'\\"round\\": {damaged + 1}'.encode()
    assert said in content
    path.write_bytes(content.replace(said, said[:-1] + b"0"))
    with pytest.raises(CheckpointError, match="damaged"):
        memory.before(3)


def old_memory(folder):
    """What 83d5088 kept in one file: memories of rounds 2 and 5."""
    shutil.copytree(Path(__file__).parent / "memories" / "83d5088", folder, dirs_exist_ok=True)
    memory = memory_of(folder, run="a")
    assert [path.exists() for path in memory.paths] == [True, False]
    return memory


def test_a_memory_of_an_earlier_version_goes_on(tmp_path):
    memory = old_memory(tmp_path)
    assert same(memory.before(5).memory, plus(memory.newcomer, 1))
    assert same(memory.before(6).memory, plus(memory.newcomer, 2))
    assert same(memory.after(4), plus(memory.newcomer, 1))
    assert memory.has_trained(4)
    memory.keep(6, memory.before(6), plus(memory.newcomer, 3))
    assert [path.exists() for path in memory.paths] == [True, True]
    assert same(memory.before(6).memory, plus(memory.newcomer, 2))
    memory.keep(7, memory.before(7), plus(memory.newcomer, 4))
    assert same(memory.before(7).memory, plus(memory.newcomer, 3))
    assert same(memory.before(LATER)[0], plus(memory.newcomer, 4))


def test_the_last_round_of_an_earlier_version_can_be_asked_for_again(tmp_path):
    memory = old_memory(tmp_path)
    for _ in range(2):
        memory.keep(5, memory.before(5), plus(memory.newcomer, 2))
        assert same(memory.before(5).memory, plus(memory.newcomer, 1))
        assert same(memory.before(6).memory, plus(memory.newcomer, 2))
        assert memory.has_trained(4)


def test_a_damaged_memory_of_an_earlier_version_is_refused(tmp_path):
    memory = old_memory(tmp_path)
    content = bytearray(memory.path.read_bytes())
    content[-3] ^= 1
    memory.path.write_bytes(content)
    with pytest.raises(CheckpointError, match="its checksum differs"):
        memory.before(6)
    with pytest.raises(CheckpointError, match="its checksum differs"):
        memory.keep(6, Start(memory.newcomer, 5), memory.newcomer)


def test_a_reader_waits_for_a_writer(tmp_path):
    """Between two looks at two files another process could replace one of them."""
    memory = memory_of(tmp_path)
    memory.keep(1, memory.before(1), plus(memory.newcomer, 1))
    found = []
    reader = threading.Thread(target=lambda: found.append(memory.before(2)))
    with exclusive_lock(memory.path):
        reader.start()
        reader.join(0.2)
        assert not found
    reader.join()
    assert found[0].round_number == 1
