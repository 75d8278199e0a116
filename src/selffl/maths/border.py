"""The border of the maths: arrays of any kind in, finite tensors on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from selffl.errors import DataError


def finite_tensor(name: str, value: Any, like: Tensor | None = None) -> Tensor:
    """An array-like as a finite floating-point tensor, of the dtype and on the device of ``like``."""
    try:
        tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value, dtype=_numpy_dtype(value)))
    except (TypeError, ValueError) as error:
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
    """The same for variances, none of which may be negative."""
    tensor = finite_tensor(name, value, like)
    if (tensor < 0).any():
        raise DataError(f"{name} is {float(tensor.min()):.6g} at its smallest; expected 0 or more. Check the rows.")
    return tensor


def _numpy_dtype(value: Any) -> Any:
    """float32 and float64 arrays keep their type; everything else becomes float64."""
    dtype = getattr(value, "dtype", None)
    return dtype if dtype in (np.float32, np.float64) else np.float64
