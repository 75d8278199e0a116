"""Self-FL without anything to set: the exact two-level posterior, its variances learned from what the clients report.

Not in the paper (D17; how it was found: docs/research.md).  Every round the server sends two models: the latest
average w of FedAvg, and theta, the running mean of those averages, the global model and the centre of every client's
prior.  A client trains w as in FedAvg.  Beside it, it trains its own model towards the posterior mode

    theta_m = argmin  N_m loss_m(theta_m) + c/2 |theta_m - mu_m|^2,      c = 1/sigma_0^2,

and when theta moves on, until the client's next visit, theta_m moves with it by 1 - k_m of the way, as the mode does.
Its prior mean mu_m is theta; where rows have classes, with scores as large as they should be
(`selffl.maths.score_scale`) and everybody's class frequencies replaced by the client's, as far as its rows tell
(`selffl.maths.frequencies`): the logarithm of their ratio is added to the bias of the scores.  While models train they
have the frequencies of the very rows they train on instead, and so learn nothing from how often classes come.

Large clients are therefore hardly held, small ones lean on the rest, and no strength is chosen: c is learned from two
halves of each client's rows (`selffl.maths.split_half`).  A client trains a model for each half, as if it had no more
rows, with that half's share of the prior; what the two agree on is the client's, and what they disagree on is noise, of
its rows and of its steps.  Their mean is theta_m, but for what the curvatures of both differ by: a few steps on all
rows find that.  Groups of parameters (tensors; in small models single parameters) have a c of their own, as far as
clients decide enough of them to tell.

Noise of steps adds to what halves disagree on, and so makes clients look more alike than they are.  As the running
means settle, steps of halves have less momentum and those on all rows become smaller.

The share of the P parameters that an average client decides says how many rows n_0 of one's own the prior equals:
k = gamma/P = N/(N + n_0).  With sigma_m^2 = sigma_0^2 n_0/N_m clients weigh 1/(sigma_0^2 + sigma_m^2), Eq. (20): by
their rows where models have many parameters, equally where they have few.  Personalises the whole model.

Once training is over each client makes a long closing visit by itself, for few have arrived at their modes by then:
some tens of passes over its rows, and no longer than it would have trained had it taken part in every round.  How hard
it is held then, and around which centre, is learned before, from models of halves that have arrived
(`selffl.algorithms.auto_closing`).

Uploads add.  A client weighs itself, by the n_0 that it was sent, which is one round old, and its class frequencies
travel multiplied by that weight: the server learns everybody's, and of no client how many rows of a class it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from selffl.algorithms.auto_closing import NUM_CLOSING_ROUNDS, ClosingRound
from selffl.algorithms.auto_hierarchy import AutoHierarchy
from selffl.algorithms.auto_mixed import NUM_MIXED_ROUNDS, MixedRound, order_of
from selffl.algorithms.auto_records import (
    Arrival,
    AutoBroadcast,
    AutoMemory,
    AutoServer,
    AutoUpload,
    ClosingSpread,
    MixedSpread,
    SpreadReport,
)
from selffl.algorithms.auto_safeguards import AutoSafeguards, usable_sum
from selffl.algorithms.auto_spread import find_prior_rows, learn_spread
from selffl.algorithms.averaging import FixedLocalSteps, move, weighted_change
from selffl.algorithms.contract import Algorithm, Personalises
from selffl.algorithms.features import FeatureTask
from selffl.algorithms.grids import Grid
from selffl.algorithms.held_steps import Hold, descend_held
from selffl.algorithms.layers import by_group, sizes_of
from selffl.algorithms.options import check_number
from selffl.algorithms.population import Population
from selffl.algorithms.posterior_mode import Mode, find_modes, find_order, in_model_order
from selffl.algorithms.rowwise import RowwiseTask
from selffl.algorithms.solver import descend
from selffl.maths.frequencies import class_shift, class_skew, row_shift, same_class_rate
from selffl.maths.posterior import local_weight
from selffl.maths.score_scale import Derivatives, derivatives, next_factors
from selffl.maths.split_half import HalvesOfClients, spread_products

# Decision D17: these numbers are part of the method, the same for every model and data set.
FIRST_MOMENTUM = 0.9  # of the steps of halves in the first round
LAST_MOMENTUM = 0.5  # of those in late rounds, when noise counts for more than speed
FIRST_PRECISION = 10.0  # c before anybody has reported
VARIANCE_RATE = 0.2  # share of the way that log n_0 moves in a round
AVERAGING_POWER = 8.0  # round t weighs as t^8 in the running means of the shared model and of what halves agree on
CLOSING_PASSES = 50  # over its own rows that a client makes once training is over, in the time of a power of two visits
LEAST_CLOSING_VISITS = 4  # that these take, at least
LEAST_SKEW = 0.01  # rho: a client that has met one class alone believes so, a little, whatever others have met
NUM_MEASUREMENTS = 2  # gradients of a visit that measure how halves disagree
STEPS_PER_WHOLE = 10  # of the steps of a visit, one in so many is on all rows; the others are on halves


@dataclass(frozen=True)
class SelfFLAuto(
    AutoHierarchy, AutoSafeguards, FixedLocalSteps, Algorithm[AutoServer, AutoBroadcast, AutoMemory, AutoUpload]
):
    """Self-FL with learned variances; there is nothing to choose but how long clients train.

    Attributes:
        num_local_steps: L, of the shared model; of all others together, with what is measured, as many.
        prior_precision: c, by hand; none: it is learned.
    """

    prior_precision: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prior_precision is not None:
            check_number("prior_precision", self.prior_precision, above=0.0, alternative=", or none")

    name: ClassVar[str] = "self-fl-auto"
    grid: ClassVar[Grid] = {}  # there is nothing to tune
    personalises: ClassVar[Personalises] = "model"
    only_sgd: ClassVar[str | None] = "it sets the momentum of its own steps itself"
    no_weight_decay: ClassVar[str | None] = "its loss is a likelihood, and the prior beside it is what it learns"
    no_clipping: ClassVar[str | None] = "it measures variances by gradients, and balances them with its prior"
    momentum: ClassVar[float] = FIRST_MOMENTUM
    recorded: ClassVar[tuple[str, ...]] = ("effective_params", "weight")
    hierarchy_inputs: ClassVar[tuple[str, ...]] = ("num_examples",)
    may_be_unknown: ClassVar[tuple[str, ...]] = ("effective_params",)
    has_closing_visit: ClassVar[bool] = True

    def start(self, params: Tensor, population: Population) -> AutoServer:
        """The initial model twice, a first guess of sigma_0^2, and every class as frequent as any other."""
        each = params[..., 0]
        num_classes = population.class_bias.num_classes if population.class_bias else 0
        order = torch.tensor(find_order(population), dtype=torch.int64, device=params.device)
        num_scores = population.head.num_outputs if population.head else 1
        sizes = torch.tensor(population.group_sizes or (params.shape[-1],), device=params.device)
        ones = params.new_ones(*each.shape, len(sizes))
        return AutoServer(
            params,
            params.clone(),
            torch.full_like(each, 1.0 / (self.prior_precision or FIRST_PRECISION)),
            ones,
            sizes.expand(ones.shape),
            torch.full_like(each, torch.nan),
            params.new_full((*each.shape, num_classes), 1.0 / max(num_classes, 1)),
            torch.zeros_like(each),
            torch.zeros_like(ones),
            torch.zeros_like(ones),
            params.new_full((*each.shape, 3), torch.nan),
            torch.full_like(each, torch.nan),
            torch.full_like(each, torch.nan),
            torch.full_like(each, population.num_clients),
            params.new_ones(*each.shape, 2),
            params.new_zeros(*each.shape, 2, 2),
            params.new_zeros(*each.shape, 2),
            ClosingSpread.unknown(each, ones, MixedSpread.unknown(each, len(order), len(order) // num_scores), params),
            order.expand(*each.shape, -1),
            torch.zeros_like(each),
        )

    def newcomer(self, params: Tensor) -> AutoMemory:
        """Nothing of its own yet: the global model."""
        none = torch.zeros_like(params[..., 0])
        own, first, second = (torch.zeros_like(params) for _ in range(3))
        return AutoMemory(own, first, second, none + 1, none, params.new_ones(*none.shape, 2))

    def broadcast(self, server: AutoServer, clients: Tensor) -> AutoBroadcast:
        """Both models and what is known of the federation, the same for everybody."""
        skew = class_skew(server.same_class_rate, server.frequencies).clamp(min=LEAST_SKEW)
        covariance, centre = self.closing_mixture(server)
        return AutoBroadcast(
            server.params.unsqueeze(-2).expand(*clients.shape, -1),
            server.latest.unsqueeze(-2).expand(*clients.shape, -1),
            (server.inter_variance.unsqueeze(-1) * server.variance_ratios).unsqueeze(-2).expand(*clients.shape, -1),
            server.group_sizes.unsqueeze(-2).expand(*clients.shape, -1),
            server.prior_rows.unsqueeze(-1).expand(clients.shape),
            server.frequencies.unsqueeze(-2).expand(*clients.shape, -1),
            skew.unsqueeze(-1).expand(clients.shape),
            server.score_factors.unsqueeze(-2).expand(*clients.shape, -1),
            self.closing_variances(server).unsqueeze(-2).expand(*clients.shape, -1),
            covariance.unsqueeze(-3).expand(*clients.shape, *covariance.shape[-2:]),
            centre.unsqueeze(-2).expand(*clients.shape, -1),
            server.coefficient_order.unsqueeze(-2).expand(*clients.shape, -1),
            _newness(server.clock + 1).unsqueeze(-1).expand(clients.shape),
        )

    def closing_broadcast(self, server: AutoServer, clients: Tensor) -> AutoBroadcast:
        """What is sent for closing visits: the centre that closing rounds have found, in place of the running mean."""
        centre = self.closing_centre(server).unsqueeze(-2).expand(*clients.shape, -1)
        return replace(self.broadcast(server, clients), params=centre)

    def client_round(
        self, broadcast: AutoBroadcast, memory: AutoMemory, task: RowwiseTask
    ) -> tuple[AutoUpload, AutoMemory]:
        """FedAvg's steps from w, and as many towards the posterior modes of both halves and of all rows."""
        trained = descend(task, broadcast.latest, self.steps(task))
        halves = task.halves()
        by_half = halves.class_counts(broadcast.frequencies.shape[-1]).to(trained)
        counts = by_half.sum(-2)
        arrival = self.arrive(broadcast, memory, task, by_half)
        model, models = self.train_own(broadcast, task, halves, arrival)
        report = self.measure(broadcast, halves, arrival.half_anchors, models)
        count = task.num_examples.expand(task.shape).to(trained)
        # While n_0 is unknown, because rows have decided nothing yet, as with the largest: by rows.
        weight = torch.where(broadcast.prior_rows.isnan(), count, local_weight(broadcast.prior_rows, count))
        of_classes = counts.sum(-1, keepdim=True)
        same_class = same_class_rate(counts)
        upload = AutoUpload(
            weighted_change(trained, broadcast.latest, weight),
            weight,
            count,
            *report,
            weight.unsqueeze(-1) * counts / of_classes.clamp(min=1.0),
            torch.where(of_classes.squeeze(-1) > 0, weight, 0.0),
            same_class.nan_to_num(nan=0.0),
            (~same_class.isnan()).to(weight),
            *self.weigh_frequencies(broadcast, halves, by_half),
        )
        return upload, self.keep(broadcast, task, arrival, model, models)

    def arrive(self, broadcast: AutoBroadcast, memory: AutoMemory, task: RowwiseTask, by_half: Tensor) -> Arrival:
        """Prior means and own models, by the class frequencies as they are known by now.

        ``by_half [..., C, 2, K]`` are rows of each class.  The bias of a client's own models has moved by 1 - k_m times
        the change of the shift since its last visit.  While they train, they have the frequencies of the rows they
        train on in its place.
        """
        anchor = _scale_scores(broadcast.params, broadcast.score_factors, task)
        model, halves = memory.model(anchor), memory.half_models(anchor)
        counts = torch.cat([by_half.sum(-2, keepdim=True), by_half], dim=-2)
        excess = torch.zeros_like(counts)
        if (bias := task.class_bias) is not None:
            factor, of_all = broadcast.score_factors[..., 1:], counts[..., 0, :]
            shift = factor * class_shift(of_all, broadcast.frequencies, broadcast.class_skew)
            before = memory.score_factors[..., 1:] * class_shift(of_all, broadcast.frequencies, memory.class_skew)
            moved = memory.prior_weight.unsqueeze(-1) * (shift - before)
            of_rows = row_shift(counts, broadcast.frequencies.unsqueeze(-2))
            excess = of_rows - shift.unsqueeze(-2)
            anchor = bias.add_shift(anchor, of_rows[..., 0, :])
            bias.write_shift(model, moved + excess[..., 0, :])
            bias.write_shift(halves, moved.unsqueeze(-2) + excess[..., 1:, :])
        return Arrival(anchor, self.half_anchors(broadcast, task, by_half), model, halves, excess)

    def half_anchors(self, broadcast: AutoBroadcast, task: RowwiseTask, by_half: Tensor) -> Tensor:
        """Prior means of halves ``[..., C, 2, P]``, to train from, by rows of each class ``by_half [..., C, 2, K]``."""
        anchor = _scale_scores(broadcast.params, broadcast.score_factors, task).unsqueeze(-2)
        anchors = anchor.expand(*by_half.shape[:-1], anchor.shape[-1])
        if (bias := task.class_bias) is None:
            return anchors
        return bias.add_shift(anchors, row_shift(by_half, broadcast.frequencies.unsqueeze(-2)))

    def adapt(self, broadcast: AutoBroadcast, memory: AutoMemory, task: RowwiseTask) -> AutoMemory:
        """A client's own training alone, on all rows: neither FedAvg's steps, nor halves, nor a report."""
        return self.train_alone(broadcast, memory, task, self.steps(task))

    def closing_visit(
        self, broadcast: AutoBroadcast, memory: AutoMemory, task: RowwiseTask, num_rounds: int
    ) -> AutoMemory:
        """A client's own training alone, in as many steps as bring it close to its mode."""
        return self.train_alone(broadcast, memory, task, self.closing_steps(task, num_rounds))

    def closing_steps(self, task: RowwiseTask, num_rounds: int) -> Tensor:
        """Steps of a closing visit ``[..., C]``: so many passes over a client's rows, in a power of two visits.

        Clients of about as many rows so end together.  No more visits than there were rounds, and at least a few.
        """
        steps = torch.as_tensor(self.steps(task), device=task.num_examples.device)
        fraction, exponent = torch.frexp(CLOSING_PASSES * task.steps_per_epoch / steps)
        visits = 2 ** (exponent - (fraction == 0.5).to(exponent)).clamp(min=0)
        return steps * visits.clamp(max=num_rounds).clamp(min=LEAST_CLOSING_VISITS)

    def closing_rounds(self, num_rounds: int, population: Population) -> tuple[ClosingRound | MixedRound, ...]:
        """Rounds in which it is learned once more how far clients differ; none where c is set by hand."""
        if self.prior_precision is not None:
            return ()
        mixed = [MixedRound(self, num_rounds, number) for number in range(1, 1 + NUM_MIXED_ROUNDS)]
        of_halves = [ClosingRound(self, num_rounds, number) for number in range(1, 1 + NUM_CLOSING_ROUNDS)]
        return (*(mixed if find_order(population) else ()), *of_halves)

    def reopen(self, server: AutoServer) -> AutoServer:
        """The server's state without the centre and the variances of closing rounds."""
        known = server.closing
        forgotten = ClosingSpread.unknown(server.inter_variance, server.variance_ratios, known.mixed, server.params)
        return replace(server, closing=forgotten)

    def global_model(self, server: AutoServer) -> Tensor:
        """The running mean; once training is over, the centre of the clients, as closing rounds have found it."""
        return _move_to_centre(
            self.closing_centre(server), self.closing_mixture(server)[1], order_of(server.coefficient_order)
        )

    def closing_modes(
        self, broadcast: AutoBroadcast, memory: AutoMemory, task: RowwiseTask
    ) -> tuple[Mode, tuple[Arrival, Tensor]]:
        """Posterior modes of small linear models; what clients have come with, and their models ``[..., C, P]``."""
        by_half = task.halves().class_counts(broadcast.frequencies.shape[-1]).to(broadcast.params)
        arrival, order = self.arrive(broadcast, memory, task, by_half), order_of(broadcast.coefficient_order)
        anchor = _move_to_centre(arrival.anchor.double(), broadcast.closing_centre, order)
        assert isinstance(task, FeatureTask)  # as any whose model has a last layer
        found = find_modes(task, anchor, broadcast.closing_covariance, order)
        model = anchor + in_model_order(found.deviation, order)
        return found, (arrival, model.to(broadcast.params))

    def train_alone(
        self, broadcast: AutoBroadcast, memory: AutoMemory, task: RowwiseTask, num_steps: int | Tensor
    ) -> AutoMemory:
        """What clients keep after so many steps towards their posterior modes; small linear models are at them."""
        if broadcast.closing_covariance.shape[-1]:
            arrival, model = self.closing_modes(broadcast, memory, task)[1]
            order = order_of(broadcast.coefficient_order)
            params = _move_to_centre(broadcast.params, broadcast.closing_centre, order)
            return self.keep(replace(broadcast, params=params), task, arrival, model, arrival.halves)
        by_half = task.halves().class_counts(broadcast.frequencies.shape[-1]).to(broadcast.params)
        arrival, momentum = self.arrive(broadcast, memory, task, by_half), self.own_momentum(broadcast)
        hold = Hold.of(broadcast.closing_variances, broadcast.group_sizes, task)
        model = descend_held(task, arrival.model, arrival.anchor, hold, num_steps, momentum)
        return self.keep(broadcast, task, arrival, model, arrival.halves)

    def train_own(
        self, broadcast: AutoBroadcast, task: RowwiseTask, halves: RowwiseTask, arrival: Arrival
    ) -> tuple[Tensor, Tensor]:
        """Each client's own model ``[..., C, P]``, and those of its halves ``[..., C, 2, P]``.

        A half has its share of the rows and as large a share of the prior: a row of it is held as hard as one of all.
        The client's model goes where the mean of its halves has gone, and a few plain steps on all rows beside it.
        """
        of_client, of_half = self.own_steps(task)
        hold = Hold.of(broadcast.group_variances, broadcast.group_sizes, task)
        by_half = of_half.unsqueeze(-1) if isinstance(of_half, Tensor) else of_half
        momentum = self.own_momentum(broadcast)
        models = descend_held(
            halves, arrival.halves, arrival.half_anchors, hold.of_halves(), by_half, momentum.unsqueeze(-1)
        )
        share = halves.num_terms.to(models) / task.num_terms.to(models).unsqueeze(-1)
        moved = models - arrival.halves
        start = torch.addcmul(arrival.model, share[..., :1], moved[..., 0, :])
        start.addcmul_(share[..., 1:], moved[..., 1, :])
        plain = torch.zeros_like(momentum)
        return descend_held(task, start, arrival.anchor, hold, of_client, plain, broadcast.newness), models

    def own_momentum(self, broadcast: AutoBroadcast) -> Tensor:
        """Momentum of a client's own steps ``[..., C]``: less as the running means settle, and so less noise."""
        return LAST_MOMENTUM + (FIRST_MOMENTUM - LAST_MOMENTUM) * broadcast.newness

    def own_steps(self, task: RowwiseTask) -> tuple[int, int] | tuple[Tensor, Tensor]:
        """Steps on all rows, and of each half: with what is measured as many as FedAvg takes; at least one of each."""
        steps = self.steps(task)
        if isinstance(steps, Tensor):
            of_client = (steps // STEPS_PER_WHOLE).clamp(min=1)
            return of_client, ((steps - NUM_MEASUREMENTS - of_client) // 2).clamp(min=1)
        whole = max(steps // STEPS_PER_WHOLE, 1)
        return whole, max((steps - NUM_MEASUREMENTS - whole) // 2, 1)

    def weigh_frequencies(self, broadcast: AutoBroadcast, halves: RowwiseTask, counts: Tensor) -> Derivatives:
        """What a client's rows say of both factors: the global model's scores, and the other half's frequencies.

        ``counts [..., C, 2, K]`` are rows of each class, by half.  Zeros where rows have no class.
        """
        factors = broadcast.score_factors
        models = broadcast.params.unsqueeze(-2).expand(*halves.shape, -1)
        found = halves.class_scores(models.reshape(-1, models.shape[-1]), 0) if counts.shape[-1] else None
        if found is None:
            return Derivatives(torch.zeros_like(factors), factors.new_zeros(*factors.shape, 2))
        scores, targets = (each.reshape(*halves.shape, *each.shape[1:]) for each in found)
        frequencies, skew = broadcast.frequencies.unsqueeze(-2), broadcast.class_skew.unsqueeze(-1)
        shift = class_shift(counts.flip(-2), frequencies, skew)
        has_rows = (halves.num_examples > 0).to(targets)[..., None, None]
        by_half = derivatives(scores, shift, has_rows * targets, factors.unsqueeze(-2))
        return Derivatives(by_half.slope.sum(-2), by_half.curvature.sum(-3))

    def measure(self, broadcast: AutoBroadcast, halves: RowwiseTask, anchors: Tensor, models: Tensor) -> SpreadReport:
        """What the ``models [..., C, 2, P]`` of both halves agree and disagree on, beyond their ``anchors``."""
        deviations = models - anchors
        is_there = (halves.num_terms > 0).all(-1)
        found = HalvesOfClients(deviations, halves.num_terms.to(models))
        sizes = sizes_of(broadcast.group_sizes)
        measured = halves.measure_halves(models, deviations, sizes)
        squares = by_group(found.mean.square(), sizes)
        differences = by_group(found.half_difference.square(), sizes)
        disagreements = found.disagreement(measured.slope_changes)
        squared = found.squared_disagreement(measured.slope_changes)
        undecided = found.undecided((differences / broadcast.group_variances).sum(-1))
        decided = ((disagreements.sum(-1) + undecided) / measured.temperature).clamp(0.0, models.shape[-1])

        def where_there(numbers: Tensor) -> Tensor:
            return numbers.masked_fill(~(is_there.unsqueeze(-1) if numbers.ndim > is_there.ndim else is_there), 0.0)

        return SpreadReport(
            is_there.to(undecided),
            where_there(found.mean),
            where_there(squares),
            where_there(differences),
            where_there(disagreements),
            where_there(squared),
            where_there(spread_products((squares - differences).sum(-1), disagreements.sum(-1))),
            where_there(undecided),
            where_there(measured.temperature),
            decided.masked_fill(~is_there, torch.nan),
        )

    def keep(
        self, broadcast: AutoBroadcast, task: RowwiseTask, arrival: Arrival, model: Tensor, halves: Tensor
    ) -> AutoMemory:
        """What clients keep of their ``model [..., C, P]`` and of those of their ``halves [..., C, 2, P]``.

        They are kept as they predict: with the client's class frequencies, not with those of the rows they trained on.
        """
        # k_m = N_m/(N_m + n_0), both variances in units of sigma_0^2/N_m; while n_0 is unknown the prior is everything.
        prior_weight = 1.0 - local_weight(broadcast.prior_rows, task.num_examples.to(model)).nan_to_num(nan=0.0)
        scaled, models = _scale_scores(broadcast.params, broadcast.score_factors, task), (model, *halves.unbind(-2))
        own, first, second = kept = [
            torch.addcmul(each, prior_weight.unsqueeze(-1), scaled, value=-1) for each in models
        ]
        if task.class_bias is not None:
            for each, excess in zip(kept, arrival.excess.unbind(-2), strict=True):
                task.class_bias.write_shift(each, -excess)
        factors = broadcast.score_factors.clone()
        return AutoMemory(own, first, second, prior_weight, broadcast.class_skew.clone(), factors)

    def server_round(self, server: AutoServer, clients: Tensor, upload: AutoUpload) -> AutoServer:
        """The precision-weighted average of the w_m, its running mean, and both variances a step further."""
        number = clients.shape[-1]
        latest, clock = move(server.latest, upload.change, upload.weight), server.clock + 1
        share = _newness(clock)
        prior_rows = find_prior_rows(upload, upload.change.shape[-1], number)
        # Means over all rounds; the guess that frequencies began from counts as one.
        frequencies = upload.class_weights / upload.weight_with_classes.unsqueeze(-1)
        same_class = upload.same_class_rate / upload.has_pairs
        spread = learn_spread(server, upload, share, number, is_fixed=self.prior_precision is not None)
        return AutoServer(
            torch.lerp(server.params, latest, share.unsqueeze(-1)),
            latest,
            spread.inter_variance,
            spread.variance_ratios,
            server.group_sizes,
            _geometric_step(server.prior_rows, prior_rows),
            _running_mean(server.frequencies, frequencies, (clock + 1.0).unsqueeze(-1)),
            _running_mean(server.same_class_rate, same_class, clock),
            spread.agreements,
            spread.disagreements,
            spread.spread_products,
            spread.num_reporting,
            spread.unit,
            server.num_clients,
            *self.factors_round(server, upload, share),
            self.reopen(server).closing,
            server.coefficient_order,
            clock,
        )

    def factors_round(self, server: AutoServer, upload: AutoUpload, share: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Both factors ``[..., 2]`` and what they are learned from, after one more cohort, which weighs ``share``."""
        weight, curvature = share.unsqueeze(-1), upload.factor_curvature
        old = server.score_factors.to(curvature)
        pull = (curvature @ old.unsqueeze(-1)).squeeze(-1) - upload.factor_slope
        curvatures = torch.lerp(server.factor_curvature.to(curvature), curvature, weight.unsqueeze(-1).to(curvature))
        pulls = torch.lerp(server.factor_pull.to(pull), pull, weight.to(pull))
        factors = next_factors(old, curvatures / weight.unsqueeze(-1), pulls / weight)
        return tuple(each.to(server.params) for each in (factors, curvatures, pulls))  # type: ignore[return-value]

    def noisy_server_round(
        self, server: AutoServer, clients: Tensor, upload: AutoUpload, noise: Mapping[str, float]
    ) -> AutoServer:
        """Once noise has been taken off squares, and off counts that cannot be."""
        usable = usable_sum(upload, clients.shape[-1], sizes_of(server.group_sizes), noise["deviation"])
        return self.server_round(server, clients, usable)

    def personal(self, global_params: Tensor, memory: AutoMemory, task: RowwiseTask) -> Tensor:
        """The client's own part, and as much of the global model as it leans on, as that is now (D10, D17)."""
        return memory.model(_scale_scores(global_params.unsqueeze(-2), memory.score_factors, task))


def _scale_scores(params: Tensor, factors: Tensor, task: RowwiseTask) -> Tensor:
    """``params [..., C, P]`` with scores of classes t times as large, ``factors [..., C, 2]`` being (t, a)."""
    return params if task.class_bias is None else task.class_bias.scale_scores(params, factors[..., 0])


def _move_to_centre(params: Tensor, centre: Tensor, order: Tensor) -> Tensor:
    """``params [..., P]`` and how far the ``centre [..., P]`` of small linear models is from there, if they are any."""
    return params + in_model_order(centre.to(params), order) if len(order) else params


def _newness(clock: Tensor) -> Tensor:
    """How much round t weighs in a running mean over all rounds up to it, of which it weighs as t^8."""
    return (AVERAGING_POWER + 1) / (clock + AVERAGING_POWER)


def _geometric_step(old: Tensor, new: Tensor) -> Tensor:
    """A variance after one more estimate of it: its logarithm moves; nothing where the estimate is 0 or not finite."""
    is_usable = new.isfinite() & (new > 0)
    moved = torch.where(old.isnan(), new, old * (new / old) ** VARIANCE_RATE)
    return moved.where(is_usable, old).to(old)


def _running_mean(old: Tensor, new: Tensor, number: Tensor) -> Tensor:
    """The mean of ``number`` values of which ``new`` is the last; unchanged where there is none."""
    return torch.where(new.isfinite(), old + (new - old) / number, old).to(old)
