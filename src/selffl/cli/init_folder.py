"""What `selffl init` writes for folders that other libraries have made: LEAF's and PFLlib's."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from selffl.cli.init_table import StudyParts
from selffl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from selffl.data.federation import Federation

Kind = Literal["leaf", "pfllib"]
MIN_SIDE_PIXELS = 16  # of an image that the small network takes
FLAT_IMAGES = {28 * 28: (1, 28, 28)}  # rows of this length are images: FEMNIST and MNIST, as LEAF and FedProx keep them


def folder_study(kind: Kind, path: Path, folder: Path, trusted: bool = False) -> StudyParts:
    """Read the rows at ``path`` and choose a model for them; ``folder`` is where the study will be written."""
    fed, call, is_split = _read(kind, path, trusted)
    if fed.num_clients < 2:
        raise DataError(f"{path} has one client; expected rows of at least two clients.")
    num_classes = fed.num_classes or 0
    if num_classes < 2 or fed.train.labels.ndim != 1:
        raise DataError(f"{path} has labels of a single class; expected something to predict.")
    shape = tuple(fed.train.array.shape[1:])
    image = _image(shape)
    is_whole = not fed.train.array.is_floating_point()
    model = "softmax regression" if image is None else f"a small convolutional network on images {image}"
    counts = {name: len(rows.labels) for name, rows in fed.parts.items()}
    how = "as the folder splits them" if is_split else "three tenths of each client's to test"
    summary = [
        f"{sum(counts.values()):,} rows of {fed.num_clients:,} clients in {num_classes} classes: {counts['train']:,} "
        f"to train on and {counts['test']:,} to test, {how}.",
        f"Rows have the shape {shape}; the model is {model}.",
    ]
    if is_whole:
        summary.append(
            "Features are whole numbers and are taken for quantities; for numbers of words, put a model with "
            "nn.Embedding into study.py."
        )
    values = {
        "rows": json.dumps(Path(os.path.relpath(path, folder)).as_posix(), ensure_ascii=False),
        "call": call,
        "is_split": is_split,
        "is_whole": is_whole,
        "is_flat": len(shape) == 1,
        "is_image": image is not None,
        "image": image,
        "title": json.dumps(
            f"{path.resolve().name}, from {'LEAF' if kind == 'leaf' else 'PFLlib'}", ensure_ascii=False
        ),
    }
    about = {"rows": counts, "clients": fed.num_clients, "classes": num_classes, "shape": list(shape), "model": model}
    return StudyParts(values, fed.num_clients, summary, about)


def _read(kind: Kind, path: Path, trusted: bool) -> tuple[Federation, str, bool]:
    """The rows, the call that reads them in study.py, and whether they come with a split."""
    from selffl.data.federation import Federation

    if kind == "pfllib":
        if not trusted:
            raise ConfigError(
                f"{path} holds pickles, which can run code when they are read; expected files that you trust. Add "
                "--trusted if you have made them, or know who has."
            )
        return Federation.from_pfllib(path, trusted=True), "from_pfllib(ROWS, trusted=True)", True
    # Whole numbers with a decimal point are classes, as in FedProx's files; other fractions are refused.
    if (path / "train").is_dir():
        return Federation.from_leaf(path, labels="classes"), 'from_leaf(ROWS, labels="classes")', True
    fed = Federation.from_leaf(path, labels="classes", test_fraction=0.3)
    return fed, 'from_leaf(ROWS, labels="classes", test_fraction=0.3, seed=seed)', False


def _image(shape: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Channels, height and width, where rows are images for the small network."""
    if len(shape) == 3 and shape[0] in (1, 3) and min(shape[1:]) >= MIN_SIDE_PIXELS:
        return shape[0], shape[1], shape[2]
    return FLAT_IMAGES.get(shape[0]) if len(shape) == 1 else None
