"""What a data set says of itself, and loaders whose federations know the call that made them."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from importlib import resources
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Self

from selffl.data.federation import Federation
from selffl.data.locate import DataFile
from selffl.data.split import Split

# By the name of the data set: what a `DataSet` says, checksums, and the table of R that it is made of, where it is.
DESCRIPTIONS: dict[str, dict[str, Any]] = tomllib.loads(
    resources.files("selffl.data").joinpath("data_sets.toml").read_text("utf-8")
)
SPLIT_OPTIONS = ("test_fraction", "seed", "validation_fraction")  # that users choose; `stratify` is the data set's own


@dataclass(frozen=True)
class Remote:
    """A file at a public home."""

    url: str  # where it is
    sha256: str  # of the file as it is served
    members: Sequence[str] = ()  # what is taken out of it, where it is an archive; else the file itself is kept

    @property
    def file(self) -> str:
        """Its name there."""
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class DataSet:
    """A data set.

    Attributes:
        name: For `load` and the command line.
        title: What it is, in a line.
        clients: How many there are by default.
        classes: What they are called, by default; empty where numbers say it.
        stands_for: The data set it stands in for, where that could not be had; empty where it is what it says.
        licence: What is known of it.
        load: Makes the federation.
        files: Says which files it is read from; none where it needs no file.
        home: A page about the original.
        remotes: The files that `selffl data fetch` gets; none where it gets none from a server.
        write_file: Writes its one file where no server has it, from an R package, say; `selffl data fetch` calls it.
    """

    name: str
    title: str
    clients: int
    licence: str
    load: Callable[..., Federation]
    files: Callable[[], list[DataFile]] = list
    classes: tuple[str, ...] = ()
    stands_for: str = ""
    home: str = ""
    remotes: tuple[Remote, ...] = ()
    write_file: Callable[[Path], None] | None = None

    @classmethod
    def described(cls, name: str, load: Callable[..., Federation], files: Callable[[], list[DataFile]] = list) -> Self:
        """The data set of that name among the `DESCRIPTIONS`."""
        about = {key: value for key, value in DESCRIPTIONS[name].items() if key not in ("md5", "r_table")}
        about["classes"] = tuple(about.get("classes", ()))
        about["remotes"] = tuple(Remote(**each) for each in about.get("remotes", ()))
        return cls(name, load=load, files=files, **about)

    @property
    def can_fetch(self) -> bool:
        """Whether `selffl data fetch` can get it."""
        return bool(self.remotes) or self.write_file is not None


def named(name: str, split: Split | None = None) -> Callable[[Callable[..., Federation]], Callable[..., Federation]]:
    """A loader whose federations know the call that made them: the name of the data set, and every option.

    Args:
        name: of the data set.
        split: how its rows are divided where the user says nothing.  The loader takes a `Split` as its argument
            ``split``; users give ``test_fraction``, ``seed`` and ``validation_fraction``.  None: the loader divides
            rows in a way of its own.
    """
    defaults = {} if split is None else {option: getattr(split, option) for option in SPLIT_OPTIONS}
    of_users = [Parameter(option, Parameter.POSITIONAL_OR_KEYWORD, default=value) for option, value in defaults.items()]

    def naming(loader: Callable[..., Federation]) -> Callable[..., Federation]:
        written = signature(loader)
        own = [parameter for parameter in written.parameters.values() if split is None or parameter.name != "split"]
        public = written.replace(parameters=[*own, *of_users])

        @wraps(loader)
        def load(*args: Any, **kwargs: Any) -> Federation:
            call = public.bind(*args, **kwargs)
            call.apply_defaults()
            options = dict(call.arguments)
            if split is not None:
                options["split"] = replace(split, **{option: options.pop(option) for option in defaults})
            return replace(loader(**options), source={"name": name, **call.arguments})

        load.__signature__ = public  # type: ignore[attr-defined]
        return load

    return naming
