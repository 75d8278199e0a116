"""One of the outputs of a module that returns several."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from selffl.errors import ConfigError


class Select(nn.Module):
    """A module with one of its outputs: an entry of the dictionary, record or tuple that it returns.

    Only needed where a module returns several tensors and none of them is called ``logits``.

    Args:
        module: which takes rows as it does by itself.
        entry: name of the output, or its place in a tuple.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from selffl.models import Select
        >>> Select(nn.LSTM(3, 2, batch_first=True), 0)(torch.zeros(4, 5, 3)).shape
        torch.Size([4, 5, 2])
    """

    def __init__(self, module: nn.Module, entry: str | int) -> None:
        super().__init__()
        self.module, self.entry = module, entry

    def forward(self, *given: Any, **named: Any) -> Tensor:
        """That output."""
        answer = self.module(*given, **named)
        try:
            found: Tensor = answer[self.entry] if hasattr(answer, "__getitem__") else getattr(answer, str(self.entry))
        except (KeyError, IndexError, AttributeError, TypeError):
            found = None  # type: ignore[assignment]
        if not isinstance(found, Tensor) or isinstance(answer, Tensor):
            raise ConfigError(
                f"{type(self.module).__name__} returns a {type(answer).__name__} in which {self.entry!r} is no tensor; "
                "expected the name or the place of one of its outputs."
            )
        return found
