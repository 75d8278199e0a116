"""MNIST as FedProx splits it: 1000 clients with two digits each, sizes by a power law; or as pFedBayes does.

LeCun, Cortes and Burges; read from the original idx files, plain or gzipped.  The split follows the FedProx authors'
procedure (Li et al., MLSys 2020): both published parts are pooled, and every pixel is standardised over all images.
"""

from __future__ import annotations

import gzip
import hashlib
import struct
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from selffl.data.dataset import DataSet, Remote, named
from selffl.data.federation import Federation
from selffl.data.locate import DataFile
from selffl.data.partition import class_blocks, two_digits_by_power_law
from selffl.data.split import Split
from selffl.errors import DataError, unknown_name

Bytes = npt.NDArray[np.uint8]

# Published MD5s of the *uncompressed* files: a file may have been gzipped anew.
FILES = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
SERVER = "https://ossci-datasets.s3.amazonaws.com/mnist"
SERVED_FILES = {  # published MD5s of the files as they are served, gzipped
    "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
}


def read_idx(path: Path, md5: str | None = None) -> Bytes:
    """An idx file of bytes, plain or gzipped, as an array; with ``md5``, of its uncompressed content, checked."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}); expected an idx file. Fetch it again.") from None
    if md5 is not None and (digest := hashlib.md5(content, usedforsecurity=False).hexdigest()) != md5:
        raise DataError(f"{path} has MD5 {digest}; expected {md5}. It is damaged or another file: fetch it again.")
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise DataError(
            f"{path} begins with {content[:4].hex() or 'nothing'}; expected an idx file of bytes (000008..)."
        )
    num_axes = content[3]
    start = 4 + 4 * num_axes
    if len(content) < start:
        raise DataError(f"{path} ends inside its header; expected {num_axes} sizes. Fetch it again.")
    shape = struct.unpack(f">{num_axes}I", content[4:start])
    if len(content) - start != int(np.prod(shape)):
        raise DataError(f"{path} holds {len(content) - start} bytes; its header says {shape}. Fetch it again.")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


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


def standardised(pixels: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
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
    if partition not in PARTITIONS:
        raise unknown_name("partition of mnist", partition, PARTITIONS)
    images, labels = images_and_labels()
    pixels = images.reshape(len(images), -1).astype(np.float32)
    if partition == "two-digits":
        client, pixels = two_digits_by_power_law(labels, split.seed), standardised(pixels)
    else:
        client, pixels = class_blocks(labels, split.seed, 10, num_held=5, rows_each=1000), pixels / 127.5 - 1
    used = client >= 0
    return Federation.from_arrays(pixels[used], labels[used], client[used], **split.options)


DATA_SET = DataSet(
    name="mnist",
    title="MNIST, 70,000 handwritten digits; two digits per client, sizes by a power law (FedProx)",
    clients=1000,
    licence="usually distributed under CC BY-SA 3.0",
    load=mnist,
    files=files,
    home="http://yann.lecun.com/exdb/mnist/",
    remotes=tuple(Remote(f"{SERVER}/{name}.gz", md5) for name, md5 in SERVED_FILES.items()),
)
