"""Where the parts of a model lie among its parameters."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Layer(NamedTuple):
    """The parameters of one layer: ``params[..., start:stop]``."""

    name: str
    start: int
    stop: int


class ClassBias(NamedTuple):
    """The numbers that a model adds to the scores of classes: ``params[..., start:stop]``."""

    start: int
    stop: int

    @property
    def num_classes(self) -> int:
        """As many as there are scores; a single score tells two apart."""
        return max(self.stop - self.start, 2)

    def added(self, params: Tensor, shift: Tensor) -> Tensor:
        """``params [..., P]`` with ``shift [..., K]`` on top of the scores; they are not changed themselves."""
        is_one = self.stop - self.start == 1
        found = params.clone()
        found[..., self.start : self.stop] += shift[..., 1:] - shift[..., :1] if is_one else shift
        return found
