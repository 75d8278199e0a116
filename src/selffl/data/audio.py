"""Recordings cut into clips: FLAC files with many clips end to end, and a table that says where each clip lies.

The recordings are real and public: the test part of Speech Commands v0.02 (Warden 2018), the clips of Picovoice's
wake-word benchmark, and environmental sounds of ESC-50 (Piczak 2015), 16 kHz and 16 bit.  They are read from the FLAC
files, with soundfile, or from a decoded copy in their folder, ``clips-1.npz`` and so on, which needs NumPy alone.
Whichever it is, the samples are compared with their checksums.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.resources import files as files_of
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from selffl.data.locate import DataFile, read_checked, refuse_unreadable
from selffl.errors import ConfigError, DataError, one_line
from selffl.state.files import atomic_write

Samples = npt.NDArray[np.int16]

FOLDER = "kws"
RATE_HZ = 16_000  # of samples
INDEX_SHA256 = "5fb589c7db719ec06e04ace9410bc346f3c6544854c2628b5c131cadacbd729c"
_KNOWN = list(csv.DictReader(files_of("selffl.data").joinpath("recordings.csv").read_text("utf-8").splitlines()))
FLAC_SHA256 = {row["file"]: row["flac_sha256"] for row in _KNOWN}
# Of the samples as little-endian 16-bit numbers: the same from whatever file they are read.
SAMPLES_SHA256 = {row["file"]: row["samples_sha256"] for row in _KNOWN}
MAX_PART_BYTES = 60_000_000  # bytes of samples in a file of the decoded copy, before they are compressed


@dataclass(frozen=True)
class Index:
    """Where each clip lies and what it is; all columns are as long as there are clips."""

    file: npt.NDArray[np.str_]
    start: npt.NDArray[np.int64]  # first sample within its file
    length: npt.NDArray[np.int64]
    source: npt.NDArray[np.str_]  # corpus
    label: npt.NDArray[np.str_]
    word: npt.NDArray[np.str_]  # of ESC-50, the category
    speaker: npt.NDArray[np.str_]  # of ESC-50, the freesound id; empty where it is not known

    def __len__(self) -> int:
        return len(self.file)


@dataclass(frozen=True)
class Clips:
    """The samples of all clips behind each other, in the order of the index."""

    samples: Samples
    start: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]


def read_index(path: Path) -> Index:
    """The table of clips, once its checksum is right."""
    content = read_checked(path, INDEX_SHA256, "a file of recordings")
    expected = "expected a table of clips with the columns file, start, length, source, label, word and speaker"
    kinds = (UnicodeDecodeError, csv.Error, KeyError, ValueError, TypeError)
    with refuse_unreadable(path, f"{expected}. Copy it again", *kinds):
        rows = list(csv.DictReader(io.StringIO(content.decode("utf-8"), newline="")))
        columns: dict[str, Any] = {
            name: np.array([row[name] for row in rows], dtype=np.str_)
            for name in ("file", "source", "label", "word", "speaker")
        }
        columns |= {name: np.array([int(row[name]) for row in rows], dtype=np.int64) for name in ("start", "length")}
    return Index(**columns)


def read_recording(path: Path, sha256: str | None = None) -> Samples:
    """All samples of a FLAC file, once its checksum is right."""
    soundfile = _soundfile()
    content = read_checked(path, sha256, "a file of recordings")
    damaged = "expected a recording as FLAC. It is damaged: copy it again"
    with (
        refuse_unreadable(path, damaged, soundfile.SoundFileError, RuntimeError, ValueError),
        soundfile.SoundFile(io.BytesIO(content)) as file,
    ):
        rate, channels, expected = file.samplerate, file.channels, file.frames
        samples: Samples = file.read(dtype="int16")
    if rate != RATE_HZ or channels != 1:
        raise DataError(
            f"{path} has {rate} samples a second in {channels} channel(s); expected {RATE_HZ} in one. Convert it, or "
            "copy the original again."
        )
    if len(samples) != expected:
        raise DataError(f"{path} ends after {len(samples)} of {expected} samples. It is damaged: copy it again.")
    return samples


def read_decoded(path: Path) -> dict[str, Samples]:
    """One file of a decoded copy: the samples of some recordings, by their names, once their checksums are right."""
    content = read_checked(path, None, "a file of recordings")
    # A damaged archive can fail in any way.
    with (
        refuse_unreadable(path, "expected decoded recordings. Decode them again", Exception),
        np.load(io.BytesIO(content), allow_pickle=False) as file,
    ):
        arrays = {name: file[name] for name in file.files}
    for name, samples in arrays.items():
        if name not in SAMPLES_SHA256 or samples.dtype != np.int16 or samples.ndim != 1:
            raise DataError(
                f"{path} holds {name!r}, {samples.dtype} of shape {samples.shape}; expected 16-bit samples of a known "
                "recording. Decode them again."
            )
        _check_samples(samples, name, path)
    return arrays


def index_file() -> DataFile:
    """The table of clips."""
    return DataFile(FOLDER, ("index.csv",), read_index)


def files() -> list[DataFile]:
    """The table and, from the folder it lies in, the decoded copy where there is one, else the FLAC files."""
    index = index_file()
    parts = sorted(index.find().parent.glob("clips*.npz")) if index.is_there else []
    recordings = [DataFile(FOLDER, (part.name,), read_decoded) for part in parts] or [
        DataFile(FOLDER, (name,), partial(read_recording, sha256=sha256)) for name, sha256 in FLAC_SHA256.items()
    ]
    return [index, *recordings]


def load_recordings() -> dict[str, Samples]:
    """The samples of every recording by its name, from wherever they are."""
    recordings: dict[str, Samples] = {}
    for file in files()[1:]:
        content = file.load()
        if isinstance(content, dict):
            recordings |= content
        else:
            _check_samples(content, file.names[0], file.find())
            recordings[file.names[0]] = content
    return recordings


def load_clips() -> tuple[Index, Clips]:
    """The table of clips, and the clips."""
    path = index_file().find()
    index, recordings = read_index(path), load_recordings()
    return index, cut(index, recordings, path)


def cut(index: Index, recordings: Mapping[str, Samples], path: Path) -> Clips:
    """The clips of a table, from their recordings; ``path`` is the table's, for what may be said about it."""
    pieces = []
    for row in range(len(index)):
        name, start, length = str(index.file[row]), int(index.start[row]), int(index.length[row])
        if name not in recordings:
            raise DataError(f"{path.parent / name}, named in row {row} of {path.name}, was not found. Copy it again.")
        if start < 0 or length < 1 or start + length > len(recordings[name]):
            raise DataError(
                f"{path}: row {row} is {length} samples of {name} from {start}; expected a piece of its "
                f"{len(recordings[name])}. The table or the recording is of another version: copy both again."
            )
        pieces.append(recordings[name][start : start + length])
    if not pieces:
        raise DataError(f"{path} lists no clips; expected at least one. Copy it again.")
    return Clips(np.concatenate(pieces), np.cumsum(index.length) - index.length, index.length)


def decode_to(folder: Path | str, largest_part: int = MAX_PART_BYTES) -> list[Path]:
    """Write a decoded copy of all recordings, for machines without soundfile: ``clips-1.npz``, ``clips-2.npz``, …

    Put it into a folder of its own beside a copy of ``index.csv``.

    Args:
        folder: where to; it must exist.
        largest_part: bytes of samples in one file at most, before they are compressed; a recording is not divided.
    """
    parts: list[dict[str, Samples]] = []
    bytes_left = 0
    for name, samples in load_recordings().items():
        if not parts or samples.nbytes > bytes_left:
            parts.append({})
            bytes_left = largest_part
        parts[-1][name] = samples
        bytes_left -= samples.nbytes
    paths = [Path(folder) / f"clips-{number}.npz" for number in range(1, len(parts) + 1)]
    for path, part in zip(paths, parts, strict=True):
        try:
            with atomic_write(path) as partial_file, partial_file.open("wb") as file:
                np.savez_compressed(file, **part)  # type: ignore[arg-type]  # NumPy's stub takes names for its options
        except OSError as error:
            raise DataError(f"{path} cannot be written ({error}); expected a folder that is there.") from None
    return paths


def _check_samples(samples: Samples, name: str, path: Path) -> None:
    digest = hashlib.sha256(np.ascontiguousarray(samples, dtype="<i2").data).hexdigest()
    if digest != SAMPLES_SHA256[name]:
        raise DataError(
            f"{path} holds samples of {name} with SHA-256 {digest}; expected {SAMPLES_SHA256[name]}. It is damaged or "
            "another recording: copy it again."
        )


def _soundfile() -> Any:
    """The package that reads FLAC, which not everybody needs."""
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: the package is there, its library of the system is not
        raise ConfigError(
            f'recordings are read with soundfile, which is missing ({one_line(error)}): pip install "selffl[audio]", '
            "or use a decoded copy."
        ) from None
    return soundfile
