"""How each client's rows are divided into training, test and validation rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict, cast

import numpy as np
import numpy.typing as npt
from torch import Tensor

from selffl.errors import ConfigError

Integers = npt.NDArray[np.int64]


class SplitOptions(TypedDict, total=False):
    """The fields of a `Split` as keywords, for every function that divides rows."""

    test_fraction: float
    validation_fraction: float
    stratify: bool
    seed: int


@dataclass(frozen=True)
class Split:
    """How each client's rows are divided into training, test and validation rows.

    Attributes:
        test_fraction: Share of each client's rows for testing, rounded to nearest; every client keeps at least one
            training row, and a client with a single row has no test rows.
        validation_fraction: Share of each client's rows for choosing a method's options; taken after the test rows,
            which are the same whatever this is, and only as far as one training row stays.
        stratify: Whether the shares are taken of each client's rows *of each class*, of which one stays for training.
        seed: Of the choice of rows.

    Examples:
        >>> import numpy, torch
        >>> from selffl.data.split import Split
        >>> owner, labels = numpy.array([0, 0, 0, 1]), torch.tensor([0, 1, 0, 1])
        >>> {part: len(rows) for part, rows in Split(test_fraction=0.3).rows_of_parts(owner, labels).items()}
        {'train': 3, 'test': 1}
    """

    test_fraction: float = 0.1
    validation_fraction: float = 0.0
    stratify: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_share("test_fraction", self.test_fraction)
        check_share("validation_fraction", self.validation_fraction)
        check_seed(self.seed)

    @property
    def options(self) -> SplitOptions:
        """The fields as keywords."""
        return cast(SplitOptions, dict(vars(self)))

    def rows_of_parts(self, owner: Integers, labels: Tensor) -> dict[str, Integers]:
        """The numbers of each part's rows, client by client and in a random order within each."""
        lot, part = self._draw(owner, labels, (self.test_fraction, self.validation_fraction))
        order = np.lexsort((lot, owner))
        rows = {name: order[part[order] == number] for name, number in (("train", 2), ("test", 0))}
        return rows | ({"validation": order[part[order] == 1]} if self.validation_fraction else {})

    def is_validation(self, owner: Integers, labels: Tensor) -> npt.NDArray[np.bool_]:
        """Whether a row is set aside for validation, where the test rows are others."""
        _, part = self._draw(owner, labels, (self.validation_fraction,))
        return np.equal(part, 0)

    def _draw(
        self, owner: Integers, labels: Tensor, shares: Sequence[float]
    ) -> tuple[npt.NDArray[np.float64], Integers]:
        """A random number for each row, and the number of its part."""
        group = owner
        if self.stratify:
            if labels.is_floating_point() or labels.ndim != 1:
                raise ConfigError(f"stratify wants classes; y is {labels.dtype} of shape {tuple(labels.shape)}.")
            group = owner * (int(labels.max()) + 1) + labels.cpu().numpy()
        lot = np.random.default_rng(self.seed).random(len(owner))
        return lot, parts_by_lot(lot, group, shares)


def split_of(options: SplitOptions) -> Split:
    """The split of keywords that a user gave; those left out are as in `Split`."""
    odd = next((name for name in options if name not in SplitOptions.__annotations__), None)
    if odd is not None:
        known = ", ".join(SplitOptions.__annotations__)
        raise ConfigError(f"{odd!r} is no argument here; expected one of the function's, or of the split: {known}.")
    return Split(**options)


def split_of_training_rows(options: SplitOptions, where: object) -> Split:
    """The split of keywords that a user gave, for rows at ``place`` whose test rows are chosen already."""
    if "test_fraction" in options:
        raise ConfigError(
            f"test_fraction is {options['test_fraction']}, and {where} is split into train and test; expected none. "
            "Leave it out to keep that split."
        )
    return split_of(options)


def parts_by_lot(lot: npt.NDArray[np.float64], group: Integers, shares: Sequence[float]) -> Integers:
    """The number of each row's part: within each group and by lot, share after share of it, and then the rest.

    Shares are rounded to nearest, and one row of each group is left for the rest.
    """
    order = np.lexsort((lot, group))
    _, start, position, count = np.unique(group[order], return_index=True, return_inverse=True, return_counts=True)
    rank = np.arange(len(group)) - start[position]
    part = np.zeros(len(group), dtype=np.int64)
    taken = np.zeros_like(count)
    for share in shares:
        taken = np.minimum(taken + np.rint(share * count).astype(np.int64), count - 1)
        part[order] += rank >= taken[position]
    return part


def check_seed(seed: int) -> None:
    """Refuse a seed that NumPy or torch does not take."""
    if not isinstance(seed, int) or not 0 <= seed < 1 << 63:
        raise ConfigError(f"seed is {seed!r}; expected a whole number, 0 or more, below 2^63.")


def check_share(name: str, share: float) -> None:
    """Refuse a share of rows that is no number from 0 up to, not including, 1."""
    if not isinstance(share, int | float) or not 0 <= share < 1:
        raise ConfigError(f"{name} is {share!r}; expected a share from 0 up to, not including, 1.")
