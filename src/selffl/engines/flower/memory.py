"""A client's memory on its own disk, one file per experiment and client.

The file holds the memory twice: after the last round that the client took part in, and before it.  A round that is
asked for again, because the answer was lost or the server went back to its checkpoint, starts from the memory before
it: the client's clock advances once, and the answer is the same.  Either both memories are written or neither is.

Flower starts a process for every message, and one that was given up may still be running: what it finds in the end is
not written over a later round's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import torch

from selffl.algorithms.records import tensors_of
from selffl.errors import CheckpointError, RefusedError
from selffl.state.checkpoint import fill_record, load_about, load_tensors, save_tensors
from selffl.state.files import exclusive_lock


def file_name(name: str) -> str:
    """A name of any characters as part of a path: readable, of bounded length, and no two alike.

    The digest tells apart what is cut off, and what some file systems take for the same (``A`` and ``a``).
    """
    return f"{quote(name, safe='')[:60]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


@dataclass(frozen=True)
class _Both:
    """What a file holds."""

    before: Any
    after: Any


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
        """The file; there is none before the first round."""
        return self.folder / file_name(self.experiment) / f"{file_name(self.client)}.safetensors"

    @property
    def model_path(self) -> Path:
        """Where the client's personal model lies, as of its last evaluation."""
        return self.path.with_name(self.path.stem + "-model.safetensors")

    def latest(self) -> tuple[Any, int]:
        """The memory after the last round the client took part in, and that round's number; 0 if there is none."""
        both, round_number = self._read()
        return both.after, round_number

    def after(self, round_number: int) -> Any:
        """The memory as it was after round ``round_number``, if the client took part in one round since, or none."""
        both, last = self._read()
        return both.before if last > round_number else both.after

    def has_trained(self, round_number: int) -> bool:
        """Whether the client had taken part in any round up to ``round_number``; a later one is no more than one."""
        both, last = self._read()
        if last <= round_number:
            return last > 0
        before, unmet = tensors_of(both.before), tensors_of(self.newcomer)
        return not all(torch.equal(before[name], unmet[name]) for name in unmet)

    def before(self, round_number: int) -> Any:
        """The memory that round ``round_number`` starts from."""
        both, last = self._read()
        if round_number < last:
            raise RefusedError(
                f"client {self.client} is asked for round {round_number} of experiment {self.experiment} and has done "
                f"round {last}; expected that round or a later one. Resume the server from its last checkpoint, or "
                "start another experiment."
            )
        return both.before if round_number == last else both.after

    def keep(self, round_number: int, before: Any, after: Any) -> None:
        """Remember what round ``round_number`` started from and what it left."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        about = {"experiment": self.experiment, "client": self.client, "round": round_number, "run": self.run}
        with exclusive_lock(self.path):
            kept: dict[str, Any] = load_about(self.path) if self.path.exists() else {"round": 0, "run": self.run}
            self._check_run(kept)
            last = int(kept["round"])
            if last > round_number:
                raise RefusedError(
                    f"client {self.client} has done round {last} of experiment {self.experiment} while it was still "
                    f"busy with round {round_number}; what it found in that one is not kept."
                )
            save_tensors(self.path, tensors_of(_Both(before, after)), about)

    def _read(self) -> tuple[_Both, int]:
        if not self.path.exists():
            return _Both(self.newcomer, self.newcomer), 0
        tensors, about = load_tensors(self.path)
        try:
            owner, round_number = (about["experiment"], about["client"]), int(about["round"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{self.path} is no client's memory ({error!r}).") from None
        if owner != (self.experiment, self.client):
            raise CheckpointError(
                f"{self.path} is the memory of client {owner[1]} in experiment {owner[0]}; expected client "
                f"{self.client} in experiment {self.experiment}."
            )
        self._check_run(about)
        return fill_record(_Both(self.newcomer, self.newcomer), tensors), round_number

    def _check_run(self, about: dict[str, Any]) -> None:
        if about.get("run", "") != self.run:
            raise RefusedError(
                f"client {self.client} remembers another run of experiment {self.experiment}; expected the one that it "
                "began with. Give the experiment another name, go on with that run, or remove the client's memory."
            )


def memories(folder: Path) -> Iterator[tuple[ClientMemory, int | None, int | None, str | None]]:
    """Each client's memory in a folder, the rounds of memory and personal model, and what is wrong with them."""
    owners: dict[Path, list[Path]] = {}
    for path in sorted(folder.glob("*/*.safetensors")):
        stem = path.stem.removesuffix("-model")
        owners.setdefault(path.with_name(f"{stem}.safetensors"), []).append(path)
    for own, paths in owners.items():
        rounds: dict[Path, int] = {}
        # The names of the files are good enough where their contents cannot be read.
        names = [unquote(part.rpartition("-")[0]) for part in (own.parent.name, own.stem)]
        problem = None
        for path in paths:
            try:
                _, about = load_tensors(path)
                rounds[path], names = int(about["round"]), [about["experiment"], about["client"]]
            except (CheckpointError, KeyError, TypeError, ValueError) as error:
                problem = f"damaged: {error}" if not isinstance(error, CheckpointError) else str(error)
        memory = ClientMemory(folder, names[0], names[1], None)
        yield memory, rounds.get(own), rounds.get(own.with_name(f"{own.stem}-model.safetensors")), problem
