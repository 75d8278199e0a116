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


@dataclass(frozen=True)
class DataFile:
    """A file that a data set is read from."""

    folder: str  # below each of the `places`
    names: tuple[str, ...]  # spellings, each tried in every place
    read: Callable[[Path], Any]  # gives its content, or a `DataError` where the file is damaged
    can_fetch: bool = False  # whether `selffl data fetch` can get it

    def find(self) -> Path:
        """The first of the files ``PLACE/folder/name`` that exists."""
        for place in places():
            for name in self.names:
                if (place / self.folder / name).is_file():
                    return place / self.folder / name
        looked = ", ".join(str(place / self.folder) for place in places())
        fetch = f"Run `selffl data fetch {self.folder}`, put" if self.can_fetch else "Put"
        raise DataError(
            f"{self.names[0]} of {self.folder} was not found in {looked}. {fetch} it into one of them, or set "
            f"SELFFL_DATA to the folder that holds {self.folder}/."
        )

    @property
    def is_there(self) -> bool:
        """Whether it is in any of the places."""
        return any((place / self.folder / name).is_file() for place in places() for name in self.names)

    def load(self) -> Any:
        """Its content, from wherever it is."""
        return self.read(self.find())
