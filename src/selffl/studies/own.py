"""A study of the user's own: a TOML file beside the Python that makes its clients, its model and, if need be, its loss.

`selffl init` writes such a folder; wherever the command line takes a study, it takes the folder, or the file.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import tomllib
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import nn

from selffl.algorithms import ALGORITHMS
from selffl.algorithms.options import check_integer
from selffl.data import DATA_SETS
from selffl.data.federation import Federation
from selffl.errors import ConfigError, SelfFLError, check_known, one_line, unknown_name
from selffl.models import MODELS
from selffl.randomness import draw_network
from selffl.runs.recipe import STUDY_SETTINGS, check_settings
from selffl.studies.problems import Problem
from selffl.training.blocks import Loss
from selffl.training.losses import NAMES as LOSSES
from selffl.training.losses import loss_named

FILE = "study.toml"
PREFIX = "selffl_study_"  # of the names that study files have as modules
WHERE_PYTHON_IS = "FILE.py:FUNCTION, such as study.py:"


@dataclass(frozen=True)
class OwnProblem(Problem):
    """What a study file says; the functions it names are looked up where they are needed, in whatever process.

    Attributes:
        folder: Where the file lies, and the Python that it names.
        loss: One of torch.nn.functional or of `selffl.training.losses`, or FILE.py:FUNCTION; none: it follows from
            labels and outputs.
        options: Of methods, by their names.
    """

    folder: str = "."
    loss: str | None = None
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def method(self, name: str, **options: Any) -> Any:
        """A method, with the file's options for it."""
        return super().method(name, **dict(self.options.get(name, {})) | options)

    def federation(self, seed: int, validation_fraction: float = 0.0) -> Federation:
        """What the user's function returns for a seed; validation rows are its own, or a share of the training rows."""
        if _is_named(self.data):
            return super().federation(seed, validation_fraction)
        found = _federation(str(Path(self.folder).resolve()), self.data, seed, _written(self.folder, self.data))
        if not validation_fraction or found.validation is not None:
            return found
        return found.with_validation(validation_fraction, seed=seed)

    def module(self, federation: Federation, seed: int) -> nn.Module | str:
        """What the user's function returns for a federation; its first weights depend on the seed alone."""
        if _is_named(self.model):
            return super().module(federation, seed)
        found = draw_network(lambda: _call(self.folder, self.model, federation), seed)
        if not isinstance(found, nn.Module):
            raise ConfigError(f"{self.model} returned {_kind(found)}; expected a torch.nn.Module. Return the model.")
        return found

    def own_parts(self, seed: int) -> dict[str, Any]:
        """Model, loss and rows as the study has them today: nothing of a run's folder is unpickled."""
        federation = self.federation(seed)
        module = self.module(federation, seed)
        parts: dict[str, Any] = {"model": module} if isinstance(module, nn.Module) else {}
        if self.loss is not None and not _is_named(self.loss):
            parts["loss"] = self._loss()
        return parts if _is_named(self.data) else parts | {"federation": federation}

    def content(self, seed: int, validation_fraction: float = 0.0) -> dict[str, Any]:
        """The settings, the rows, the first weights and the code that was loaded: not where it lies, nor its title."""
        federation = self.federation(seed, validation_fraction)
        module, digest = self.module(federation, seed), hashlib.sha256()
        if isinstance(module, nn.Module):
            for name, tensor in module.state_dict().items():
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        for text in sorted(path.read_bytes() for path in code_files(self)):
            digest.update(text)
        beside = ("name", "title", "folder")
        return {
            **{key: value for key, value in super().content(seed).items() if key not in beside},
            "fingerprint": federation.fingerprint(),
            "digest": digest.hexdigest(),
        }

    def _loss(self) -> Loss | None:
        if self.loss is None:
            return None
        return loss_named(self.loss) if _is_named(self.loss) else _function(self.folder, self.loss)

    def _training(self) -> dict[str, Any]:
        return super()._training() | {"loss": self._loss()}


def read_study(path: Path) -> OwnProblem:
    """The study in a folder, or of a file; every key is checked, and every function looked up."""
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        folder = path.with_suffix("")
        raise ConfigError(f"{file} does not exist; expected a study file. Make one with `selffl init {folder}`.")
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is no TOML ({error}); expected lines KEY = VALUE, words in quotes.") from None
    for key, value in found.items():
        check_known(f"key in {file}", key, KEYS)
        KEYS[key](f"{key} in {file}", value)
    for key in ("data", "model"):
        if key not in found:
            raise ConfigError(f"{file} has no {key}; expected {key} = {WHERE_PYTHON_IS + NAMES[key]!r}.")
    folder = file.parent
    for key, known in (("data", DATA_SETS), ("model", MODELS), ("loss", LOSSES)):
        value = found.get(key)
        if value is None:  # a loss that follows
            continue
        if not _is_named(value):
            _function(str(folder), value)
        elif value not in known:
            raise unknown_name(
                f"{key} in {file}", value, [*known, f"study.py:{NAMES[key]} (a function of your own in study.py)"]
            )
    for key, owner in (("data_options", "data"), ("model_options", "model")):
        if found.get(key) and not _is_named(found[owner]):
            raise ConfigError(
                f"{key} in {file} is for a {owner} given by name; {found[owner]} has its own. Leave it out."
            )
    name = folder.resolve().name if file.name == FILE else file.stem
    values = {"num_seeds" if key == "seeds" else key: value for key, value in found.items()}
    if "algorithms" in found:
        values = {"algorithm": found["algorithms"][0], **values, "algorithms": tuple(found["algorithms"])}
    problem = OwnProblem(**{"name": name, "title": name, "folder": str(folder)} | values)
    try:
        check_settings(problem.settings)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    for method in problem.options:
        problem.method(method)  # which refuses an option that it does not have
    return problem


# ---------------------------------------------------------------------------------------------------- what a key may be


def _a_string(name: str, value: object) -> None:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{name} is {value!r}; expected words in quotes.")


def _a_method(name: str, value: object) -> None:
    if not isinstance(value, str) or value not in ALGORITHMS:
        raise unknown_name(name, str(value), ALGORITHMS)


def _methods(name: str, value: object) -> None:
    if not isinstance(value, list) or not value or len(set(map(str, value))) != len(value):
        raise ConfigError(f"{name} is {value!r}; expected a list of names, each once, such as ['self-fl', 'ditto'].")
    for method in value:
        _a_method(name, method)


def _count(name: str, value: object) -> None:
    check_integer(name, value, 1)


def _table(name: str, value: object) -> None:
    if not isinstance(value, dict):
        raise ConfigError(f"{name} is {value!r}; expected a table, such as [{name.split()[0]}] and lines KEY = VALUE.")


def _tables(name: str, value: object) -> None:
    _table(name, value)
    assert isinstance(value, dict)
    for method, options in value.items():
        _a_method(f"method in {name}", method)
        if not isinstance(options, dict):
            raise ConfigError(
                f"{method} in {name} is {options!r}; expected a table, [options.{method}], and lines KEY = VALUE."
            )


KEYS: dict[str, Callable[[str, object], None]] = {  # of the file, with what checks each at once
    "title": _a_string,
    "data": _a_string,
    "data_options": _table,
    "model": _a_string,
    "model_options": _table,
    "loss": _a_string,
    "algorithm": _a_method,
    "algorithms": _methods,
    "seeds": _count,
    **dict.fromkeys(STUDY_SETTINGS, lambda name, value: None),  # checked together, as a recipe's are
    "num_local_steps": _count,
    "max_local_steps": _count,
    "num_local_epochs": _count,
    "options": _tables,
}
NAMES = {"data": "federation", "model": "model", "loss": "loss"}  # of functions, in messages


# ---------------------------------------------------------------------------------------------------- the user's Python


def _is_named(what: str) -> bool:
    return ":" not in what


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def _path(folder: str, where: str) -> Path:
    return Path(folder) / where.rpartition(":")[0]


def _written(folder: str, where: str) -> str:
    """A digest of the file that a function is in: an edited one is another."""
    return hashlib.sha256(_path(folder, where).read_bytes()).hexdigest()


def _function(folder: str, where: str) -> Callable[..., Any]:
    """The function that FILE.py:FUNCTION names."""
    path, name = _path(folder, where), where.rpartition(":")[2]
    if path.suffix != ".py" or not name.isidentifier():
        raise ConfigError(f"{where!r} in the study file is no place; expected FILE.py:FUNCTION.")
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; expected the Python file that the study file names ({where}).")
    module = _module(path.resolve(), _written(folder, where))
    function = getattr(module, name, None)
    if function is None:
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise unknown_name(f"function in {path}", name, public)
    if not callable(function):
        raise ConfigError(f"{name} in {path} is {_kind(function)}; expected a function.")
    return function  # type: ignore[no-any-return]


class _SourceLoader(SourceFileLoader):
    """Python's own, but that it never takes byte code: a file edited within a second may be as long as it was."""

    def get_code(self, fullname: str) -> CodeType:
        """Compiled from the file as it is."""
        return self.source_to_code(self.get_data(self.path), self.path)


@lru_cache
def _module(path: Path, digest: str) -> ModuleType:
    """A Python file as a module of its own, which may import what lies beside it."""
    _enter(str(path.parent))
    name = f"{PREFIX}{hashlib.sha256(f'{path} {digest}'.encode()).hexdigest()[:12]}"
    loader = _SourceLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where pickle looks for its classes
    try:
        loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _as_mistake(path, path.name, error) from error
    return module


def _enter(folder: str) -> None:
    """Let Python find what lies in a study's folder, and forget what it found in another's by the same names."""
    for other in _ENTERED - {folder}:
        sys.path.remove(other)
        for name, module in list(sys.modules.items()):
            if not name.startswith(PREFIX) and str(Path(getattr(module, "__file__", None) or "/").parent) == other:
                del sys.modules[name]
        _ENTERED.remove(other)
    if folder not in _ENTERED:
        sys.path.append(folder)  # last: what the user calls his files hides no package
        _ENTERED.add(folder)


_ENTERED: set[str] = set()  # study folders on Python's path


def _call(folder: str, where: str, *arguments: Any) -> Any:
    """What a function of the user's returns; what goes wrong in it is the user's to mend, in one line."""
    function = _function(folder, where)
    try:
        return function(*arguments)
    except Exception as error:
        if isinstance(error, SelfFLError):
            raise
        raise _as_mistake(_path(folder, where), where, error) from error


def _as_mistake(path: Path, where: str, error: Exception) -> ConfigError:
    own = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path.resolve()
    ]
    line = error.lineno if isinstance(error, SyntaxError) else own[-1] if own else None
    at = f", line {line}" if line else ""
    return ConfigError(f"{where} failed ({path}{at}): {type(error).__name__}: {one_line(error)}. Mend it there.")


@lru_cache(maxsize=2)  # runs of one seed follow each other
def _federation(folder: str, where: str, seed: int, digest: str) -> Federation:
    del digest  # part of the key: an edited file is read again
    found = _call(folder, where, seed)
    if not isinstance(found, Federation):
        raise ConfigError(
            f"{where} returned {_kind(found)}; expected a selffl.Federation, such as Federation.from_arrays makes."
        )
    return found


def code_files(problem: OwnProblem) -> list[Path]:
    """All code that was loaded from a study's folder."""
    root = os.path.join(Path(problem.folder).resolve(), "")
    found = {_resolve(path) for module in list(sys.modules.values()) if (path := getattr(module, "__file__", ""))}
    own = (Path(path) for path in found if path.startswith(root) and path.endswith(".py"))
    return sorted(path for path in own if path.is_file())


@cache  # thousands of modules, asked for again with every run
def _resolve(path: str) -> str:
    return os.path.realpath(path)
