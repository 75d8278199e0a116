"""Self-FL without anything to set: the exact two-level posterior, its variances learned from what the clients report.

Not in the paper (D17; how it was found: docs/research.md).  Every round the server sends two models: the latest
average w of FedAvg, and theta, the running mean of those averages, the global model and the centre of every client's
prior.  A client trains w as in FedAvg.  Beside it, it trains its own model towards the posterior mode

    theta_m = argmin  N_m loss_m(theta_m) + c/2 |theta_m - mu_m|^2,      c = 1/sigma_0^2,

and when theta moves on, until the client's next visit, theta_m moves with it by 1 - k_m of the way, as the mode does.
Its prior mean mu_m is theta; where rows have classes, with everybody's class frequencies replaced by the client's, as
far as its rows tell (`selffl.maths.frequencies`): the logarithm of their ratio is added to the bias of the scores.

Large clients are therefore hardly held, small ones lean on the rest, and no strength is chosen: c is the one under
which what the clients saw is most likely.  On arrival a client measures, on the first minibatch of its own training,
how many parameters its rows decide (gamma_m, `selffl.maths.evidence`), and reports it with |theta_m - mu_m|^2; the
server moves log c towards log (sum gamma_m / sum |theta_m - mu_m|^2).

The share of the P parameters that an average client decides says how many rows n_0 of one's own the prior is worth:
k = gamma/P = N/(N + n_0).  With sigma_m^2 = sigma_0^2 n_0/N_m clients weigh 1/(sigma_0^2 + sigma_m^2), Eq. (20): by
their rows where models have many parameters, equally where they have few.  Personalises the whole model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from selffl.algorithms.averaging import FixedLocalSteps, ModelUpload
from selffl.algorithms.contract import Algorithm, Personalises, Population
from selffl.algorithms.rowwise import RowwiseTask
from selffl.algorithms.solver import descend, iterate, rate_of
from selffl.budget import Budget
from selffl.maths.evidence import effective_parameters
from selffl.maths.frequencies import class_shift, class_skew, same_class_rate
from selffl.maths.posterior import local_weight, weighted_mean

# Decision D17: these numbers are part of the method, the same for every model and data set.
MOMENTUM = 0.9  # of a client's own steps
FIRST_PRECISION = 10.0  # c before anybody has reported
LEARNING = 0.2  # share of the way that log c moves in a round
RECENT = 8.0  # round t weighs as t^8 in the running mean of the shared model, and visit v as v^8 in that of one's own
BALANCE = 0.25  # 0: empirical information of a row; 1/2: expected information; between them, their geometric mean
SKIPPED = 0.5  # share of the steps before those whose mean is kept
MOST_ROWS = 20  # of a minibatch that are looked at one by one
NEARLY_ALL = 1e-6  # what is left, at least, of a share of parameters that rows do not decide
ROOM = Budget.gradient_numbers  # of rows, at a time


@dataclass(frozen=True)
class AutoServer:
    """What the server knows."""

    params: Tensor  # theta [..., P], the running mean of the averages
    latest: Tensor  # w [..., P], the last of them
    inter_variance: Tensor  # sigma_0^2 = 1/c [...]
    intra_variance: Tensor  # sigma_m^2 [..., M], as of the client's last report; NaN where there is none
    prior_rows: Tensor  # n_0 [...]: rows of one's own that the prior is worth; NaN before the first report
    frequencies: Tensor  # pi [..., K], of the classes, everybody's; K = 0 where models have no scores of classes
    alike: Tensor  # how often two rows of one client are of one class [...]; 0 before the first report
    clock: Tensor  # t [...]


@dataclass(frozen=True)
class AutoBroadcast:
    """What a client is sent: two models, three numbers and a frequency for each class."""

    params: Tensor  # theta [..., C, P]
    latest: Tensor  # w [..., C, P]
    inter_variance: Tensor  # sigma_0^2 [..., C]
    prior_rows: Tensor  # n_0 [..., C]
    frequencies: Tensor  # pi [..., C, K]
    skew: Tensor  # rho [..., C]: how much frequencies differ between clients; 0 while nothing is known


@dataclass(frozen=True)
class AutoMemory:
    """What a client keeps: its model and its training's, as functions of the global one, which goes on moving."""

    own: Tensor  # theta_m - (1 - k_m) theta [..., C, P], as of its last visit
    last: Tensor  # the same of where its training has got to [..., C, P]: its model is the mean over visits
    lean: Tensor  # 1 - k_m [..., C]
    skew: Tensor  # rho of that visit [..., C]
    visits: Tensor  # how many there were [..., C]

    def model(self, global_params: Tensor) -> Tensor:
        """The posterior mode moves by 1 - k_m of the way that the prior mean has moved since."""
        return torch.addcmul(self.own, self.lean.unsqueeze(-1), global_params)


@dataclass(frozen=True)
class AutoUpload(ModelUpload):
    """What a client sends back: FedAvg's model and number of rows, three numbers more, and its rows of each class."""

    effective_params: Tensor  # gamma_m [..., C]
    temperature: Tensor  # of its loss [..., C]
    distance: Tensor  # |theta_m - its prior mean|^2 on arrival [..., C]; 0 on the first visit
    class_counts: Tensor  # [..., C, K]


class Arrival(NamedTuple):
    """A client at the beginning of a visit."""

    anchor: Tensor  # its prior mean [..., C, P]
    model: Tensor  # its own [..., C, P], the mean over its visits
    start: Tensor  # where its training goes on [..., C, P]
    class_counts: Tensor  # [..., C, K]


class Measured(NamedTuple):
    """What a client finds on arrival, by its slot."""

    effective_params: Tensor  # gamma_m [n]
    temperature: Tensor  # of its loss [n]


@dataclass(frozen=True)
class SelfFLAuto(FixedLocalSteps, Algorithm[AutoServer, AutoBroadcast, AutoMemory, AutoUpload]):
    """Self-FL with learned variances; there is nothing to choose but how long clients train.

    Attributes:
        num_local_steps: L, of both models.
    """

    name: ClassVar[str] = "self-fl-auto"
    personalises: ClassVar[Personalises] = "model"
    only_sgd: ClassVar[str | None] = "it sets the momentum of its own steps itself"
    momentum: ClassVar[float] = MOMENTUM
    recorded: ClassVar[tuple[str, ...]] = ("effective_params",)
    row_counts: ClassVar[tuple[str, ...]] = ("num_examples", "class_counts")
    per_client: ClassVar[tuple[str, ...]] = ("intra_variance",)
    information_balance: ClassVar[float | None] = BALANCE

    def start(self, params: Tensor, population: Population) -> AutoServer:
        """The initial model twice, a first guess of sigma_0^2, and every class as frequent as any other."""
        each = params[..., 0]
        unknown = params.new_full((*each.shape, population.num_clients), torch.nan)
        num_classes = population.class_bias.num_classes if population.class_bias else 0
        return AutoServer(
            params,
            params.clone(),
            torch.full_like(each, 1.0 / FIRST_PRECISION),
            unknown,
            unknown[..., 0],
            params.new_full((*each.shape, num_classes), 1.0 / max(num_classes, 1)),
            torch.zeros_like(each),
            torch.zeros_like(each),
        )

    def newcomer(self, params: Tensor) -> AutoMemory:
        """Nothing of its own yet: the global model."""
        none = torch.zeros_like(params[..., 0])
        return AutoMemory(torch.zeros_like(params), torch.zeros_like(params), none + 1, none, none.clone())

    def broadcast(self, server: AutoServer, clients: Tensor) -> AutoBroadcast:
        """Both models and what is known of the federation, the same for everybody."""
        skew = class_skew(server.alike, server.frequencies)
        return AutoBroadcast(
            server.params.unsqueeze(-2).expand(*clients.shape, -1),
            server.latest.unsqueeze(-2).expand(*clients.shape, -1),
            server.inter_variance.unsqueeze(-1).expand(clients.shape),
            server.prior_rows.unsqueeze(-1).expand(clients.shape),
            server.frequencies.unsqueeze(-2).expand(*clients.shape, -1),
            skew.unsqueeze(-1).expand(clients.shape),
        )

    def client_round(
        self, broadcast: AutoBroadcast, memory: AutoMemory, task: RowwiseTask
    ) -> tuple[AutoUpload, AutoMemory]:
        """FedAvg's steps from w, and as many towards the posterior mode from theta_m."""
        trained = descend(task, broadcast.latest, self.steps(task))
        arrival = self.arrived(broadcast, memory, task)
        decided, temperature = torch.zeros_like(broadcast.inter_variance), torch.ones_like(broadcast.inter_variance)
        kept = self.adapted(broadcast, memory, task, arrival, Measured(decided.view(-1), temperature.view(-1)))
        distance = (arrival.model - arrival.anchor).square().sum(-1)
        count = task.num_examples.to(trained)
        return AutoUpload(trained, count, decided, temperature, distance, arrival.class_counts), kept

    def arrived(self, broadcast: AutoBroadcast, memory: AutoMemory, task: RowwiseTask) -> Arrival:
        """Prior mean and own model, by the class frequencies as they are known by now.

        The model follows them, as it follows the prior mean, as far as it leans on it.
        """
        anchor, model = broadcast.params, memory.model(broadcast.params)
        start = model + (memory.last - memory.own)
        counts = task.class_counts(broadcast.frequencies.shape[-1]).to(anchor)
        if task.class_bias is not None:
            shift = class_shift(counts, broadcast.frequencies, broadcast.skew)
            before = class_shift(counts, broadcast.frequencies, memory.skew)
            anchor = task.class_bias.added(anchor, shift)
            moved = memory.lean.unsqueeze(-1) * (shift - before)
            model, start = (task.class_bias.added(own, moved) for own in (model, start))
        return Arrival(anchor, model, start, counts)

    def adapt(self, broadcast: AutoBroadcast, memory: AutoMemory, task: RowwiseTask) -> AutoMemory:
        """A client's own training alone: neither FedAvg's steps nor a report."""
        return self.adapted(broadcast, memory, task, self.arrived(broadcast, memory, task))

    def adapted(
        self,
        broadcast: AutoBroadcast,
        memory: AutoMemory,
        task: RowwiseTask,
        arrival: Arrival,
        measured: Measured | None = None,
    ) -> AutoMemory:
        """A client's own training: what it keeps; what its rows decide on arrival is written into ``measured``.

        Steps with momentum on the loss, each followed by the pull towards the prior mean, implicitly, so that no
        strength is too much for the step size.  A visit arrives at the mean over the second half of them, and the
        client's model is the running mean of these over its visits: nobody else averages minibatch noise out of it.
        """
        steps = self.steps(task)
        anchor, start = (model.reshape(-1, model.shape[-1]) for model in (arrival.anchor, arrival.start))
        precision = 1.0 / broadcast.inter_variance
        pull = (precision / task.num_terms).reshape(-1, 1)
        num_steps = torch.as_tensor(steps, dtype=pull.dtype, device=pull.device).expand(task.shape).reshape(-1, 1)
        skipped = (num_steps * SKIPPED).floor()

        def step(number: int, rows: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            params, centre, velocity, mean = states
            if number == 0 and measured is not None:
                gradient, *numbers = self.looked_at(task, params, rows, precision.reshape(-1))
                measured.effective_params[rows], measured.temperature[rows] = numbers
            else:
                gradient = task.gradient(params, task.batch(number, rows), rows)
            velocity.mul_(MOMENTUM).add_(gradient)
            rate = rate_of(task, rows)
            params.sub_(rate * velocity)
            # The pull builds up as the momentum does, so that they balance where the posterior is highest.
            held = rate * pull[rows] * (1.0 - MOMENTUM ** (number + 1)) / (1.0 - MOMENTUM)
            params.lerp_(centre, held / (1.0 + held))
            since = (number - skipped[rows]).clamp(min=0.0) + 1.0
            mean.lerp_(params, 1.0 / since)
            return states

        found = iterate(task, steps, step, start, anchor, torch.zeros_like(start), start)[3]
        # k_m = N_m/(N_m + n_0), both variances in units of sigma_0^2/N_m; while n_0 is unknown the prior is everything.
        lean = 1.0 - local_weight(broadcast.prior_rows, task.num_examples.to(found)).nan_to_num(nan=0.0)
        visits = memory.visits + 1
        share = (RECENT + 1) / (visits + RECENT)
        last = found.reshape_as(memory.own)
        mean = torch.lerp(arrival.model, last, share.unsqueeze(-1))
        own, last = (model - lean.unsqueeze(-1) * broadcast.params for model in (mean, last))
        return AutoMemory(own, last, lean, broadcast.skew.clone(), visits)

    def looked_at(
        self, task: RowwiseTask, params: Tensor, rows: Tensor, precision: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradient of the first minibatch ``[n, P]``, and from its single rows gamma_m and the temperature ``[n]``."""
        found = []
        size = max(ROOM // (MOST_ROWS * params.shape[-1]), 1)
        for begin in range(0, len(rows), size):
            part = slice(begin, begin + size)
            chosen = rows[part]
            single = task.row_gradients(params[part], task.batch(0, chosen), chosen, MOST_ROWS)
            information = single.rows * single.surplus.pow(BALANCE).unsqueeze(-1)
            decided = effective_parameters(information, single.num_rows, single.num_examples, precision[chosen])
            found.append((single.mean, decided, single.temperature.to(decided)))
        gradient, decided, temperature = (torch.cat(parts) for parts in zip(*found, strict=True))
        return gradient, decided, temperature

    def server_round(self, server: AutoServer, clients: Tensor, upload: AutoUpload) -> AutoServer:
        """The precision-weighted average of the w_m, its running mean, and both variances a step further."""
        known = self.learned(server, clients, upload)
        weights = self.weights(known, clients, upload).unsqueeze(-1)
        latest = weighted_mean(upload.params, weights)
        known = self.counted(known, upload.class_counts, weights)
        clock = server.clock + 1
        share = (RECENT + 1) / (clock + RECENT)
        return replace(known, params=torch.lerp(server.params, latest, share.unsqueeze(-1)), latest=latest, clock=clock)

    def counted(self, server: AutoServer, counts: Tensor, weights: Tensor) -> AutoServer:
        """Class frequencies of what the average was trained on, and how much clients differ in them.

        Means over all rounds; the guess that frequencies began from counts as one.
        """
        count = counts.sum(-1, keepdim=True)
        seen = weighted_mean(counts / count.clamp(min=1.0), weights * (count > 0))
        found = same_class_rate(counts).nanmean(-1)
        frequencies = torch.lerp(server.frequencies, seen, 1.0 / (server.clock + 2.0).unsqueeze(-1))
        alike = torch.lerp(server.alike, found, 1.0 / (server.clock + 1.0))
        return replace(
            server,
            frequencies=torch.where(seen.isfinite(), frequencies, server.frequencies),
            alike=torch.where(found.isfinite(), alike, server.alike),
        )

    def learned(self, server: AutoServer, clients: Tensor, upload: AutoUpload) -> AutoServer:
        """sigma_0^2, n_0 and the cohort's sigma_m^2, after its reports.

        A client on its first visit has no difference yet, and does not count for sigma_0^2.  Temperatures multiply
        gamma instead of dividing distances: that of a few rows can be next to nothing, and one over it anything.
        """
        is_back = upload.distance > 0
        decided = torch.where(is_back, upload.effective_params * upload.temperature, 0.0).sum(-1)
        inter = _moved(server.inter_variance, upload.distance.sum(-1) / decided)
        count = upload.num_examples
        # k = N/(N + n_0) of an average client.
        share = (upload.effective_params.mean(-1) / upload.params.shape[-1]).clamp(max=1.0 - NEARLY_ALL)
        worth = _moved(server.prior_rows, count.mean(-1) * (1.0 / share - 1.0))
        intra = (inter * worth).unsqueeze(-1) / count
        everyone = server.intra_variance.scatter(-1, clients, intra.to(server.intra_variance))
        return replace(server, inter_variance=inter, prior_rows=worth, intra_variance=everyone)

    def inter_variance(self, server: AutoServer) -> Tensor | None:
        """sigma_0^2, as learned."""
        return server.inter_variance

    def intra_variance(self, server: AutoServer) -> Tensor | None:
        """sigma_m^2, as of the client's last report."""
        return server.intra_variance

    def weights(self, server: AutoServer, clients: Tensor, upload: AutoUpload) -> Tensor:
        """What each client of the cohort weighs, ``[..., C]``: N_m/(N_m + n_0), which is 1/(sigma_0^2 + sigma_m^2).

        While n_0 is unknown, because rows have decided nothing yet, as with the largest: by rows.
        """
        worth = server.prior_rows.unsqueeze(-1)
        return torch.where(worth.isnan(), upload.num_examples, local_weight(worth, upload.num_examples))

    def gains(self, server: AutoServer) -> Tensor:
        """Factor by which the others shrink each client's variance, ``[..., M]``: 1 + sigma_m^2/sigma_0^2 (D11)."""
        return 1.0 + server.intra_variance.double() / server.inter_variance.double().unsqueeze(-1)

    def personal(self, global_params: Tensor, memory: AutoMemory, task: RowwiseTask) -> Tensor:
        """The client's own part, and as much of the global model as it leans on, as that is now (D10, D17)."""
        return memory.model(global_params.unsqueeze(-2))


def _moved(old: Tensor, new: Tensor) -> Tensor:
    """A variance after one more estimate of it: its logarithm moves; an estimate that is none moves nothing."""
    is_one = new.isfinite() & (new > 0)
    return torch.where(old.isnan(), new, old * (new / old) ** LEARNING).where(is_one, old)
