"""LSTMs of a whole cohort, each client with its own weights.

The kernels of `nn.LSTM` take one set of weights, and `torch.func.vmap` has no rule for them; written in operations that
vmap knows, an LSTM is hundreds of tiny ones, each with the overhead of vmap.  Here a layer is one operation, there and
back, which takes any number of axes in front and hands those of vmap on to itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from selffl.budget import budget_of

States = tuple[Tensor, Tensor]


def is_convertible(part: nn.Module) -> TypeGuard[nn.LSTM]:
    """Whether this is an `nn.LSTM` that `lstm` computes: in one direction, without projections or dropout."""
    return (
        type(part) is nn.LSTM
        and not part.bidirectional
        and part.proj_size == 0
        and (part.dropout == 0.0 or not part.training)
    )


def convert_lstms(module: nn.Module) -> None:
    """Have the LSTMs among the module's parts computed by `lstm`, where they can be; parameters keep their names."""
    for part in module.modules():
        if is_convertible(part):
            part.forward = partial(lstm, part)  # type: ignore[assignment,method-assign]


def lstm(layer: nn.LSTM, inputs: Tensor, hx: States | None = None) -> tuple[Tensor, States]:
    """What ``layer`` makes of ``inputs [B, T, I]`` (``[T, B, I]`` unless ``batch_first``), or of one row ``[T, I]``."""
    if not isinstance(inputs, Tensor) or inputs.ndim not in (2, 3):  # packed rows, or what `nn.LSTM` refuses
        result: tuple[Tensor, States] = nn.LSTM.forward(layer, inputs, hx)
        return result
    rows = 0 if layer.batch_first else 1
    if inputs.ndim == 2:
        hx = None if hx is None else (hx[0].unsqueeze(1), hx[1].unsqueeze(1))
        outputs, (hidden, cell) = lstm(layer, inputs.unsqueeze(rows), hx)
        return outputs.squeeze(rows), (hidden.squeeze(1), cell.squeeze(1))
    steps = inputs.transpose(0, 1) if layer.batch_first else inputs
    if hx is None:
        zeros = inputs.new_zeros(inputs.shape[rows], layer.hidden_size)
        first = [(zeros, zeros)] * layer.num_layers
    else:
        for state in hx:
            layer.check_hidden_size(state, layer.get_expected_hidden_size(inputs, None))
        first = list(zip(*hx, strict=True))
    last = []
    for number, states in enumerate(first):
        weights = (getattr(layer, f"{name}_l{number}") for name in ("weight_ih", "weight_hh"))
        bias = getattr(layer, f"bias_ih_l{number}") + getattr(layer, f"bias_hh_l{number}") if layer.bias else None
        # Without a gradient to come nothing need be kept for it.
        steps, cell, _, _ = _apply(_Layer, steps, *weights, bias, *states, torch.is_grad_enabled())
        last.append((steps[-1], cell))
    hidden, cell = (torch.stack(states) for states in zip(*last, strict=True))
    return steps.transpose(0, 1) if layer.batch_first else steps, (hidden, cell)


class _Layer(torch.autograd.Function):
    """One layer over all steps; axes in front are clients.

    Inputs ``[..., T, B, I]``, weights ``[..., 4 H, I]`` and ``[..., 4 H, H]``, bias ``[..., 4 H]`` or None, first
    hidden state and cell ``[..., B, H]``.  Returns hidden states ``[..., T, B, H]`` and the last cell ``[..., B, H]``;
    for the way back, gates ``[..., T, B, 4 H]`` and cells ``[..., T, B, H]``, which are empty unless they are kept.
    """

    @staticmethod
    def forward(
        inputs: Tensor, weight_in: Tensor, weight_hidden: Tensor, bias: Tensor | None, hidden: Tensor, cell: Tensor,
        is_kept: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        clients = inputs.shape[:-3]
        given = [_flat(tensor, clients) for tensor in (inputs, weight_in, weight_hidden, bias, hidden, cell)]
        outputs, last, gates, cells = (
            tensor.view(*clients, *tensor.shape[1:]) for tensor in _forward(*given, is_kept=is_kept)
        )
        return outputs, last, gates, cells

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        steps, weight_in, weight_hidden, _, hidden, cell, _ = inputs
        found, _, gates, cells = output
        ctx.mark_non_differentiable(gates, cells)
        ctx.set_materialize_grads(False)  # zeros for the gates would be as large as they are
        ctx.save_for_backward(steps, weight_in, weight_hidden, hidden, cell, found, gates, cells)

    @staticmethod
    def backward(ctx: Any, by_found: Tensor | None, by_cell: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        needs = tuple(ctx.needs_input_grad[:6])
        if by_found is None:
            by_found = torch.zeros_like(ctx.saved_tensors[5])
        slopes = iter(_apply(_Slopes, by_found, by_cell, *ctx.saved_tensors, needs))
        return (*(next(slopes) if need else None for need in needs), None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *given: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        return _apply(_Layer, *_in_front(info.batch_size, in_dims, given)), (0, 0, 0, 0)


class _Slopes(torch.autograd.Function):
    """The slopes of `_Layer` that are needed, of its six tensors in their order."""

    @staticmethod
    def forward(
        by_found: Tensor, by_cell: Tensor | None, inputs: Tensor, weight_in: Tensor, weight_hidden: Tensor,
        hidden: Tensor, cell: Tensor, outputs: Tensor, gates: Tensor, cells: Tensor, needs: tuple[bool, ...],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        clients = inputs.shape[:-3]
        given = (by_found, by_cell, inputs, weight_in, weight_hidden, hidden, cell, outputs, gates, cells)
        slopes = _backward(*(_flat(tensor, clients) for tensor in given), needs=needs)
        return tuple(tensor.view(*clients, *tensor.shape[1:]) for tensor in slopes)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *given: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        slopes = _apply(_Slopes, *_in_front(info.batch_size, in_dims, given))
        return slopes, (0,) * len(slopes)


def _apply(function: type[torch.autograd.Function], *given: Any) -> tuple[Tensor, ...]:
    results: tuple[Tensor, ...] = function.apply(*given)  # type: ignore[no-untyped-call]
    return results


def _in_front(num_clients: int, dims: tuple[int | None, ...], given: tuple[Any, ...]) -> list[Any]:
    """Every tensor with the axis of vmap in front; those without one are everybody's."""
    return [
        tensor if not isinstance(tensor, Tensor)
        else tensor.expand(num_clients, *tensor.shape) if dim is None
        else tensor.movedim(dim, 0)
        for tensor, dim in zip(given, dims, strict=True)
    ]  # fmt: skip


def _flat(tensor: Tensor | None, clients: torch.Size) -> Any:
    """All axes of clients as one."""
    return None if tensor is None else tensor.reshape(math.prod(clients), *tensor.shape[len(clients) :])


def _forward(
    inputs: Tensor, weight_in: Tensor, weight_hidden: Tensor, bias: Tensor | None, hidden: Tensor, cell: Tensor,
    *, is_kept: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`_Layer` with one axis of clients, ``n``."""
    n, num_steps, num_rows, num_inputs = inputs.shape
    size = hidden.shape[-1]
    weight_in, weight_hidden = weight_in.transpose(1, 2), weight_hidden.transpose(1, 2)
    outputs = inputs.new_empty(n, num_steps, num_rows, size)
    squashed, buffer = torch.empty_like(cell), _buffer(inputs, n, num_rows, 4 * size)
    most = budget_of(inputs.device).gate_numbers
    at_once = num_steps if is_kept else max(most // max(n * num_rows * 4 * size, 1), 1)
    for start in range(0, num_steps, at_once):
        some = min(at_once, num_steps - start)
        flat = inputs[:, start : start + some].reshape(n, some * num_rows, num_inputs)
        gates = torch.bmm(flat, weight_in) if bias is None else torch.baddbmm(bias.unsqueeze(1), flat, weight_in)
        gates = gates.view(n, some, num_rows, 4 * size)
        cells = inputs.new_empty(n, some, num_rows, size)
        # Views of all steps at once: taken step by step they cost as much as the arithmetic of a small block.
        views = (gates, gates[..., : 2 * size], *gates.chunk(4, -1), cells, outputs[:, start : start + some])
        steps = zip(*(view.unbind(1) for view in views), strict=True)
        for every, first_two, entry, forget, new, out, cell_now, hidden_now in steps:
            if buffer is None:
                every.baddbmm_(hidden, weight_hidden)
            else:
                every.add_(torch.bmm(hidden, weight_hidden, out=buffer))
            first_two.sigmoid_()
            new.tanh_()
            out.sigmoid_()
            torch.mul(forget, cell, out=cell_now).addcmul_(entry, new)
            torch.mul(out, torch.tanh(cell_now, out=squashed), out=hidden_now)
            hidden, cell = hidden_now, cell_now
    if not is_kept:
        gates = cells = inputs.new_empty(n, 0)
    return outputs, cell.clone(), gates, cells


def _backward(
    by_found: Tensor, by_cell: Tensor | None, inputs: Tensor, weight_in: Tensor, weight_hidden: Tensor,
    hidden: Tensor, cell: Tensor, outputs: Tensor, gates: Tensor, cells: Tensor, *, needs: tuple[bool, ...],
) -> list[Tensor]:  # fmt: skip
    """`_Slopes` with one axis of clients, ``n``."""
    n, num_steps, num_rows, size = outputs.shape
    entry, forget, new, out = gates.chunk(4, -1)
    # What the slopes by cell and by hidden state are multiplied by, all steps at once.  By cell: the forget gate, which
    # gives the slope by the cell before, and what gives those by the gates entry, forget and new; by hidden state: out.
    slab = outputs.new_empty(n, num_steps, num_rows, 5, size)
    of_sigmoid, of_tanh = torch.ops.aten.sigmoid_backward.grad_input, torch.ops.aten.tanh_backward.grad_input
    squashed = cells.tanh()
    slab[..., 0, :] = forget
    of_sigmoid(new, entry, grad_input=slab[..., 1, :])
    of_sigmoid(cell, forget[:, 0], grad_input=slab[:, 0, :, 2])
    of_sigmoid(cells[:, :-1], forget[:, 1:], grad_input=slab[:, 1:, :, 2])
    of_tanh(entry, new, grad_input=slab[..., 3, :])
    of_sigmoid(squashed, out, grad_input=slab[..., 4, :])
    through = of_tanh(out, squashed, grad_input=squashed)  # slope of the hidden state by the cell

    by_gates = slab.view(n, num_steps, num_rows, 5 * size)[..., size:]
    buffer = _buffer(outputs, n, num_rows, size)
    by_hidden = by_found if buffer is not None else by_found.clone(memory_format=torch.contiguous_format)
    by_earlier = torch.zeros_like(cell) if by_cell is None else by_cell
    by_now = torch.empty_like(cell)
    views = (by_hidden, through, slab[..., :4, :], slab[..., 0, :], slab[..., 4, :], by_gates)
    steps = zip(*(reversed(view.unbind(1)) for view in views), strict=True)
    later: Tensor | None = None
    for slope, factor, first_four, first, out, gate in steps:
        if later is not None:
            if buffer is None:
                slope.baddbmm_(later, weight_hidden)
            else:
                slope = torch.bmm(later, weight_hidden, out=buffer).add_(slope)
        first_four.mul_(torch.addcmul(by_earlier, slope, factor, out=by_now).unsqueeze(-2))
        out.mul_(slope)
        by_earlier, later = first, gate
    by_gates = by_gates.flatten(1, 2)
    across = by_gates.transpose(1, 2)
    slopes: tuple[Callable[[], Tensor], ...] = (
        lambda: torch.bmm(by_gates, weight_in).view(inputs.shape),
        lambda: torch.bmm(across, inputs.flatten(1, 2)),
        lambda: torch.bmm(across, torch.cat([hidden.unsqueeze(1), outputs[:, :-1]], dim=1).flatten(1, 2)),
        lambda: by_gates.sum(1),
        lambda: torch.bmm(by_gates[:, :num_rows], weight_hidden),
        by_earlier.contiguous,
    )
    return [slope() for slope, need in zip(slopes, needs, strict=True) if need]


def _buffer(like: Tensor, *shape: int) -> Tensor | None:
    """Where a product is written before it is added: on a CPU, one into a part of a tensor goes client by client."""
    return like.new_empty(shape) if like.device.type == "cpu" else None
