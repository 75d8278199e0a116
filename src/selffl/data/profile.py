"""What a set of training rows says about its columns, in numbers that add up over clients.

Sites that may not pool their rows send their `Profile`s instead, and one preparation is fitted to all of them.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import numpy.typing as npt

from selffl.data.arrow import pa
from selffl.data.labels import Label, Task, known_task, label_of, sorted_classes
from selffl.data.readers import read_table, table_of_frame
from selffl.data.roles import MissingRule, Roles, check_table, settle_missing
from selffl.data.tables import PLURAL, Array, Decimals, Kind, Table
from selffl.errors import ConfigError, DataError

VERSION = 1  # of the file format


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
    """What has to be known of a column, and adds up over clients."""

    kind: Kind | None  # what its cells are; none where all are missing
    num_missing: int  # rows without a value
    moments: Moments = Moments()  # of its numbers; of dates, in seconds since 1970
    words: tuple[str, ...] = ()  # those that occur, sorted

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
            sorted_classes({*self.classes, *other.classes}),
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
        """The profile as text that `from_json` reads."""
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
                known_task(content["task"]),
                tuple(content["classes"]),
                moments,
                content["client"],
                int(content["num_dropped"]),
                known_decimal(content.get("decimal")),
            )
        except (KeyError, TypeError, ValueError, AttributeError, ConfigError):
            raise DataError("the text is no profile; expected what Profile.to_json has written.") from None


def profile_column(table: Table, name: str, rows: Array | None = None) -> ColumnProfile:
    """What has to be known of one column, over ``rows`` (their numbers) or all rows."""
    kind, values = table.interpret_column(name)
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


def known_decimal(decimal: Any) -> Decimals | None:
    """A decimal sign, once it is one, or none."""
    if decimal not in (None, *get_args(Decimals)):
        raise ValueError(f"decimal is {decimal!r}")
    return cast("Decimals | None", decimal)
