"""Robust aggregation for any method: what clients would move the server's models by is made robust before it counts.

The same for every engine.  Single clients are needed, not only their sum; nothing is remembered from round to round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from selffl.algorithms.contract import Algorithm
from selffl.algorithms.options import check_choice
from selffl.algorithms.suggestions import suggest
from selffl.errors import ConfigError
from selffl.maths.robust import cap_weights, clip_lengths, draw_to_centre, take_median, trim

Robust = Literal["none", "clip", "median", "trimmed", "hierarchy"]
ROBUST: tuple[str, ...] = get_args(Robust)
Method = Algorithm[Any, Any, Any, Any]


def check_robust(robust: Any) -> None:
    """Refuse a defence that there is not."""
    check_choice("robust", robust, ROBUST)


def check_defence(robust: str, method: Method) -> None:
    """Refuse a defence that makes no sense of a method's uploads."""
    why = _refusal(robust, method)
    if why is not None:
        others = [name for name in ROBUST[1:] if _refusal(name, method) is None]
        methods = suggest(lambda other: _refusal(robust, other) is None)
        instead = f"one of {', '.join(others)}" if others else f"another method, such as {methods}"
        raise ConfigError(
            f"robust is {robust!r}, and {method.name} cannot have it: {why}. Expected 'none', or {instead}."
        )


def _refusal(robust: str, method: Method) -> str | None:
    """Why a method cannot have a defence; none: it can."""
    if robust == "none":
        return None
    if not method.is_federated:
        return "its clients learn nothing from each other"
    if not method.averaged:
        return "its server combines single clients' models by more than an average"
    if robust == "hierarchy" and not method.has_inter_variance:
        return "it has no variance between clients to say what is plausible"
    return method.no_defence.get(robust)


def defend(robust: str, method: Method, server: Any, clients: Tensor, upload: Any) -> Any:
    """The uploads of a whole cohort, ``clients [..., C]``, once nobody's counts for more than is plausible."""
    moves = method.moves(server, upload)
    weights = {name: getattr(upload, name) for name in set(method.averaged.values()) if name is not None}
    upload = replace(upload, **{name: cap_weights(each) for name, each in weights.items()})
    equal = torch.ones_like(next(iter(moves.values()))[..., 0])
    variances = expected_squares(method, server, clients, upload, equal) if robust == "hierarchy" else equal
    change: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
        "clip": lambda vectors, _: clip_lengths(vectors),
        "median": lambda vectors, _: take_median(vectors),
        "trimmed": trim,
        "hierarchy": lambda vectors, _: draw_to_centre(vectors, variances),
    }
    found = {}
    for name, vectors in moves.items():
        weight = method.averaged[name]
        found[name] = change[robust](vectors, equal if weight is None else getattr(upload, weight).to(vectors))
    return method.replace_moves(server, upload, found)


def expected_squares(method: Method, server: Any, clients: Tensor, upload: Any, equal: Tensor) -> Tensor:
    """σ₀² + σₘ² of each client, or ``equal [..., C]`` where they are not known yet."""
    inter = method.inter_variance(server)
    recorded = {name: getattr(upload, name) for name in method.fields_by_client()}
    intra = method.intra_variance(server, clients, recorded)
    assert inter is not None
    if intra is None:
        return equal
    typical = intra.nanmean(-1, keepdim=True)  # of a client of which nothing is known
    found = (inter.unsqueeze(-1) + torch.where(intra.isnan(), typical, intra)).to(equal)
    return torch.where((found.isfinite() & (found > 0)).all(-1, keepdim=True), found, equal)
