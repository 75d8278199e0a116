"""Records over the wire and back: the same bits, or an error that says what does not fit."""

import math
from dataclasses import dataclass, replace
from io import BytesIO

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'selffl[flower]'")

from flwr.app import Array, ArrayRecord, Message, RecordDict
from wire import WireGrid, over_the_wire, sealed

from selffl.algorithms import ALGORITHMS, algorithm
from selffl.algorithms.records import map_tensors, tensors_of
from selffl.engines.flower import records
from selffl.engines.flower.messages import Answer, Order, fingerprint, options_of, read, write
from selffl.engines.flower.records import DTYPES, of_place, pack, templates, unpack, upload_template
from selffl.errors import DataError
from selffl.training.flat import FlatModel


@dataclass(frozen=True)
class Inner:
    count: Tensor
    is_there: Tensor


@dataclass(frozen=True)
class Outer:
    params: Tensor
    inner: Inner
    small: Tensor
    label: str = "no tensor"


def record(num_clients=3):
    params = torch.randn(num_clients, 5)
    params[0, :4] = torch.tensor([torch.nan, torch.inf, -0.0, 1e-45])
    return Outer(
        params,
        Inner(torch.tensor([2**62 + 1, -7, 0])[:num_clients], torch.tensor([True, False, True])[:num_clients]),
        torch.rand(num_clients, 0, 2, dtype=torch.float64),
    )


def sent(arrays):
    WireGrid(None, {})
    message = Message(RecordDict({"arrays": arrays}), 5, "train", ttl=60.0)
    return over_the_wire(sealed(message, is_reply=False)).content.array_records["arrays"]


def bits(tensor):
    return tensor.contiguous().view(torch.uint8) if tensor.numel() else tensor


def test_a_client_of_a_cohort_arrives_with_its_bits():
    whole = record()
    template = map_tensors(lambda tensor: torch.zeros_like(tensor[:1]), whole)
    parts = [unpack(template, sent(pack(of_place(whole, client)))) for client in range(3)]
    for name, tensor in tensors_of(map_tensors(lambda *tensors: torch.cat(tensors), *parts)).items():
        expected = tensors_of(whole)[name]
        assert tensor.dtype == expected.dtype
        assert tensor.shape == expected.shape
        assert bits(tensor).equal(bits(expected)), name
    assert parts[0].label == "no tensor"
    assert "small" not in pack(of_place(whole, 0))  # it has no numbers


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32])
def test_types_are_kept(dtype):
    tensor = torch.arange(6).reshape(1, 6).to(dtype)
    one = Inner(tensor, tensor > 2)
    assert unpack(one, sent(pack(one))).count.equal(tensor)


def test_tensors_that_jump_through_memory_and_scalars_are_sent_as_they_look():
    one = Inner(torch.arange(12).reshape(3, 4).T[1:2], torch.tensor(True).expand(1))
    assert unpack(one, sent(pack(one))).count.equal(one.count)
    scalar = Inner(torch.tensor(3), torch.tensor(False))
    assert unpack(scalar, sent(pack(scalar))).count.shape == ()


def test_a_type_that_numpy_does_not_have_is_refused():
    with pytest.raises(DataError, match="bfloat16"):
        pack(Inner(torch.zeros(1, dtype=torch.bfloat16), torch.ones(1)))


def test_a_record_without_tensors_is_an_empty_message():
    method = algorithm("fedavg")
    memory = method.newcomer(torch.zeros(1, 3))
    assert unpack(memory, sent(pack(memory))) == memory


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda a: a.pop("numbers.int64"),
            r"lacks \['numbers.int64'\]; expected params, numbers.int64, numbers.bool",
        ),
        (lambda a: a.update(more=a["params"]), r"also has \['more'\]"),
        (lambda a: a.update(params=Array(a["params"].numpy()[0])), r"'params' is float32 \(5,\); expected .* \(1, 5\)"),
        (lambda a: a.update({"numbers.int64": a["numbers.bool"]}), "'numbers.int64' is bool .* expected int64"),
        (lambda a: a.update({"numbers.int64": Array(np.zeros(2, np.int64))}), r"\(2,\); expected int64 \(1,\)"),
        (lambda a: a.update(params=Array("float32", (1, 5), "numpy.ndarray", b"\x93NUMPY")), "cannot be read"),
        (lambda a: a.update(params=Array("float32", (1, 5), "pickle", b"c")), "cannot be read"),
        (
            lambda a: a.update(params=Array("float32", (1, 5), "numpy.ndarray", Array(np.zeros((1, 5))).data)),
            "is torch.float64",
        ),
    ],
)
def test_what_does_not_fit_is_an_error_that_says_so(change, reason):
    one = record(1)
    arrays = ArrayRecord(dict(pack(one)))
    change(arrays)
    with pytest.raises(DataError, match=reason):
        unpack(one, sent(arrays))


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_templates_are_what_the_method_makes_of_one_client(name):
    model = FlatModel(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)))
    before = model.params.clone()
    found = templates(algorithm(name), model)
    upload = upload_template(algorithm(name), model)
    for part in (*found, upload):
        assert all(tensor.shape[0] == 1 for tensor in tensors_of(part).values())
    assert (1, 23) in {tuple(tensor.shape) for tensor in tensors_of(upload).values()}
    assert model.params.equal(before)


def test_a_note_is_read_as_it_was_written_and_nothing_else_is():
    options = options_of(algorithm("ditto"))
    order = Order(1, "x", "r", 3, True, 2, "7", 7, 2**63 - 1, 0.1, 10, "{}", "{}", "{}", "", "ditto", options, "f")
    WireGrid(None, {})
    message = Message(RecordDict({"about": write(order)}), 5, "train", ttl=60.0)
    content = over_the_wire(sealed(message, is_reply=False)).content
    assert read(Order, content) == order
    with pytest.raises(DataError, match="num_gradients is None in the message; expected int"):
        read(Answer, content)
    content["about"]["number"] = True
    with pytest.raises(DataError, match="number is True"):
        read(Order, content)


def test_options_are_told_apart_and_equal_ones_are_equal():
    assert options_of(algorithm("self-fl")) == options_of(algorithm("self-fl", form="paper"))
    assert options_of(algorithm("self-fl")) != options_of(algorithm("self-fl-exact"))


def test_a_fingerprint_sees_shapes_types_and_frozen_values_but_no_trained_ones():
    def flat(change=lambda module: None, size=3, dtype=torch.float32):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, size), nn.Linear(size, 2)).to(dtype)
        module[1].bias.requires_grad_(False)
        with torch.no_grad():
            change(module)
        return fingerprint(FlatModel(module))

    assert flat() == flat(lambda module: module[0].weight.add_(1))
    others = [flat(size=4), flat(dtype=torch.float64), flat(lambda module: module[1].bias.add_(1))]
    assert len({flat(), *others}) == 4


@pytest.mark.parametrize("dtype", list(DTYPES.values()))
@pytest.mark.parametrize("shape", [(1, 5), (2, 3, 4), (0, 3), (7,)])
def test_an_array_is_what_flower_makes_of_it(dtype, shape):
    """Byte for byte, so that Flower's own reader has it, and that ours has what Flower's writes."""
    values = (torch.arange(math.prod(shape)).reshape(shape) * 3 - 7).to(dtype)
    ours, theirs = records._array("a", values), Array(values.numpy())
    assert (ours.dtype, ours.shape, ours.stype, ours.data) == (theirs.dtype, theirs.shape, theirs.stype, theirs.data)
    assert torch.equal(records._tensor("a", theirs), values)
    turned = Array(np.asfortranarray(values.numpy()))
    assert torch.equal(records._tensor("a", turned), values)


@pytest.mark.parametrize("harm", ["longer", "shorter", "version", "pickled", "kind"])
def test_an_array_that_is_not_whole_is_refused(harm):
    whole = records._array("a", torch.arange(6.0).reshape(1, 6))
    objects = BytesIO()
    np.save(objects, np.array([[1]], dtype=object), allow_pickle=True)
    data = {
        "longer": whole.data + b"more",
        "shorter": whole.data[:-4],
        "version": whole.data[:6] + b"\x02" + whole.data[7:],
        "pickled": objects.getvalue(),
        "kind": whole.data,
    }[harm]
    stype = "pickle" if harm == "kind" else whole.stype
    with pytest.raises(DataError, match="'a' cannot be read"):
        records._tensor("a", Array(whole.dtype, whole.shape, stype, data))


def test_what_all_clients_are_sent_is_one_array():
    whole = record()
    whole = replace(whole, params=whole.params[0].expand(3, -1), small=torch.rand(3, 4))
    found = records.pack_each(whole, 3)
    assert len({id(arrays["params"]) for arrays in found}) == 1
    assert len({id(arrays["small"]) for arrays in found}) == 3
    for place, arrays in enumerate(found):
        expected = pack(of_place(whole, place))
        assert {name: array.data for name, array in arrays.items()} == {
            name: array.data for name, array in expected.items()
        }
