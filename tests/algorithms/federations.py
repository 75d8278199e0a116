"""Small federations, from Python's own random numbers: what these tests run on.

Gaussian ones with several coordinates; and rows of three classes with a small network, for methods that need features.
"""

import random
from dataclasses import dataclass, replace
from functools import cache, partial

import pytest
import torch
from torch import nn

from selffl.algorithms import Layer, algorithm, auto_closing, auto_spread, held_steps, self_fl_auto
from selffl.algorithms.records import tensors_of
from selffl.data.federation import Federation, Rows
from selffl.engines.cohort import CohortEngine
from selffl.engines.limits import NOT_PRIVATE
from selffl.engines.rounds import GatheredUploads
from selffl.maths import score_scale
from selffl.training.flat import FlatModel
from selffl.training.gaussian import GaussianFederation
from selffl.training.model import ModelSource, ModelTask

CENTRES = (1.6, -2.5, 4.0)  # θ_0, coordinate by coordinate; away from 0, so that relative errors mean something
# The numbers of D17, as its twin is told them; docs/methods/self-fl-auto.md states them, and a test compares.
AUTO = {
    "first_momentum": self_fl_auto.FIRST_MOMENTUM,
    "last_momentum": self_fl_auto.LAST_MOMENTUM,
    "recent": self_fl_auto.AVERAGING_POWER,
    "learning": self_fl_auto.VARIANCE_RATE,
    "first": self_fl_auto.FIRST_PRECISION,
    "skipped": held_steps.BURN_IN,
    "change": auto_spread.MOST_CHANGE,
    "least": auto_spread.LEAST_DECIDED,
    "per_whole": self_fl_auto.STEPS_PER_WHOLE,
    "prior_decided": auto_spread.PRIOR_DECIDED,
    "factor_step": score_scale.MAX_STEP,
    "least_score_factor": score_scale.MIN_SCORE_FACTOR,
    "most_frequency_weight": score_scale.MAX_FREQUENCY_WEIGHT,
    "least_skew": self_fl_auto.LEAST_SKEW,
    "least_disagreement": auto_spread.LEAST_DISAGREEMENT,
    "closing_passes": self_fl_auto.CLOSING_PASSES,
    "least_visits": self_fl_auto.LEAST_CLOSING_VISITS,
    "closing_rounds": auto_closing.NUM_CLOSING_ROUNDS,
    "closing_splits": auto_closing.NUM_SPLITS,
    "most_closing_change": auto_closing.MOST_CLOSING_CHANGE,
}


@dataclass(frozen=True)
class StructuredFederation(GaussianFederation):
    """With a few clusters in turn, and a model whose last coordinate is a layer of its own: its head."""

    num_clusters: int = 3
    keeps_head: bool = True  # whether clients keep it, whatever the method shares
    is_grouped: bool = False  # whether the parameters of each layer may vary by a variance of their own

    @property
    def population(self):
        known, last = super().population, self.local_estimate.shape[-1] - 1
        layers = (Layer("body.0", 0, last), Layer("head", last, last + 1))[0 if last else 1 :]
        sizes = tuple(layer.stop - layer.start for layer in layers) if self.is_grouped else ()
        cluster = torch.arange(known.num_clients) % self.num_clusters
        return replace(known, cluster=cluster, layers=layers, group_sizes=sizes, kept=layers[-1:] * self.keeps_head)


def federation(
    num_clients=6,
    num_params=3,
    *,
    seed=0,
    examples=(3, 40),
    inter_variance=0.05,
    rate=1e-3,
    rates_differ=False,
    resample=False,
    with_rows=False,
    is_grouped=False,
    dtype=torch.float64,
):
    """M clients of the two-level model with variances 0.1/N_m, and rows if asked for; η is one number, or one each."""
    rng = random.Random(seed)
    centre = CENTRES[:num_params]
    counts = [rng.randint(*examples) for _ in range(num_clients)]
    variances = [0.1 / count for count in counts]
    personal = [[rng.gauss(c, inter_variance**0.5) for c in centre] for _ in range(num_clients)]
    estimates = [[rng.gauss(x, v**0.5) for x in model] for model, v in zip(personal, variances, strict=True)]
    rates = torch.tensor([rate * rng.uniform(0.5, 1.5) for _ in range(num_clients)], dtype=dtype)
    data = None
    if with_rows:  # around the estimate, which stays their mean
        data = torch.zeros(num_clients, max(counts), num_params, dtype=dtype)
        for client, count in enumerate(counts):
            noise = torch.tensor([[rng.gauss(0, 0.1**0.5) for _ in centre] for _ in range(count)], dtype=dtype)
            data[client, :count] = torch.tensor(estimates[client], dtype=dtype) + noise - noise.mean(0)
    return StructuredFederation(
        global_params=torch.tensor(centre, dtype=dtype),
        personal_params=torch.tensor(personal, dtype=dtype),
        local_estimate=torch.tensor(estimates, dtype=dtype),
        intra_variance=torch.tensor(variances, dtype=dtype),
        inter_variance=torch.tensor(inter_variance, dtype=dtype),
        num_examples=torch.tensor(counts),
        seeds=torch.tensor(seed),
        learning_rate=rates if rates_differ else rate,
        resample=resample,
        data=data,
        is_grouped=is_grouped,
    )


@dataclass(frozen=True)
class NetworkFederation:
    """Rows of three classes and a network of two layers; the minibatches of a round are drawn anew."""

    features: torch.Tensor
    labels: torch.Tensor
    offset: torch.Tensor
    params: torch.Tensor  # of the network, before training
    learning_rate: float | torch.Tensor

    @property
    def shape(self):
        return torch.Size()

    @property
    def global_params(self):
        """So that `starting_point` is the network as it was made."""
        return self.params + 0.5

    @property
    def source(self):
        torch.manual_seed(0)
        model = FlatModel(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(self.params.dtype))
        rows = Rows(self.features, self.labels, self.offset)
        federation = Federation(clients=range(len(self.offset) - 1), train=rows, test=rows)
        return ModelSource(federation, model, nn.functional.cross_entropy, 0.1, 3)

    @property
    def population(self):
        return self.source.population

    def task(self, clients, round_number):
        made, rate = self.source, self.learning_rate
        rate = rate[clients] if isinstance(rate, torch.Tensor) else rate
        return ModelTask(made.model, made.loss, made.federation.train, clients, rate, made.batch_size, 0, round_number)


def network_federation(num_clients=6, *, seed=0, rate=0.1, rates_differ=False, resample=False, dtype=torch.float64):
    """M clients with 3 to 12 rows around a centre of each class, moved by a vector of each client's own."""
    rng = random.Random(seed)
    counts = [rng.randint(3, 12) for _ in range(num_clients)]
    centres = [[rng.gauss(0, 1) for _ in range(4)] for _ in range(3)]
    features, labels = [], []
    for count in counts:
        own, classes = [rng.gauss(0, 0.5) for _ in range(4)], rng.sample(range(3), 2)
        for _ in range(count):
            labels.append(rng.choice(classes))
            features.append([c + o + rng.gauss(0, 0.5) for c, o in zip(centres[labels[-1]], own, strict=True)])
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    rates = torch.tensor([rate * rng.uniform(0.5, 1.5) for _ in range(num_clients)], dtype=dtype)
    return NetworkFederation(
        features=torch.tensor(features, dtype=dtype),
        labels=torch.tensor(labels),
        offset=torch.tensor([0, *counts]).cumsum(0),
        params=FlatModel(network).params,
        learning_rate=rates if rates_differ else rate,
    )


def classes_by_half(source, num_classes):
    """A function of client and split: rows of each class in both halves, as minibatches hold them, each row once."""

    @cache
    def of_client(m, split=0):
        halves, found = source.task(torch.tensor([m]), 1).halves(split), []
        for half, size in enumerate(halves.num_examples[0].tolist()):
            classes = {}
            for draw in range(-(-size // source.batch_size)):  # an epoch
                features, labels = (part[0].numpy() for part in halves.batch(draw, torch.tensor([half])))
                classes |= {row.tobytes(): int(label) for row, label in zip(features, labels.reshape(-1), strict=True)}
            found.append([list(classes.values()).count(k) for k in range(num_classes)])
        return found

    return of_client


def assert_closing_spread(server, expected, rel):
    """What closing rounds have said is what the twin of self-fl-auto says."""
    method, close = algorithm("self-fl-auto"), partial(pytest.approx, rel=rel, abs=1e-12)
    assert method.inter_variance(server).item() == close(expected["inter_variance"])
    assert method.group_variances(server).tolist() == close(expected["of_group"])
    assert method.closing_variances(server).tolist() == close(expected["of_closing"])
    if expected["interval"] is not None:
        assert [end.item() for end in method.inter_variance_interval(server)] == close(expected["interval"])
    if expected["prior_rows"] is not None:
        rows = (method.gains(server, torch.ones(1)) - 1.0).item()
        assert rows == close(expected["prior_rows"])


def starting_point(source):
    """A first model that is nobody's optimum."""
    return source.global_params - 0.5


def gathered(method, *uploads):
    """What the server's step is given of the uploads of some clients, or of several parts of a cohort."""
    found = GatheredUploads(method, axis=0)
    for upload in uploads:
        number = len(next(iter(tensors_of(upload).values())))
        found.add(torch.arange(number), upload)
    return found.upload()


def sent_models(received, upload):
    """The models ``[C, P]`` behind the weighted changes of an averaging method's clients."""
    return received + upload.change / upload.weight.unsqueeze(-1)


def run(method, source, rounds=12, *, participation=1.0, seed=0, on_round=None, start=None, privacy=NOT_PRIVATE):
    """The engine, its last state, and everybody's personal model before any closing visit."""
    engine = CohortEngine(method, source, participation=participation, seed=seed, privacy=privacy)
    first = engine.start(starting_point(source) if start is None else start)
    state = engine.advance(first, rounds, on_round)
    return engine, state, engine.personal(state)
