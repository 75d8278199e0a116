"""What users hand to the maths, checked: arrays and numbers of any kind become finite tensors and floats."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selffl.errors import ConfigError, DataError


def finite_tensor(name: str, value: Any, like: Tensor | None = None) -> Tensor:
    """An array-like as a finite floating-point tensor, of the dtype and on the device of ``like``."""
    dtype = getattr(value, "dtype", None)  # float32 and float64 arrays keep theirs
    dtype = dtype if dtype in (np.float32, np.float64) else np.float64
    try:
        tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value, dtype=dtype))
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{name} is not an array of numbers ({error}); expected one number per client.") from None
    if not tensor.is_floating_point():
        tensor = tensor.to(torch.get_default_dtype() if isinstance(value, Tensor) else torch.float64)
    if like is not None:
        tensor = tensor.to(dtype=like.dtype, device=like.device)
    if not torch.isfinite(tensor).all():
        raise DataError(
            f"{name} holds {int((~torch.isfinite(tensor)).sum())} value(s) that are NaN or infinite; expected finite "
            "numbers. Leave out the clients that have none."
        )
    return tensor


def variance_tensor(name: str, value: Any, like: Tensor) -> Tensor:
    """An array-like of variances, none of them negative, as a finite tensor like ``like``."""
    tensor = finite_tensor(name, value, like)
    if (tensor < 0).any():
        raise DataError(f"{name} is {float(tensor.min()):.6g} at its smallest; expected 0 or more. Check the rows.")
    return tensor


def finite_number(name: str, value: Any, expected: str) -> float:
    """An option that is one finite number, as a float."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{name} is {_shorten(value)}; expected {expected}.") from None
    if not math.isfinite(number):
        raise ConfigError(f"{name} is {number}; expected {expected}.")
    return number


def probability(name: str, value: Any) -> float:
    """An option that is a probability strictly between 0 and 1, as a float."""
    number = finite_number(name, value, expected := "a probability between 0 and 1, such as 0.95")
    if not 0.0 < number < 1.0:
        raise ConfigError(f"{name} is {value}; expected {expected}.")
    return number


def _shorten(value: Any) -> str:
    """What was given, in few characters: a whole number can have more digits than Python prints."""
    if isinstance(value, int):
        return f"a whole number of {value.bit_length()} bits"
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else f"{text[:40]}…"
