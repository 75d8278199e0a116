"""A client's part of a record of tensors as Flower sends it, and back, to the bit.

What travels is the slice of one client, client axis and all (``[1, ...]``), by its dotted names: a single client is a
cohort of one.  What arrives is compared with a template, for it comes from another machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from flwr.common.constant import SType
from numpy.lib import format as npy
from torch import Tensor

from selffl.algorithms.contract import Algorithm
from selffl.algorithms.features import ClassMoments, FeatureTask, LossDerivatives, Objective
from selffl.algorithms.population import Population
from selffl.algorithms.records import map_tensors, sent_tensors, tensors_of
from selffl.engines.flower.messages import shown
from selffl.errors import ConfigError, DataError
from selffl.state.checkpoint import fill_record
from selffl.training.flat import FlatModel

Record = TypeVar("Record")

NUMBERS = "numbers"  # under which single numbers travel together

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float16, torch.float32, torch.float64, torch.bool,
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    )
}  # fmt: skip


def check_dtype(dtype: torch.dtype) -> None:
    """Refuse parameters of a type that cannot travel."""
    if dtype not in DTYPES.values() or not dtype.is_floating_point:
        raise ConfigError(f"dtype is {dtype}; expected torch.float32, torch.float64 or torch.float16.")


def pack(record: Any, withheld: Tensor | None = None) -> ArrayRecord:
    """The tensors of a record that travel, by name; of a model ``[1, P]`` without what is ``withheld [P]``."""
    tensors = _cut_models(sent_tensors(record), withheld)
    return ArrayRecord({name: _array(name, tensor) for name, tensor in _join_numbers(tensors).items()})


def _cut_models(tensors: Mapping[str, Tensor], withheld: Tensor | None) -> dict[str, Tensor]:
    """The tensors, models among them without what is withheld."""
    return {name: tensor[:, ~withheld] if _is_cut(tensor, withheld) else tensor for name, tensor in tensors.items()}  # type: ignore[operator]


def _is_cut(tensor: Tensor, withheld: Tensor | None) -> bool:
    return withheld is not None and tensor.shape == (1, *withheld.shape)


def pack_each(record: Any, num_clients: int) -> list[ArrayRecord]:
    """The tensors of a cohort's record, client by client.

    A tensor that is the same for all of them is one array, which Flower hashes once and not for each client.
    """
    tensors = sent_tensors(record)
    shared = {
        name: _array(name, tensor[:1])
        for name, tensor in tensors.items()
        if num_clients > 1 and tensor.stride(0) == 0 and tensor[0].numel() > 1
    }
    found = []
    for place in range(num_clients):
        own = {name: tensor[place : place + 1] for name, tensor in tensors.items()}
        arrays = ArrayRecord()
        for name, tensor in _join_numbers(own).items():  # one by one: given a dictionary, it would make its own arrays
            arrays[name] = shared[name] if name in shared else _array(name, tensor)
        found.append(arrays)
    return found


def of_place(record: Record, place: int) -> Record:
    """The part of one client of a cohort, by its place in it."""
    return map_tensors(lambda tensor: tensor.narrow(0, place, 1), record)


def _join_numbers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, with single numbers in one vector for each type: Flower stores and sends every array by itself.

    An array costs two objects, 400 bytes and two requests, however short it is.  One without numbers stays away.
    """
    single = {name: tensor for name, tensor in tensors.items() if tensor.numel() == 1}
    found = {name: tensor for name, tensor in tensors.items() if tensor.numel() > 1}
    for dtype in dict.fromkeys(tensor.dtype for tensor in single.values()):
        of_type = [tensor.reshape(1) for tensor in single.values() if tensor.dtype == dtype]
        found[f"{NUMBERS}.{str(dtype).removeprefix('torch.')}"] = torch.cat(of_type)
    return found


def _split_numbers(template: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names and shapes of ``template``, from what `_join_numbers` made of them."""
    numbers = {name: iter(tensor) for name, tensor in found.items() if name.startswith(f"{NUMBERS}.")}
    return {
        name: next(numbers[f"{NUMBERS}.{str(wanted.dtype).removeprefix('torch.')}"]).reshape(wanted.shape)
        if wanted.numel() == 1
        else found.get(name, wanted)  # itself, where it has no numbers
        for name, wanted in template.items()
    }


def unpack(template: Record, arrays: ArrayRecord, withheld: Tensor | None = None) -> Record:
    """The record of ``template``'s names, shapes and types that ``arrays`` hold; anything else is an error.

    What does not travel is the template's; of models, what is ``withheld [P]`` is zero.
    """
    whole = sent_tensors(template)
    parts = _cut_models(whole, withheld)
    expected = _join_numbers(parts)
    for what, names in (("lacks", expected.keys() - arrays.keys()), ("also has", arrays.keys() - expected.keys())):
        if names:
            raise DataError(
                f"the message {what} {shown(sorted(names))}; expected {', '.join(expected) or 'no tensors'}."
            )
    found = {}
    for name, wanted in expected.items():
        # Told by the header, before anything is read: a wrong one may be large.
        dtype = str(wanted.dtype).removeprefix("torch.")
        header = arrays[name].dtype[:20], tuple(arrays[name].shape)
        tensor = _tensor(name, arrays[name]) if header == (dtype, tuple(wanted.shape)) else None
        if tensor is None or tensor.dtype != wanted.dtype or tensor.shape != wanted.shape:
            seen = header if tensor is None else (tensor.dtype, tuple(tensor.shape))
            raise DataError(
                f"{name!r} is {shown(str(seen[0]))[1:-1]} {shown(seen[1])}; expected {dtype} {tuple(wanted.shape)}."
            )
        found[name] = tensor
    parts = _split_numbers(parts, found)
    for name in [name for name, tensor in whole.items() if _is_cut(tensor, withheld)]:
        parts[name] = torch.zeros_like(whole[name]).masked_scatter_(~withheld, parts[name])  # type: ignore[operator]
    return fill_record(template, tensors_of(template) | parts)


def is_finite(params: Tensor) -> bool:
    """Whether all numbers are finite: their sum says so in a tenth of the time, unless it overflows."""
    return bool(params.sum().isfinite()) or bool(params.isfinite().all())


def models_of(record: Any, num_params: int) -> dict[str, Tensor]:
    """Tensors of a client's record that are models: ``[1, P]``."""
    return {name: tensor for name, tensor in tensors_of(record).items() if tensor.shape == (1, num_params)}


def _array(name: str, tensor: Tensor) -> Array:
    if tensor.dtype not in DTYPES.values():
        raise DataError(f"{name!r} is {tensor.dtype}, which NumPy does not have; expected one of {', '.join(DTYPES)}.")
    values, head = tensor.detach().cpu().contiguous().numpy(), BytesIO()
    npy.write_array_header_1_0(head, npy.header_data_from_array_1_0(values))
    # As `Array(values)` has it, which copies the numbers three times.
    data = b"".join((head.getvalue(), values.reshape(-1).view(np.uint8).data))
    return Array(str(values.dtype), tuple(values.shape), SType.NUMPY, data)


def _tensor(name: str, array: Array) -> Tensor:
    try:
        if array.stype != SType.NUMPY:
            raise TypeError(f"it is of the kind {array.stype!r}")
        data = BytesIO(array.data)
        if npy.read_magic(data) != (1, 0):
            raise ValueError("its version is not 1.0")
        shape, is_fortran, dtype = npy.read_array_header_1_0(data)
        found = np.frombuffer(array.data, dtype, offset=data.tell())
        return torch.from_numpy(found.reshape(shape, order="F" if is_fortran else "C").copy())
    except Exception as error:  # bytes from elsewhere are unreadable in many ways
        raise DataError(f"{name!r} cannot be read ({' '.join(str(error).split())[:120]}); expected an array.") from None


class _Idle(FeatureTask):
    """One client with one row and no slope: local work that costs nothing."""

    def __init__(self, model: FlatModel) -> None:
        super().__init__(torch.Size([1]), torch.ones(1, dtype=torch.int64, device=model.device), 0.1, 1)
        self.head, self.class_bias = model.head, model.class_bias

    @property
    def has_classes(self) -> bool:
        """Whatever a method needs."""
        return True

    def batch(self, draw: int, slots: Tensor) -> None:
        """There is nothing to draw."""

    def noise(self, draw: int, slots: Tensor, params: Tensor) -> Tensor:
        """Noise of zero."""
        return torch.zeros_like(params)

    def batch_gradient(self, params: Tensor, batch: Any) -> Tensor:
        """A gradient of zero."""
        return torch.zeros_like(params)

    def features(self, params: Tensor, batch: Any) -> Tensor:
        """Features that are zero, of one row."""
        return params.new_zeros(len(params), 1, self.head.num_features if self.head else 0)

    def class_moments(self, params: Tensor) -> ClassMoments:
        """Moments of classes without rows: zero."""
        num_classes = self.class_bias.num_classes if self.class_bias else 0
        counts = params.new_zeros(*params.shape[:-1], num_classes)
        means = counts.unsqueeze(-1).expand(*counts.shape, self.head.num_features if self.head else 0)
        return ClassMoments(counts, means, counts)

    def objective_gradient(
        self, objective: Objective, params: Tensor, num_extra: int, batch: Any, constants: Sequence[Tensor]
    ) -> Tensor:
        """A gradient of zero, whatever the objective."""
        return torch.zeros_like(params)

    def derivatives(self, params: Tensor) -> LossDerivatives:
        """Derivatives of a loss without slope: zero."""
        params = params.double()
        none = torch.zeros_like(params[..., 0])
        curvature = torch.zeros_like(params).unsqueeze(-1) * params.unsqueeze(-2)
        return LossDerivatives(none, torch.zeros_like(params), curvature, none)

    def halves(self, split: int = 0) -> Self:
        """Two halves of the rows: the one row, and none."""
        return self._copy_for_halves()


class Templates(NamedTuple):
    """What a client's records look like, but for its upload."""

    broadcast: Any
    memory: Any


def lone_population(model: FlatModel) -> Population:
    """One client that is known by its model alone."""
    zero = torch.zeros(1, dtype=model.dtype, device=model.device)
    cluster = torch.zeros(1, dtype=torch.int64, device=model.device)
    return model.describe(Population(1, zero, zero[0], cluster))


def templates(algorithm: Algorithm[Any, Any, Any, Any], model: FlatModel) -> Templates:
    """Names, shapes and types of what one client is sent and keeps.

    Only the method knows its records, so it is asked what it would send to a lone new client.
    """
    params = model.params
    server = algorithm.start(params, lone_population(model))
    broadcast = algorithm.broadcast(server, torch.zeros(1, dtype=torch.int64, device=params.device))
    return Templates(broadcast, algorithm.newcomer(params.unsqueeze(0)))


def withheld_by(algorithm: Algorithm[Any, Any, Any, Any], model: FlatModel) -> Tensor | None:
    """Where uploads of a method say nothing of this model ``[P]``; server and clients know it from the model."""
    return algorithm.withheld(algorithm.start(model.params, lone_population(model)))


def upload_template(algorithm: Algorithm[Any, Any, Any, Any], model: FlatModel) -> Any:
    """A template of what a client sends: of one round of a lone client that has nothing to learn.

    For the server, once a run: the round has all its steps over vectors ``[P]``, too many for every message.
    """
    found = templates(algorithm, model)
    upload, _ = algorithm.client_round(found.broadcast, found.memory, _Idle(model))
    return upload
