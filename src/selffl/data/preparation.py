"""How a user's table becomes numbers, and answers become the user's own units and names again.

A `Preparation` is one value: it says which columns are inputs, how words, dates and missing values become numbers, how
inputs and the label are scaled, and what the classes are called.  It is fitted on training rows in float64, from
`Profile`s, which add up: sites that may not pool their rows send theirs instead.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from selffl.data.arrow import pa, pc
from selffl.data.labels import Label, encode_label, known_task
from selffl.data.profile import VERSION, Moments, Profile, known_decimal
from selffl.data.roles import MissingRule, Roles, check_rule, unknown_column
from selffl.data.tables import PLURAL, Array, Decimals, Kind, Table
from selffl.errors import ConfigError, DataError, unknown_name
from selffl.state.files import atomic_write

MAX_WORDS = 20  # different words of a column that still become inputs


@dataclass(frozen=True)
class Column:
    """A column of the table, and the inputs of the model that it becomes."""

    name: str  # of the column
    kind: Kind  # number and date are one input, words one input for each word, 0 or 1
    words: tuple[str, ...] = ()  # the words, of a column of words; any other is 0 in all of them
    has_missing: bool = False  # whether a further input says, by 1, that the value is missing

    @property
    def inputs(self) -> list[str]:
        """The names of its inputs."""
        own = [f"{self.name}={word}" for word in self.words] if self.kind == "words" else [self.name]
        return [*own, *([f"{self.name} is missing"] if self.has_missing else [])]


@dataclass(frozen=True)
class Preparation:
    """Everything that turns a user's rows into a model's inputs, and its outputs into the user's units and names.

    Attributes:
        columns: Of the table; none where rows are arrays.
        mean: Of each input over the training rows; 0 for words.
        scale: Standard deviation of each input; 1 for words.
        label: What is predicted.
        client: The column that says whose row it is.
        missing: What is done about missing values: ``refuse``, ``drop`` or ``impute`` (the mean, and an input that says
            so).
        num_dropped: Rows that were dropped for missing values when it was fitted.
        shape: Of the inputs of one row.
        decimal: The decimal sign of the file that it was fitted on, by which later files are read, too.
    """

    columns: tuple[Column, ...]
    mean: tuple[float, ...]
    scale: tuple[float, ...]
    label: Label
    client: str | None = None
    missing: MissingRule = "refuse"
    num_dropped: int = 0
    shape: tuple[int, ...] = field(default=())
    decimal: Decimals | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not self.shape:
            object.__setattr__(self, "shape", (len(self.mean),))

    @classmethod
    def fit(cls, *profiles: Profile, missing: MissingRule = "refuse", num_dropped: int | None = None) -> Preparation:
        """The preparation for the rows of these profiles together, each of a client, or one of all of them."""
        if not profiles:
            raise ConfigError("there are no profiles; expected one for each client.")
        check_rule(missing)
        whole = reduce(Profile.merge, profiles)
        columns: list[Column] = []
        mean: list[float] = []
        scale: list[float] = []
        for name, facts in whole.columns.items():
            if facts.num_missing and missing != "impute":
                raise DataError(
                    f"column {name!r} lacks {facts.num_missing:,} values; expected none with missing={missing!r}. Pass "
                    f'missing="impute", or make the profiles with missing={missing!r}.'
                )
            if facts.kind is None:
                raise DataError(f"column {name!r} is missing in every training row; expected values. Leave it out.")
            if len(facts.words) > MAX_WORDS:
                raise DataError(
                    f"column {name!r} holds {len(facts.words):,} different words, such as {facts.words[0]!r}; expected "
                    f"numbers, dates (2026-01-31), or at most {MAX_WORDS} words. Leave it out, or encode it as numbers."
                )
            column = Column(name, facts.kind, facts.words, missing == "impute" and facts.num_missing > 0)
            columns.append(column)
            is_scaled = facts.kind != "words"
            own = [(facts.moments.mean, facts.moments.scale)] if is_scaled else []
            own += [(0.0, 1.0)] * (len(column.inputs) - len(own))
            mean += [centre for centre, _ in own]
            scale += [spread for _, spread in own]
        label = Label(whole.label, whole.task, whole.classes)
        if whole.task != "classes":
            label = replace(label, mean=whole.label_moments.mean, scale=whole.label_moments.scale)
        dropped = whole.num_dropped if num_dropped is None else num_dropped
        return cls(
            tuple(columns), tuple(mean), tuple(scale), label, whole.client, missing, dropped, decimal=whole.decimal
        )

    @property
    def inputs(self) -> list[str]:
        """The names of a model's inputs, in order; empty where rows are arrays."""
        return [name for column in self.columns for name in column.inputs]

    @property
    def roles(self) -> Roles:
        """The columns that it was fitted with."""
        return Roles(self.label.name, self.client, [column.name for column in self.columns])

    @property
    def texts(self) -> list[str]:
        """The columns whose cells should be read as they are written."""
        words = [column.name for column in self.columns if column.kind == "words"]
        is_named = any(isinstance(each, str) for each in self.label.classes)
        return [*words, *([self.label.name] if is_named else []), *filter(None, [self.client])]

    def encode(self, table: Table) -> npt.NDArray[np.float32]:
        """The inputs of a table's rows, scaled, ``[rows, inputs]``."""
        return self.encode_parts(table, [None])[0]

    def encode_parts(
        self, table: Table, parts: Sequence[Array | None], release: bool = False
    ) -> list[npt.NDArray[np.float32]]:
        """The inputs of several parts of a table, each the numbers of its rows (none: all), ``[rows, inputs]``.

        With ``release`` the table gives up each column once it is encoded, so that no number is held twice.
        """
        sizes = [len(table) if rows is None else len(rows) for rows in parts]
        inputs = [np.empty((size, len(self.mean)), dtype=np.float32) for size in sizes]
        number = 0
        for column in self.columns:
            for values in self._inputs_of(table, column, self.mean[number]):
                scaled = ((values - self.mean[number]) / self.scale[number]).astype(np.float32)
                for part, rows in zip(inputs, parts, strict=True):
                    part[:, number] = scaled if rows is None else scaled[rows]
                number += 1
            if release:
                table.release(column.name)
        return inputs

    def _inputs_of(self, table: Table, column: Column, mean: float) -> Iterator[Array]:
        """The inputs of a column in the user's own units: numbers, seconds, and 0 or 1 for words."""
        is_missing = table.is_missing(column.name)
        if is_missing.any() and self.missing != "impute":
            raise DataError(
                f"{table.where(is_missing)}: {column.name} is missing; expected a value in each row, as of the rows "
                "that were trained on. Fill them in, or drop those rows."
            )
        if column.kind == "words":
            words = pa.array(column.words, pa.string())
            indices = pc.index_in(table.words(column.name), value_set=words).fill_null(-1).to_numpy()
            yield from ((indices == number).astype(np.float32) for number in range(len(column.words)))
        else:
            kind = table.interpret_column(column.name).kind
            if kind != column.kind and not is_missing.all():
                raise DataError(
                    f"{table.place}: column {column.name!r} holds {PLURAL[kind]}; expected {PLURAL[column.kind]}, as "
                    "in the rows that were trained on."
                )
            numbers = table.numbers(column.name)
            yield np.where(is_missing, mean, numbers) if is_missing.any() else numbers
        if column.has_missing:
            yield is_missing.astype(np.float32)

    def check_columns(self, table: Table) -> None:
        """Refuse a table that lacks a column of features."""
        for column in self.columns:
            if column.name not in table.columns:
                raise unknown_column(table, column.name, "Expected the columns that the run was trained on.")

    def unknown_words(self, table: Table) -> dict[str, list[str]]:
        """Words of a table that the training rows did not hold, by column: they count as none of the known ones."""
        unknown = {}
        for column in self.columns:
            if column.kind == "words":
                words = table.words(column.name).unique().drop_null().to_pylist()
                if strange := [word for word in words if word not in column.words]:
                    unknown[column.name] = strange
        return unknown

    def newly_missing(self, table: Table) -> dict[str, int]:
        """Rows without a value in columns of which no training row lacked one, by column: no input says where."""
        complete = [column.name for column in self.columns if not column.has_missing]
        return {name: number for name in complete if (number := int(table.is_missing(name).sum()))}

    def scale_array(self, x: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
        """Rows that are arrays in the user's units as inputs of the model."""
        return ((x - self.means) / self.scales).astype(np.float32)

    @property
    def means(self) -> npt.NDArray[np.float64]:
        """Means of the inputs, in the shape of a row."""
        return np.array(self.mean).reshape(self.shape)

    @property
    def scales(self) -> npt.NDArray[np.float64]:
        """Standard deviations of the inputs, in the shape of a row."""
        return np.array(self.scale).reshape(self.shape)

    def encode_label(self, table: Table) -> Array:
        """The label of each row: a class's number, or a value in the user's units."""
        return encode_label(table, self.label)

    def to_dict(self) -> dict[str, Any]:
        """The preparation as JSON has it."""
        return {"version": VERSION, **asdict(self)}

    def digest(self) -> str:
        """SHA-256 of everything in it: equal preparations, equal digests."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Preparation:
        """What `to_dict` has made, also by way of JSON."""
        try:
            given = dict(content)
            if (version := given.pop("version")) != VERSION:
                raise DataError(f"the text has version {version!r}; expected {VERSION}. Use the selffl that wrote it.")
            columns = tuple(Column(**{**column, "words": tuple(column["words"])}) for column in given.pop("columns"))
            label = Label(**{**given["label"], "classes": tuple(given.pop("label")["classes"])})
            lists: dict[str, Any] = {name: tuple(given.pop(name)) for name in ("mean", "scale", "shape")}
            made = cls(columns=columns, label=label, **lists, **given)
            check_rule(made.missing)
            known_task(label.task)
            known_decimal(made.decimal)
            fits = len(made.mean) == len(made.scale) == np.prod(made.shape)
            numbers = np.array([*made.mean, *made.scale, label.mean, label.scale], dtype=np.float64)
            is_scaled = min((*made.scale, label.scale)) > 0 and np.isfinite(numbers).all()
            if not (fits and is_scaled and len(made.inputs) in ({len(made.mean)} if columns else {0})):
                raise ValueError("numbers that do not fit each other")
            return made
        except (KeyError, TypeError, ValueError, AttributeError, ConfigError):
            raise DataError("the text is no preparation; expected what Preparation.save has written.") from None

    def save(self, path: Path | str) -> None:
        """Write it as JSON."""
        with atomic_write(Path(path)) as partial:
            partial.write_text(json.dumps(self.to_dict(), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path | str) -> Preparation:
        """Read what `save` has written."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError):
            raise DataError(f"{path} is no preparation; expected a file that Preparation.save has written.") from None
        except DataError as error:
            said = str(error).replace("the text", str(path), 1)
            raise DataError(said.replace("expected what", "expected a file that")) from None


def prepare_array(x: npt.NDArray[np.float64], label: Label) -> Preparation:
    """The preparation that brings every number of a row to mean 0 and standard deviation 1 over the rows ``x``."""
    mean = x.mean(0)
    squares = np.square(x - mean).sum(0)
    scale = [
        Moments(len(x), float(m), float(s)).scale for m, s in zip(mean.reshape(-1), squares.reshape(-1), strict=True)
    ]
    return Preparation((), tuple(mean.reshape(-1).tolist()), tuple(scale), label, shape=x.shape[1:] or (1,))


def encode_classes(labels: Any, classes: Sequence[Any]) -> Array:
    """Classes as the user names them, as their numbers ``[rows]``."""
    known = {each: number for number, each in enumerate(classes)}
    values = np.asarray(labels).reshape(-1).tolist()
    strange = [value for value in values if value not in known]
    if strange:
        raise unknown_name("class", str(strange[0]), [str(each) for each in classes])
    return np.array([known[value] for value in values], dtype=np.int64)
