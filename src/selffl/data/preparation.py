"""How a user's table becomes numbers, and answers become the user's own units and names again.

A `Preparation` is one value: it says which columns are inputs, how words, dates and missing values become numbers, how
inputs and the label are scaled, and what the classes are called.  It is fitted on training rows in float64, from
`Profile`s, which add up: sites that may not pool their rows send theirs instead.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from selffl.data.tables import PLURAL, Array, Decimals, Kind, Table, read_table, table_of_frame
from selffl.errors import ConfigError, DataError, unknown_name

Task = Literal["classes", "values", "counts"]
MissingRule = Literal["refuse", "drop", "impute"]

MAX_WORDS = 20  # different words of a column that still become inputs
MAX_CLASSES_UNASKED = 20  # different whole numbers of a label that are taken for classes without being asked about
VERSION = 1  # of the file format


# ------------------------------------------------------------------------------------------------------ what is what


@dataclass(frozen=True)
class Roles:
    """Which column of a table is what.

    Attributes:
        label: The column to predict; none where there is nothing to learn from.
        client: The column that says whose row it is; none: all rows are one client's.
        features: The columns of features, in this order; none: all others, in the table's order.
        exclude: Columns that are no features, where ``features`` is none.
        cluster: The column of the clients' clusters, if they are grouped.
    """

    label: Hashable | None
    client: Hashable | None = None
    features: Sequence[Hashable] | None = None
    exclude: Sequence[Hashable] | None = None
    cluster: Hashable | None = None

    def __post_init__(self) -> None:
        for option in ("features", "exclude"):
            given = getattr(self, option)
            if isinstance(given, str) or not isinstance(given, Iterable | None):
                raise DataError(f"{option} is {given!r}; expected a list of columns, such as [{given!r}].")
            object.__setattr__(self, option, None if given is None else [str(name) for name in given])
        for role in ("label", "client", "cluster"):
            given = getattr(self, role)
            object.__setattr__(self, role, None if given is None else str(given))

    @property
    def by_name(self) -> dict[str, str]:
        """The columns that are no features, by what they are for."""
        every = {"label": self.label, "client": self.client, "cluster": self.cluster}
        return {role: str(name) for role, name in every.items() if name is not None}

    def features_of(self, table: Table) -> list[str]:
        """The features of a table, once all that is asked for is there."""
        kept = self.by_name
        for role, name in kept.items():
            if name not in table.columns:
                raise unknown_column(table, name, f"Name the column of {role}s with {role}=.")
        if len(set(kept.values())) < len(kept):
            twice = next(name for name in kept.values() if list(kept.values()).count(name) > 1)
            roles = " and ".join(role for role, name in kept.items() if name == twice)
            raise DataError(f"{twice!r} is given as {roles}; expected a column for each.")
        taken = set(kept.values())
        for option, given in (("features", self.features), ("exclude", self.exclude)):
            seen: set[Hashable] = set()
            for column in given or ():
                if column not in table.columns:
                    raise unknown_column(table, column, f"Name columns of the table with {option}=.")
                if column in taken:
                    role = next(role for role, name in kept.items() if name == column)
                    raise DataError(
                        f"{column!r} is in {option} and the column of {role}s; expected one of these. Take it out of "
                        f"{option}=."
                    )
                if column in seen:
                    raise DataError(f"{column!r} is in {option} twice; expected names that differ.")
                seen.add(column)
        left_out = dict.fromkeys([*kept.values(), *map(str, self.exclude or ())])
        chosen = table.columns if self.features is None else self.features
        features = [str(name) for name in chosen if name not in left_out]
        if not features:
            beside = " and ".join(map(repr, left_out))
            raise DataError(f"{table.place} has no column beside {beside}; expected features.")
        if "" in features:
            raise DataError(
                f"{table.place}, line 1: column {list(table.columns).index('') + 1} has no name, as where pandas or R "
                "has written row numbers; expected a name for each feature. Name it, or leave it out with exclude=['']."
            )
        return features


def unknown_column(table: Table, name: Hashable, advice: str) -> DataError:
    """The error of a column that a table does not have."""
    names = list(table.columns)
    near = difflib.get_close_matches(str(name), list(map(str, names)), n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    shown = ", ".join(map(str, names[:6])) + (", …" if len(names) > 6 else "")
    return DataError(f"{table.place} has no column {name!r} among: {shown}{hint} {advice}")


def check_table(table: Table, roles: Roles) -> None:
    """Refuse a table without rows, and roles without a label."""
    if len(table) == 0:
        raise DataError(f"{table.place} has no rows; expected at least one.")
    if roles.label is None:
        raise DataError("label is None; expected the name of the column of labels.")


def check_rule(missing: str) -> None:
    """Refuse what is no way to deal with missing values."""
    if missing not in get_args(MissingRule):
        raise unknown_name("missing", str(missing), get_args(MissingRule))


def settle_missing(table: Table, roles: Roles, features: Sequence[str], rule: MissingRule) -> tuple[Table, int]:
    """The table without the rows that are dropped for their missing values, and how many these are.

    ``refuse`` allows no missing value, ``drop`` drops every row with one, and ``impute`` drops only the rows without a
    label, client or cluster, which nothing can stand for.
    """
    check_rule(rule)
    checked = [*roles.by_name.values(), *(features if rule != "impute" else ())]
    is_missing = np.zeros(len(table), dtype=bool)
    for name in checked:
        here = table.is_missing(name)
        if rule == "refuse" and here.any():
            advice = 'Pass missing="drop" or missing="impute", or fill them in.'
            if name in roles.by_name.values():
                advice = 'Pass missing="drop", or fill them in.'
            raise DataError(f"{table.where(here)}: {name} is missing; expected a value in each row. {advice}")
        is_missing |= here
    table = table.select(dict.fromkeys([*roles.by_name.values(), *features]))
    if not is_missing.any():
        return table, 0
    if is_missing.all():
        raise DataError(f"{table.place} has no row without a missing value; expected some. Leave out sparse columns.")
    return table.take(~is_missing), int(is_missing.sum())


# ---------------------------------------------------------------------------------------------------------- profiles


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of some numbers, which merge without cancellation."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def __post_init__(self) -> None:
        if not (self.count >= 0 and np.isfinite(self.mean) and 0 <= self.squares < np.inf):
            raise ValueError(f"{self} are no moments")

    @classmethod
    def of(cls, values: npt.NDArray[np.float64]) -> Moments:
        """Moments of the values that are not NaN, in two passes."""
        known = values[~np.isnan(values)]
        if len(known) == 0:
            return cls()
        if known.min() == known.max():  # whose mean could be off by rounding
            return cls(len(known), float(known[0]), 0.0)
        mean = float(known.mean())
        return cls(len(known), mean, float(np.square(known - mean).sum()))

    def merge(self, other: Moments) -> Moments:
        """Moments of both sets together (Chan, Golub and LeVeque 1979)."""
        count = self.count + other.count
        if 0 in (self.count, other.count):
            return self if other.count == 0 else other
        gap = other.mean - self.mean
        mean = self.mean + gap * (other.count / count)
        return Moments(count, mean, self.squares + other.squares + gap * gap * (self.count * other.count / count))

    @property
    def scale(self) -> float:
        """The standard deviation; 1 for numbers that do not vary beyond rounding."""
        if self.count == 0:
            return 1.0
        spread = float(np.sqrt(self.squares / self.count))
        return spread if spread > max(self.count, 10) * np.finfo(np.float64).eps * abs(self.mean) else 1.0


@dataclass(frozen=True)
class ColumnProfile:
    """What has to be known of a column, and adds up over clients.

    Attributes:
        kind: What its cells are; none where all are missing.
        num_missing: Rows without a value.
        moments: Of its numbers; of dates, in seconds since 1970.
        words: Those that occur, sorted.
    """

    kind: Kind | None
    num_missing: int
    moments: Moments = Moments()
    words: tuple[str, ...] = ()

    def merge(self, name: str, other: ColumnProfile) -> ColumnProfile:
        """Profile of the column in both sets of rows together."""
        if self.kind is not None and other.kind is not None and self.kind != other.kind:
            raise DataError(
                f"column {name!r} holds {PLURAL[self.kind]} in one profile and {PLURAL[other.kind]} in another; "
                "expected one kind. Write it the same way everywhere, or leave it out."
            )
        return ColumnProfile(
            self.kind or other.kind,
            self.num_missing + other.num_missing,
            self.moments.merge(other.moments),
            tuple(sorted({*self.words, *other.words})),
        )


@dataclass(frozen=True)
class Profile:
    """What a set of training rows says about its columns: counts, means, sums of squares and the words that occur.

    Profiles of several clients `merge` into that of all their rows, so that sites can fit one `Preparation` without
    showing each other a row.

    Attributes:
        columns: Of the features, in order.
        label: The name of the label.
        task: What the label is.
        classes: The classes that occur, sorted; none where the label is no class.
        label_moments: Of a label of values or counts.
        client: The name of the column of clients.
        num_dropped: Rows that were dropped for missing values.
        decimal: The decimal sign of the file, where it is known to have one.
    """

    columns: Mapping[str, ColumnProfile]
    label: str
    task: Task
    classes: tuple[Any, ...] = ()
    label_moments: Moments = Moments()
    client: str | None = None
    num_dropped: int = 0
    decimal: Decimals | None = None

    def merge(self, other: Profile) -> Profile:
        """Profile of both sets of rows together."""
        for name in ("label", "task"):
            if getattr(self, name) != getattr(other, name):
                raise DataError(
                    f"profiles have the {name}s {getattr(self, name)!r} and {getattr(other, name)!r}; expected one. "
                    f"Make them with the same {name}=."
                )
        if odd := sorted(set(self.columns) ^ set(other.columns)):
            raise DataError(
                f"the column {odd[0]!r} is in some profiles and not in others; expected the same features everywhere. "
                "Name them with features=."
            )
        if len({isinstance(each, str) for each in (*self.classes, *other.classes)}) > 1:
            raise DataError(
                f"the label {self.label!r} holds words in one profile and numbers in another; expected one kind of "
                "classes. Write them the same way everywhere."
            )
        return Profile(
            {name: column.merge(name, other.columns[name]) for name, column in self.columns.items()},
            self.label,
            self.task,
            _sorted_classes({*self.classes, *other.classes}),
            self.label_moments.merge(other.label_moments),
            self.client or other.client,
            self.num_dropped + other.num_dropped,
            self.decimal if self.decimal == other.decimal else None,
        )

    @classmethod
    def of_csv(
        cls,
        path: Path | str,
        label: str,
        client: str | None = None,
        features: Sequence[str] | None = None,
        *,
        exclude: Sequence[str] | None = None,
        task: Task | None = None,
        missing: MissingRule = "refuse",
        decimal: Decimals | None = None,
    ) -> Profile:
        """The profile of the rows of a file, ``.csv`` or ``.parquet``, as a site makes it of its training rows.

        Arguments are those of `Federation.from_csv`; there need be no column of clients.
        """
        roles = Roles(label, client, features, exclude)
        return cls.of_table(read_table(Path(path), roles.by_name.values(), decimal), roles, task, missing)

    @classmethod
    def of_frame(
        cls,
        frame: Any,
        label: Hashable,
        client: Hashable | None = None,
        features: Sequence[Hashable] | None = None,
        *,
        exclude: Sequence[Hashable] | None = None,
        task: Task | None = None,
        missing: MissingRule = "refuse",
    ) -> Profile:
        """The profile of the rows of a DataFrame of pandas or polars, or a Table of pyarrow.

        Examples:
            >>> import pyarrow, selffl
            >>> tables = [pyarrow.table({"age": ages, "ill": ["no", "yes"]}) for ages in ([31, 48], [27, 60])]
            >>> profiles = [selffl.Profile.of_frame(table, label="ill") for table in tables]
            >>> selffl.Preparation.fit(*profiles).mean
            (41.5,)
        """
        return cls.of_table(table_of_frame(frame), Roles(label, client, features, exclude), task, missing)

    @classmethod
    def of_table(cls, table: Table, roles: Roles, task: Task | None = None, missing: MissingRule = "refuse") -> Profile:
        """The profile of all rows of a table."""
        check_table(table, roles)
        features = roles.features_of(table)
        table, num_dropped = settle_missing(table, roles, features, missing)
        label = label_of(table, str(roles.label), task)
        return cls.of_rows(table, features, label, None if roles.client is None else str(roles.client), num_dropped)

    @classmethod
    def of_rows(
        cls,
        table: Table,
        features: Sequence[str],
        label: Label,
        client: str | None = None,
        num_dropped: int = 0,
        rows: Array | None = None,
    ) -> Profile:
        """The profile of the rows numbered ``rows``, or of all, of a table whose label is known."""
        moments = Moments()
        if label.task != "classes":
            values = table.numbers(label.name)
            moments = Moments.of(values if rows is None else values[rows])
        columns = {name: profile_column(table, name, rows) for name in features}
        return cls(columns, label.name, label.task, label.classes, moments, client, num_dropped, table.decimals)

    def save(self, path: Path | str) -> None:
        """Write it as JSON."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path | str) -> Profile:
        """Read what `save` has written."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, DataError):
            raise DataError(f"{path} is no profile; expected a file that Profile.save has written.") from None

    def to_json(self) -> str:
        """As text that `from_json` reads."""
        return json.dumps({"profile": VERSION, **asdict(self)}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """What `to_json` has written."""
        try:
            content = json.loads(text)
            if content.pop("profile") != VERSION:
                raise KeyError("profile")
            columns = {
                name: ColumnProfile(
                    column["kind"], column["num_missing"], Moments(**column["moments"]), tuple(column["words"])
                )
                for name, column in content["columns"].items()
            }
            if not all(column.kind in (None, *PLURAL) for column in columns.values()):
                raise KeyError("kind")
            moments = Moments(**content["label_moments"])
            return cls(
                columns,
                str(content["label"]),
                _known_task(content["task"]),
                tuple(content["classes"]),
                moments,
                content["client"],
                int(content["num_dropped"]),
                _known_decimal(content.get("decimal")),
            )
        except (KeyError, TypeError, ValueError, AttributeError, ConfigError):
            raise DataError("the text is no profile; expected what Profile.to_json has written.") from None


def profile_column(table: Table, name: str, rows: Array | None = None) -> ColumnProfile:
    """What has to be known of one column, over ``rows`` (their numbers) or all rows."""
    kind, values = table.interpreted(name)
    if rows is not None:
        values = values.take(pa.array(rows))
    num_missing = values.null_count
    if num_missing == len(values):
        return ColumnProfile(None, num_missing)
    if kind == "words":
        words = values.unique().drop_null().to_pylist()
        return ColumnProfile(kind, num_missing, words=tuple(sorted(words)))
    numbers = table.numbers(name)
    return ColumnProfile(kind, num_missing, Moments.of(numbers if rows is None else numbers[rows]))


# ------------------------------------------------------------------------------------------------------ preparations


@dataclass(frozen=True)
class Column:
    """A column of the table, and the inputs of the model that it becomes.

    Attributes:
        name: Of the column.
        kind: ``number`` and ``date`` are one input, ``words`` one input for each word, 0 or 1.
        words: The words, of a column of words; any other is 0 in all of them.
        has_missing: Whether a further input says, by 1, that the value is missing.
    """

    name: str
    kind: Kind
    words: tuple[str, ...] = ()
    has_missing: bool = False

    @property
    def inputs(self) -> list[str]:
        """The names of its inputs."""
        own = [f"{self.name}={word}" for word in self.words] if self.kind == "words" else [self.name]
        return [*own, *([f"{self.name} is missing"] if self.has_missing else [])]


@dataclass(frozen=True)
class Label:
    """What is predicted, in the user's own units and names.

    Attributes:
        name: Of the column.
        task: ``classes``, ``values`` or ``counts``.
        classes: Their names, or numbers, as the user writes them: output k of a model is ``classes[k]``.
        mean: Of values or counts in the training rows.
        scale: Their standard deviation.
    """

    name: str
    task: Task
    classes: tuple[Any, ...] = ()
    mean: float = 0.0
    scale: float = 1.0


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
            kind = table.interpreted(column.name).kind
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
        """As JSON has it."""
        return {"version": VERSION, **asdict(self)}

    def digest(self) -> str:
        """SHA-256 of everything in it: equal preparations, equal digests."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Preparation:
        """What `to_dict` has made, also by way of JSON."""
        try:
            given = dict(content)
            if given.pop("version") != VERSION:
                raise KeyError("version")
            columns = tuple(Column(**{**column, "words": tuple(column["words"])}) for column in given.pop("columns"))
            label = Label(**{**given["label"], "classes": tuple(given.pop("label")["classes"])})
            lists: dict[str, Any] = {name: tuple(given.pop(name)) for name in ("mean", "scale", "shape")}
            made = cls(columns=columns, label=label, **lists, **given)
            check_rule(made.missing)
            _known_task(label.task)
            _known_decimal(made.decimal)
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
        Path(path).write_text(json.dumps(self.to_dict(), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path | str) -> Preparation:
        """Read what `save` has written."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError, DataError):
            raise DataError(f"{path} is no preparation; expected a file that Preparation.save has written.") from None


def prepare_array(x: npt.NDArray[np.float64], label: Label) -> Preparation:
    """The preparation that brings every number of a row to mean 0 and standard deviation 1 over the rows ``x``."""
    mean = x.mean(0)
    squares = np.square(x - mean).sum(0)
    scale = [
        Moments(len(x), float(m), float(s)).scale for m, s in zip(mean.reshape(-1), squares.reshape(-1), strict=True)
    ]
    return Preparation((), tuple(mean.reshape(-1).tolist()), tuple(scale), label, shape=x.shape[1:] or (1,))


# ------------------------------------------------------------------------------------------------------------ labels


def label_of(table: Table, name: str, task: Task | None) -> Label:
    """What a column of labels is: as the user says, or as its values do where they leave no doubt.

    Words and truth values are classes, whole numbers classes where they are few, other numbers values.
    """
    if task is not None:
        _known_task(task)
    kind, values = table.interpreted(name)
    if kind in ("date", "time"):
        raise DataError(f"{table.place}: the label {name!r} holds {PLURAL[kind]}; expected classes or numbers.")
    if kind == "words":
        return Label(name, "classes", _word_classes(table, name, values, task))
    numbers = table.numbers(name)  # which refuses infinity
    is_whole = bool((numbers == np.floor(numbers)).all())
    distinct = values.unique().drop_null().to_pylist() if is_whole and task in (None, "classes") else []
    if task is None:
        is_integer = pa.types.is_integer(values.type)
        is_open = len(distinct) > MAX_CLASSES_UNASKED if is_integer else len(distinct) <= len(table) / 2
        if is_whole and is_open:
            shown = ", ".join(f"{value:g}" for value in sorted(distinct)[:5]) + (", …" if len(distinct) > 5 else "")
            raise DataError(
                f"{table.place}: the label {name!r} holds {len(distinct):,} different whole numbers ({shown}); "
                'expected to be told what they are. Pass task="classes", task="values" or task="counts".'
            )
        task = "classes" if is_integer else "values"
    is_odd = numbers != np.floor(numbers)
    if task == "counts":
        is_odd |= numbers < 0
    if task != "values" and is_odd.any():
        wanted = "whole numbers or words as classes" if task == "classes" else "counts, whole numbers from 0 up"
        raise DataError(f"{table.where(is_odd)}: the label {name!r} is {numbers[is_odd][0]:g}; expected {wanted}.")
    if task != "classes":
        return Label(name, task)
    kind_of = bool if pa.types.is_boolean(table.columns[name].type) else int
    return Label(name, "classes", _sorted_classes(kind_of(value) for value in distinct))


def _known_task(task: str) -> Task:
    if task not in get_args(Task):
        raise unknown_name("task", str(task), get_args(Task))
    return cast(Task, task)


def _known_decimal(decimal: Any) -> Decimals | None:
    if decimal not in (None, *get_args(Decimals)):
        raise ValueError(f"decimal is {decimal!r}")
    return cast("Decimals | None", decimal)


def _word_classes(table: Table, name: str, words: pa.Array, task: Task | None) -> tuple[Any, ...]:
    """The classes of a label that holds words."""
    if task in ("values", "counts"):
        raise DataError(
            f"{table.place}: the label {name!r} holds words, such as {words.drop_null()[0].as_py()!r}; expected "
            f"numbers for task={task!r}."
        )
    distinct = words.unique().drop_null().to_pylist()
    if task is None and len(distinct) > max(MAX_CLASSES_UNASKED, len(table) / 2):
        raise DataError(
            f"{table.place}: the label {name!r} holds {len(distinct):,} different words in {len(table):,} rows, such "
            f'as {distinct[0]!r}; expected classes that repeat, or numbers. Pass task="classes" if they are classes.'
        )
    return _sorted_classes(distinct)


def encode_label(table: Table, label: Label) -> Array:
    """The label of each row of a table: the number of its class, or its value as float64."""
    name = label.name
    if name not in table.columns:
        raise unknown_column(table, name, "Expected the label that the run was trained on.")
    is_missing = table.is_missing(name)
    if is_missing.any():
        raise DataError(
            f"{table.where(is_missing)}: {name} is missing; expected a label in every row. Fill them in, or drop "
            "those rows."
        )
    if label.task != "classes":
        return table.numbers(name)
    values = table.interpreted(name).values
    is_words = any(isinstance(each, str) for each in label.classes)
    known = {each: number for number, each in enumerate(label.classes)}
    encoded = (table.words(name) if is_words else values).dictionary_encode()
    distinct = encoded.dictionary.to_pylist()
    strange = next((index for index, value in enumerate(distinct) if value not in known), None)
    if strange is not None:
        is_strange = np.asarray(encoded.indices) == strange
        shown = ", ".join(map(str, label.classes[:8])) + (", …" if len(label.classes) > 8 else "")
        raise DataError(
            f"{table.where(is_strange)}: {name} is {distinct[strange]!r}; expected one of the classes {shown}."
        )
    numbers: Array = np.array([known[value] for value in distinct], dtype=np.int64)[np.asarray(encoded.indices)]
    return numbers


def encode_classes(labels: Any, classes: Sequence[Any]) -> Array:
    """Classes as the user names them, as their numbers ``[rows]``."""
    known = {each: number for number, each in enumerate(classes)}
    values = np.asarray(labels).reshape(-1).tolist()
    strange = [value for value in values if value not in known]
    if strange:
        raise unknown_name("class", str(strange[0]), [str(each) for each in classes])
    return np.array([known[value] for value in values], dtype=np.int64)


def _sorted_classes(classes: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(sorted(set(classes)))
