"""A problem some of whose clients are hostile: they train as the others do, and then lie about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selffl.algorithms import Algorithm, Ditto, FedAvg, SelfFL, SelfFLAuto
from selffl.maths.posterior import local_weight
from selffl.studies.problems import Problem

Method = Algorithm[Any, Any, Any, Any]
Lie = Callable[[Any, Any, Tensor], Any]  # what was received, what is to be sent, who lies [C]

MANY_TIMES = 10.0  # as far, of moves that are made longer
FAR_TIMES = 100.0
FALSE_ROWS = 1e5


def moving(change: Callable[[Tensor, Tensor], Tensor]) -> Lie:
    """A lie about the model: ``change(moves [C, P], is_liar [C])`` gives what liars move it by."""

    def lie(broadcast: Any, upload: Any, is_liar: Tensor) -> Any:
        latest = broadcast.latest if hasattr(broadcast, "latest") else broadcast.params
        is_whole = hasattr(upload, "params")
        own = upload.params - latest if is_whole else upload.change / upload.weight.unsqueeze(-1)
        found = torch.where(is_liar.unsqueeze(-1), change(own, is_liar), own)
        if is_whole:
            return replace(upload, params=latest + found)
        return replace(upload, change=found * upload.weight.unsqueeze(-1))

    return lie


def _random(moves: Tensor, is_liar: Tensor) -> Tensor:
    """Noise, ten times as long as an honest move, another for each liar, the same in every round."""
    noise = torch.randn(moves.shape, generator=torch.Generator().manual_seed(0), dtype=moves.dtype)
    found: Tensor = MANY_TIMES * noise * (moves.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True))
    return found


def _colluding(moves: Tensor, is_liar: Tensor) -> Tensor:
    """All the same: back from where their own rows would go together, as far as one of them goes on average."""
    own = moves[is_liar]
    if not len(own):
        return moves
    mean = own.mean(0)
    found: Tensor = -mean * own.norm(dim=-1).mean() / mean.norm()
    return found.expand_as(moves)


def rows(broadcast: Any, upload: Any, is_liar: Tensor) -> Any:
    """A false number of rows, and whatever is weighed by it."""
    if not hasattr(upload, "weight"):
        return replace(upload, num_examples=upload.num_examples.masked_fill(is_liar, FALSE_ROWS))
    weight = torch.full_like(upload.weight, FALSE_ROWS)
    found = {}
    if hasattr(upload, "num_examples"):
        found["num_examples"] = upload.num_examples.masked_fill(is_liar, FALSE_ROWS)
        prior = broadcast.prior_rows
        weight = torch.where(prior.isnan(), weight, local_weight(prior, weight))
    factor = torch.where(is_liar, weight / upload.weight, 1.0)
    for name in ("change", "weight", "class_weights", "weight_with_classes"):
        if hasattr(upload, name):
            tensor = getattr(upload, name)
            found[name] = tensor * factor.reshape(-1, *[1] * (tensor.ndim - 1))
    return replace(upload, **found)


def variances(broadcast: Any, upload: Any, is_liar: Tensor) -> Any:
    """The largest variance that passes, or that rows decide far more than they do; nothing where none is sent."""
    if hasattr(upload, "intra_variance"):
        most = 3.9 * upload.params.square().sum(-1)
        return replace(upload, intra_variance=torch.where(is_liar, most, upload.intra_variance))
    if hasattr(upload, "disagreements"):
        factor = torch.where(is_liar, 1e6, 1.0).unsqueeze(-1)
        return replace(upload, disagreements=upload.disagreements.abs() * factor)
    return upload


def classes(broadcast: Any, upload: Any, is_liar: Tensor) -> Any:
    """Rows of the first class alone; nothing where no classes are sent."""
    if not hasattr(upload, "class_weights"):
        return upload
    false = torch.zeros_like(upload.class_weights)
    false[..., 0] = upload.weight_with_classes
    return replace(upload, class_weights=torch.where(is_liar.unsqueeze(-1), false, upload.class_weights))


ATTACKS: Mapping[str, Lie] = {
    "flip": moving(lambda moves, _: -moves),
    "flip ×10": moving(lambda moves, _: -MANY_TIMES * moves),
    "scale ×100": moving(lambda moves, _: FAR_TIMES * moves),
    "random": moving(_random),
    "colluding": moving(_colluding),
    "rows": rows,
    "variances": variances,
    "classes": classes,
}


@dataclass(frozen=True)
class Lying:
    """Clients of a method that lie about what they send; what they keep is honest.

    Attributes:
        attack: One of `ATTACKS`.
        liars: Numbers of the clients that lie.
    """

    attack: str = field(default="flip", kw_only=True)
    liars: tuple[int, ...] = field(default=(), kw_only=True)

    def client_round(self, broadcast: Any, memory: Any, task: Any) -> tuple[Any, Any]:
        """The method's; then the lie."""
        upload, memory = super().client_round(broadcast, memory, task)  # type: ignore[misc]
        is_liar = torch.isin(task.clients, torch.tensor(self.liars, device=task.clients.device))
        return ATTACKS[self.attack](broadcast, upload, is_liar), memory


@dataclass(frozen=True)
class LyingFedAvg(Lying, FedAvg):
    """FedAvg with hostile clients."""


@dataclass(frozen=True)
class LyingDitto(Lying, Ditto):
    """DITTO with hostile clients."""


@dataclass(frozen=True)
class LyingSelfFL(Lying, SelfFL):
    """Self-FL with hostile clients."""


@dataclass(frozen=True)
class LyingSelfFLAuto(Lying, SelfFLAuto):
    """`self-fl-auto` with hostile clients."""


LYING: Mapping[type, Any] = {
    kind.__mro__[2]: kind for kind in (LyingFedAvg, LyingDitto, LyingSelfFL, LyingSelfFLAuto)
}  # by the method itself


def attack_method(method: Method, attack: str, liars: tuple[int, ...]) -> Method:
    """The method, with clients that lie about what they send."""
    found: Method = LYING[type(method)](**vars(method), attack=attack, liars=liars)
    return found


@dataclass(frozen=True)
class AttackedProblem(Problem):
    """A problem of which a share of the clients, by lot, is hostile."""

    attack: str = "none"  # one of `ATTACKS`
    hostile_share: float = 0.0

    def liars(self, seed: int) -> tuple[int, ...]:
        """Numbers of the hostile clients: of a larger share, the first are those of a smaller."""
        number = self.federation(seed).num_clients
        chosen = np.random.default_rng(seed).permutation(number)[: round(self.hostile_share * number)]
        return tuple(sorted(chosen.tolist()))

    def _train(self, method: Method, seed: int, validation_fraction: float, **training: Any) -> Any:
        if self.attack != "none":
            method = attack_method(method, self.attack, self.liars(seed))
        return super()._train(method, seed, validation_fraction, **training)
