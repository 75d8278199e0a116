"""Wake word or not, on five types of device in three states: a stand-in for a private corpus of Alexa's.

The paper's audio data are private.  Here 315 public clips of "alexa" are told from 2,658 clips of anything else: 600 of
other wake words, 1,908 of single words and 150 of background noise.  The devices are made up (`devices`).  What the
paper says of its own is kept: five types, the states normal, playback and alarm, and the numbers of rows, times
``scale``.  There are far fewer clips than rows: a row is one *rendering* of a clip, at a random place, level and
signal-to-noise ratio, and each clip has many.  So rows say how long training takes, and clips how much can be learnt
and how well it is measured; `describe` counts both.

Clips are dealt out by group: a speaker (Speech Commands), a freesound id (ESC-50), or a single clip where the speaker
is not known (the wake words, whose speakers may be heard by several clients and on both sides of the split; background
noise).  No group is in two parts or with two types, as clip or as bed.  Two thirds of the groups of each kind are for
training, a third for testing.  Training clips go to the types in proportion to the paper's rows; test clips go evenly,
so that each type is measured equally well.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from torch import Tensor

from selffl.data import audio, devices
from selffl.data.audio import Clips, Index
from selffl.data.dataset import DataSet, named
from selffl.data.devices import DEVICES, Takes
from selffl.data.federation import Federation, Rows
from selffl.data.locate import cache
from selffl.data.spectrogram import features
from selffl.data.split import check_seed, check_share
from selffl.data.wakeword_rows import STATES, TEST, TRAIN, WAKE_WORD, cells, deal, share_out, takes_of
from selffl.errors import CheckpointError, ConfigError
from selffl.state.checkpoint import load_tensors, save_tensors

Integers = npt.NDArray[np.int64]

RECIPE = 3  # number of this way to render rows: another number, and cached rows are rendered anew


@dataclass(frozen=True)
class RowTable:
    """What the rows of a part are, in the federation's order; all arrays ``[rows]``."""

    device: Integers  # type, 0 for A to 4 for E
    state: Integers  # `NORMAL`, `PLAYBACK` or `ALARM`
    clip: Integers  # number of the clip, its row in index.csv
    label: Integers  # 1 for the wake word

    def __len__(self) -> int:
        return len(self.clip)

    def at(self, rows: Integers) -> RowTable:
        """Some of the rows."""
        return RowTable(*(values[rows] for values in vars(self).values()))


@dataclass(frozen=True)
class Description:
    """What the rows of a federation are, part by part."""

    train: RowTable
    test: RowTable
    validation: RowTable | None = None

    def counts(self) -> list[dict[str, Any]]:
        """Different clips and rows made of them, by part, type, state and label; without cells that have none."""
        table = []
        parts = (("train", self.train), ("validation", self.validation), ("test", self.test))
        cells = list(product(enumerate(DEVICES), enumerate(STATES), (1, 0)))
        for part, rows in ((part, rows) for part, rows in parts if rows is not None):
            for (device, name), (state, title), label in cells:
                here = (rows.device == device) & (rows.state == state) & (rows.label == label)
                if here.any():
                    cell = {"part": part, "type": name, "state": title, "label": label}
                    table.append({**cell, "clips": len(np.unique(rows.clip[here])), "rows": int(here.sum())})
        return table


@named("wakeword")
def wakeword(
    seed: int = 0, clients_per_type: int = 1, scale: float = 1 / 32, validation_fraction: float = 0.0
) -> Federation:
    """Wake word (1) or something else (0) for five types of device, which are the clusters.

    Rows are log-mel spectrograms ``[1, 40, 76]`` from −1 to 1 of 1.5 s.  They are rendered once, which takes under a
    minute, and kept in the user's cache directory.

    A quarter of the training rows are positive.  Test rows do not depend on ``scale``: in each state of its type, each
    test clip of the wake word is rendered 8 times and any other 3 times.

    Args:
        seed: of everything: the split, and all that is random in a rendering.
        clients_per_type: 1 for clients A to E; more for A-1, A-2 and so on, who share out the clips of their type by
            group, so that each has about as many rows of either class.
        scale: training rows relative to the paper's, of which there are 267,536.
        validation_fraction: share of each client's training groups, of either class, whose rows are set aside; at least
            one where there are two.  Their beds are those of the training rows.
    """
    options = (seed, clients_per_type, scale, validation_fraction)
    index, plan = _plan(*options)
    clients = list(DEVICES)
    if clients_per_type > 1:
        clients = [f"{name}-{number}" for name in DEVICES for number in range(1, clients_per_type + 1)]
    bytes_of = _render(index, seed, scale)
    parts = {}
    for name, (rows, offset) in plan.layout.items():
        part = TEST if name == "test" else TRAIN
        labels = torch.from_numpy(plan.tables[part].label[rows])
        parts[name] = Rows(features(bytes_of[part][torch.from_numpy(rows)]), labels, torch.from_numpy(offset))
    return Federation(
        clients,
        parts["train"],
        parts["test"],
        parts.get("validation"),
        torch.arange(len(DEVICES)).repeat_interleave(clients_per_type),
    )


def describe(
    seed: int = 0, clients_per_type: int = 1, scale: float = 1 / 32, validation_fraction: float = 0.0
) -> Description:
    """What the rows of the federation with these options are, in its order; no sound is read."""
    _, plan = _plan(seed, clients_per_type, scale, validation_fraction)
    return Description(
        **{name: plan.tables[TEST if name == "test" else TRAIN].at(rows) for name, (rows, _) in plan.layout.items()}
    )


@dataclass(frozen=True)
class Plan:
    """All rows as they are rendered, by part, and which of them each part of the federation has, client by client."""

    tables: tuple[RowTable, RowTable]  # training (with validation), test
    layout: dict[str, tuple[Integers, Integers]]  # rows, offset of each client


def _plan(seed: int, clients_per_type: int, scale: float, validation_fraction: float) -> tuple[Index, Plan]:
    """Which rows there are and whose they are, from the table of clips alone."""
    check_seed(seed)
    check_share("validation_fraction", validation_fraction)
    if not isinstance(clients_per_type, int) or clients_per_type < 1:
        raise ConfigError(f"clients_per_type is {clients_per_type!r}; expected a whole number, 1 or more.")
    if not 0 < scale < float("inf"):
        raise ConfigError(f"scale is {scale}; expected a number above 0, such as 1 / 32.")
    index = audio.index_file().load()
    dealt = deal(index, seed)
    tables = []
    layout: dict[str, tuple[Integers, Integers]] = {}
    for part in (TRAIN, TEST):
        pieces = []
        for cell in cells():
            clip = takes_of(index, dealt, seed, cell, part, scale).clip
            pieces.append(np.stack([np.full(len(clip), cell[0]), np.full(len(clip), cell[1]), clip]))
        device, state, clip = np.concatenate(pieces, axis=1)
        table = RowTable(device, state, clip, (dealt.kind[clip] == WAKE_WORD).astype(np.int64))
        tables.append(table)
        rng = np.random.default_rng([seed, part, zlib.crc32(b"clients")])
        client, is_validation = _clients(table, dealt.group[clip], clients_per_type, validation_fraction, part, rng)
        lot = rng.random(len(table))
        order = np.lexsort((lot, client))
        for name, wanted in (("validation", is_validation), (("train", "test")[part], ~is_validation)):
            if name != "validation" or (part == TRAIN and validation_fraction):
                rows = order[wanted[order]]
                sizes = np.bincount(client[rows], minlength=len(DEVICES) * clients_per_type)
                layout[name] = rows, np.concatenate([[0], np.cumsum(sizes)])
    return index, Plan((tables[TRAIN], tables[TEST]), layout)


def _clients(
    table: RowTable, group: Integers, clients_per_type: int, fraction: float, part: int, rng: np.random.Generator
) -> tuple[Integers, npt.NDArray[np.bool_]]:
    """Whose each row is, and whether it is set aside for validation; rows of a group stay together."""
    client = table.device * clients_per_type
    is_validation = np.zeros(len(table), dtype=bool)
    for device, label in ((device, label) for device in range(len(DEVICES)) for label in (0, 1)):
        rows = np.flatnonzero((table.device == device) & (table.label == label))
        names, member, size = np.unique(group[rows], return_inverse=True, return_counts=True)
        if len(names) == 0:
            raise ConfigError(f"type {list(DEVICES)[device]} has no rows of class {label}; give a larger scale.")
        if len(names) < clients_per_type:
            raise ConfigError(
                f"clients_per_type is {clients_per_type}; expected {len(names)} at most, as type "
                f"{list(DEVICES)[device]} has only {len(names)} group(s) of clips of class {label} in a part."
            )
        mixed = rng.permutation(len(names))
        owner = np.empty(len(names), dtype=np.int64)
        owner[mixed] = share_out(size[mixed], np.ones(clients_per_type))
        client[rows] += owner[member]
        if part == TRAIN and fraction:
            aside = np.zeros(len(names), dtype=bool)
            for number in range(clients_per_type):
                own = mixed[owner[mixed] == number]
                aside[own[: min(max(round(fraction * len(own)), 1), len(own) - 1)]] = True
            is_validation[rows] = aside[member]
    return client, is_validation


def _render(index: Index, seed: int, scale: float) -> tuple[Tensor, Tensor]:
    """The rows of training and test in bytes, from the cache where it has them whole."""
    dealt = deal(index, seed)
    sound: tuple[Clips, npt.NDArray[np.float64]] | None = None
    parts = []
    for part in (TRAIN, TEST):
        every = [takes_of(index, dealt, seed, cell, part, scale) for cell in cells()]
        key = _key(seed, part, every)
        path = cache() / "wakeword" / f"{key}.safetensors"
        codes = _read_cached(path, key, sum(map(len, every)))
        if codes is None:
            if sound is None:
                clips = audio.load_clips()[1]
                sound = clips, devices.loudness(clips)
            pieces = []
            for (device, state), takes in zip(cells(), every, strict=True):
                rng = np.random.default_rng([seed, device, part, state, 1])
                pieces.append(devices.render(sound[0], sound[1], takes, list(DEVICES.values())[device], rng))
            codes = torch.cat(pieces)
            _keep(path, key, codes)
        parts.append(codes)
    return parts[TRAIN], parts[TEST]


def _key(seed: int, part: int, every: Sequence[Takes]) -> str:
    """Digest of all that rendered rows depend on: the sounds, the devices, how each row is made, and the recipe."""
    about = [RECIPE, seed, part, audio.SAMPLES_SHA256, {name: vars(device) for name, device in DEVICES.items()}]
    digest = hashlib.sha256(json.dumps(about).encode())
    for takes in every:
        for values in vars(takes).values():
            digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()[:24]


def _read_cached(path: Path, key: str, num_rows: int) -> Tensor | None:
    """Rows that were kept; none where there are none, or the file is not what it should be."""
    try:
        tensors, about = load_tensors(path)
    except CheckpointError:
        return None
    codes = tensors.get("codes")
    return codes if about.get("key") == key and codes is not None and len(codes) == num_rows else None


def _keep(path: Path, key: str, codes: Tensor) -> None:
    """Put rows into the cache; where it cannot be written, they are rendered again next time."""
    own = path.with_name(f"{path.name}.{os.getpid()}")  # two processes may do so at once
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(own, {"codes": codes}, {"key": key})
        own.replace(path)
    except (OSError, SafetensorError):
        with suppress(OSError):
            own.unlink(missing_ok=True)


DATA_SET = DataSet.described("wakeword", wakeword, audio.files)
