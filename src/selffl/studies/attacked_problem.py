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


def _random(moves: Tensor, is_liar: Tensor) -> Tensor:
    """Noise, ten times as long as an honest move, another for each liar, the same in every round."""
    noise = torch.randn(moves.shape, generator=torch.Generator().manual_seed(0), dtype=moves.dtype)
    found: Tensor = MANY_TIMES * noise * (moves.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True))
    return found


def _colluding(moves: Tensor, is_liar: Tensor) -> Tensor:
    """Moves of clients that collude: back from where their rows lead together, as far as one goes on average."""
    own = moves[is_liar]
    if not len(own):
        return moves
    mean = own.mean(0)
    found: Tensor = -mean * own.norm(dim=-1).mean() / mean.norm()
    return found.expand_as(moves)


Move = Callable[[Tensor, Tensor], Tensor]  # what liars move the model by, of honest moves [C, P] and who lies [C]
MOVES: Mapping[str, Move] = {
    "flip": lambda moves, _: -moves,
    "flip ×10": lambda moves, _: -MANY_TIMES * moves,
    "scale ×100": lambda moves, _: FAR_TIMES * moves,
    "random": _random,
    "colluding": _colluding,
}
ATTACKS = (*MOVES, "rows", "variances", "classes")


@dataclass(frozen=True)
class Lying:
    """Clients of a method that lie about what they send; what they keep is honest.

    What stands here suits a method that sends a weighted change of the model and its weight, and nothing else.

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
        lies: Mapping[str, Lie] = {
            "rows": self.claim_rows,
            "variances": self.claim_variances,
            "classes": self.claim_class,
        }
        return lies.get(self.attack, self.move)(broadcast, upload, is_liar), memory

    def move(self, broadcast: Any, upload: Any, is_liar: Tensor) -> Any:
        """What `MOVES` says, instead of the clients' own change of the model."""
        weight = upload.weight.unsqueeze(-1)
        return replace(upload, change=self._moves(upload.change / weight, is_liar) * weight)

    def claim_rows(self, broadcast: Any, upload: Any, is_liar: Tensor) -> Any:
        """A false number of rows, and whatever is weighed by it."""
        return _reweigh(upload, torch.full_like(upload.weight, FALSE_ROWS), is_liar, "change", "weight")

    def claim_variances(self, broadcast: Any, upload: Any, is_liar: Tensor) -> Any:
        """Nothing: no variance is sent."""
        return upload

    def claim_class(self, broadcast: Any, upload: Any, is_liar: Tensor) -> Any:
        """Nothing: no classes are sent."""
        return upload

    def _moves(self, moves: Tensor, is_liar: Tensor) -> Tensor:
        return torch.where(is_liar.unsqueeze(-1), MOVES[self.attack](moves, is_liar), moves)


def _reweigh(upload: Any, weight: Tensor, is_liar: Tensor, *names: str) -> Any:
    """An upload whose liars weigh ``weight [C]``, and with them the sums of these names."""
    factor = torch.where(is_liar, weight / upload.weight, 1.0)
    sums = {name: getattr(upload, name) for name in names}
    return replace(upload, **{name: each * factor.reshape(-1, *[1] * (each.ndim - 1)) for name, each in sums.items()})


@dataclass(frozen=True)
class LyingFedAvg(Lying, FedAvg):
    """FedAvg with hostile clients."""


@dataclass(frozen=True)
class LyingDitto(Lying, Ditto):
    """DITTO with hostile clients."""


@dataclass(frozen=True)
class LyingSelfFL(Lying, SelfFL):
    """Self-FL with hostile clients, which send models, numbers of rows and variances."""

    def move(self, broadcast: Any, upload: Any, is_liar: Tensor) -> Any:
        """What `MOVES` says, on top of the model that was received."""
        return replace(upload, params=broadcast.params + self._moves(upload.params - broadcast.params, is_liar))

    def claim_rows(self, broadcast: Any, upload: Any, is_liar: Tensor) -> Any:
        """A false number of rows."""
        return replace(upload, num_examples=upload.num_examples.masked_fill(is_liar, FALSE_ROWS))

    def claim_variances(self, broadcast: Any, upload: Any, is_liar: Tensor) -> Any:
        """The largest variance that passes."""
        most = 3.9 * upload.params.square().sum(-1)
        return replace(upload, intra_variance=torch.where(is_liar, most, upload.intra_variance))


@dataclass(frozen=True)
class LyingSelfFLAuto(Lying, SelfFLAuto):
    """`self-fl-auto` with hostile clients, which send numbers of rows, classes and what halves of rows disagree on."""

    def claim_rows(self, broadcast: Any, upload: Any, is_liar: Tensor) -> Any:
        """A false number of rows, and the weight that a client of so many rows has."""
        weight, prior = torch.full_like(upload.weight, FALSE_ROWS), broadcast.prior_rows
        weight = torch.where(prior.isnan(), weight, local_weight(prior, weight))
        found = _reweigh(upload, weight, is_liar, "change", "weight", "class_weights", "weight_with_classes")
        return replace(found, num_examples=upload.num_examples.masked_fill(is_liar, FALSE_ROWS))

    def claim_variances(self, broadcast: Any, upload: Any, is_liar: Tensor) -> Any:
        """That rows decide far more than they do."""
        factor = torch.where(is_liar, 1e6, 1.0).unsqueeze(-1)
        return replace(upload, disagreements=upload.disagreements.abs() * factor)

    def claim_class(self, broadcast: Any, upload: Any, is_liar: Tensor) -> Any:
        """Rows of the first class alone."""
        false = torch.zeros_like(upload.class_weights)
        false[..., 0] = upload.weight_with_classes
        return replace(upload, class_weights=torch.where(is_liar.unsqueeze(-1), false, upload.class_weights))


LYING: Mapping[str, Any] = {kind.name: kind for kind in (LyingFedAvg, LyingDitto, LyingSelfFL, LyingSelfFLAuto)}


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
            method = LYING[method.name](**vars(method), attack=self.attack, liars=self.liars(seed))
        return super()._train(method, seed, validation_fraction, **training)
