"""Real grouped rows of the textbooks on multilevel models, from R's packages: a client is a school, county or person.

They come with R packages, not with this one.  `selffl data fetch` lets R write each of them as a CSV file.  Which they
are stands in ``data_sets.toml``.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from selffl.data.dataset import DESCRIPTIONS, DataSet, named
from selffl.data.federation import Federation
from selffl.data.locate import DataFile, refuse_unreadable
from selffl.data.split import Split
from selffl.errors import DataError, one_line

EXPORT_TIMEOUT_S = 120
EXPORT = """
found <- commandArgs(trailingOnly = TRUE)
rows <- new.env()
utils::data(list = found[2], package = found[1], envir = rows)
utils::write.csv(as.data.frame(rows[[found[2]]]), found[3], row.names = FALSE, fileEncoding = "UTF-8")
"""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class GroupedRows:
    """Rows with a group each."""

    features: Array  # one column each [rows, columns], float64, in their own units
    outcome: Array  # float64 values, or 0 and 1 as int64 [rows]
    group: Array  # the group of each row, as text [rows]

    def at(self, chosen: Array) -> GroupedRows:
        """The rows at these positions."""
        return GroupedRows(self.features[chosen], self.outcome[chosen], self.group[chosen])


@dataclass(frozen=True)
class RTable:
    """A table in an R package, and which of its columns are used."""

    name: str  # of the data set
    package: str  # R package that holds the table
    table: str  # its name there
    group: str  # column with the groups
    outcome: str  # column to predict; column=level is 1 where the column has this level and 0 elsewhere
    features: tuple[str, ...]  # columns to predict from: numbers, column=level, or column^2 for the square of a number
    num_rows: int  # how many rows the table has
    num_groups: int  # how many groups they have

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", tuple(self.features))

    @property
    def debian(self) -> str:
        """Debian's package that brings the R package."""
        return f"r-cran-{self.package.lower()}"

    @property
    def is_binary(self) -> bool:
        """Whether the outcome is one of two classes."""
        return "=" in self.outcome

    @property
    def file(self) -> DataFile:
        """The CSV file that R has written."""
        return DataFile(self.name, (f"{self.table}.csv",), self.read, can_fetch=True)

    def read(self, path: Path) -> GroupedRows:
        """Rows of a CSV file, once it has the columns and the numbers of rows and groups that the table has."""
        again = f"Run `selffl data fetch {self.name}` again, into another folder."
        expected = f"expected a CSV file. {again.rstrip('.')}"
        with (
            refuse_unreadable(path, expected, OSError, UnicodeDecodeError, csv.Error),
            path.open(encoding="utf-8-sig", newline="") as file,
        ):
            lines = list(csv.DictReader(file))
        used = dict.fromkeys(_column_of(term) for term in (self.group, self.outcome, *self.features))
        missing = [column for column in used if not lines or lines[0].get(column) is None]
        if missing:
            raise DataError(f"{path} has no column {missing[0]!r}; expected {', '.join(used)}. {again}")
        group = np.array([line[self.group] for line in lines])
        counts = len(lines), len(np.unique(group))
        if counts != (self.num_rows, self.num_groups):
            raise DataError(
                f"{path} has {counts[0]:,} rows of {counts[1]:,} groups; expected {self.num_rows:,} of "
                f"{self.num_groups:,}. {again}"
            )
        try:
            columns = [_values(lines, term) for term in (self.outcome, *self.features)]
        except ValueError as error:
            raise DataError(f"{path} holds {one_line(error)}; expected numbers. {again}") from None
        outcome = columns[0].astype(np.int64) if self.is_binary else columns[0]
        return GroupedRows(np.column_stack(columns[1:]), outcome, group)

    def export(self, path: Path) -> None:
        """Let R write the table of its package as a CSV file."""
        rscript = shutil.which("Rscript")
        if rscript is None:
            raise DataError(
                f"Rscript was not found; expected R, whose package {self.package} holds {self.name}. Install "
                f"Debian's {self.debian}, or R and its package {self.package}."
            )
        part = path.with_name(path.name + ".part")
        command = [rscript, "--vanilla", "-e", EXPORT, self.package, self.table, str(part)]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=EXPORT_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DataError(f"{rscript} did not run to its end ({one_line(error)}); expected {path.name}.") from None
        if ended.returncode or not part.is_file():
            said = " ".join(ended.stderr.split())[-200:] or f"exit code {ended.returncode}"
            raise DataError(
                f"R gave no table {self.table} of its package {self.package} ({said}). Install Debian's "
                f'{self.debian}, or in R install.packages("{self.package}"), and run it again.'
            )
        self.read(part)
        part.replace(path)

    def load(self) -> GroupedRows:
        """All rows, from wherever the CSV file is."""
        rows: GroupedRows = self.file.load()
        return rows


def _column_of(term: str) -> str:
    return term.partition("=")[0].removesuffix("^2")


def _values(lines: list[dict[str, str]], term: str) -> Array:
    """One column of the design: an indicator, a square, or a number as it is."""
    column, sign, level = term.partition("=")
    if sign:
        return np.array([float(line[column] == level) for line in lines])
    numbers = np.array([float(line[_column_of(term)]) for line in lines])
    if not np.isfinite(numbers).all():
        raise ValueError(f"values in {term} that are not finite")
    return numbers**2 if term.endswith("^2") else numbers


def _federation(table: RTable, split: Split) -> Federation:
    """The federation of a table; each group is a client."""
    rows = table.load()
    return Federation.from_arrays(
        rows.features.astype(np.float32),
        rows.outcome if table.is_binary else rows.outcome.astype(np.float32),
        rows.group,
        **split.options,
    )


def _data_set(table: RTable) -> DataSet:
    """A data set that comes with an R package."""
    load = named(table.name, Split(test_fraction=0.3))(partial(_federation, table))
    return replace(DataSet.described(table.name, load, lambda: [table.file]), write_file=table.export)


R_TABLES = {
    name: RTable(name, num_groups=about["clients"], **about["r_table"])
    for name, about in DESCRIPTIONS.items()
    if "r_table" in about
}
DATA_SETS = [_data_set(table) for table in R_TABLES.values()]
