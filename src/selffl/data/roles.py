"""Which column of a user's table is what, and which rows are left where values are missing."""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from selffl.data.tables import Table
from selffl.errors import DataError, check_known, first_few

MissingRule = Literal["refuse", "drop", "impute"]


@dataclass(frozen=True)
class Roles:
    """Which column of a table is what."""

    label: Hashable | None  # the column to predict; none where there is nothing to learn from
    client: Hashable | None = None  # the column that says whose row it is; none: all rows are one client's
    features: Sequence[Hashable] | None = None  # the features, in this order; none: all others, in the table's order
    exclude: Sequence[Hashable] | None = None  # columns that are no features, where features is none
    cluster: Hashable | None = None  # the column of the clients' clusters, if they are grouped

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
    return DataError(f"{table.place} has no column {name!r} among: {first_few(names, 6)}{hint} {advice}")


def check_table(table: Table, roles: Roles) -> None:
    """Refuse a table without rows, and roles without a label."""
    if len(table) == 0:
        raise DataError(f"{table.place} has no rows; expected at least one.")
    if roles.label is None:
        raise DataError("label is None; expected the name of the column of labels.")


def check_rule(missing: str) -> None:
    """Refuse what is no way to deal with missing values."""
    check_known("missing", missing, get_args(MissingRule))


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
