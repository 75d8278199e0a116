"""The trial of priors, by which `selffl.algorithms.self_fl_auto` settles how hard closing visits are held.

What halves of clients' rows agree on says how far clients differ from each other (`selffl.maths.split_half`).  How far
a client should go from the global model may be more, where that is hardly trained, and less, where halves remember what
the global model has learned since.  So when training is over some clients try it.  Each trains the model of either half
as in a closing visit, under the learned precision c and under multiples of it, and sums up what each half's model loses
on rows of the other half.  The multiple with the smallest sum over clients is everybody's, of those whose sum is below
that of c by more than a standard error.

One half's rows are what the other half's model has not been trained on, but for the global model, which has seen both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from selffl.algorithms.auto_records import AutoBroadcast, AutoMemory, AutoServer
from selffl.algorithms.contract import Algorithm, Personalises
from selffl.algorithms.held_steps import Hold, descend_held
from selffl.algorithms.population import Population
from selffl.algorithms.rowwise import RowwiseTask
from selffl.algorithms.safeguards import Bound
from selffl.maths.frequencies import class_shift, row_shift

if TYPE_CHECKING:
    from selffl.algorithms.self_fl_auto import SelfFLAuto

# Decision D17: these numbers are part of the method, the same for every model and data set.
MULTIPLES = (0.01, 0.1, 10.0, 100.0)  # of c that are tried beside c itself
MOST_NATS = 1.0  # that a client may count a multiple as better or worse than c, for each of its rows


@dataclass(frozen=True)
class TrialUpload:
    """What a client adds to the sums."""

    excess_losses: Tensor  # N_m times what a row of the other half loses under each multiple beyond c [..., C, 4]
    excess_squares: Tensor  # of which these are the squares [..., C, 4]


@dataclass(frozen=True)
class PriorTrial(Algorithm[AutoServer, AutoBroadcast, AutoMemory, TrialUpload]):
    """A round after the last of ``num_rounds``, with state and memories of ``method``; memories stay as they are."""

    method: SelfFLAuto
    num_rounds: int

    name: ClassVar[str] = "self-fl-auto"
    personalises: ClassVar[Personalises] = "model"
    averaged: ClassVar[Mapping[str, str | None]] = {}

    def start(self, params: Tensor, population: Population) -> AutoServer:
        """The method's."""
        return self.method.start(params, population)

    def newcomer(self, params: Tensor) -> AutoMemory:
        """The method's."""
        return self.method.newcomer(params)

    def broadcast(self, server: AutoServer, clients: Tensor) -> AutoBroadcast:
        """The method's."""
        return self.method.broadcast(server, clients)

    def client_round(
        self, broadcast: AutoBroadcast, memory: AutoMemory, task: RowwiseTask
    ) -> tuple[TrialUpload, AutoMemory]:
        """Closing visits of both halves under each precision, and what they lose on each other's rows."""
        halves = task.halves()
        by_half = halves.class_counts(broadcast.frequencies.shape[-1]).to(broadcast.params)
        arrival = self.method.arrive(broadcast, memory, task, by_half)
        hold = Hold.of(broadcast.group_variances, broadcast.group_sizes, task).of_halves()
        shift, momentum = shift_to_predict(broadcast, by_half), self.method.own_momentum(broadcast).unsqueeze(-1)
        steps = self.method.closing_steps(halves, self.num_rounds)

        def close(multiple: float) -> Tensor:
            """Both halves' models ``[..., C, 2, P]``, for the other half's rows."""
            held = hold._replace(pull=multiple * hold.pull)
            models = descend_held(halves, arrival.halves, arrival.half_anchors, held, steps, momentum)
            return (models if halves.class_bias is None else halves.class_bias.add_shift(models, shift)).flip(-2)

        learned = close(1.0)
        losses, nat = halves.mean_losses(learned), halves.mean_temperature(learned)
        excess = torch.stack([halves.mean_losses(close(multiple)) - losses for multiple in MULTIPLES], dim=-1)
        share = halves.num_terms.to(excess) / task.num_terms.to(excess).unsqueeze(-1)
        of_row = ((share / nat).unsqueeze(-1) * excess).sum(-2).nan_to_num(nan=MOST_NATS).clamp(-MOST_NATS, MOST_NATS)
        count = task.num_examples.expand(task.shape).to(of_row)
        is_there = (halves.num_terms > 0).all(-1)  # not where there is a single row
        excess_losses = (count * is_there).unsqueeze(-1) * of_row
        return TrialUpload(excess_losses, excess_losses.square()), memory

    def server_round(self, server: AutoServer, clients: Tensor, upload: TrialUpload) -> AutoServer:
        """The multiple under which rows lose least; c itself, unless another is surely better."""
        total, number = upload.excess_losses, clients.shape[-1]
        error = (upload.excess_squares - total.square() / number).clamp(min=0.0).sqrt()
        least, place = total.where(total < -error, 0.0).min(-1)
        best = total.new_tensor(MULTIPLES)[place]
        return replace(server, closing_multiple=torch.where(least < 0, best, 1.0).to(server.params))

    def personal(self, global_params: Tensor, memory: AutoMemory, task: RowwiseTask) -> Tensor:
        """The method's."""
        return self.method.personal(global_params, memory, task)

    def bounds(self, server: AutoServer, clients: Tensor, upload: TrialUpload, rows: Tensor) -> Mapping[str, Bound]:
        """No row counts for more than it may."""
        most = MOST_NATS * rows.unsqueeze(-1)
        return {"excess_losses": Bound(-most, most), "excess_squares": Bound(0.0, most.square())}


def shift_to_predict(broadcast: AutoBroadcast, by_half: Tensor) -> Tensor:
    """What is added to scores of classes of each half's model once it has trained ``[..., C, 2, K]``.

    While it trains it has the frequencies of its rows; it predicts with those that they tell of the client.
    """
    frequencies, skew = broadcast.frequencies.unsqueeze(-2), broadcast.class_skew.unsqueeze(-1)
    factor = broadcast.score_factors[..., None, 1:]
    return factor * class_shift(by_half, frequencies, skew) - row_shift(by_half, frequencies)
