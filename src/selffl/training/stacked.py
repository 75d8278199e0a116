"""Gradients of a block of clients by one ordinary pass: the rows of all behind each other, a few layers apart.

Where clients train nothing but adapters, linear layers and biases, every other part of a module is the same for all of
them.  Their rows go through it together, and only those few layers take a client's own weights, by batched products.
The slope of the sum of the clients' losses holds each client's own.  No vmap is needed: attention keeps its fused
kernels, and blocks of layers can be computed again in the backward pass instead of being kept.

A module may also mix rows, or look at how many there are; then this would be wrong.  `StackedGradient.problem` finds
out, for each shape before it is first used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from selffl.adapters.layers import DOWN, UP, Adapted, AdaptedConv, AdaptedEmbedding, AdaptedLinear
from selffl.adapters.prefix import PrefixAttention
from selffl.data.named import Features, map_entries, row_kind
from selffl.errors import one_line
from selffl.randomness import normal
from selffl.training.calls import call
from selffl.training.flat import FlatModel
from selffl.training.graphs import python_state
from selffl.training.passes import share_copy

TOLERANCE = 5e-3  # of the largest entry of a tensor's gradient: products of a GPU may have ten bits
LEAST_MOVE, MOVE = 0.05, 0.5  # of parameters in the comparison, and of their size: another client's would be noticed
KINDS = 3  # of models in the comparison: neighbours, and the first and the last of two, have others
BIAS_LAST = (nn.Linear, nn.LayerNorm)  # what adds its bias at the end, along the last axes
CHANNELS_SECOND = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class OwnParts:
    """Trained parameters of the clients whose rows are in the pass, by name ``[n, ...]``."""

    def __init__(self) -> None:
        self.num_clients = 0
        self.parts: Mapping[str, Tensor] = {}

    @contextmanager
    def held(self, num_clients: int, parts: Mapping[str, Tensor]) -> Iterator[None]:
        """Keep the clients' own parts until the context ends, after the backward pass: it may compute blocks again."""
        self.num_clients, self.parts = num_clients, parts
        try:
            yield
        finally:
            self.num_clients, self.parts = 0, {}

    def by_client(self, rows: Tensor) -> Tensor:
        """``[..., D]`` as ``[n, ..., D]``, the rows of a client behind each other."""
        return rows.reshape(self.num_clients, -1, rows.shape[-1])


def take_linear(layer: nn.Linear, own: OwnParts, weight: str, bias: str, inputs: Tensor) -> Tensor:
    """A linear layer whose weights, and bias where it is trained, are each client's."""
    rows, slopes = own.by_client(inputs), own.parts[weight].transpose(1, 2)
    shape = (*inputs.shape[:-1], slopes.shape[-1])
    if bias in own.parts:
        return torch.baddbmm(own.parts[bias].unsqueeze(1), rows, slopes).reshape(shape)
    outputs = torch.bmm(rows, slopes).reshape(shape)
    return outputs if layer.bias is None else outputs + layer.bias


def add_bias(forward: Callable[[Tensor], Tensor], own: OwnParts, bias: str, is_last: bool, inputs: Tensor) -> Tensor:
    """What a layer without its bias makes of all rows, and each client's bias."""
    outputs, added = forward(inputs), own.parts[bias].unsqueeze(1)
    if is_last:
        return (outputs.reshape(own.num_clients, -1, *added.shape[2:]) + added).reshape(outputs.shape)
    rows = outputs.reshape(own.num_clients, -1, outputs.shape[1], outputs[0, 0].numel())
    return (rows + added.unsqueeze(-1)).reshape(outputs.shape)


def adapt_rows(layer: Adapted, own: OwnParts, down: str, up: str, inputs: Tensor) -> Tensor:
    """W x + b + (alpha/r) B A x with each client's B, and A where it is trained; or such vectors of entries."""
    if down in own.parts:
        low = torch.bmm(own.by_client(inputs), own.parts[down].transpose(1, 2))
    else:
        low = own.by_client(layer.bring_down(inputs))
    outputs = layer.base(inputs)
    changes = own.parts[up].transpose(1, 2)
    return torch.baddbmm(own.by_client(outputs), low, changes, alpha=layer.scale).reshape(outputs.shape)


def adapt_convolution(layer: AdaptedConv, own: OwnParts, up: str, inputs: Tensor) -> Tensor:
    """The convolution, and that of its change by each client's B."""
    outputs = cast(Tensor, layer.base(inputs))
    low = layer.bring_down(inputs)
    low = low.reshape(own.num_clients, -1, layer.rank, outputs[0, 0].numel())  # clients, rows, r, places
    return outputs + layer.scale * (own.parts[up].flatten(2).unsqueeze(1) @ low).reshape(outputs.shape)


def take_values(layer: PrefixAttention, own: OwnParts, name: str, num_rows: int) -> Tensor:
    """Values of a prefix by head ``[rows, heads, length, width]``, each row's those of its client."""
    values = layer.by_head(own.parts[name])
    return values.repeat_interleave(num_rows // own.num_clients, 0)


class Stacked(nn.Module):
    """A copy of a module for the rows of many clients at once; frozen parameters are the very same.

    What clients train is not in it.  Weights are replaced by NaN, and biases by none: code that takes them from a layer
    instead of calling it cannot go unnoticed.
    """

    def __init__(self, module: nn.Module, own: OwnParts) -> None:
        super().__init__()
        self.module, self.own = module, own

    def forward(self, rows: Features) -> Tensor:
        """Outputs for the rows of all clients, behind each other."""
        return call(self.module, rows)


def stacked_copy(model: FlatModel, recomputes: bool) -> Stacked | str:
    """The module for many clients' rows, made once; where there is none, why in a few words.

    ``recomputes``: blocks of layers are computed again in the backward pass.
    """
    key = "recomputed" if recomputes else "stacked"
    if key not in model.twins:
        model.twins[key] = _make(model, recomputes)
    return cast("Stacked | str", model.twins[key])


def _make(model: FlatModel, recomputes: bool) -> Stacked | str:
    if model.num_statistics or model.mixes_rows:
        return "it normalises by batches"
    if model.leaves_out:
        return "it has dropout"
    module, own = share_copy(model.module), OwnParts()
    every = [name for name, part in module.named_parameters(remove_duplicate=False) if part.requires_grad]
    if len(every) != len(model.trained_names):
        return "parts of it share what they train"
    taken = {name for path, part in [*module.named_modules()] for name in _give_own(part, path, own)}
    left = [name for name in every if name not in taken]
    if left:
        return f"it trains {left[0]}; expected adapters, nn.Linear, and biases of linear layers, convolutions and norms"
    if recomputes:
        blocks = repeated_blocks(module)
        if not blocks:
            return "it has no blocks, two or more of a kind in an nn.Sequential or nn.ModuleList"
        for block in blocks:
            again = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
            block.forward = again
    return Stacked(module, own)


def _give_own(part: nn.Module, path: str, own: OwnParts) -> list[str]:
    """Have a layer take each client's parameters; names of those that it takes."""
    prefix = f"{path}." if path else ""
    if isinstance(part, Adapted):
        return _give_change(part, prefix, own)
    if isinstance(part, PrefixAttention) and part.prefix_values.weight.requires_grad:
        _hide(part.prefix_values, "weight")
        part.values = partial(take_values, part, own, f"{prefix}prefix_values.weight")  # type: ignore[method-assign]
        return [f"{prefix}prefix_values.weight"]
    trained = [kind for kind, given in part.named_parameters(recurse=False) if given.requires_grad]
    weight, bias = (prefix + kind for kind in ("weight", "bias"))
    if type(part) is nn.Linear and "weight" in trained:
        _hide(part, "weight")
        part.forward = partial(take_linear, part, own, weight, bias)  # type: ignore[method-assign]
    elif type(part) in (*BIAS_LAST, *CHANNELS_SECOND) and trained == ["bias"]:
        is_last = isinstance(part, BIAS_LAST)
        part.forward = partial(add_bias, part.forward, own, bias, is_last)
    else:
        return []
    if "bias" in trained:
        part._parameters["bias"] = None
    return [prefix + kind for kind in trained]


def _give_change(part: Adapted, prefix: str, own: OwnParts) -> list[str]:
    """Give a layer with a change of low rank what clients have of their own; the names of those parts."""
    trained = [kind for kind in (DOWN, UP) if getattr(part, kind).weight.requires_grad]
    down, up = (f"{prefix}{kind}.weight" for kind in (DOWN, UP))
    if (type(part) is AdaptedLinear and UP in trained) or (type(part) is AdaptedEmbedding and trained == [UP]):
        part.forward = partial(adapt_rows, part, own, down, up)  # type: ignore[method-assign]
    elif type(part) is AdaptedConv and trained == [UP]:
        part.forward = partial(adapt_convolution, part, own, up)  # type: ignore[method-assign]
    else:
        return []
    for kind in trained:
        _hide(getattr(part, kind), "weight")
    return [f"{prefix}{kind}.weight" for kind in trained]


def _hide(part: nn.Module, kind: str) -> None:
    given = getattr(part, kind).detach()
    nothing = given.new_full((), torch.nan).expand(given.shape)
    setattr(part, kind, nn.Parameter(nothing, requires_grad=False))


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Blocks of layers, two or more of one class behind each other, the outermost of them."""
    children = list(module.children())
    if isinstance(module, nn.Sequential | nn.ModuleList):
        plain = nn.Sequential, nn.ModuleList, Adapted
        blocks = [part for part in children if next(part.children(), None) and not isinstance(part, plain)]
        if max(Counter(map(type, blocks)).values(), default=0) > 1:
            return blocks
    return [block for part in children for block in repeated_blocks(part)]


class WholeNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether numbers are made whole: NaN would become some number, which a GPU may look up and stop for good."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.are_made = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Any operation."""
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].is_floating_point():
            self.are_made |= found.dtype != torch.bool and not found.is_floating_point()
        return found


class StackedGradient:
    """Gradients of the mean loss of many clients by one pass over all their rows.

    It is of one model, which is given at each call and not held.
    """

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], recomputes: bool) -> None:
        self._loss, self._recomputes = loss, recomputes
        self._problems: dict[Hashable, str | None] = {}  # by shapes, as far as they have come

    def __call__(self, model: FlatModel, params: Tensor, features: Features, labels: Tensor) -> Tensor:
        """``[n, P]`` at ``params [n, P]`` for ``features [n, B, ...]`` and ``labels [n, B]``."""
        return self._slope(model, params, features, labels, model.half_products(features))

    def _slope(
        self, model: FlatModel, params: Tensor, features: Features, labels: Tensor,
        products: AbstractContextManager[None] | None = None,
    ) -> Tensor:  # fmt: skip
        stacked, (num_clients, num_rows) = stacked_copy(model, self._recomputes), labels.shape[:2]
        assert isinstance(stacked, Stacked)
        leaf = params.detach().requires_grad_()
        rows = model.protect_rows(map_entries(lambda entry: entry.flatten(0, 1), features))
        with torch.enable_grad(), model.plain_attention(), stacked.own.held(num_clients, model.parts_by_client(leaf)):
            with products or nullcontext():
                outputs = model.precise(stacked(rows))
            if len(outputs) != num_clients * num_rows:
                raise ValueError(f"it gives {len(outputs)} outputs for {num_clients * num_rows} rows")
            losses = torch.func.vmap(self._loss)(outputs.view(num_clients, num_rows, *outputs.shape[1:]), labels)
            return torch.autograd.grad(losses.sum(), leaf, materialize_grads=True)[0]

    def problem(self, model: FlatModel, params: Tensor, features: Features, labels: Tensor) -> str | None:
        """Why clients such as these cannot be computed so, in a few words; none where they can.

        Looked at once for each number of clients and shape of their rows, with models that are moved apart.
        """
        shapes = params.dtype, tuple(labels.shape), labels.dtype, row_kind(features)
        if shapes not in self._problems:
            stacked = stacked_copy(model, self._recomputes)
            if isinstance(stacked, Stacked):
                self._problems[shapes] = self._compare(model, stacked, params, features, labels)
            else:
                self._problems[shapes] = stacked
        return self._problems[shapes]

    def _compare(
        self, model: FlatModel, stacked: Stacked, params: Tensor, features: Features, labels: Tensor
    ) -> str | None:  # fmt: skip
        """Against ordinary autograd on three clients; and whether the first and the last see anything of the others."""
        if not model.is_vectorisable(features[0], params[0]):
            return "it looks at numbers to decide what to do"
        moved, last = moved_apart(model, params), len(params) - 1
        before = python_state([stacked.module])
        try:
            with WholeNumbers() as numbers:
                found = self._slope(model, moved, features, labels)
            if numbers.are_made:
                return "it makes whole numbers of others"
            for client in sorted({0, last // 2, last}):
                given = moved[client], features[client], labels[client]
                if not self._is_same(model, found[client], self._of_one(model, *given)):
                    return "its rows are not computed apart"
            for client in {0, last} if last else ():
                own = torch.arange(len(params), device=params.device) == client
                rows = map_entries(partial(hide_others, own), features)
                again = self._slope(model, hide_others(own, moved), rows, labels)
                if not self._is_same(model, again[client], found[client]):
                    return "its rows look at each other"
        except Exception as error:  # a module is the user's code; if rows or loss are at fault, another way will say so
            return one_line(error)
        return None if python_state([stacked.module]) == before else "it changes when it is called"

    def _of_one(self, model: FlatModel, params: Tensor, features: Features, labels: Tensor) -> Tensor:
        """The gradient ``[P]`` of one client by ordinary autograd."""
        leaf = params.detach().requires_grad_()
        with torch.enable_grad(), model.plain_attention():
            outputs = call(model.module, model.protect_rows(features), model.parts(leaf))
            return torch.autograd.grad(self._loss(outputs, labels), leaf, materialize_grads=True)[0]

    def _is_same(self, model: FlatModel, found: Tensor, expected: Tensor) -> bool:
        """Whether each trained tensor's gradient is as expected, to rounding; tiny beside the others counts as 0."""
        least = TOLERANCE * expected.abs().max()
        pairs = zip(model.parts(found).values(), model.parts(expected).values(), strict=True)
        return all(bool((one - other).abs().max() <= TOLERANCE * (other.abs().max() + least)) for one, other in pairs)


def moved_apart(model: FlatModel, params: Tensor) -> Tensor:
    """Models ``[n, P]`` that differ from their neighbours' and from where training starts, where B is 0."""
    start = model.params.to(params)
    size = torch.cat([part.square().mean().sqrt().expand(part.numel()) for part in model.parts(start).values()])
    place = torch.arange(len(start), device=params.device)
    lots = normal(0, "stacked", torch.arange(KINDS, device=params.device).unsqueeze(-1), place).to(params)
    kinds = start + (LEAST_MOVE + MOVE * size) * lots
    return kinds[torch.arange(len(params), device=params.device) % KINDS]


def hide_others(own: Tensor, entry: Tensor) -> Tensor:
    """NaN in place of the numbers of all clients but one; whole numbers stay."""
    if not entry.is_floating_point():
        return entry
    return entry.masked_fill(~own.view(-1, *[1] * (entry.ndim - 1)), torch.nan)
