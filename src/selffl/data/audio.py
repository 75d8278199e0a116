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
FLAC_SHA256 = {
    "noise_church_bells.flac": "98baff871af37f7ec7738d171412e4063511b0419818e07ae0d9f95a3553051f",
    "noise_clock_alarm.flac": "285790a0b2eafe29a6c572f06b0ac66af72a9b3d0ff4b27ee28cc1ea8e9c756d",
    "noise_clock_tick.flac": "b21ab82a1172c3aa56a6bba57213bdf037a0f03bfe7efc847be45c5af37bebf8",
    "noise_crying_baby.flac": "6e7037e49b1caa6669439815a374f0bdb1096b3f8488ae917bd8955806837f93",
    "noise_door_wood_knock.flac": "19ddc41acc977c4fb2f7608c678851593d4796ef04c4f24dcc9929c14483bb57",
    "noise_engine.flac": "449b651ef72898903d0d9fe249410883f67dd0d5b64244ea80cd4d04f18e09e9",
    "noise_keyboard_typing.flac": "697a9234067e6ccc06a3ecae979f39b8929f45b4fbe3d9e8b37759d598de823b",
    "noise_laughing.flac": "6d85d038270d10e289976208c67b47c945bcebc847068cbd4f137877a4d10177",
    "noise_rain.flac": "b0c74e99bba01d5cc78af3f4f628557b371cf5ab4c66fb245ed39d8db0119d0b",
    "noise_siren.flac": "517d5a39dc39bb1fafa0b6fd1b4a0417acf3ac8edd2833273a2108f4c4a8615f",
    "noise_vacuum_cleaner.flac": "0a578b223dda6e2b0b210b19ddecc2d1007c3744e2fcc991fcce49312217d72b",
    "noise_washing_machine.flac": "64643dedf671fd3e2a31a16e915fca524ce46fd2ca3b00552f4bab551f26a926",
    "sc_down.flac": "cd37989a8457b193a750de5092aef567279aa30333cd3a5c44ef61144d4e5861",
    "sc_go.flac": "7742c3cfa27ebdeee80e2c60fbc57fbeaa08b2b3c58fa9a36cabe5e1d8872173",
    "sc_left.flac": "6265913613be78b77b88abc2dc9309e2d1d9c75672acd1037f6c095b63e1976a",
    "sc_no.flac": "d19c872e207ae0752111cab55d6cd025b04f4af1ce0d2b3629081c7f93a364bf",
    "sc_off.flac": "a41c3c6595231f9ae937afff8ab5e04a5e582dac5017fb62e360a4d24ac2175b",
    "sc_on.flac": "d8af64602aa133d227e77a04322a9d16fff2c1dccdec453085c448cd20be6a3e",
    "sc_right.flac": "7d3d0cb10d573fbf022879829ca31d278a74785eff635f37962e75e695b1f097",
    "sc_silence.flac": "1f2560be1edca9544ce1828be3b3082264b05bbbc2448459def8f8c6928037dd",
    "sc_stop.flac": "7a3dab419339a0add39394acc32a0ab8e309cf40748e67d885613c356ddd8681",
    "sc_unknown.flac": "76c47019e69d953635ee7b36619541f99c28f2b06331f3b4ec177e48061342bd",
    "sc_up.flac": "bc58f76ce7444a5507f16eebf9e6311a2f75fb3abab3ad2291f482939c1e8df5",
    "sc_yes.flac": "bc716a98c58876d8cd998cb2b9d5691e2c3b3d371393412882fab935da832b5f",
    "ww_alexa.flac": "c1c91ed7f2fac095fb6b251d615a754ee155a2da2d69ea6615ede15fd549df51",
    "ww_computer.flac": "1214d4321c28dc880b1c9454b88350c454b26093648d7e2176992175ee104d36",
    "ww_jarvis.flac": "0e2417890a9861b40e1f5b352f9fa6d8d8365791d1667714c09c0ff5b3a95045",
    "ww_snowboy.flac": "07b6d3468ff9554dd4ebac8433930e6768d2b8685e5040a314d7a743ad5a19d6",
}
# Of the samples as little-endian 16-bit numbers: the same from whatever file they are read.
SAMPLES_SHA256 = {
    "noise_church_bells.flac": "c92d6ede5f0c36a19b8dc66c69a2dc87c0451309c9bb9d52aa001678d9b8fa4d",
    "noise_clock_alarm.flac": "799b8663b6deb0f8b6366ac2679353af17578f31f77a9e0927900a6046775ca8",
    "noise_clock_tick.flac": "cf5c16786664c7cfc598162828e529646ec8b2c37bc7ac577fdf7cb6e9afc508",
    "noise_crying_baby.flac": "35c1ce006d1eb65ee1a98d68333e76cb3506bbda07047a2001f51a7e3edee6c5",
    "noise_door_wood_knock.flac": "ce3e130b0450cc45bb6a3516c68c6765393dd245a754573fb6e257295f8e1316",
    "noise_engine.flac": "941c645b9a439f447edb6671d71e6b094246c95bae23348dbabe2b05b51ab697",
    "noise_keyboard_typing.flac": "3a8932812683ddb41725d7be0c469c0d206e752d20eb4e63c45d8e6879a116df",
    "noise_laughing.flac": "c34628bd0299915bd7be9951b2b80b222df245e36e5e92187438d29919c82f88",
    "noise_rain.flac": "1dbd4e847f49857edf512b51cdc020d315b58cd3d72e7df9686b5b09c665340f",
    "noise_siren.flac": "27b840327520c40746eb79d1456ae11a3c28940a14db9284b2c0848eca5bf390",
    "noise_vacuum_cleaner.flac": "d712fcc29853f8df7b988e1a313c4b1c4c1256c6e3f4016b7834814cb5ca9941",
    "noise_washing_machine.flac": "dfdc72482f9a92a55a61e10ad5fa4446f48b3cfdb1d1b4ca8d278eb2992b72de",
    "sc_down.flac": "991290612b907976786ac9b8b1e0868a2fed09999685d6abec89dc319fca0f70",
    "sc_go.flac": "32c7a651f6ead709b6582947eee4e0ee475f06c838c451e264607042e8f7dbd5",
    "sc_left.flac": "29f408fe757356f7cc5563d9bc57ac26ec1be5315acde3e0696a5dca93c8e78a",
    "sc_no.flac": "64b727319c2fc2a95fe949f3a7aae331e3261989a67f31e19b3f8865bc1bf4c2",
    "sc_off.flac": "c336f738458f82da34e5c727452a8e6600a4d77554b67f8bc923e6b52d96055d",
    "sc_on.flac": "99887b6afb78149e63be1a50fbd820730166f5148f9a92935e169c5d39ae41dc",
    "sc_right.flac": "f28b1858955d4333ed9302bd46e3275ae889456bc0767839b8c56ca16c75bd53",
    "sc_silence.flac": "2b23f0daf8961f1bf6e1df18c52a6104cae65df9c1b348f647e73b2cba2dccf3",
    "sc_stop.flac": "5f9825b9faaee74fbe4f6b964494fa531f7d0c3f88078e1b91f531ba19f5e484",
    "sc_unknown.flac": "9f0091fd8208b030401cbde34caf0d9905177f956e2d71040063f2e960b8c0c2",
    "sc_up.flac": "52821b0c52661068a24cacdcc7e31caca782ae186c6309c5b3e6958502cd538a",
    "sc_yes.flac": "e9f7b125e5d1e07422b0ab9f93ada4b5922d0a8865419e47d69084f5563f94de",
    "ww_alexa.flac": "4e6d8975dfba058b4d32954c6ff791fc94ff55e1aeee6ccc5a01a9e5687f3c97",
    "ww_computer.flac": "67981d5a02a1f59401e8fc2db3ca0e879e114aa6d0cfd53c58eeba3edf962875",
    "ww_jarvis.flac": "8a7a610a3dff2f6a2b2621ea349e6a1450e556585eaa35bee766afabb50b1522",
    "ww_snowboy.flac": "d5865d4f1a93b637ab8b31ebb6107b0c6b36b248e462ece6df889ba961049ae3",
}
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
    try:
        parts = sorted(index_file().find().parent.glob("clips*.npz"))
    except DataError:
        parts = []
    recordings = [DataFile(FOLDER, (part.name,), read_decoded) for part in parts] or [
        DataFile(FOLDER, (name,), partial(read_recording, sha256=sha256)) for name, sha256 in FLAC_SHA256.items()
    ]
    return [index_file(), *recordings]


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
