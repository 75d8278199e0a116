"""Handwritten lower-case letters over 200 clients with five letters each: a stand-in for FedProx's nist (FEMNIST).

It is not EMNIST, of which no file could be had.  OCR letters, collected by Rob Kassel at MIT and published by Taskar,
Guestrin and Koller (Max-Margin Markov Networks, 2003): 52,152 letters cut from handwritten words, 16 × 8 pixels of one
bit, of very different frequency, without the writers' identity.  `emnist` reads the data set this stands for.
"""

from __future__ import annotations

import io
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from selffl.data.dataset import DataSet, named
from selffl.data.federation import Federation
from selffl.data.locate import DataFile, read_checked, refuse_unreadable
from selffl.data.mnist import standardise
from selffl.data.partition import five_of_ten_letters
from selffl.data.split import Split
from selffl.errors import ConfigError

SHA256 = "5d7163fe8a1eec5af7d22ad19cba91fd8f51c05d8b4f3049e0136b5af3f56d78"
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
FREQUENT = "acegilnoru"  # ten letters of at least 2,114 pictures; of a … j, FedProx's ten, there are only 189 j

Bytes = npt.NDArray[np.uint8]


def read_letters(path: Path) -> tuple[Bytes, Bytes]:
    """Pictures of zeros and ones ``[52152, 16, 8]`` and labels, 0 for a to 25 for z, once the checksum is right."""
    content = read_checked(path, SHA256, "the OCR letters")
    with (
        refuse_unreadable(path, "expected an .npz with bits and label", OSError, ValueError, KeyError, BadZipFile),
        np.load(io.BytesIO(content), allow_pickle=False) as file,
    ):
        bits, labels = file["bits"], file["label"]
    return np.unpackbits(bits, axis=1).reshape(-1, 16, 8), labels


def files() -> list[DataFile]:
    """The one file there is."""
    return [DataFile("ocr_letters", ("ocr_letters.npz",), read_letters)]


def letters_of(chosen: str) -> tuple[Bytes, npt.NDArray[np.int64]]:
    """Pictures of some letters, a row of 128 zeros and ones each, and which they are: 0 for the first one chosen."""
    pictures, labels = files()[0].load()
    number = np.full(len(ALPHABET), -1)
    number[[ALPHABET.index(letter) for letter in chosen]] = np.arange(len(chosen))
    classes = number[labels]
    return pictures.reshape(len(pictures), -1)[classes >= 0], classes[classes >= 0]


@named("letters", Split())
def letters(
    split: Split, num_clients: int = 200, classes_per_client: int = 5, chosen: str = FREQUENT, scale: str = "standard"
) -> Federation:
    """Ten of the letters over 200 clients with five each; sizes are lognormal (`five_of_ten_letters`).

    Rows are 128 pixels.  With ``scale="standard"`` each is standardised over all pictures, as FedProx does for MNIST;
    with ``"bits"`` it is 0 for paper and 1 for ink.  A gradient is as long as its row, so that a learning rate means
    the same only for rows of about one length.  FedProx's nist, 784 pixels from 0 to 1, has a mean squared norm of 110
    (from EMNIST's published mean of 0.174 and standard deviation of 0.332), standardised letters 130, bits 27.
    Class k is the k-th of the letters ``chosen``.
    """
    if scale not in ("standard", "bits"):
        raise ConfigError(f"scale is {scale!r}; expected 'standard' or 'bits'.")
    if len(chosen) != 10 or len(set(chosen) & set(ALPHABET)) != 10:
        raise ConfigError(f"chosen is {chosen!r}; expected ten different letters from a to z.")
    pictures, classes = letters_of(chosen)
    client = five_of_ten_letters(classes, split.seed, num_clients, classes_per_client)
    used = client >= 0
    pixels = pictures.astype(np.float32)
    if scale == "standard":
        pixels = standardise(pixels)
    return Federation.from_arrays(pixels[used], classes[used], client[used], **split.options)


DATA_SET = DataSet.described("letters", letters, files)
