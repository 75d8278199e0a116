"""CIFAR-10 as pFedMe splits it: 20 clients with three classes each, sizes by a power law; and as others have.

Krizhevsky, Learning Multiple Layers of Features from Tiny Images (2009); read from the original binary batches, the
original Python batches, or a compact copy (lossless WebP mosaics).  Whatever a batch is read from, its content is held
against the published MD5 of the binary batch.  The split follows the pFedMe authors' procedure (Dinh et al., NeurIPS
2020): both published parts are pooled, pixels scaled to [−1, 1], and a quarter of each client's images of each class
held out.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from selffl.data.dataset import DESCRIPTIONS, DataSet, named
from selffl.data.federation import Federation
from selffl.data.locate import DataFile, refuse_unreadable
from selffl.data.partition import (
    Integers,
    Labels,
    capped_dirichlet,
    class_blocks,
    dirichlet,
    evenly,
    three_classes_by_power_law,
)
from selffl.data.pfllib import ArraysOnly
from selffl.data.rows import Rows
from selffl.data.split import Split
from selffl.errors import ConfigError, DataError, check_known

Bytes = npt.NDArray[np.uint8]

# Published MD5s of the binary batches: for each image a byte for its class, then 3 × 32 × 32 for its pixels.
BATCHES: dict[str, str] = DESCRIPTIONS["cifar10"]["md5"]


def read_batch(path: Path, md5: str | None = None) -> Bytes:
    """A batch in any of the three formats, as the binary one has it: ``[10000, 1 + 3072]``, class first."""
    reader = {".bin": _read_binary, ".webp": _read_mosaic}.get(path.suffix, _read_pickle)
    # A damaged picture or pickle can fail in any way.
    with refuse_unreadable(path, "expected a batch of CIFAR-10. Fetch it again", Exception):
        batch = reader(path)
    if md5 is not None and (digest := hashlib.md5(batch.data, usedforsecurity=False).hexdigest()) != md5:
        raise DataError(f"{path} holds a batch of MD5 {digest}; expected {md5}. It is damaged: fetch it again.")
    return batch


def _read_binary(path: Path) -> Bytes:
    return np.frombuffer(path.read_bytes(), dtype=np.uint8).reshape(-1, 3073)


def _read_mosaic(path: Path) -> Bytes:
    """100 × 100 tiles of 32 × 32 pixels, row by row; the labels of all batches lie beside them."""
    from PIL import Image

    with Image.open(path) as picture:
        mosaic = np.asarray(picture.convert("RGB"))
    tiles = mosaic.reshape(100, 32, 100, 32, 3).transpose(0, 2, 4, 1, 3).reshape(10_000, 3072)
    with np.load(path.with_name("labels.npz"), allow_pickle=False) as file:
        labels = np.concatenate([file["train"], file["test"]]).reshape(len(BATCHES), -1)[list(BATCHES).index(path.stem)]
    return np.concatenate([labels[:, None], tiles], axis=1)


def _read_pickle(path: Path) -> Bytes:
    content = _BatchReader(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    pixels, labels = content[b"data"], np.asarray(content[b"labels"], dtype=np.uint8)
    return np.concatenate([labels[:, None], pixels.astype(np.uint8, casting="safe")], axis=1)


class _BatchReader(ArraysOnly):
    """Reads the pickles of the published batches: arrays among plain values, written by Python 2."""

    def find_class(self, module: str, name: str) -> Any:
        """What arrays are rebuilt with, and how Python 2 wrote their bytes."""
        if (module, name) == ("_codecs", "encode"):
            return lambda text, encoding: str.encode(text, encoding)
        return super().find_class(module, name)


def files() -> list[DataFile]:
    """The six batches."""
    return [
        DataFile(
            "cifar10",
            (f"cifar-10-batches-bin/{name}.bin", f"cifar-10-batches-py/{name}", f"{name}.webp"),
            partial(read_batch, md5=md5),
            can_fetch=True,
        )
        for name, md5 in BATCHES.items()
    ]


def images_and_labels() -> tuple[Bytes, Bytes]:
    """All 60,000 images ``[60000, 3, 32, 32]`` and labels, read-only."""
    batches = _read_batches(tuple((path, path.stat().st_mtime_ns) for path in (file.find() for file in files())))
    return batches[:, 1:].reshape(-1, 3, 32, 32), batches[:, 0]


@lru_cache(maxsize=1)  # decoding takes ten seconds, and a study's runs in one process follow each other
def _read_batches(places: tuple[tuple[Path, int], ...]) -> Bytes:
    """All batches, one below the other, by where they lie and when they were written."""
    batches = np.concatenate([file.read(path) for file, (path, _) in zip(files(), places, strict=True)])
    batches.flags.writeable = False
    return batches


# Who gets which of the images, by name.
PARTITIONS: dict[str, Callable[[Labels, int], Integers]] = {
    "three-classes": three_classes_by_power_law,
    "pfedgraph-dirichlet": partial(capped_dirichlet, num_clients=10, concentration=0.1, least=10),
    "pfedgraph-classes": partial(class_blocks, num_clients=10, num_held=2),
    "pfedgraph-alike": partial(evenly, num_clients=10),
    "pfllib-dirichlet": partial(capped_dirichlet, num_clients=20, concentration=0.1, least=1),
    "pfllib-classes": partial(class_blocks, num_clients=20, num_held=2, is_even=False),
    "knnper": partial(dirichlet, num_clients=200, concentration=0.3),
}
SHARED_TEST = "pfedgraph-"  # how partitions begin whose clients are all tested on the published test images
CHANNEL_MEANS, CHANNEL_SPREADS = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)  # of pixels from 0 to 1


TEST_SHARE = 0.25


@named("cifar10", Split(test_fraction=TEST_SHARE, stratify=True))
def cifar10(split: Split, partition: str = "three-classes") -> Federation:
    """CIFAR-10 over clients of a published partition; rows are images ``[3, 32, 32]``.

    ``three-classes``: 20 clients, three classes each, sizes by a power law; pixels run from -1 to 1, shares of the
    split are taken of each class (pFedMe).

    ``pfllib-dirichlet`` and ``pfllib-classes``: 20 clients, classes by a Dirichlet distribution of 0.1, or two each.
    ``knnper``: 200 clients, by one of 0.3.  These three divide all 60,000 images, and each client's at random; pixels
    run from -1 to 1.

    ``pfedgraph-dirichlet`` (0.1), ``pfedgraph-classes`` (two each) and ``pfedgraph-alike``: ten clients that share the
    50,000 training images and are all tested on the 10,000 test images, each by its own shares of the classes
    (`selffl.training.class_shares`); there is no ``test_fraction``.  Channels have mean 0 and standard deviation 1.
    """
    check_known("partition of cifar10", partition, PARTITIONS)
    images, labels = images_and_labels()
    if partition.startswith(SHARED_TEST):
        return _with_shared_test(images, labels.astype(np.int64), split, PARTITIONS[partition])
    client = PARTITIONS[partition](labels, split.seed)
    used = client >= 0
    chosen = replace(split, stratify=partition == "three-classes")
    return Federation.from_arrays(images[used], labels[used], client[used], **chosen.options).map_features(
        lambda pixels: pixels.float().div_(127.5).sub_(1)
    )  # after the split: bytes are quicker to move


def _with_shared_test(
    images: Bytes, labels: npt.NDArray[np.int64], split: Split, partition: Callable[[Labels, int], Integers]
) -> Federation:
    """Clients that train on parts of the published training images and are all tested on all test images."""
    if split.test_fraction != TEST_SHARE:
        raise ConfigError(
            f"test_fraction is {split.test_fraction}, and these clients are tested on the published test images; "
            "expected none. Leave it out, or take another partition."
        )
    num_train = len(labels) - len(labels) // len(BATCHES)  # all batches but the last
    client = partition(labels[:num_train], split.seed)
    used = np.flatnonzero(client >= 0)
    undivided = replace(split, test_fraction=0.0, stratify=False)
    whole = Federation.from_arrays(images[used], labels[used], client[used], **undivided.options)
    test_images, test_labels = (torch.tensor(each[num_train:]) for each in (images, labels))
    count = whole.num_clients
    test = Rows(
        test_images.repeat(count, 1, 1, 1), test_labels.repeat(count), torch.arange(count + 1) * len(test_labels)
    )
    mean, spread = (torch.tensor(each).view(3, 1, 1) for each in (CHANNEL_MEANS, CHANNEL_SPREADS))
    return replace(whole, test=test).map_features(lambda pixels: pixels.float().div_(255).sub_(mean).div_(spread))


DATA_SET = DataSet.described("cifar10", cifar10, files)
