"""Checkpoints: whole or not there, checked before they are believed."""

import hashlib
import json
import os
import struct
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from selffl.algorithms.records import ADDED_LATER, tensors_of
from selffl.errors import CheckpointError
from selffl.state.checkpoint import (
    DTYPES,
    fill_record,
    load_about,
    load_tensors,
    save_tensors,
    write_safetensors,
)

TENSORS = {
    "params": torch.tensor([[1.5, -0.0], [float("nan"), 1e-42]]),
    "inner.count": torch.tensor([3, -4]),
    "flag": torch.tensor([True, False]),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.zeros(0, 3),
}
ABOUT = {"round": 7, "seconds": 0.1 + 0.2, "text": "θ"}


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8).tolist()


def saved(folder):
    path = folder / "c.safetensors"
    save_tensors(path, TENSORS, ABOUT)
    return path


def test_what_is_saved_is_loaded_bit_for_bit(tmp_path):
    tensors, about = load_tensors(saved(tmp_path))
    assert about == ABOUT
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert tensors[name].shape == tensor.shape
        assert bits(tensors[name]) == bits(tensor)


def test_views_that_share_memory_are_saved(tmp_path):
    base = torch.arange(6.0)
    parts = {"a": base[:3], "b": base[2:], "c": base.reshape(2, 3).T, "d": base[0].expand(4)}
    save_tensors(tmp_path / "c", parts, {})
    found, _ = load_tensors(tmp_path / "c")
    assert all(torch.equal(found[name], part) for name, part in parts.items())


def test_nothing_but_the_file_is_left(tmp_path):
    saved(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["c.safetensors"]


def test_a_write_that_fails_leaves_the_old_one(tmp_path):
    path = saved(tmp_path)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        save_tensors(path, TENSORS, {"round": object()})
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["c.safetensors"]


@given(where=st.floats(0, 1), flip=st.integers(1, 255))
def test_any_changed_byte_is_noticed(tmp_path_factory, where, flip):
    path = saved(tmp_path_factory.mktemp("c"))
    content = bytearray(path.read_bytes())
    place = min(int(where * len(content)), len(content) - 1)
    content[place] ^= flip
    path.write_bytes(content)
    try:
        tensors, about = load_tensors(path)
    except CheckpointError:
        return
    # A byte of padding, or a blank in the header: nothing that was saved has changed.
    assert about == ABOUT
    assert all(bits(tensors[name]) == bits(tensor) for name, tensor in TENSORS.items())


@settings(deadline=None)  # a busy machine writes a file in more than a fifth of a second
@given(share=st.floats(0, 0.999))
def test_any_truncation_is_noticed(tmp_path_factory, share):
    path = saved(tmp_path_factory.mktemp("c"))
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(CheckpointError, match="damaged"):
        load_tensors(path)


def test_swapped_numbers_are_noticed(tmp_path):
    """The same bytes under another name: the format is sound, the checksum is not."""
    path = saved(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"flag"', b'"flog"'))
    with pytest.raises(CheckpointError, match="checksum"):
        load_tensors(path)


def test_files_that_are_not_ours(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        load_tensors(tmp_path / "none")
    (tmp_path / "empty").touch()
    with pytest.raises(CheckpointError, match="damaged"):
        load_tensors(tmp_path / "empty")
    save_file({"a": torch.zeros(1)}, tmp_path / "foreign")
    with pytest.raises(CheckpointError, match="not written by selffl"):
        load_tensors(tmp_path / "foreign")


def test_another_version_is_refused(tmp_path):
    path = saved(tmp_path)
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"]["version"] = "99"
    new = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(new)) + new + content[8 + size :])
    with pytest.raises(CheckpointError, match="has version 99; expected 1 or 2"):
        load_tensors(path)


@dataclass(frozen=True)
class Inner:
    count: torch.Tensor


@dataclass(frozen=True)
class Outer:
    params: torch.Tensor
    inner: Inner
    label: str = "kept"


def test_a_record_is_filled_by_name():
    record = Outer(torch.tensor([1.0, 2.0]), Inner(torch.tensor([3])))
    template = Outer(torch.zeros(2), Inner(torch.zeros(1, dtype=torch.int64)), label="template")
    found = fill_record(template, tensors_of(record))
    assert found.params.tolist() == [1.0, 2.0]
    assert found.inner.count.tolist() == [3]
    assert found.label == "template"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"params": torch.zeros(2)}, "lacks 'inner.count'"),
        ({"params": torch.zeros(3), "inner.count": torch.zeros(1, dtype=torch.int64)}, r"\(3,\); expected .* \(2,\)"),
        ({"params": torch.zeros(2).double(), "inner.count": torch.zeros(1, dtype=torch.int64)}, "float64"),
    ],
)
def test_a_record_of_another_kind_is_refused(tensors, message):
    template = Outer(torch.zeros(2), Inner(torch.zeros(1, dtype=torch.int64)))
    with pytest.raises(CheckpointError, match=message):
        fill_record(template, tensors)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match="denied"):
        save_tensors(tmp_path / "c", TENSORS, {})


def test_what_is_said_of_a_file_is_read_alone(tmp_path):
    path = saved(tmp_path)
    assert load_about(path) == load_tensors(path)[1] == ABOUT
    save_file({"x": torch.zeros(1)}, tmp_path / "plain.safetensors")
    (tmp_path / "torn.safetensors").write_bytes(path.read_bytes()[:20])
    for name, why in (("plain", "was not written by selffl"), ("torn", "is damaged"), ("absent", "does not exist")):
        with pytest.raises(CheckpointError, match=f"{name}.safetensors {why}"):
            load_about(tmp_path / f"{name}.safetensors")


def test_a_file_that_may_not_be_read_says_so(tmp_path, monkeypatch):
    path = saved(tmp_path)

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(CheckpointError, match=r"cannot be opened \(Permission denied\); expected a readable file"):
        load_tensors(path)


def test_a_field_that_came_later_is_left_as_it_is_and_the_others_are_read():
    @dataclass(frozen=True)
    class Grown:
        added: torch.Tensor = field(metadata={ADDED_LATER: True})
        params: torch.Tensor = field(default_factory=lambda: torch.zeros(2))

    found = fill_record(Grown(torch.ones(1)), {"params": torch.tensor([3.0, 4.0])})
    assert (found.added.tolist(), found.params.tolist()) == ([1.0], [3.0, 4.0])


def test_every_type_is_what_safetensors_reads(tmp_path):
    tensors = {f"{number}.{code}": torch.arange(3).to(dtype) for number, (dtype, code) in enumerate(DTYPES.items())}
    tensors |= {"bits": torch.tensor([True, False, True]), "strided": torch.zeros(3, 4)[:1, :1], "none": torch.zeros(0)}
    write_safetensors(tmp_path / "t", tensors, {"note": "θ"})
    back = load_file(tmp_path / "t")
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(back[name], tensor)


def first_version(path):
    """What version 1 wrote: a SHA-256 of everything."""
    text = json.dumps(ABOUT, sort_keys=True)
    digest = hashlib.sha256(text.encode())
    for name in sorted(TENSORS):
        digest.update(f"{name}\0{TENSORS[name].dtype}\0{tuple(TENSORS[name].shape)}\0".encode())
        digest.update(bytes(bits(TENSORS[name])))
    save_file(TENSORS, path, {"format": "selffl", "version": "1", "about": text, "sha256": digest.hexdigest()})
    return path


def test_a_file_of_the_first_version_is_read(tmp_path):
    tensors, about = load_tensors(first_version(tmp_path / "c"))
    assert about == load_about(tmp_path / "c") == ABOUT
    assert {name: bits(tensor) for name, tensor in tensors.items()} == {n: bits(t) for n, t in TENSORS.items()}


@pytest.mark.parametrize("read", [load_tensors, load_about])
def test_a_damaged_file_of_the_first_version_is_refused(read, tmp_path):
    path = first_version(tmp_path / "c")
    content = path.read_bytes()
    for harmed in (content[:-1] + bytes([content[-1] ^ 1]), content.replace(b'\\"round\\": 7', b'\\"round\\": 8')):
        assert harmed != content
        path.write_bytes(harmed)
        with pytest.raises(CheckpointError, match="its checksum differs"):
            read(path)


def test_a_file_cannot_be_made_one_of_the_first_version(tmp_path):
    """No version stands without its checksum."""
    path = saved(tmp_path)
    path.write_bytes(path.read_bytes().replace(b'"version": "2"', b'"version": "1"'))
    with pytest.raises(CheckpointError, match="its checksum differs"):
        load_tensors(path)


def test_what_is_said_of_a_file_has_a_checksum_of_its_own(tmp_path):
    path = saved(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content.replace(b'\\"round\\": 7', b'\\"round\\": 8'))
    for read in (load_tensors, load_about):
        with pytest.raises(CheckpointError, match="its checksum differs"):
            read(path)
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert load_about(path) == ABOUT
    with pytest.raises(CheckpointError, match="its checksum differs"):
        load_tensors(path)
