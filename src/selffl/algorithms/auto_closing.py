"""The closing rounds of `selffl.algorithms.self_fl_auto`: how far clients differ, learned once more at the end.

While training goes on, models of halves of a client's rows follow a global model that moves, and few have arrived.
They keep what the global model has learned since, and the rows have been cut in two in one way alone.  So when training
is over some clients cut their rows anew, in other ways, and train a model of each half from its prior mean as long as
in a closing visit.  What both halves agree on, over what they disagree on, is the variance, as in every round
(`selffl.maths.split_half`).  The second round holds models by what the first has found; both say what is reported.

The global model is not known exactly either.  What the models of all clients have in common is how far it is from
where they would have it.  That is no difference between clients, and is taken off what is reported.  After each round
the centre moves there, as far as the mean of the clients' deviations is what all have in common and not of those who
happen to be drawn (`selffl.maths.split_half.common_share`).  The next round measures from there.  What it still finds
in common each client may have to go, so that the prior of closing visits has it on top.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch
from torch import Tensor

from selffl.algorithms.auto_records import (
    AutoBroadcast,
    AutoMemory,
    AutoServer,
    ClosingSpread,
    ClosingUpload,
    SpreadReport,
)
from selffl.algorithms.auto_spread import find_prior_rows, learn_variances, sum_disagreements
from selffl.algorithms.averaging import row_count
from selffl.algorithms.contract import Algorithm, Personalises
from selffl.algorithms.held_steps import Hold, descend_held
from selffl.algorithms.layers import by_group, by_parameter, sizes_of
from selffl.algorithms.population import Population
from selffl.algorithms.rowwise import RowwiseTask
from selffl.algorithms.safeguards import Bound
from selffl.maths.split_half import centred_products, common_share, common_square, spread_products

if TYPE_CHECKING:
    from selffl.algorithms.self_fl_auto import SelfFLAuto

Upload = TypeVar("Upload")

# Decision D17: these numbers are part of the method, the same for every model and data set.
NUM_CLOSING_ROUNDS = 2
NUM_SPLITS = 2  # ways in which a client's rows are cut in two in a closing round
MOST_CLOSING_CHANGE = 1e4  # times what it was that c is after a closing round, at most; and one over it, at least


def is_mixed(server: AutoServer) -> bool:
    """Whether a mixed model is fitted: of small linear models whose outcomes are numbers.

    Modes of classes that a line separates are far away, and what they say of variances makes predictions too sure.
    """
    has_met_classes = (server.same_class_rate > 0).any() | (server.frequencies != server.frequencies[..., :1]).any()
    return bool(server.coefficient_order.shape[-1]) and not bool(has_met_classes)


@dataclass(frozen=True)
class RoundAfterTraining(Algorithm[AutoServer, AutoBroadcast, AutoMemory, Upload]):
    """Round ``number`` after the last of ``num_rounds``, with the state of ``method``; memories stay as they are."""

    method: SelfFLAuto
    num_rounds: int
    number: int

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
        """What the method sends for closing visits."""
        return self.method.closing_broadcast(server, clients)

    def personal(self, global_params: Tensor, memory: AutoMemory, task: RowwiseTask) -> Tensor:
        """The method's."""
        return self.method.personal(global_params, memory, task)


@dataclass(frozen=True)
class ClosingRound(RoundAfterTraining[ClosingUpload]):
    """A closing round in which clients train models of halves of their rows."""

    capped: ClassVar[Mapping[str, float]] = {
        "num_examples": 1e2,
        # The centre moves by deviations. Their squares are cut where they are, so that both still fit.
        "deviation": 1e1,
        "deviation_squares": 1e2,
        **dict.fromkeys(("agreements", "disagreements", "undecided", "temperature"), 1e3),
        "squared_disagreements": 1e5,
        "spread_products": 1e6,
    }

    def is_due(self, server: AutoServer) -> bool:
        """Unless a mixed model has been fitted."""
        return not is_mixed(server)

    def client_round(
        self, broadcast: AutoBroadcast, memory: AutoMemory, task: RowwiseTask
    ) -> tuple[ClosingUpload, AutoMemory]:
        """Models of halves of the rows, cut anew, and what they agree and disagree on."""
        held = replace(broadcast, group_variances=broadcast.closing_variances)
        first = (self.number - 1) * NUM_SPLITS + 1  # split 0 is that of training
        reports = [self.measure(held, task, split) for split in range(first, first + NUM_SPLITS)]

        def mean(field: str) -> Tensor:
            return torch.stack([getattr(report, field) for report in reports]).mean(0)

        deviation, disagreements = mean("deviation"), mean("disagreements")
        agreements = mean("deviation_squares") - mean("difference_squares")
        upload = ClosingUpload(
            task.num_examples.expand(task.shape).to(deviation),
            mean("has_halves"),
            deviation,
            by_group(deviation.square(), sizes_of(broadcast.group_sizes)),
            agreements,
            disagreements,
            mean("squared_disagreements"),
            spread_products(agreements.sum(-1), disagreements.sum(-1)),
            mean("undecided"),
            mean("temperature"),
        )
        return upload, memory

    def measure(self, broadcast: AutoBroadcast, task: RowwiseTask, split: int) -> SpreadReport:
        """What halves of one split say, trained from their prior means as long as in a closing visit."""
        halves = task.halves(split)
        by_half = halves.class_counts(broadcast.frequencies.shape[-1]).to(broadcast.params)
        anchors = self.method.half_anchors(broadcast, task, by_half)
        hold = Hold.of(broadcast.group_variances, broadcast.group_sizes, task).of_halves()
        momentum = self.method.own_momentum(broadcast).unsqueeze(-1)
        steps = self.method.closing_steps(halves, self.num_rounds)
        models = descend_held(halves, anchors, anchors, hold, steps, momentum)
        return self.method.measure(broadcast, halves, anchors, models)

    def server_round(self, server: AutoServer, clients: Tensor, upload: ClosingUpload) -> AutoServer:
        """The server's state with the centre and both variances of closing visits, after one more closing round.

        Rounds are added up as they are, so that one counts by how much its models show of how clients differ.  What
        clients have in common is that of this round alone: the centre has moved since the round before.
        """
        pairs, before = upload.has_halves.unsqueeze(-1), server.closing
        total_square = by_group(upload.deviation.square(), sizes_of(server.group_sizes))
        common = common_square(total_square, upload.deviation_squares, pairs)
        share_in_common = by_parameter(common_share(total_square / pairs.square(), common), server.group_sizes)
        shift = before.shift.nan_to_num(nan=0.0) + share_in_common * upload.deviation / pairs
        agreements = upload.agreements / pairs - common
        disagreements = sum_disagreements(upload) / pairs
        products = centred_products(
            upload.spread_products / pairs,
            (agreements + common).sum(-1),
            upload.disagreements.sum(-1) / upload.has_halves,
            common.sum(-1),
        )
        is_first = before.inter_variance.isnan()
        share = torch.where(is_first, 1.0, 1.0 / self.number).to(agreements)

        def pool(old: Tensor, new: Tensor) -> Tensor:
            begun = old.to(new).where(~is_first.unsqueeze(-1), new)
            return torch.lerp(begun, new, share.unsqueeze(-1))

        agreements, disagreements = pool(before.agreements, agreements), pool(before.disagreements, disagreements)
        products = pool(before.spread_products, products)
        in_nats = (upload.has_halves / upload.temperature).unsqueeze(-1)
        number = torch.minimum(upload.has_halves / share, server.num_clients)
        with_halves = server.num_clients * upload.has_halves / clients.shape[-1]
        known = self.method.latest_spread(server)

        def learn(one: Tensor, ratios: Tensor, agreed: Tensor) -> tuple[Tensor, Tensor]:
            sums = agreed * in_nats, disagreements * in_nats
            return learn_variances(one, ratios, *sums, number, MOST_CLOSING_CHANGE)

        inter_variance, ratios = learn(known.inter_variance, known.variance_ratios, agreements)
        prior_variance, prior_ratios = learn(*self.method.closing_prior(server), agreements + common)
        prior_rows = find_prior_rows(upload, server.params.shape[-1], clients.shape[-1])
        found = ClosingSpread(
            inter_variance,
            ratios,
            prior_variance,
            prior_ratios,
            torch.where(prior_rows.isfinite(), prior_rows, known.prior_rows.to(prior_rows)),
            agreements,
            common,
            disagreements,
            products,
            number.minimum(with_halves),
            before.mixed,
            shift,
        )
        is_known = agreements.isfinite().all(-1) & common.isfinite().all(-1) & shift.isfinite().all(-1)
        is_usable = is_known & (disagreements.sum(-1) > 0)
        return replace(server, closing=found.where(is_usable, before))

    def bounds(self, server: AutoServer, clients: Tensor, upload: ClosingUpload, rows: Tensor) -> Mapping[str, Bound]:
        """A client has no more rows than it has, squares are of what they say that they are of, and shares 1."""
        length = by_group(upload.deviation.square(), sizes_of(server.group_sizes))
        any_number = Bound(-torch.inf, torch.inf)
        agreement, disagreement = upload.agreements.sum(-1), upload.disagreements.sum(-1)
        products = spread_products(agreement, disagreement)
        return {
            "num_examples": row_count(rows),
            "has_halves": Bound(0.0, 1.0),
            "deviation": any_number,
            "deviation_squares": Bound(length, length),
            "agreements": any_number,
            "disagreements": any_number,
            "squared_disagreements": any_number,
            "spread_products": Bound(products, products),
        }
