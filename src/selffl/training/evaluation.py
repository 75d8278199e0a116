"""What models make of rows: a number or two for each, and whether the rows are such that a model can take."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence

import torch
from torch import Tensor, nn

from selffl.budget import Budget, budget_of
from selffl.data.federation import Rows
from selffl.data.named import Features, NamedFeatures, describe_rows, entries_of, row_size
from selffl.data.preparation import Preparation
from selffl.errors import ConfigError, DataError, one_line
from selffl.training.blocks import Gradients, Loss, check_gradients, outputs_of, quickest_way, rows_at, rows_for_loop
from selffl.training.calls import check_names
from selffl.training.embedding import refuse_beyond
from selffl.training.flat import FlatModel
from selffl.training.losses import check_fit, count_loss, default_loss
from selffl.training.metrics import ONE_LOGIT, ONE_PROBABILITY, Measure, measure_of

MAX_FIRST_OUTPUT = 1e3  # of a classifier before training, a log-odds: no model should be as sure as that


WHOLE_TYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)  # that may be looked up in embeddings

OnClient = Callable[[int, Tensor, Tensor], None]  # (position, outputs [rows, ...], labels [rows, ...])


class _ByClient:
    """Outputs as they come, handed on client by client: no more wait than those of clients that are not through."""

    def __init__(self, rows: Rows, on_client: OnClient) -> None:
        self._rows, self._on_client, self._bounds = rows, on_client, rows.offset.tolist()
        self._waiting: dict[int, list[Tensor]] = {}

    def add(self, index: Tensor, outputs: Tensor) -> None:
        """Outputs for the rows numbered ``index``, those of a client in their order and behind each other."""
        owner = torch.searchsorted(self._rows.offset, index, right=True) - 1
        clients, counts = owner.unique_consecutive(return_counts=True)  # type: ignore[no-untyped-call]
        pieces = outputs.split(counts.tolist())  # type: ignore[no-untyped-call]
        for client, piece in zip(clients.tolist(), pieces, strict=True):
            waiting = self._waiting.setdefault(client, [])
            waiting.append(piece)
            low, high = self._bounds[client : client + 2]
            if sum(map(len, waiting)) == high - low:
                # Copies: a metric that turns labels of 0 into -1 in place should not alter the rows.
                self._on_client(client, torch.cat(self._waiting.pop(client)), self._rows.labels[low:high].clone())


def numbers_of_rows(
    model: FlatModel,
    params: Tensor,
    rows: Rows,
    measure: Measure,
    gradients: Gradients = "auto",
    on_client: OnClient | None = None,
) -> tuple[Tensor, ...]:
    """The numbers that ``measure`` makes of every row, ``[rows]`` each.

    Models are ``params [clients, P]``, or one ``[P]`` for all.  Clients of similar numbers of rows are evaluated
    together; where rows are normalised by those beside them, each client by itself, with all of its rows at once.
    ``on_client(position, outputs, labels)`` is called once for each client that has rows, with all of them,
    in no particular order of clients.
    """
    check_gradients(gradients)
    budget = budget_of(params.device)
    gathered = None if on_client is None else _ByClient(rows, on_client)
    with torch.no_grad():
        if params.ndim == 1 and not model.mixes_rows:
            numbers = _of_one_model(model, params, rows, measure, budget, gathered)
        else:
            own = params.expand(len(rows.num_examples), -1)
            numbers = _of_own_models(model, own, rows, measure, gradients, budget, gathered)
    return numbers


def numbers_of_outputs(
    outputs: Tensor, rows: Rows, measure: Measure, on_client: OnClient | None = None
) -> tuple[Tensor, ...]:
    """Numbers of each row from outputs ``[rows, ...]`` that are there already."""
    if len(rows.labels) == 0:
        return _of_no_rows(outputs, measure)
    if on_client is not None:
        _ByClient(rows, on_client).add(torch.arange(len(outputs), device=outputs.device), outputs)
    return measure.of_rows(outputs, rows.labels)


def _of_one_model(
    model: FlatModel, params: Tensor, rows: Rows, measure: Measure, budget: Budget, gathered: _ByClient | None
) -> tuple[Tensor, ...]:
    """Numbers of all rows by one model, as many at a time as the memory holds, whatever client they are of."""
    step = budget.rows_evaluated(row_size(rows.features))
    numbers = []
    for start in range(0, len(rows.labels), step):
        outputs = model(params, rows.features[start : start + step])
        numbers.append(measure.of_rows(outputs, rows.labels[start : start + step]))
        if gathered is not None:
            gathered.add(torch.arange(start, start + len(outputs), device=outputs.device), outputs)
    return tuple(map(torch.cat, zip(*numbers, strict=True))) if numbers else _of_no_rows(params, measure)


def _of_own_models(
    model: FlatModel,
    params: Tensor,
    rows: Rows,
    measure: Measure,
    gradients: Gradients,
    budget: Budget,
    gathered: _ByClient | None,
) -> tuple[Tensor, ...]:
    """Every client with its own model, block by block."""
    every_number: tuple[Tensor, ...] | None = None
    if len(rows.labels) == 0:
        return _of_no_rows(params, measure)
    num_features = row_size(rows.features)
    sizes, order = rows.num_examples.sort(descending=True, stable=True)
    alone = {"auto": rows_for_loop(model, params[0], rows.features), "loop": 0.0}.get(gradients, math.inf)
    alone = 0.0 if model.mixes_rows else alone
    max_clients, max_rows = budget.evaluated_numbers // params.shape[1], budget.rows_evaluated(num_features)
    for low, high in blocks_of_clients(sizes.tolist(), max_clients, max_rows, alone):
        clients, size = order[low:high], sizes[low:high].unsqueeze(-1)
        own = params[clients]
        widest = int(size[0])
        step = widest if model.mixes_rows else budget.rows_evaluated(num_features, len(clients))
        for start in range(0, widest, step):
            # Clients with fewer rows than the first of their block look at their last row again, which is not kept.
            column_index = torch.arange(start, min(start + step, widest), device=size.device)
            index = rows.offset[clients].unsqueeze(-1) + torch.minimum(column_index, size - 1)
            features, labels = rows_at(rows, index)
            chosen = quickest_way(model, own, features) if gradients == "auto" else gradients
            outputs = outputs_of(model, own, features, chosen).flatten(0, 1)
            numbers = measure.of_rows(outputs, labels.flatten(0, 1))
            if every_number is None:
                every_number = tuple(each.new_empty(len(rows.labels)) for each in numbers)
            is_own = (column_index < size).flatten()
            for column, each in zip(every_number, numbers, strict=True):
                column[index.flatten()[is_own]] = each[is_own]
            if gathered is not None:
                gathered.add(index.flatten()[is_own], outputs[is_own])
    assert every_number is not None
    return every_number


def _of_no_rows(params: Tensor, measure: Measure) -> tuple[Tensor, ...]:
    return tuple(params.new_zeros(0) for _ in range(1 + ("log_loss" in measure.metrics)))


def blocks_of_clients(
    sizes: list[int], max_clients: int, max_rows: int, alone: float = math.inf
) -> Iterator[tuple[int, int]]:
    """Positions ``low`` to ``high`` of clients to take together, of ``sizes`` that descend; those without rows in none.

    A block is padded to the rows of its first client: at most to twice what its last has.  Clients with ``alone`` rows
    or more have a block of their own.
    """
    low = 0
    while low < len(sizes) and sizes[low] > 0:
        most = 1 if sizes[low] >= alone else max(min(max_clients, max_rows // sizes[low]), 1)
        high = low + 1
        while high < len(sizes) and high - low < most and 2 * sizes[high] >= sizes[low]:
            high += 1
        yield low, high
        low = high


def check_rows(model: FlatModel, loss: Loss, rows: Rows, clients: Sequence[Hashable] = ()) -> Measure:
    """Refuse rows that the model or the loss cannot take, labels beyond the outputs, a model that draws random numbers.

    A pass over two rows, one of them with the largest label, says what outputs and loss look like.  Returns how the
    answers are measured.  ``clients`` are the ids, for the message.
    """
    if len(rows.labels) == 0:
        raise DataError("there are no rows; expected at least one.")
    kind = type(model.module).__name__
    check_numbers(model, rows.features)
    is_plain = rows.labels.ndim == 1
    some = torch.tensor([0, int(rows.labels.argmax()) if is_plain else 0], device=rows.labels.device)
    features, labels = rows.features[some], rows.labels[some]
    outputs = _outputs(model, features, kind)
    num_outputs = outputs.shape[-1] if outputs.ndim == 2 else 1
    classifies = is_plain and not labels.is_floating_point() and num_outputs > 1
    if classifies:
        wrong = (rows.labels < 0) | (rows.labels >= num_outputs)
        if wrong.any():
            row = int(wrong.nonzero()[0])
            position = int(torch.searchsorted(rows.offset, row, right=True)) - 1
            who = repr(clients[position]) if clients else f"number {position}"
            raise DataError(
                f"client {who} has the label {int(rows.labels[row])}, and {kind} has {num_outputs} outputs; expected "
                f"labels from 0 to {num_outputs - 1}. Number the classes anew, or give the model more outputs."
            )
        largest = float(outputs.abs().max())
        if largest > MAX_FIRST_OUTPUT:
            warnings.warn(
                f"before training, outputs of {kind} reach {largest:.2g}: rows hold numbers too large for steps of a "
                "usual size. Put selffl.models.Standardise.of(training rows) first in the model, or scale the rows.",
                stacklevel=2,
            )
    _check_single_rows(model, rows, clients)
    check_fit(loss, outputs, rows.labels)
    _check_loss(loss, outputs, labels, rows.labels)
    measure = measure_of(loss, outputs, rows.labels)
    if measure in (ONE_LOGIT, ONE_PROBABILITY) and not bool(((rows.labels >= 0) & (rows.labels <= 1)).all()):
        raise DataError(
            f"labels under binary cross-entropy run from {float(rows.labels.min()):g} to {float(rows.labels.max()):g}; "
            "expected 0 to 1. Number the classes 0 and 1."
        )
    return measure


def _check_single_rows(model: FlatModel, rows: Rows, clients: Sequence[Hashable]) -> None:
    """Refuse a client with one row, where rows are normalised by those beside them and one has no spread."""
    alone = (rows.num_examples == 1).nonzero().flatten()
    if not model.mixes_rows or not len(alone):
        return
    position = int(alone[0])
    try:
        with torch.no_grad():
            model(model.params.to(rows.labels.device), rows.features[rows.offset[position]][None])
    except DataError as error:
        who = repr(clients[position]) if clients else f"number {position}"
        raise DataError(f"client {who} has one row, and {error}") from None


def loss_for(model: FlatModel, rows: Rows, preparation: Preparation | None = None) -> Loss:
    """The loss that follows from the rows' labels and the model's outputs, where none is given."""
    if len(rows.labels) == 0:
        raise DataError("there are no rows; expected at least one.")
    few = Rows(rows.features[:2], rows.labels[:2], rows.offset).to(model.device, model.dtype)
    if preparation is not None and preparation.label.task == "counts":
        return count_loss
    check_numbers(model, few.features)
    return default_loss(_outputs(model, few.features, type(model.module).__name__), rows.labels)


def check_numbers(model: FlatModel, features: Features) -> None:
    """Refuse rows of numbers that no embedding of the model has: computed for many clients, they would go unnoticed.

    Of features by name, only the module says which of them are looked up, and where: it is asked, with the rows of the
    smallest and the largest numbers.
    """
    if isinstance(features, NamedFeatures):
        if len(features):
            _outputs(model, features[_extreme_rows(features)], type(model.module).__name__)
        return
    tables = [part.num_embeddings for part in model.module.modules() if isinstance(part, nn.Embedding)]
    if not tables or features.is_floating_point() or features.numel() == 0:
        return
    low, high = int(features.min()), int(features.max())
    if low < 0 or high >= max(tables):
        raise DataError(
            f"rows hold the number {low if low < 0 else high}, and {type(model.module).__name__} has embeddings of "
            f"{max(tables)}; expected 0 to {max(tables) - 1}. Number words and padding anew, or give the model more."
        )


def _extreme_rows(features: NamedFeatures) -> Tensor:
    """The first row, the last, and those with the smallest and the largest of each entry of whole numbers."""
    found = [0, len(features) - 1]
    for entry in entries_of(features).values():
        if entry.dtype in WHOLE_TYPES and entry.numel():
            by_row = entry.reshape(len(entry), -1)
            found += [int(by_row.amin(1).argmin()), int(by_row.amax(1).argmax())]
    return torch.tensor(found, device=features.device)


def _outputs(model: FlatModel, features: Features, kind: str) -> Tensor:
    parts = model.own_parts(features.device)
    generators = [torch.default_generator]
    if features.device.type == "cuda":
        generators.append(torch.cuda.default_generators[features.device.index or 0])
    before = [generator.get_state() for generator in generators]
    check_names(model.module, features)
    try:
        with refuse_beyond(model.answering):
            model.probe_rows(features)
            with torch.no_grad():
                outputs = model.at(parts, features)
        model.probe_training(features)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        found = describe_rows(features)
        if isinstance(features, Tensor):
            found = f"shape {tuple(features.shape[1:])} and type {features.dtype}"
        raise DataError(
            f"{kind} cannot take a row of {found}: {one_line(error)}. Reshape or cast the rows; the "
            f"model has parameters of type {model.dtype}."
        ) from None
    if not all(torch.equal(old, generator.get_state()) for old, generator in zip(before, generators, strict=True)):
        raise ConfigError(
            f"{kind} draws random numbers of its own; expected outputs that depend on parameters and rows alone, but "
            "for nn.Dropout. Remove what draws them, or call eval() on the module."
        )
    return outputs


def _check_loss(loss: Loss, outputs: Tensor, labels: Tensor, all_labels: Tensor) -> None:
    """Refuse a loss that cannot be computed or has no gradient, or is not one number, the mean over the rows."""
    shapes = f"outputs of shape {tuple(outputs.shape)} and labels of shape {tuple(labels.shape)}, {labels.dtype}"
    try:
        with warnings.catch_warnings(record=True) as said, torch.enable_grad():
            warnings.simplefilter("always")
            leaf = outputs.detach().clone().requires_grad_()
            value = loss(leaf, labels.clone())
            if isinstance(value, Tensor) and value.ndim == 0:
                torch.autograd.grad(value, leaf)
    except Exception as error:  # a loss is the user's code
        raise DataError(
            f"the loss cannot take {shapes}: {one_line(error)}. For classes pass whole numbers from 0, one per row; "
            "for binary cross-entropy floating-point labels of the outputs' shape; for anything else a loss that fits."
        ) from None
    # torch's losses broadcast [B, 1] against [B] to [B, B], and warn: every row would be compared with every other.
    is_crossed = any("different to the input size" in str(warning.message) for warning in said)
    if not isinstance(value, Tensor) or value.ndim > 0:
        what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ConfigError(f"the loss of {shapes} is of {what}; expected one number, the mean over the rows.")
    kind = _reduction(loss, outputs, labels, all_labels)
    if is_crossed or kind == "pairs":
        raise DataError(
            f"the loss takes {shapes} for each other's rows; expected the same shape of both. Give the model a "
            "squeeze(-1), or the labels a last axis of 1."
        )
    if kind == "sum":
        raise ConfigError(
            "the loss of two rows is the sum of their losses; expected the mean over the rows, so that steps do not "
            "depend on the batch size. Divide by the number of rows, or leave out reduction='sum'."
        )


def _reduction(loss: Loss, outputs: Tensor, labels: Tensor, all_labels: Tensor) -> str:
    """How a loss joins two rows: by their ``mean``, their ``sum``, over ``pairs`` of outputs and labels, or ``other``.

    The outputs are moved apart, towards 1/2, so that they differ and those from 0 to 1 stay there.
    """
    if all_labels.ndim == 1:
        labels = torch.stack([all_labels.min(), all_labels.max()])
    share = torch.linspace(0.25, 0.75, 2, device=outputs.device, dtype=outputs.dtype)
    outputs = torch.lerp(outputs, torch.full_like(outputs, 0.5), share.view(-1, *[1] * (outputs.ndim - 1)))
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            both = float(loss(outputs, labels.clone()))
            each = [
                [float(loss(outputs[row : row + 1], labels[other : other + 1].clone())) for other in (0, 1)]
                for row in (0, 1)
            ]
    except Exception:  # a loss of the user's own that takes no single rows
        return "other"
    total = each[0][0] + each[1][1]
    pairs = (total + each[0][1] + each[1][0]) / 4.0
    within = torch.finfo(outputs.dtype).eps ** 0.5 * max(1.0, abs(both))
    for kind, expected in (("mean", total / 2.0), ("sum", total), ("pairs", pairs)):
        if abs(both - expected) <= within:
            return kind
    return "other"
