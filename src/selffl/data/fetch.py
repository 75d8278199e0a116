"""Fetching the public originals of data sets: resumed where it was cut off, checked before it counts.

A file that is being fetched has the ending ``.part``.  It gets its own name once its checksum is right, so that what
has its own name is whole.
"""

from __future__ import annotations

import hashlib
import http.client
import shutil
import tarfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from selffl._version import __version__
from selffl.data.dataset import Remote
from selffl.data.locate import cache
from selffl.data.registry import data_set
from selffl.errors import DataError

Progress = Callable[[str, int, int | None], None]  # (file, bytes that are here, bytes in all where that is known)

BLOCK_BYTES = 1 << 18
TIMEOUT_SECONDS = 30.0  # seconds without a byte


def fetch(name: str, folder: Path | None = None, on_progress: Progress | None = None) -> list[Path]:
    """Get a data set's files from their public home or from R; those that are here already are left alone.

    Args:
        name: of the data set.
        folder: where its own folder is made; without it, the user's cache directory.
        on_progress: is told how far each file has come.

    Returns:
        The files, under their own names.
    """
    chosen = data_set(name)
    if not chosen.can_fetch:
        if not chosen.files():
            raise DataError(f"{name} needs no files, so that there is nothing to fetch. Load it as it is.")
        raise DataError(
            f"{name} has no home that serves it in this form; expected {chosen.files()[0].names[0]}, copied by hand. "
            f"About it: {chosen.home}"
        )
    target = (cache() if folder is None else Path(folder)) / name
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{target} cannot be made ({error.strerror}); expected a folder to write into.") from None
    if chosen.write_file is not None:
        path = target / chosen.files()[0].names[0]
        if not path.is_file():
            chosen.write_file(path)
        return [path]
    files: list[Path] = []
    for remote in chosen.remotes:
        wanted = [target / member for member in remote.members] or [target / remote.file]
        if not all(path.is_file() for path in wanted):
            archive = download(remote, target / remote.file, on_progress)
            if remote.members:
                unpack(archive, remote.members, target)
                archive.unlink()
        files += wanted
    return files


def download(remote: Remote, path: Path, on_progress: Progress | None = None) -> Path:
    """Get one file, if it is not here whole; what was cut off before goes on from where it was."""
    if path.is_file() and _sha256(path) == remote.sha256:
        return path
    part = path.with_name(path.name + ".part")
    tell = on_progress or (lambda file, done, total: None)
    here = part.stat().st_size if part.is_file() else 0
    again = "Run the same command again to go on from there"
    headers = {"User-Agent": f"selffl/{__version__}"} | ({"Range": f"bytes={here}-"} if here else {})
    request = urllib.request.Request(remote.url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            # A server that does not know ranges begins again from the first byte.
            here = here if answer.status == http.HTTPStatus.PARTIAL_CONTENT else 0
            length = answer.headers.get("Content-Length")
            total = None if length is None else here + int(length)
            with part.open("ab" if here else "wb") as file:
                tell(path.name, here, total)
                while block := answer.read(BLOCK_BYTES):
                    file.write(block)
                    here += len(block)
                    tell(path.name, here, total)
        if total is not None and here < total:
            raise http.client.IncompleteRead(b"", total - here)
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise DataError(
                f"{remote.url} answers {error.code} {error.reason}; expected the file. Try later, or get it by hand."
            ) from None
        # All bytes were here already; the checksum says whether they are the right ones.
    except (OSError, http.client.HTTPException) as error:
        kept = f"{here:,} bytes are kept in {part}. {again}" if here else "Check the network, and run it again"
        raise DataError(f"{remote.url} could not be fetched to its end ({_why(error)}). {kept}.") from None
    digest = _sha256(part)
    if digest != remote.sha256:
        part.unlink()
        raise DataError(
            f"{remote.url} served a file of SHA-256 {digest}; expected {remote.sha256}. It was thrown away: "
            "run it again, or get the file by hand."
        )
    part.replace(path)
    return path


def _why(error: Exception) -> str:
    if isinstance(error, http.client.IncompleteRead):
        return "it was cut off"
    reason = getattr(error, "reason", None) or error
    return " ".join(str(reason).split()) or type(error).__name__


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpack(archive: Path, members: Sequence[str], target: Path) -> None:
    """Take the named files out of a tar or zip archive, each whole or not at all, and nothing else."""
    try:
        with _members(archive) as open_member:
            for member in members:
                path = target / member
                path.parent.mkdir(parents=True, exist_ok=True)
                part = path.with_name(path.name + ".part")
                with open_member(member) as content, part.open("wb") as file:
                    shutil.copyfileobj(content, file, BLOCK_BYTES)
                part.replace(path)
    except (OSError, EOFError, KeyError, tarfile.TarError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{archive} cannot be unpacked ({_why(error)}); expected {', '.join(members[:2])}, …") from None


@contextmanager
def _members(archive: Path) -> Iterator[Callable[[str], IO[bytes]]]:
    """A function that opens a plain file of an archive by its name."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed:
            yield packed.open
        return
    with tarfile.open(archive) as tar:

        def open_member(name: str) -> IO[bytes]:
            # The filter refuses links that lead elsewhere and whatever else is no plain data.
            member = tarfile.data_filter(tar.getmember(name), str(archive.parent))
            content = tar.extractfile(member) if member is not None and member.isreg() else None
            if content is None:
                raise KeyError(f"{name} is no plain file")
            return content

        yield open_member
