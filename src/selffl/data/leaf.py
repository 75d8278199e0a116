"""LEAF's folders of JSON files, read as they were split.

Caldas et al., LEAF: A Benchmark for Federated Settings (2018).  A file holds ``users``, ``num_samples`` and
``user_data``, which has ``x`` and ``y`` for each user; ``data/utils/split_data.py`` of TalwalkarLab/leaf writes such
files into ``train/`` and ``test/``, either with some rows of every user in both, or with other users in each.  FedProx
and others keep their data sets in the same form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from selffl.data.locate import refuse_unreadable
from selffl.data.parts import Array, ClientRows, LabelKind, SplitRows, join_parts
from selffl.errors import DataError

KEYS = ("users", "num_samples", "user_data")
UNDIVIDED = "all"  # name of the only part, where rows are not split
FOLDERS = {"train": "train", "test": "test", "val": "validation"}  # the parts, by their folders; val is Reddit's
Encode = Callable[[list[Any]], Any]
Users = dict[str, ClientRows]


def read_leaf(
    path: Path,
    encode: Encode | None = None,
    labels: LabelKind | None = None,
    classes: Sequence[str] | None = None,
    cluster: bool = False,
) -> SplitRows:
    """Rows of all users; the arguments are those of `Federation.from_leaf`.

    Where the rows are not split, their only part is `UNDIVIDED`.
    """
    parts: dict[str, Users] = {}
    group: dict[str, Hashable] = {}
    for part, files in _files(path).items():
        parts[part] = users = {}
        file_of: dict[str, Path] = {}
        for file in files:
            for user, rows, hierarchy in _users(file, encode):
                if user in users:
                    raise DataError(f"{rows.place} is in {file_of[user]} too; expected each user in one file.")
                users[user], file_of[user] = rows, file
                if cluster:
                    group[user] = _group(rows.place, hierarchy, group.get(user))
    _check_users(path, *parts.values())
    joined = join_parts(
        {part: {user: rows for user, rows in users.items() if len(rows.y)} for part, users in parts.items()},
        labels,
        classes,
    )
    return replace(joined, cluster=[group[user] for user in joined.ids]) if cluster else joined


def _files(path: Path) -> dict[str, list[Path]]:
    """The files of each part, in the order of their names."""
    advice = "expected a .json file, a folder of such files, or one with the folders train and test"
    if path.is_file():
        return {UNDIVIDED: [path]}
    if not path.is_dir():
        raise DataError(f"{path} does not exist; {advice}.")
    folders = {part: path / folder for folder, part in FOLDERS.items() if (path / folder).is_dir()}
    if folders and not {"train", "test"} <= set(folders):
        missing = "train" if "train" not in folders else "test"
        raise DataError(
            f"{path} has the folder {next(iter(folders.values())).name} and no folder {missing}; expected both train "
            "and test. Split the rows with LEAF's split_data.py, or read the one folder by itself."
        )
    files_of_part = {part: sorted(folder.glob("*.json")) for part, folder in (folders or {UNDIVIDED: path}).items()}
    empty = next((part for part, files in files_of_part.items() if not files), None)
    if empty is not None:
        raise DataError(f"{folders.get(empty, path)} holds no .json files; {advice}.")
    return files_of_part


def _check_users(path: Path, trained: Users, *others: Users) -> None:
    """Refuse users without training rows: all of them, as in LEAF's split by user, or some."""
    if not trained:
        raise DataError(f"{path} holds no users; expected at least one.")
    for users in others:
        strange = [rows for user, rows in users.items() if user not in trained and len(rows.y)]
        if strange and not set(trained) & set(users):
            raise DataError(
                f"{path}: train and test share no user, as LEAF's split by user leaves them; expected training rows of "
                f"every user, for personal models. Read {path / 'train'} by itself and train on it, then read "
                f"{path / 'test'} by itself, whose users Run.welcome takes as new clients; or split by sample."
            )
        if strange:
            raise DataError(
                f"{strange[0].place} has no rows in {path / 'train'}; expected training rows of every user. Move some "
                "there, or remove the user."
            )
    empty = next((rows for rows in trained.values() if not len(rows.y)), None)
    if empty is not None:
        raise DataError(f"{empty.place} has no rows to train on; expected at least one. Remove the user.")


def _group(where: str, hierarchy: Any, known: Hashable | None) -> Hashable:
    """The group of a user, which is the same in every part."""
    if hierarchy is None:
        raise DataError(
            f"{where} has no hierarchy that can be told; expected as many hierarchies as users in the file for "
            "cluster=True. Leave cluster out, or group the clients with Federation.with_clusters."
        )
    if not isinstance(hierarchy, str | int):
        raise DataError(f"{where}: the hierarchy is {hierarchy!r}; expected text or a whole number for cluster=True.")
    if known is not None and known != hierarchy:
        raise DataError(f"{where}: the hierarchy is {hierarchy!r}, and {known!r} in another part; expected one.")
    return hierarchy


def _users(path: Path, encode: Encode | None) -> Iterator[tuple[str, ClientRows, Any]]:
    """Each user of a file with the rows and the hierarchy, which is none where the file has none."""
    users, num_samples, user_data, hierarchies = _read(path, keeps_features=encode is not None)
    listed = set(users)
    if len(listed) < len(users):
        twice = next(user for user in users if users.count(user) > 1)
        raise DataError(f"{path}: user {twice!r} is listed twice; expected every user once.")
    for user, record in user_data.items():  # LEAF keeps users whose rows were too few to split, without rows
        if user not in listed and (not isinstance(record, dict) or len(record.get("y", ()))):
            raise DataError(f"{path}: user {user!r} has rows but is not listed in users; expected every user there.")
    for user, count, hierarchy in zip(users, num_samples, hierarchies, strict=True):
        where = f"{path}: user {user!r}"
        record = user_data.get(user)
        if not isinstance(record, dict) or not all(isinstance(record.get(key), list | np.ndarray) for key in "xy"):
            raise DataError(f"{where} has no lists x and y in user_data; expected both.")
        if len(record["x"]) != count or len(record["y"]) != count:
            raise DataError(
                f"{where} has {len(record['x'])} rows in x and {len(record['y'])} in y, and num_samples says "
                f"{count!r}; expected as many of each. The file is damaged: make it again."
            )
        yield user, ClientRows(where, _features(where, record["x"], encode), _labels(where, record["y"])), hierarchy


def _read(path: Path, keeps_features: bool) -> tuple[list[str], list[Any], dict[str, Any], list[Any]]:
    """Users, numbers of rows, records by user and hierarchies of a file.

    Lists of numbers become arrays as soon as their user has been read: 4 bytes a number instead of Python's 32.
    """

    def compact(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise DataError(f"{path}: the key {twice!r} appears twice; expected keys that differ.")
        if isinstance(content.get("x"), list) and isinstance(content.get("y"), list):
            if not keeps_features:
                content["x"] = _numbers(content["x"], single=True)
            content["y"] = _numbers(content["y"])
        return content

    expected = f"expected LEAF's JSON with the keys {', '.join(KEYS)}"
    # ValueError: not JSON, not UTF-8, thousands of digits.
    with refuse_unreadable(path, expected, OSError, ValueError, RecursionError), path.open(encoding="utf-8") as file:
        content = json.load(file, object_pairs_hook=compact)
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a {type(content).__name__}; {expected}.")
    missing = next((key for key in KEYS if key not in content), None)
    if missing is not None:
        raise DataError(f"{path} has no key {missing!r} among: {', '.join(content) or 'none'}; {expected}.")
    users, num_samples, user_data = (content[key] for key in KEYS)
    hierarchies = content.get("hierarchies")
    kinds = ((users, list, "users"), (num_samples, list, "num_samples"), (user_data, dict, "user_data"))
    for value, kind, name in kinds:
        if not isinstance(value, kind):
            raise DataError(f"{path}: {name} is a {type(value).__name__}; expected a {kind.__name__}.")
    odd = [user for user in users if type(user) not in (str, int)]
    if odd:
        raise DataError(f"{path}: users holds {odd[0]!r}; expected text or whole numbers.")
    if len(num_samples) != len(users):
        raise DataError(
            f"{path}: {len(users)} users and {len(num_samples)} num_samples; expected as many of each. The file is "
            "damaged: make it again."
        )
    # LEAF's split by sample leaves users out without their hierarchies: which is whose cannot be told then.
    if not isinstance(hierarchies, list) or len(hierarchies) != len(users):
        hierarchies = [None] * len(users)
    return [str(user) for user in users], num_samples, user_data, hierarchies  # keys of JSON are text


def _numbers(values: list[Any], single: bool = False) -> Array | list[Any]:
    """Lists of numbers as an array, with floating-point numbers in single precision if asked for; else the lists."""
    value: Any = values
    while isinstance(value, list) and value:
        value = value[0]
    if isinstance(value, str):  # to tell, NumPy would take several times the memory of the text
        return values
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths
        return values
    if array.dtype.kind not in "biuf":
        return values
    return _in_single_precision(array) if single else array


def _in_single_precision(array: Array) -> Array:
    """Floating-point numbers as float32, others as they are."""
    with np.errstate(over="ignore"):  # beyond float32 is infinity, which is refused where rows are joined
        return array.astype(np.float32, copy=False) if array.dtype.kind == "f" else array


def _features(where: str, x: Any, encode: Encode | None) -> Array:
    if encode is not None and len(x):
        array = np.asarray(encode(x))
        if array.dtype.kind not in "biuf" or array.ndim == 0 or len(array) != len(x):
            raise DataError(
                f"{where}: encode returned {array.dtype} of shape {array.shape} for {len(x)} rows; expected numbers, a "
                "row each."
            )
        return _in_single_precision(array)
    if isinstance(x, np.ndarray):
        return x
    if not x:
        return np.empty((0,))
    if _holds_text(x):
        raise DataError(
            f"{where}: x holds text; expected numbers. Pass encode= to Federation.from_leaf: a function that takes the "
            "list of one user's texts and returns an array of numbers, a row each."
        )
    raise DataError(f"{where}: x is no table of numbers; expected numbers, and rows of one shape.")


def _holds_text(values: Any) -> bool:
    return isinstance(values, str) or (isinstance(values, list) and any(map(_holds_text, values)))


def _labels(where: str, y: Any) -> Array:
    if isinstance(y, np.ndarray):
        return y
    if all(isinstance(label, str) for label in y):
        return np.fromiter(y, dtype=object, count=len(y))
    odd = (isinstance(label, str) != isinstance(y[0], str) or not isinstance(label, str | int | float) for label in y)
    row = next((row for row, is_odd in enumerate(odd) if is_odd), 0)
    raise DataError(
        f"{where}: y is {repr(y[row])[:40]} in row {row}; expected numbers, or names of classes, throughout."
    )
