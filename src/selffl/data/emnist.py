"""EMNIST's lower-case letters a to j as FedProx splits them (nist, FEMNIST): 200 clients with a few letters each.

Cohen, Afshar, Tapson and van Schaik, EMNIST (2017), the by-class files, as idx files or as the MATLAB file.  The split
follows the FedProx authors' procedure (Li et al., MLSys 2020), without its slip: no image is given to two clients.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from selffl.data.dataset import DataSet, named
from selffl.data.federation import Federation
from selffl.data.locate import DataFile, refuse_unreadable
from selffl.data.mnist import read_idx
from selffl.data.partition import five_of_ten_letters
from selffl.data.split import Split
from selffl.errors import DataError

Bytes = npt.NDArray[np.uint8]

FIRST_LETTER = 36  # by-class labels: 0 … 9, A … Z, then a … z
MAX_IMAGES_PER_LETTER = 4000  # images of a letter that FedProx takes
MATLAB = "emnist-byclass.mat"
PARTS = {
    part: tuple(f"emnist-byclass-{part}-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1"))
    for part in ("train", "test")
}


def _spellings(name: str) -> tuple[str, ...]:
    return (f"{name}.gz", name, f"gzip/{name}.gz", f"gzip/{name}")


def files() -> list[DataFile]:
    """The four idx files, or the one MATLAB file where that is what there is."""
    parts = [
        DataFile("emnist", _spellings(name), read_idx, can_fetch=True) for names in PARTS.values() for name in names
    ]
    whole = DataFile("emnist", (MATLAB,), _read_mat)
    return [whole] if whole.is_there and not parts[0].is_there else parts


def _read_mat(path: Path) -> list[tuple[Bytes, Bytes]]:
    """Images ``[n, 28, 28]``, as they are stored, and labels of both parts."""
    from scipy.io import loadmat

    advice = "expected EMNIST's by-class file. Fetch it again"
    with refuse_unreadable(path, advice, Exception):  # scipy's reader fails in as many ways as a file can be damaged
        data = loadmat(path, variable_names=["dataset"])["dataset"][0, 0]
        parts: list[Any] = [data[name][0, 0] for name in ("train", "test")]
        stored = [(part["images"], part["labels"].reshape(-1)) for part in parts]
    for images, labels in stored:
        if images.dtype != np.uint8 or images.ndim != 2 or images.shape[1] != 784 or len(labels) != len(images):
            raise DataError(f"{path} holds images {images.dtype}{images.shape}, {len(labels)} labels; {advice}.")
    return [(images.reshape(-1, 28, 28), labels) for images, labels in stored]


def _read_stored() -> Iterator[tuple[Bytes, Bytes]]:
    """Images and labels of the training part, then of the test part."""
    every = files()
    if len(every) == 1:
        yield from every[0].load()
        return
    for images, labels in zip(every[::2], every[1::2], strict=True):
        pair = images.load(), labels.load()
        if pair[0].shape[1:] != (28, 28) or len(pair[0]) != len(pair[1]):
            raise DataError(
                f"{images.find()} holds images {pair[0].shape} for {len(pair[1])} labels; expected 28 × 28 pixels "
                "and a label each. Fetch them again."
            )
        yield pair


def images_and_labels() -> tuple[Bytes, Bytes]:
    """The first 4,000 images of each letter a … j ``[n, 28, 28]``, upright, and their classes 0 … 9.

    All files hold the images column by column, that is transposed; this is undone.
    """
    images, classes = [], []
    seen = np.zeros(10, dtype=np.int64)
    for pictures, labels in _read_stored():
        for letter in range(10):
            rows = np.flatnonzero(labels == FIRST_LETTER + letter)[: MAX_IMAGES_PER_LETTER - seen[letter]]
            seen[letter] += len(rows)
            images.append(pictures[rows].swapaxes(1, 2))
            classes.append(np.full(len(rows), letter, dtype=np.uint8))
    return np.concatenate(images), np.concatenate(classes)


@named("emnist", Split())
def emnist(split: Split, num_clients: int = 200, classes_per_client: int = 5) -> Federation:
    """The letters a to j over 200 clients with five each; rows are 784 pixels in [0, 1] (`five_of_ten_letters`)."""
    images, classes = images_and_labels()
    client = five_of_ten_letters(classes, split.seed, num_clients, classes_per_client)
    used = client >= 0
    return Federation.from_arrays(
        images[used].reshape(-1, 784).astype(np.float32) / 255, classes[used], client[used], **split.options
    )


DATA_SET = DataSet.described("emnist", emnist, files)
