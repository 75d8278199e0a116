"""A client's memory on its own disk, two files per experiment and client.

One holds the memory after the last round that the client took part in, the other that before it: what a round leaves is
written over what was there two rounds ago.  A round that is asked for again, because the answer was lost or the server
went back to its checkpoint, starts from the memory before it: the client's clock advances once, and the answer is the
same.  A file is written whole or not at all, and which of the two is the later one, their rounds say.

Earlier versions had one file with both memories.  It is read, and the next round is written beside it.

Flower starts a process for every message, and one that was given up may still be running: what it finds in the end is
not written over a later round's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import torch

from selffl.algorithms.records import tensors_of
from selffl.errors import CheckpointError, RefusedError
from selffl.state.checkpoint import fill_record, load_about, load_tensors, save_tensors
from selffl.state.files import exclusive_lock

SECOND, MODEL = "-second", "-model"  # how the stems of the other memory and of the personal model end


def file_name(name: str) -> str:
    """A name of any characters as part of a path: readable, of bounded length, and no two alike.

    The digest tells apart what is cut off, and what some file systems take for the same (``A`` and ``a``).
    """
    return f"{quote(name, safe='')[:60]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


@dataclass(frozen=True)
class _Both:
    """The memory after a round and the one before it, as a file of an earlier version has them."""

    before: Any
    after: Any


@dataclass(frozen=True)
class _After:
    """What a file holds."""

    after: Any


@dataclass(frozen=True)
class _File:
    """A file of a client's memory: after which round, and after which round the one was that this started from."""

    path: Path
    round_number: int
    start: int | None  # 0: it had not taken part; none: of an earlier version, with both memories


class Start(NamedTuple):
    """What a round starts from: a memory, and after which round it was kept."""

    memory: Any
    round_number: int  # 0: of a client that had not taken part


def _round_of(file: _File | None) -> int:
    return 0 if file is None else file.round_number


@dataclass(frozen=True)
class ClientMemory:
    """Where one client keeps what it remembers of one experiment.

    Attributes:
        folder: Of all memories at this site.
        experiment: Whose rounds are counted.
        client: The client's id, as text.
        run: What the server knows the run by: the same name for another run is no reason to go on from its memories.
        newcomer: The memory of a client that has not taken part, ``[1, ...]``.
    """

    folder: Path
    experiment: str
    client: str
    newcomer: Any
    run: str = ""

    @property
    def path(self) -> Path:
        """The file of the first round; there is none before it."""
        return self.folder / file_name(self.experiment) / f"{file_name(self.client)}.safetensors"

    @property
    def paths(self) -> tuple[Path, Path]:
        """The two files, either of which may hold the later memory."""
        return self.path, self.path.with_name(self.path.stem + f"{SECOND}.safetensors")

    @property
    def model_path(self) -> Path:
        """Where the client's personal model lies, as of its last evaluation."""
        return self.path.with_name(self.path.stem + f"{MODEL}.safetensors")

    def after(self, round_number: int) -> Any:
        """The memory as it was after round ``round_number``, if the client took part in one round since, or none."""
        with self._reading() as (last, earlier):
            return self._before(last, earlier) if _round_of(last) > round_number else self._after(last)

    def has_trained(self, round_number: int) -> bool:
        """Whether the client had taken part in any round up to ``round_number``; a later one is no more than one."""
        with self._reading() as (last, earlier):
            if _round_of(last) <= round_number:
                return _round_of(last) > 0
            before, unmet = tensors_of(self._before(last, earlier)), tensors_of(self.newcomer)
            return not all(torch.equal(before[name], unmet[name]) for name in unmet)

    def before(self, round_number: int) -> Start:
        """The memory that round ``round_number`` starts from."""
        with self._reading() as (last, earlier):
            number = _round_of(last)
            if round_number < number:
                raise RefusedError(
                    f"client {self.client} is asked for round {round_number} of experiment {self.experiment} and has "
                    f"done round {number}; expected that round or a later one. Resume the server from its last "
                    "checkpoint, or start another experiment."
                )
            if last is None or round_number > number:
                return Start(self._after(last), number)
            return Start(self._before(last, earlier), number - 1 if last.start is None else last.start)

    def keep(self, round_number: int, start: Start, after: Any) -> None:
        """Remember what round ``round_number`` left; what it started from stays beside it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(self.path):
            last, earlier = self._find()
            if _round_of(last) > round_number:
                raise RefusedError(
                    f"client {self.client} has done round {_round_of(last)} of experiment {self.experiment} while it "
                    f"was still busy with round {round_number}; what it found in that one is not kept."
                )
            of_start = [file for file in (last, earlier) if file and file.round_number == start.round_number]
            if of_start:
                target = self._beside(of_start[0].path)
            elif last is not None and last.start is None and last.round_number == round_number:
                target = last.path  # which holds that memory as well, and is written over
                self._save(self._beside(target), start.memory, start.round_number, 0)
            elif start.round_number == 0:
                target = self.path if last is None else last.path
            else:
                raise RefusedError(
                    f"client {self.client} has done other rounds of experiment {self.experiment} while it was busy "
                    f"with round {round_number}; what it found in that one is not kept."
                )
            self._save(target, after, round_number, start.round_number)

    def _beside(self, path: Path) -> Path:
        first, second = self.paths
        return second if path == first else first

    def _save(self, path: Path, memory: Any, round_number: int, start: int) -> None:
        """Write the memory after a round that started from the one after round ``start``."""
        about = {
            "experiment": self.experiment, "client": self.client, "run": self.run, "round": round_number,
            "start": start,
        }  # fmt: skip
        save_tensors(path, tensors_of(_After(memory)), about)

    @contextmanager
    def _reading(self) -> Iterator[tuple[_File | None, _File | None]]:
        """The later and the earlier file, which nobody replaces in the meantime; none where there is none."""
        if not any(path.exists() for path in self.paths):
            yield None, None
            return
        with exclusive_lock(self.path):
            yield self._find()

    def _find(self) -> tuple[_File | None, _File | None]:
        """The later and the earlier file."""
        found = [self._look(path) for path in self.paths if path.exists()]
        last, earlier, *_ = (*sorted(found, key=_round_of, reverse=True), None, None)
        return last, earlier

    def _look(self, path: Path) -> _File:
        """Which round a file is of, once it is seen to be this client's and this run's."""
        about = load_about(path)
        try:
            owner, round_number = (about["experiment"], about["client"]), int(about["round"])
            start = None if "start" not in about else int(about["start"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{path} is no client's memory ({error!r}).") from None
        if owner != (self.experiment, self.client):
            raise CheckpointError(
                f"{path} is the memory of client {owner[1]} in experiment {owner[0]}; expected client "
                f"{self.client} in experiment {self.experiment}."
            )
        if about.get("run", "") != self.run:
            raise RefusedError(
                f"client {self.client} remembers another run of experiment {self.experiment}; expected the one that it "
                "began with. Give the experiment another name, go on with that run, or remove the client's memory."
            )
        return _File(path, round_number, start)

    def _after(self, last: _File | None) -> Any:
        """The memory after the round that a file is of."""
        if last is None:
            return self.newcomer
        return fill_record(_After(self.newcomer), load_tensors(last.path)[0]).after

    def _before(self, last: _File | None, earlier: _File | None) -> Any:
        """The memory before the round that the later file is of."""
        if last is not None and last.start is None:
            return fill_record(_Both(self.newcomer, self.newcomer), load_tensors(last.path)[0]).before
        if last is None or last.start == 0:
            return self.newcomer
        if last.start != _round_of(earlier):
            raise CheckpointError(
                f"{self._beside(last.path)} is not there, or not that of the round before {last.path}; expected the "
                "memory that this round started from. Put it back, or ask for the next round."
            )
        return self._after(earlier)


def memories(folder: Path) -> Iterator[tuple[ClientMemory, int | None, int | None, str | None]]:
    """Each client's memory in a folder, the rounds of memory and personal model, and what is wrong with them."""
    owners: dict[Path, list[Path]] = {}
    for path in sorted(folder.glob("*/*.safetensors")):
        stem = path.stem.removesuffix(MODEL).removesuffix(SECOND)
        owners.setdefault(path.with_name(f"{stem}.safetensors"), []).append(path)
    for own, paths in owners.items():
        rounds: dict[bool, int] = {}  # of the personal model, and of the memory
        # The names of the files are good enough where their contents cannot be read.
        names = [unquote(part.rpartition("-")[0]) for part in (own.parent.name, own.stem)]
        problem = None
        for path in paths:
            is_model = path.stem.endswith(MODEL)
            try:
                _, about = load_tensors(path)
                number, names = int(about["round"]), [about["experiment"], about["client"]]
                rounds[is_model] = max(number, rounds.get(is_model, number))
            except (CheckpointError, KeyError, TypeError, ValueError) as error:
                problem = f"damaged: {error}" if not isinstance(error, CheckpointError) else str(error)
        yield ClientMemory(folder, names[0], names[1], None), rounds.get(False), rounds.get(True), problem
