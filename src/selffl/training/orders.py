"""The random order in which each client runs through its own rows, epoch after epoch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from selffl.randomness import uniform

# Numbers that are sorted where clients of all sizes are filled up to the largest, over those of their own: up to this
# it is cheaper than to sort them apart.  A GPU waits for launches, of which sorting apart is many times as many: there
# so many numbers are filled up to in any case.
MOST_FILLED = 2
FILLED_ANYWAY = {"cuda": 1 << 22}


def places_in_epochs(
    keys: tuple[int | str, ...], owner: Tensor, size: Tensor, sizes: Sequence[int], start: int, width: int
) -> Tensor:
    """Positions ``start`` to ``start + width - 1`` of endless sequences of epochs, each a shuffle: ``[slots, width]``.

    They are places among a slot's own ``size [slots]`` rows, ``sizes`` being the same numbers.  A shuffle is keyed by
    seed, stream and round (``keys``), by its ``owner [slots]``, the epoch and the row, and by nothing else.
    """
    found = torch.empty(len(size), width, dtype=torch.int64, device=size.device)
    for slots, epochs, largest in _of_similar_size(sizes, start, width, size.device):
        own = size[slots, None]
        # Only the epochs that are met are shuffled.
        first = start // own
        epoch = first + torch.arange(epochs, device=size.device)
        row = torch.arange(largest, device=size.device)
        lots = uniform(*keys, owner[slots, None, None], epoch.unsqueeze(-1), row)  # type: ignore[arg-type]
        # The sort is stable, so that equal lots fall the same way on every device; what fills up comes last.
        order = lots.masked_fill_(row >= own.unsqueeze(-1), 1.0).argsort(dim=-1, stable=True)
        wanted = torch.arange(start, start + width, device=size.device) - first * own
        found[slots] = order.flatten(1).gather(1, wanted // own * largest + wanted % own)
    return found


def _of_similar_size(
    sizes: Sequence[int], start: int, width: int, device: torch.device
) -> list[tuple[Tensor | slice, int, int]]:
    """Slots that are filled up to the largest of them: which, the epochs that they meet, and that largest size."""

    def epochs(some: Sequence[int]) -> int:
        return max((start + width - 1) // size - start // size + 1 for size in set(some))

    own = sum(epochs([size]) * size * number for size, number in Counter(sizes).items())
    most = max(MOST_FILLED * own, FILLED_ANYWAY.get(device.type, 0))
    if len(sizes) * epochs(sizes) * max(sizes) <= most:
        return [(slice(None), epochs(sizes), max(sizes))]
    alike: dict[int, list[int]] = defaultdict(list)
    for slot, size in enumerate(sizes):
        alike[size.bit_length()].append(slot)
    found: list[tuple[Tensor | slice, int, int]] = []
    for slots in alike.values():
        some = [sizes[slot] for slot in slots]
        found.append((torch.tensor(slots, device=device), epochs(some), max(some)))
    return found
