"""Where data files are looked for, and that they are the right ones."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selffl.errors import DataError, one_line


def cache() -> Path:
    """The user's cache directory, where fetched files go."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "selffl"


def places() -> list[Path]:
    """``$SELFFL_DATA``, ``./data``, ``../shared/data``, then the user's cache directory."""
    named = os.environ.get("SELFFL_DATA")
    return [*([Path(named)] if named else []), Path("data"), Path("..") / "shared" / "data", cache()]


def read_checked(path: Path, sha256: str | None, what: str) -> bytes:
    """A file's content, once its checksum, if one is known, is right; ``what`` it should be is for the message."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}); expected {what}.") from None
    if sha256 is not None and (digest := hashlib.sha256(content).hexdigest()) != sha256:
        raise DataError(
            f"{path} has SHA-256 {digest}; expected {sha256}. It is damaged or another file: copy it again."
        )
    return content


@contextmanager
def refuse_unreadable(path: Path, advice: str, *kinds: type[Exception]) -> Iterator[None]:
    """Say of errors of these kinds, met while a file is read, in one line that it cannot be, and what to do."""
    try:
        yield
    except DataError:
        raise
    except kinds as error:
        raise DataError(f"{path} cannot be read ({one_line(error)}); {advice}.") from None


def find_file(data_set: str, *names: str, can_fetch: bool = False) -> Path:
    """The first of the files ``PLACE/data_set/name`` that exists; a name may be tried in several spellings."""
    for folder in places():
        for name in names:
            if (folder / data_set / name).is_file():
                return folder / data_set / name
    looked = ", ".join(str(folder / data_set) for folder in places())
    fetch = f"Run `selffl data fetch {data_set}`, put" if can_fetch else "Put"
    raise DataError(
        f"{names[0]} of {data_set} was not found in {looked}. {fetch} it into one of them, or set SELFFL_DATA to the "
        f"folder that holds {data_set}/."
    )


@dataclass(frozen=True)
class DataFile:
    """A file that a data set is read from."""

    folder: str  # below each of the `places`
    names: tuple[str, ...]  # spellings, each tried in every place
    read: Callable[[Path], Any]  # gives its content, or a `DataError` where the file is damaged
    can_fetch: bool = False  # whether `selffl data fetch` can get it

    def find(self) -> Path:
        """Where it is."""
        return find_file(self.folder, *self.names, can_fetch=self.can_fetch)

    def load(self) -> Any:
        """Its content, from wherever it is."""
        return self.read(self.find())
