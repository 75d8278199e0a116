"""Answers to new rows, each by its own client's model, in the user's classes and units."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from selffl.data.arrow import pa
from selffl.data.columns import column_of
from selffl.data.named import Features, NamedFeatures, RowShape, entries_of, is_named, map_entries
from selffl.data.preparation import Preparation
from selffl.data.readers import FRAME_LIBRARIES, read_table, table_of_frame
from selffl.data.roles import unknown_column
from selffl.data.tables import Table
from selffl.errors import ConfigError, DataError, first_few, one_line, pluralise
from selffl.training.answers import LabelScale
from selffl.training.calls import call

Array = npt.NDArray[Any]
BLOCK_ROWS = 1 << 16  # rows that a model answers at once
NUM_SHOWN = 3  # clients or words in a message
PERSONAL, GLOBAL = "personal", "global"


def read_rows(rows: Any, preparation: Preparation) -> Table:
    """A user's rows as a table: a frame, or the path of a file."""
    if isinstance(rows, Table):
        return rows
    if not isinstance(rows, str | Path):
        return table_of_frame(rows)
    return read_table(Path(rows), preparation.texts, preparation.decimal)


def is_table(rows: Any) -> bool:
    """Whether rows come with names of columns: a frame, or the path of a file."""
    roots = {kind.__module__.partition(".")[0] for kind in type(rows).__mro__}
    return isinstance(rows, str | Path | Table) or (bool(roots & set(FRAME_LIBRARIES)) and hasattr(rows, "columns"))


def inputs_of_rows(rows: Any, preparation: Preparation | None, shape: RowShape) -> Features:
    """A user's rows, in the user's units, as inputs of a model: a frame, the path of a file, an array, or several.

    ``shape`` is that of one row that was trained on.
    """
    if is_table(rows):
        if preparation is None or not preparation.columns:
            raise ConfigError(
                "the run was trained on arrays, which have no column names; expected an array of features."
            )
        table = read_rows(rows, preparation)
        preparation.check_columns(table)
        for name, words in preparation.unknown_words(table).items():
            shown = first_few(words, NUM_SHOWN, repr)
            warnings.warn(
                f"{name} holds {shown}, which no training row did: taken for none of the known.", stacklevel=3
            )
        inputs = torch.from_numpy(preparation.encode(table))
        for name, number in preparation.newly_missing(table).items():
            warnings.warn(
                f"{name} is missing in {pluralise(number, 'row')}, and was in no training row: taken for the mean.",
                stacklevel=3,
            )
        return inputs
    if isinstance(shape, dict):
        return _named_inputs(rows, shape)
    given = _checked_array("features", rows, shape)
    if preparation is None:
        return given
    return torch.from_numpy(preparation.scale_array(given.double().cpu().numpy()))


def _named_inputs(rows: Any, shapes: Mapping[str, Sequence[int]]) -> NamedFeatures:
    """A user's dictionary of features, once it has the entries that were trained on, with as many rows each."""
    wanted = ", ".join(shapes)
    if not is_named(rows):
        raise DataError(
            f"features are a {type(rows).__name__}; expected a dictionary of {wanted}, as those that were trained on."
        )
    if set(rows.keys()) != set(shapes):
        found = ", ".join(map(str, rows.keys()))
        raise DataError(f"features are a dictionary of {found}; expected {wanted}, as those that were trained on.")
    given = {name: _checked_array(f"features[{name!r}]", rows[name], shape) for name, shape in shapes.items()}
    if len({len(entry) for entry in given.values()}) > 1:
        counts = ", ".join(f"{name} {len(entry)}" for name, entry in given.items())
        raise DataError(f"features differ in their numbers of rows: {counts}; expected as many of each.")
    return NamedFeatures(given)


def _checked_array(name: str, values: Any, shape: Sequence[int]) -> Tensor:
    """A user's array, once it has finite numbers and rows of that shape."""
    try:
        given = values if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{name} are no array of numbers: {one_line(error)}; expected one row each.") from None
    if tuple(given.shape[1:]) != tuple(shape) or given.ndim != len(shape) + 1:
        raise DataError(
            f"{name} have shape {tuple(given.shape)}; expected rows of shape {tuple(shape)}, as those that were "
            "trained on."
        )
    if not bool(given.isfinite().all()):
        raise DataError(f"{name} hold NaN or infinity; expected finite numbers. Fill or drop those rows.")
    return given


def as_known(features: Features, known: Features) -> Features:
    """Inputs of a model on the device and in the types of those that it was trained on, where that loses nothing."""
    types = entries_of(known)
    found = {}
    for name, entry in entries_of(features).items():
        found[name] = entry.to(types[name])
        is_changed = not found[name].is_floating_point() and not torch.equal(found[name].to(entry), entry)
        if is_changed or (entry.is_floating_point() and not types[name].is_floating_point()):
            what = f"features[{name!r}]" if name else "features"
            raise DataError(
                f"{what} are {entry.dtype}; expected whole numbers that {types[name].dtype} holds, as those that were "
                "trained on."
            )
    return found[""] if isinstance(features, Tensor) else NamedFeatures(found)


@dataclass(frozen=True)
class Predictor:
    """Models of clients, and what their answers mean."""

    clients: Sequence[Hashable]  # their ids
    model_of: Callable[[int | None], nn.Module]  # of a client by its position, or the global one; on prepared inputs
    preparation: Preparation | None  # how a user's rows become inputs
    label_scale: LabelScale  # how outputs become answers
    classes: Sequence[Any] | None  # their names, in the order of the outputs; none where answers are numbers
    shape: RowShape  # of a row's inputs
    dtype: torch.dtype = torch.float32  # of the models
    device: torch.device | str = "cpu"  # where they are

    def predict(self, rows: Any, client: npt.ArrayLike | None = None) -> Any:
        """One row of answers for each row: its client, the prediction, probabilities of classes, whose model.

        A frame is answered by a frame of its own library, anything else by a Table of pyarrow.
        """
        if is_table(rows) and self.preparation is not None:
            rows = read_rows(rows, self.preparation) if isinstance(rows, str | Path) else rows
        inputs = inputs_of_rows(rows, self.preparation, self.shape)
        ids = self._ids(rows, client, len(inputs))
        positions, is_known = self._positions(ids, len(inputs))
        outputs = self._outputs(inputs, positions)
        columns: dict[str, Any] = {}
        if ids is not None:
            columns[self._client_name(client)] = pa.array(ids.tolist())
        columns |= self._answers(outputs)
        columns["model"] = pa.array(np.where(is_known, PERSONAL, GLOBAL)).dictionary_encode()
        return _like(rows, pa.table(columns))

    def _client_name(self, client: Any) -> str:
        if isinstance(client, str):
            return client
        return (self.preparation.client if self.preparation else None) or "client"

    def _ids(self, rows: Any, client: Any, num_rows: int) -> Array | None:
        """The client of each row; none where nobody says whose they are."""
        if is_table(rows):
            assert self.preparation is not None
            table = read_rows(rows, self.preparation)
            name = self._client_name(client)
            if name in table.columns:
                return np.array(table.words(name).to_pylist(), dtype=object)
            if client is not None:
                raise unknown_column(table, name, "Name the column of clients with client=.")
            return None
        if client is None:
            return None
        column = column_of(client)
        if len(column) != num_rows:
            raise DataError(f"there are {num_rows} rows and {len(column)} clients; expected as many of each.")
        return column.astype(object)

    def _positions(self, ids: Array | None, num_rows: int) -> tuple[Array, Array]:
        """The position of each row's client, -1 for those that were not there, and where there is one."""
        if ids is None:
            return np.full(num_rows, -1), np.zeros(num_rows, dtype=bool)
        known = {str(name): position for position, name in enumerate(self.clients)}
        found = np.array([known.get(str(name), -1) for name in ids.tolist()])
        return found, found >= 0

    def _outputs(self, inputs: Features, positions: Array) -> Tensor:
        """Outputs for each row, by the model at its position."""
        found: Tensor | None = None
        order = np.argsort(positions, kind="stable")
        distinct, start = np.unique(positions[order], return_index=True)
        for position, chosen in zip(distinct.tolist(), np.split(order, start[1:]), strict=True):
            model = self.model_of(None if position < 0 else position)
            for low in range(0, len(chosen), BLOCK_ROWS):
                some = torch.from_numpy(chosen[low : low + BLOCK_ROWS])
                with torch.no_grad():
                    outputs = call(model, map_entries(self._taken, inputs[some])).cpu()
                found = outputs.new_empty(len(inputs), *outputs.shape[1:]) if found is None else found
                found[some] = outputs
        return torch.empty(0, max(len(self.classes or ()), 1)) if found is None else found

    def _taken(self, inputs: Tensor) -> Tensor:
        return inputs.to(self.device, self.dtype if inputs.is_floating_point() else None)

    def _answers(self, outputs: Tensor) -> dict[str, Any]:
        """Columns of predictions and, of classes, their probabilities."""
        if self.classes is None:
            return {"prediction": pa.array(self.label_scale.answers(outputs).reshape(len(outputs), -1)[:, 0].numpy())}
        flat = outputs.double().reshape(len(outputs), -1)
        chances = flat.softmax(-1)
        if flat.shape[1] == 1:  # the log-odds of the second class
            chances = torch.cat([(-flat).sigmoid(), flat.sigmoid()], -1)
        names = list(self.classes)[: chances.shape[1]]
        names += list(range(len(names), chances.shape[1]))
        answer = chances.argmax(-1).tolist()
        found = {"prediction": pa.array([names[number] for number in answer])}
        return found | {f"probability_{name}": pa.array(chances[:, k].numpy()) for k, name in enumerate(names)}


def _like(rows: Any, table: pa.Table) -> Any:
    """A table in the library of the user's rows."""
    root = type(rows).__module__.partition(".")[0]
    if root == "pandas":
        found = table.to_pandas()
        found.index = rows.index
        return found
    if root == "polars":
        import polars

        return polars.from_arrow(table)
    return table
