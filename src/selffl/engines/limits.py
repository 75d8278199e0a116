"""Client-level differential privacy, one mechanism for every method whose uploads add: what one client may send.

A method says what fields of an upload may measure at most (`Algorithm.limits`), before they are multiplied by the
client's weight.  Every client shortens its own upload to that, whichever engine runs it.  Noise on each sum is then
measured by how far replacing one client, data and all, can move all sums together.

**Sensitivity.**  A client sends w a_i for fields that its weight w in [0, W0] multiplies, b_j for others, and w itself.
Measured by the noise s_i on each sum, replacing it moves the sums by the root of

    f = sum_i |w a_i - w' a'_i|^2 / s_i^2 + sum_j |b_j - b'_j|^2 / s_j^2 + (w - w')^2 / s_w^2.

For given a, b, a', b' this is convex in (w, w'), and so largest at a corner of the square.  With D_i the most that two
clients of full weight can differ by in a field (twice its limit; where it has no negative numbers, sqrt(2) times, and
once if it is one number), s_i = z D_i / sqrt(p_i) and shares p that add up to 1, both weights full give f <= 1/z^2; the
weights do not differ.  With one full and one zero weight, signed fields that it multiplies reach half their D_i, and so
leave 3/4 of their shares to the weight: s_w^2 = z^2 W0^2 / (3/4 sum of these p_i) makes f <= 1/z^2 there, too.  A
weight that is the same for everybody needs no noise.  docs/privacy.md has the same in words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from selffl.algorithms.contract import Algorithm
from selffl.algorithms.options import SettingsPart, check_number, option
from selffl.algorithms.records import tensors_of
from selffl.algorithms.safeguards import Bound, Limit
from selffl.algorithms.suggestions import suggest
from selffl.algorithms.training_options import LARGEST
from selffl.errors import ConfigError

Method = Algorithm[Any, Any, Any, Any]

SHARE_OF_OTHERS = 0.1  # of what a field that moves a model counts for, when a round's privacy is shared out
LEFT_TO_WEIGHT = 0.75  # of the share of signed fields: what they do not use while one of two weights is zero


@dataclass(frozen=True)
class PrivacyOptions(SettingsPart):
    """How much one client may add to the sums of a round, and how much noise hides it; the defaults change nothing.

    Attributes:
        clip: S, the most that a client may move a model by; none: no bound.
        max_weight: W0, the most that a client may weigh, for methods that do not weigh all alike.
        noise_multiplier: z, the noise on the sums by what one client can move them.
    """

    clip: float | None = option(None, check_number, above=0.0, at_most=LARGEST, alternative=", or none")
    max_weight: float | None = option(None, check_number, above=0.0, at_most=LARGEST, alternative=", or none")
    noise_multiplier: float = option(0.0, check_number, at_least=0.0, at_most=LARGEST)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_weight", "noise_multiplier"):
            if getattr(self, name) and self.clip is None:
                raise ConfigError(
                    f"{name} is {getattr(self, name):g} without clip; expected clip, too: noise hides only what is "
                    "bounded, and a weight bounds nothing by itself."
                )

    def check_method(self, method: Method, robust: str = "none") -> None:
        """Refuse a method whose uploads cannot be bounded or hidden so, and a defence beside it."""
        why, name = self._refusal(method, robust), "noise_multiplier" if self.noise_multiplier else "clip"
        if self.clip is not None and why is not None:
            raise ConfigError(f"{name} is {getattr(self, name):g}, and {method.name} cannot have it: {why}.")

    def _refusal(self, method: Method, robust: str) -> str | None:
        if not method.is_federated:
            return f"its clients send nothing. Expected another method, such as {suggest(_has_sums)}"
        if not method.uploads_add:
            others = suggest(lambda other: _has_sums(other) and other.personalises == method.personalises)
            return f"its server needs single clients, not sums. Expected a method whose uploads add, such as {others}"
        if robust != "none":
            return f"robust is {robust!r}, which needs single clients, not noisy sums. Expected one of both"
        if self.max_weight is None and not method.has_equal_weights():
            return "its clients do not weigh the same. Expected max_weight, too, the most that one may weigh"
        return None


def _has_sums(method: Method) -> bool:
    """Whether clients send something, and the server needs its sums alone."""
    return method.is_federated and method.uploads_add


NOT_PRIVATE = PrivacyOptions()
PRIVACY_OPTIONS = tuple(each.name for each in fields(PrivacyOptions))


@dataclass(frozen=True)
class SumLimits:
    """What each sum of a method's uploads may get from one client, and the noise that hides it.

    Attributes:
        method: The method.
        options: The bounds and the multiplier; there has to be a ``clip``.
        axis: That of the clients: how many independent federations there are before it.
    """

    method: Method
    options: PrivacyOptions
    axis: int = 0

    def limits(self, upload: Any) -> Mapping[str, Limit]:
        """Limits by field, for the fields of an upload, of clients ``[..., C, ...]`` or of their sum ``[..., ...]``."""
        assert self.options.clip is not None
        found = self.method.limits(self.options.clip, self._most_weight, upload)
        stated = {*found, *(limit.weight for limit in found.values()), *self.method.may_be_unknown}
        unstated = sorted(tensors_of(upload).keys() - stated)
        if unstated:
            raise ConfigError(
                f"clip is {self.options.clip:g}, and {self.method.name} does not say what {unstated[0]} may measure; "
                "expected a limit for every field of its upload (Algorithm.limits)."
            )
        return found

    def bound(self, upload: Any) -> Any:
        """The uploads of clients ``[..., C, ...]`` with every field shortened to its limit, every weight cut at W0.

        What a method merely records (`Algorithm.may_be_unknown`) and nothing bounds is withheld.
        """
        limits, found = self.limits(upload), {}
        upload = self.method.in_units_of_limits(upload)
        weights = {
            name: getattr(upload, name) for name in {limit.weight for limit in limits.values()} if name is not None
        }
        if not self.method.has_equal_weights():
            weights = {name: weight.clamp(max=self._most_weight) for name, weight in weights.items()}
        for name, limit in limits.items():
            value = getattr(upload, name)
            if limit.weight is not None:
                before = getattr(upload, limit.weight)
                value = value / self._beside(before.where(before > 0, torch.inf), value)
            length = self._length(value)
            factor = (limit.most / length.clamp(min=limit.most)).to(value)
            if limit.weight is not None:
                factor = factor * weights[limit.weight]
            found[name] = value * self._beside(factor, value)
        for name in self.method.may_be_unknown:
            if name not in limits:
                found[name] = torch.full_like(getattr(upload, name), torch.nan)
        return replace(upload, **found, **weights)

    def bounds(self, upload: Any) -> dict[str, Bound]:
        """What bounded uploads of clients ``[..., C, ...]`` can be, for those who check what others have sent."""
        found = {}
        for name, limit in self.limits(upload).items():
            value, most = getattr(upload, name), limit.most
            if limit.weight is not None and not self.method.has_equal_weights():
                most = limit.most * self._most_weight
                found[limit.weight] = Bound(0.0, self._most_weight)
            found[name] = Bound(-torch.inf if limit.is_signed else 0.0, torch.inf)
            found[f"the length of {name}"] = Bound(0.0, most, self._length(value))
        return found

    def scales(self, total: Any) -> dict[str, float]:
        """Standard deviation of the noise on each field of a sum of uploads; empty without noise."""
        multiplier, limits = self.options.noise_multiplier, self.limits(total)
        if not multiplier:
            return {}
        counted = {name: 1.0 if name in self.method.averaged else SHARE_OF_OTHERS for name in limits}
        shares = {name: each / sum(counted.values()) for name, each in counted.items()}
        found = {}
        for name, limit in limits.items():
            most = limit.most if limit.weight is None else limit.most * self._most_weight
            numbers = getattr(total, name)[(0,) * self.axis].numel()
            found[name] = multiplier * limit.difference(numbers) * most / math.sqrt(shares[name])
        for weight in self._varying_weights(limits):
            left = sum(shares[name] for name, limit in limits.items() if limit.weight == weight and limit.is_signed)
            found[weight] = multiplier * self._most_weight / math.sqrt(LEFT_TO_WEIGHT * left)
        return found

    def least_weights(self, total: Any) -> dict[str, float]:
        """The least that each sum of weights may be once there is noise on it, by client, by field."""
        return dict.fromkeys(self._varying_weights(self.limits(total)), SHARE_OF_OTHERS * self._most_weight)

    @property
    def _most_weight(self) -> float:
        if self.method.has_equal_weights():
            return 1.0
        assert self.options.max_weight is not None
        return self.options.max_weight

    def _varying_weights(self, limits: Mapping[str, Limit]) -> list[str]:
        if self.method.has_equal_weights():
            return []
        return sorted({limit.weight for limit in limits.values() if limit.weight is not None})

    def _length(self, value: Tensor) -> Tensor:
        """Length of all numbers of a field together, by client ``[..., C]``."""
        by_client = value.unsqueeze(-1) if value.ndim == self.axis + 1 else value.flatten(self.axis + 1)
        length: Tensor = torch.linalg.vector_norm(by_client, dim=-1, dtype=torch.float64)
        return length

    def _beside(self, numbers: Tensor, value: Tensor) -> Tensor:
        """Numbers ``[..., C]`` in a shape that multiplies a field."""
        return numbers.reshape(*numbers.shape, *[1] * (value.ndim - numbers.ndim))
