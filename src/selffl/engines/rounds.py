"""The server's half of a round, the same for every engine: gather uploads, add noise, take the method's step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from selffl.algorithms.contract import Algorithm
from selffl.algorithms.population import Population
from selffl.algorithms.records import map_tensors, tensors_of
from selffl.engines.claims import Claims, capped_factors, choose
from selffl.engines.defence import defend
from selffl.engines.limits import PrivacyOptions, SumLimits
from selffl.engines.noise import Draw, add_noise
from selffl.errors import DivergedError

Method = Algorithm[Any, Any, Any, Any]


@dataclass(frozen=True)
class RoundReport:
    """What happened in one round."""

    round_number: int
    clients: Tensor  # [..., C]
    upload: Any  # what the server's step was given: the cohort's sum, or what every client sent
    recorded: Mapping[str, Tensor]  # the method's `fields_by_client`, each [..., C]
    server: Any
    num_gradients: Tensor  # evaluations in this round, [..., C]
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)  # of what clients sent, before it was summed


@dataclass
class Uploads:
    """What some clients of a cohort have sent: what can be sent on, and joined with that of others."""

    total: Any = None  # the sum, where uploads add
    parts: list[Any] = field(default_factory=list)  # else all of them, part by part
    clients: list[Tensor] = field(default_factory=list)
    recorded: dict[str, list[Tensor]] = field(default_factory=dict)
    capped: dict[str, list[Tensor]] = field(default_factory=dict)
    left_out: dict[int, str] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)  # of the fields, as clients sent them

    def join(self, other: Uploads) -> None:
        """Take in what clients after these have sent; sums are added in the order in which they come."""
        if self.total is None:
            self.total = other.total
        elif other.total is not None:
            self.total = map_tensors(Tensor.add_, self.total, other.total)
        self.parts += other.parts
        self.clients += other.clients
        for own, theirs in ((self.recorded, other.recorded), (self.capped, other.capped)):
            for name, found in theirs.items():
                own[name] += found
        self.left_out |= other.left_out
        self.dtypes |= other.dtypes


class GatheredUploads:
    """The uploads of a cohort, part by part: their sum where the method's uploads add, else all of them.

    Who cannot have sent what it has is left out, as if it had not been there.  ``claims`` says what clients may send;
    without it they are taken at their word.  A defence (``robust``) needs all of a cohort at once, whatever the method.
    Where uploads are bounded (``limits``), nobody is held back beside others: noise is measured by plain sums.
    """

    def __init__(
        self,
        algorithm: Method,
        axis: int,
        claims: Claims | None = None,
        robust: str = "none",
        limits: SumLimits | None = None,
    ) -> None:
        self._algorithm, self._axis, self._claims = algorithm, axis, claims  # the axis of the clients
        self._robust, self.limits = robust, limits
        self.found = Uploads(
            recorded={name: [] for name in algorithm.fields_by_client()},
            capped={name: [] for name in algorithm.capped if limits is None},
        )
        self.held_back: dict[int, str] = {}  # by client's number, and why: who counts for less than it says

    @classmethod
    def of_sum(cls, algorithm: Method, clients: Tensor, total: Any, limits: SumLimits | None, template: Any) -> Self:
        """Uploads of ``clients [C]``, each like ``template``, of whom nothing but the sum is known.

        None can be checked or recorded.
        """
        gathered = cls(algorithm, 0, limits=limits)
        recorded = {name: [torch.full(clients.shape, torch.nan)] for name in algorithm.fields_by_client()}
        dtypes = {name: tensor.dtype for name, tensor in tensors_of(template).items()}
        gathered.found = Uploads(total, clients=[clients], recorded=recorded, dtypes=dtypes)
        return gathered

    @property
    def left_out(self) -> dict[int, str]:
        """Clients that are left out, by number, and why."""
        return self.found.left_out

    def add(self, clients: Tensor, upload: Any) -> None:
        """Take in the upload of some more ``clients [..., C]``."""
        if self._claims is not None:
            clients, upload = self._possible(self._claims, clients, upload)
        if not clients.shape[-1]:
            return
        found = Uploads(
            clients=[clients],
            recorded={name: [getattr(upload, name)] for name in self.found.recorded},
            capped={name: [getattr(upload, name)] for name in self.found.capped},
            dtypes={name: tensor.dtype for name, tensor in tensors_of(upload).items()},
        )
        if self._robust != "none" or not self._algorithm.uploads_add:
            found.parts.append(upload)
        else:
            found.total = map_tensors(self._sum, upload)
        self.found.join(found)

    def _possible(self, claims: Claims, clients: Tensor, upload: Any) -> tuple[Tensor, Any]:
        """Clients that can have sent what they have, and their uploads."""
        is_possible = claims.are_possible(clients, upload)
        if bool(is_possible.all()):
            return clients, upload
        if clients.ndim > 1:  # of federations side by side none can go on with fewer clients than the others
            place = tuple((~is_possible).nonzero()[0].tolist())
            raise DivergedError(
                f"client {int(clients[place])} of federation {place[:-1]} sent what cannot be used; expected finite "
                "numbers within the method's bounds. Lower the learning rate."
            )
        for place in (~is_possible).nonzero().flatten().tolist():
            one = torch.tensor([place], device=clients.device)
            self.left_out[int(clients[place])] = claims.fault(clients[one], choose(upload, one, self._axis))
        rest = is_possible.nonzero().flatten()
        return clients[rest], choose(upload, rest, self._axis)

    def _sum(self, tensor: Tensor) -> Tensor:
        """The sum over clients in double precision, so that their order and number cost no digits of a model."""
        precise = torch.float32 if tensor.device.type == "mps" else torch.float64  # which that device lacks
        if tensor.shape[self._axis] == 1:  # a sum begins at 0, so that -0 becomes 0
            return tensor.select(self._axis, 0).to(precise, copy=True).add_(0.0)
        return tensor.sum(self._axis, dtype=precise)

    @property
    def clients(self) -> Tensor:
        """Clients whose uploads count, ``[..., C]``."""
        return torch.cat(self.found.clients, dim=-1)

    def upload(self) -> Any:
        """What the server's step is given."""
        if self._robust != "none":
            assert self._claims is not None
            joined = defend(
                self._robust, self._algorithm, self._claims.server, self.clients, self._join(self.found.parts)
            )
            return self._held_back(map_tensors(self._sum, joined)) if self._algorithm.uploads_add else joined
        return self._held_back(self.found.total) if self._algorithm.uploads_add else self._join(self.found.parts)

    def _held_back(self, total: Any) -> Any:
        """The sums, where no client's numbers count for more than the method allows beside the others'."""
        capped, found = self._algorithm.capped, {}
        fields: dict[str, Tensor] = {name: self._join(parts) for name, parts in self.found.capped.items()}
        times = [capped[name] for name in fields]
        factors = capped_factors(list(fields.values()), times, self._axis) if fields else None
        if factors is None or not bool((factors < 1).any()):
            return total
        for (name, numbers), factor in zip(fields.items(), factors, strict=True):
            if bool((factor < 1).any()):
                for client in self.clients[factor < 1].tolist():
                    self.held_back[client] = f"its {name} is cut to {capped[name]:g} times the upper quartile of all"
                shaped = factor.reshape(*factor.shape, *[1] * (numbers.ndim - factor.ndim))
                found[name] = self._sum(shaped * numbers)
        return replace(total, **found)

    def collect_recorded(self) -> dict[str, Tensor]:
        """The recorded fields, client by client."""
        return {name: self._join(parts) for name, parts in self.found.recorded.items()}

    def _join(self, parts: list[Any]) -> Any:
        return map_tensors(lambda *tensors: torch.cat(tensors, dim=self._axis), *parts)


def closing_rounds_after(
    algorithm: Method, num_rounds: int, population: Population, robust: str, privacy: PrivacyOptions
) -> Sequence[Algorithm[Any, Any, Any, Any]]:
    """The method's closing rounds, after the last of ``num_rounds``.

    Their sums are none that a defence knows, or that noise is accounted for: then there are none.
    """
    if not algorithm.has_closing_visit or robust != "none" or privacy.clip is not None:
        return ()
    return algorithm.closing_rounds(num_rounds, population)


def finish_round(
    algorithm: Method,
    server: Any,
    round_number: int,
    gathered: GatheredUploads,
    num_gradients: Tensor,
    draw: Draw,
) -> RoundReport:
    """The round once its cohort has answered; ``draw`` gives the noise, where there is to be some."""
    upload, clients = gathered.upload(), gathered.clients
    noise: dict[str, float] = {}
    if gathered.limits is not None:
        upload, noise = add_noise(gathered.limits, upload, clients.shape[-1], draw)
    if noise:
        after = algorithm.noisy_server_round(server, clients, upload, noise)
    else:
        after = algorithm.server_round(server, clients, upload)
    check_finite(algorithm, after, round_number)
    recorded, dtypes = gathered.collect_recorded(), gathered.found.dtypes
    return RoundReport(round_number, clients, upload, recorded, after, num_gradients, dtypes)


def check_finite(algorithm: Method, server: Any, round_number: int) -> None:
    """Refuse a server's state with NaN or infinity in it."""
    # NaN may stand for "unknown" outside the model; infinity never does.
    faults = [~server.params.isfinite().all(), *(each.isinf().any() for each in tensors_of(server).values())]
    if bool(torch.stack([fault.to(server.params.device) for fault in faults]).any()):  # looked at once: a GPU waits
        raise DivergedError(
            f"the state of {algorithm.name} is not finite after round {round_number}; "
            "expected finite numbers. Lower the learning rate, or take more clients a round."
        )
