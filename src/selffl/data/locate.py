"""Where data files are looked for."""

from __future__ import annotations

import os
from pathlib import Path

from selffl.errors import DataError


def places() -> list[Path]:
    """``$SELFFL_DATA``, ``./data``, ``../shared/data``, then the user's cache directory."""
    named = os.environ.get("SELFFL_DATA")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "selffl"
    return [*([Path(named)] if named else []), Path("data"), Path("..") / "shared" / "data", cache]


def find_file(data_set: str, *names: str) -> Path:
    """The first of the files ``PLACE/data_set/name`` that exists; a name may be tried in several spellings."""
    for place in places():
        for name in names:
            if (place / data_set / name).is_file():
                return place / data_set / name
    looked = ", ".join(str(place / data_set) for place in places())
    raise DataError(
        f"{names[0]} of {data_set} was not found in {looked}. Put it into one of them, or set SELFFL_DATA to the "
        f"folder that holds {data_set}/."
    )
