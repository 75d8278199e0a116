"""MNIST as FedProx splits it: 1000 clients with two digits each, sizes by a power law; or as pFedBayes does.

LeCun, Cortes and Burges; read from the original idx files, plain or gzipped.  The split follows the FedProx authors'
procedure (Li et al., MLSys 2020): both published parts are pooled, and every pixel is standardised over all images.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import struct
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from selffl.data.dataset import DESCRIPTIONS, DataSet, named
from selffl.data.federation import Federation
from selffl.data.locate import DataFile, refuse_unreadable
from selffl.data.partition import class_blocks, two_digits_by_power_law
from selffl.data.split import Split
from selffl.errors import DataError, check_known

Bytes = npt.NDArray[np.uint8]

# Published MD5s of the *uncompressed* files: a file may have been gzipped anew.
FILES: dict[str, str] = DESCRIPTIONS["mnist"]["md5"]
MAX_BYTES = 1 << 30  # of an idx file; the largest that there is, of EMNIST, has 547 million


def read_idx(path: Path, md5: str | None = None) -> Bytes:
    """An idx file of bytes, plain or gzipped, as an array; with ``md5``, of its uncompressed content, checked.

    Not a byte more is unpacked than the header says, and one that says more than `MAX_BYTES` is refused: a small file
    may hold gigabytes.
    """
    with (
        refuse_unreadable(path, "expected an idx file. Fetch it again", OSError, EOFError, zlib.error),
        gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file,
    ):
        header, shape = _read_header(path, file)
        content = file.read(math.prod(shape) + 1)
    if len(content) != math.prod(shape):
        held = f"{len(content)} bytes" if len(content) < math.prod(shape) else "more bytes"
        raise DataError(f"{path} holds {held}; its header says {shape}. Fetch it again.")
    if md5 is not None:
        digest = hashlib.md5(header, usedforsecurity=False)
        digest.update(content)
        if (found := digest.hexdigest()) != md5:
            raise DataError(f"{path} has MD5 {found}; expected {md5}. It is damaged or another file: fetch it again.")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def _read_header(path: Path, file: gzip.GzipFile | io.BufferedReader) -> tuple[bytes, tuple[int, ...]]:
    """The header of an idx file, and the sizes that it says."""
    magic = file.read(4)
    if len(magic) < 4 or magic[:3] != b"\x00\x00\x08":
        raise DataError(f"{path} begins with {magic.hex() or 'nothing'}; expected an idx file of bytes (000008..).")
    num_axes = magic[3]
    sizes = file.read(4 * num_axes)
    if len(sizes) < 4 * num_axes:
        raise DataError(f"{path} ends inside its header; expected {num_axes} sizes. Fetch it again.")
    shape = struct.unpack(f">{num_axes}I", sizes)
    if math.prod(shape) > MAX_BYTES:
        raise DataError(f"{path} says that it holds {math.prod(shape):,} bytes; expected at most {MAX_BYTES:,}.")
    return magic + sizes, shape


def files() -> list[DataFile]:
    """The four files: images and labels of both parts."""
    return [
        DataFile("mnist", (name + ".gz", name), partial(read_idx, md5=md5), can_fetch=True)
        for name, md5 in FILES.items()
    ]


def images_and_labels() -> tuple[Bytes, Bytes]:
    """All 70,000 images ``[70000, 28, 28]`` and labels, training part first."""
    images, labels, more_images, more_labels = (file.load() for file in files())
    return np.concatenate([images, more_images]), np.concatenate([labels, more_labels])


def standardise(pixels: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Each pixel with mean 0 and standard deviation 1 over all pictures ``[pictures, pixels]``, as FedProx does it."""
    scaled: npt.NDArray[np.float32] = (pixels - pixels.mean(0)) / (pixels.std(0) + 0.001)
    return scaled


PARTITIONS = ("two-digits", "five-digits")


@named("mnist", Split())
def mnist(split: Split, partition: str = "two-digits") -> Federation:
    """MNIST over clients of a published partition; rows are 784 pixels.

    ``two-digits``: 1000 clients, two digits each and sizes by a power law; pixels are standardised (FedProx).

    ``five-digits``: ten clients with 1,000 images of each of five digits, 0 to 4 or 5 to 9, of which the publication
    trains on a fifth (a ``test_fraction`` of 0.8); pixels run from -1 to 1 (pFedBayes: Zhang et al., ICML 2022, the
    small MNIST; after AllenBeau's public implementation).
    """
    check_known("partition of mnist", partition, PARTITIONS)
    images, labels = images_and_labels()
    pixels = images.reshape(len(images), -1).astype(np.float32)
    if partition == "two-digits":
        client, pixels = two_digits_by_power_law(labels, split.seed), standardise(pixels)
    else:
        client, pixels = class_blocks(labels, split.seed, 10, num_held=5, rows_each=1000), pixels / 127.5 - 1
    used = client >= 0
    return Federation.from_arrays(pixels[used], labels[used], client[used], **split.options)


DATA_SET = DataSet.described("mnist", mnist, files)
