"""Which rows the minibatches of a cohort are made of, and what is drawn with them: the same, whoever asks, and when."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from selffl.randomness import normal, random_bits, uniform
from selffl.training.augmentation import draw_moves
from selffl.training.orders import places_in_epochs

BATCHES_AHEAD = 20  # minibatches whose rows are looked up at once: as many as most methods take steps in a round
HALF_BATCHES_AHEAD = 10  # of halves, which take about half as many
ROWS_AHEAD = 1 << 22  # up to which a longer visit looks further and further ahead


@dataclass(frozen=True)
class BatchesAhead:
    """What the next minibatches of every slot are made of: drawn one by one, a GPU would wait for them."""

    draws: range  # which minibatches
    places: Tensor  # among the rows of all slots [slots, minibatches, B]
    index: Tensor  # row numbers, likewise
    moves: Tensor | None  # of images that are moved [slots, minibatches, B, 3]
    mask_keys: Tensor | None  # where the model has dropout [slots, minibatches]


class Minibatches:
    """The minibatches of a cohort in one round.

    A slot's rows are ``size`` places from ``begin`` on; place p is row p, or row ``order[p]``.  What is drawn is keyed
    by seed, round, and the slot's own of the ``keys``.

    Attributes:
        keys: Of each slot ``[slots]``.
        begin: First place of each.
        size: Number of rows of each.
        order: Row numbers by place; none: the same numbers.
        draw_seed: Where noise hides rows: the seed of minibatches that are each drawn anew; else none, and they run
            through the rows epoch after epoch.
    """

    order: Tensor | None = None

    def __init__(
        self, keys: Tensor, begin: Tensor, size: Tensor, batch_size: int, seed: int, round_number: int, *,
        augmentation: str = "none", has_masks: bool = False, draw_seed: int | None = None,
    ) -> None:  # fmt: skip
        self.keys, self.begin, self.size, self.draw_seed = keys, begin, size, draw_seed
        self._batch_size, self._seed, self._round = batch_size, seed, round_number
        self._augmentation, self._has_masks = augmentation, has_masks
        self._sizes: list[int] | None = None  # the same as numbers, and of all rows together, once they are needed
        self._num_rows: int | None = None
        self._stream, self._num_ahead = "batch", BATCHES_AHEAD
        self._ahead: BatchesAhead | None = None

    def look_ahead(self, draw: int) -> BatchesAhead:
        """What a minibatch and those beside it are made of."""
        if self._ahead is None or draw not in self._ahead.draws:
            draws = self._next_draws(draw)
            numbers = torch.arange(draws.start, draws.stop, device=self.keys.device)
            places = self.places(draws) if self.draw_seed is None else self._drawn(numbers, self.draw_seed)
            moves = masks = None
            if self._augmentation != "none":
                to_move = self._augmentation, self._batch_size, self._seed, self._stream, self._round
                moves = draw_moves(*to_move, self.keys, numbers)
            if self._has_masks:
                masks = random_bits(self._seed, f"{self._stream} mask", self._round, self.keys[:, None], numbers)
            self._ahead = BatchesAhead(draws, places, self.rows_at(places), moves, masks)
        return self._ahead

    def rows_at(self, places: Tensor) -> Tensor:
        """Row numbers of places, in any shape."""
        return places if self.order is None else self.order[places]

    def _next_draws(self, draw: int) -> range:
        """The minibatches that are looked up with this one: in a long visit as many again as there have been."""
        begin, count = draw // self._num_ahead * self._num_ahead, self._num_ahead
        goes_on = self._ahead is not None and draw == self._ahead.draws.stop
        if goes_on and self.draw_seed is None:
            begin, most = draw, ROWS_AHEAD // (self.size.numel() * self._batch_size)
            count = max(min(draw, most), count)
        return range(begin, begin + count)

    def places(self, draws: range) -> Tensor:
        """Places of these minibatches of every slot: ``[slots, draws, B]``."""
        start, width = draws.start * self._batch_size, len(draws) * self._batch_size
        keyed_by = self._seed, self._stream, self._round
        own = places_in_epochs(keyed_by, self.keys, self.size, self._known_sizes(), start, width)
        return (self.begin.unsqueeze(-1) + own).view(len(own), len(draws), self._batch_size)

    def _known_sizes(self) -> list[int]:
        """``size`` as numbers: a GPU is waited for once."""
        if self._sizes is None:
            self._sizes = self.size.tolist()
        return self._sizes

    def rows_in_turn(self, size: Tensor) -> tuple[Tensor, Tensor]:
        """The slot of each row of slots with so many rows ``size [slots]``, which are all there are, and its place."""
        if self._num_rows is None:
            self._num_rows = sum(self._known_sizes())
        slots = torch.arange(len(size), device=size.device)
        owner = slots.repeat_interleave(size, output_size=self._num_rows)
        place = torch.arange(len(owner), device=size.device) - (size.cumsum(0) - size)[owner]
        return owner, place

    def _drawn(self, draws: Tensor, seed: int) -> Tensor:
        """Rows of minibatches that are each drawn anew without replacement; places beyond N repeat its last."""
        size = self.size
        owner, row = self.rows_in_turn(size)
        lots = uniform(seed, "drawn rows", self._round, self.keys[owner], draws.unsqueeze(-1), row)  # [draws, N]
        by_lot = lots.argsort(dim=-1, stable=True)
        order = by_lot.gather(-1, owner[by_lot].argsort(dim=-1, stable=True))
        place = torch.arange(self._batch_size, device=size.device)
        begin = (size.cumsum(0) - size).unsqueeze(-1)
        wanted = begin + torch.minimum(place, size.unsqueeze(-1) - 1)  # [slots, B]
        rows = (self.begin[owner] + row)[order]
        return rows[:, wanted].transpose(0, 1)

    def noise(self, draw: int, slots: Tensor, like: Tensor) -> Tensor:
        """Standard normal numbers ``like [n, P]``, by seed, round, slot and minibatch."""
        place = torch.arange(like.shape[-1], device=like.device)
        keys = self.keys[slots].unsqueeze(-1)
        return normal(self._seed, f"{self._stream} noise", self._round, keys, draw, place).to(like)

    def row_noise(self, draw: int, slots: Tensor, like: Tensor) -> Tensor:
        """The numbers that hide single rows of a minibatch, where whoever knows the seed may know them."""
        place = torch.arange(like.shape[-1], device=like.device)
        return normal(self._seed, "row noise", self._round, self.keys[slots].unsqueeze(-1), draw, place)

    def in_epochs(self) -> Minibatches:
        """Minibatches of the same slots that run through all rows, epoch by epoch, whatever hides rows here."""
        found = copy(self)
        found.draw_seed, found._ahead = None, None
        return found

    def halves(self, sizes: Tensor, split: int) -> Minibatches:
        """Minibatches of both halves of each slot's rows, of ``sizes [slots, 2]``, cut in an order of their own.

        The order is keyed by seed, slot and ``split``.
        """
        owner, row = self.rows_in_turn(self.size)
        begin = self.size.cumsum(0) - self.size
        key = (split,) if split else ()
        by_lot = uniform(self._seed, "half", *key, self.keys[owner], row).argsort(stable=True)
        found = copy(self)
        found.order = (self.begin[owner] + row)[by_lot[owner[by_lot].argsort(stable=True)]]
        found.begin = torch.stack([begin, begin + sizes[:, 0] * (sizes[:, 1] > 0)], dim=-1).reshape(-1)
        found.size, found._sizes = sizes.reshape(-1).clamp(min=1), None
        found.keys = torch.stack([2 * self.keys, 2 * self.keys + 1], dim=-1).reshape(-1)
        found._stream, found._num_ahead, found._ahead = "half batch", HALF_BATCHES_AHEAD, None
        return found
