"""Every method on a small convolutional network equals its twin: an ordinary module, one client at a time, autograd.

The twins are those of test_twins.py; here their gradients come from backpropagation through an `nn.Module` on the
minibatches that the task hands out, and nothing of the library's own training code is used.
"""

import copy
from functools import cache

import pytest
import torch
import twins
from federations import AUTO, assert_closing_spread, classes_by_half, federation, sent_models, starting_point
from torch import nn

from selffl.algorithms import ALGORITHMS, PerFedAvg, PFedMe, algorithm, self_fl_augmented
from selffl.data.federation import Federation, Rows
from selffl.engines.cohort import CohortEngine, sample_cohort
from selffl.training.model import FlatModel, ModelSource

ROUNDS, PARTICIPATION, SEED = 6, 0.6, 4
FEW_ROUNDS = 4  # where schedules and options of training are looked at
RATE, BATCH = 0.2, 4
SIZES = (7, 16, 5, 23, 12, 3)  # one client has fewer rows than a minibatch
CLUSTERS = (0, 1, 1, 0, 2, 2)
CROSS_ENTROPY = nn.functional.cross_entropy


def network():
    """Two convolutions and a linear layer on 8×8 images, with numbers of its own; the head is the layer "5"."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, stride=2),
        nn.Tanh(),
        nn.Conv2d(2, 3, 2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(12, 3),
    ).double()


def images():
    """Six clients with images around a pattern of the label, tilted differently for each."""
    generator = torch.Generator().manual_seed(8)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    patterns, owner = draw(3, 1, 8, 8), torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))
    labels = torch.randint(3, (len(owner),), generator=generator)
    features = patterns[labels] + 0.7 * draw(len(SIZES), 1, 8, 8)[owner] + 0.8 * draw(len(owner), 1, 8, 8)
    rows = Rows(features, labels, torch.tensor([0, *SIZES]).cumsum(0))
    return Federation(clients=range(len(SIZES)), train=rows, test=rows, cluster=torch.tensor(CLUSTERS))


def source_of(module):
    return ModelSource(images(), FlatModel(module), CROSS_ENTROPY, RATE, BATCH, seed=2)


def minibatches(source, t, m, half=None, split=0):
    """Client m's minibatches in round t, by number: features and labels; or those of one half of its rows."""
    task = source.task(torch.tensor([m]), t + 1)
    task, slot = (task, 0) if half is None else (task.halves(split), half)
    return lambda draw: tuple(part[0] for part in task.batch(draw, torch.tensor([slot])))


def load(module, model):
    """The module with these numbers."""
    parts = torch.tensor(model, dtype=torch.float64).split([part.numel() for part in module.parameters()])
    with torch.no_grad():
        for part, numbers in zip(module.parameters(), parts, strict=True):
            part.copy_(numbers.view_as(part))
    return module


def unload(module):
    return [number for part in module.parameters() for number in part.detach().flatten().tolist()]


def as_problem(source, module, rounds=ROUNDS):
    """The federation and the network as the twins see them."""

    own = copy.deepcopy(module)

    def gradient(t, m, half=None, split=0):
        batch = minibatches(source, t, m, half, split)

        def slope(model, draw, short=False):
            features, labels = (part[: (BATCH + 1) // 2] if short else part for part in batch(draw))
            slopes = torch.autograd.grad(CROSS_ENTROPY(load(own, model)(features), labels), list(own.parameters()))
            return [number for part in slopes for number in part.flatten().tolist()]

        return slope

    def noise(t, m):
        task, like = source.task(torch.tensor([m]), t + 1), torch.tensor([unload(module)], dtype=torch.float64)
        return lambda draw: task.noise(draw, torch.tensor([0]), like)[0].tolist()

    def scores(t, m, half):
        features, labels = minibatches(source, t, m, half)(0)

        def of_rows(model):
            with torch.no_grad():
                return list(zip(load(own, model)(features).tolist(), labels.tolist(), strict=True))

        return of_rows

    def rows_of(t, m):
        batch = minibatches(source, t, m)

        def of_model(model, draw):
            features, labels = batch(draw)
            with torch.no_grad():
                inputs = load(own, model)[:-1](features)
                return list(zip(inputs.tolist(), own[-1](inputs).tolist(), labels.tolist(), strict=True))

        return of_model

    def all_rows(m):
        train = source.federation.train
        is_own = train.owner == m

        def of_model(model):
            with torch.no_grad():
                inputs = load(own, model)[:-1](train.features[is_own])
            return list(zip(inputs.tolist(), train.labels[is_own].tolist(), strict=True))

        return of_model

    def pull_back(t, m):
        batch = minibatches(source, t, m)

        def of_slopes(model, draw, by_scores, by_features):
            inputs = load(own, model)[:-1](batch(draw)[0])
            value = (own[-1](inputs) * torch.tensor(by_scores, dtype=torch.float64)).sum()
            value = value + (inputs * torch.tensor(by_features, dtype=torch.float64)).sum()
            slopes = torch.autograd.grad(value, list(own.parameters()))
            return [number for part in slopes for number in part.flatten().tolist()]

        return of_slopes

    size, rows = sum(part.numel() for part in module.parameters()), source.federation.train
    return {
        "half_gradient": lambda t, m, split=0: [gradient(t, m, half, split) for half in (0, 1)],
        "half_terms": [((size + 1) // 2, size // 2) for size in SIZES],
        "terms": [float(size) for size in SIZES],
        "start": unload(module),
        "cohorts": [sample_cohort(SEED, t + 1, len(SIZES), PARTICIPATION).tolist() for t in range(rounds)],
        "gradient": gradient,
        "noise": noise,
        "rates": [RATE] * len(SIZES),
        "examples": [float(size) for size in SIZES],
        "batch_size": BATCH,
        "clusters": list(CLUSTERS),
        "head": list(range(size - 12 * 3 - 3, size)),
        "classes": [torch.bincount(rows.labels[rows.owner == m], minlength=3).tolist() for m in range(len(SIZES))],
        "half_classes": classes_by_half(source, 3),
        "scores": scores,
        "rows": rows_of,
        "pull_back": pull_back,
        "all_rows": all_rows,
        "closing": rounds,
        "bias": [(place, 1) for place in range(size - 3, size)],
        "scorers": range(size - 12 * 3 - 3, size),
        "groups": [part.numel() for part in module.parameters()],
    }


def trained(method, source, on_round=None, rounds=ROUNDS):
    engine = CohortEngine(method, source, participation=PARTICIPATION, seed=SEED)
    state = engine.advance(engine.start(source.model.params), rounds, on_round)
    personal, concluded = engine.personal(state), engine.conclude(state)
    return concluded, personal, engine.personal(concluded, is_over=True)


@cache
def plainly_trained(case):
    """Personal models of a case as it is, without any option of training; nobody alters them."""
    name, options, *_ = CASES[case]
    return trained(algorithm(name, **options), source_of(network()), rounds=FEW_ROUNDS)[1]


SHARE = 3 / 6  # of the clients in a cohort: ⌊0.6 · 6⌋
STEPS = {"num_local_steps": 3}
SELF_FL = {"initial_steps": 3, "max_local_steps": 6}
AS_SELF_FL = SELF_FL | {"smoothing": SHARE}
RATES = {"personal_rates": [RATE] * len(SIZES)}
INNER = {"inner_rates": [RATE] * len(SIZES)}
# case: (name, options, twin, what the twin is told)
CASES = {
    "self-fl": ("self-fl", SELF_FL, twins.run_self_fl, AS_SELF_FL),
    "self-fl-exact": ("self-fl-exact", SELF_FL, twins.run_self_fl, AS_SELF_FL | {"form": "exact"}),
    "self-fl-auto": ("self-fl-auto", STEPS, twins.run_self_fl_auto, STEPS | AUTO),
    "self-fl-auto, longer": (
        "self-fl-auto",
        {"num_local_steps": 6},
        twins.run_self_fl_auto,
        AUTO | {"num_local_steps": 6},
    ),
    "self-fl-augmented": (
        "self-fl-augmented",
        SELF_FL | {"tolerance": 0.01, "max_convergence_steps": 26},
        twins.run_self_fl,
        AS_SELF_FL | {"augmented": True, "tolerance": 0.01, "max_convergence_steps": 26},
    ),
    "self-fl-cluster": (
        "self-fl-cluster",
        SELF_FL,
        twins.run_self_fl,
        AS_SELF_FL | {"clusters": "column", "others": "all"},
    ),
    "self-fl-cluster, by variance": (
        "self-fl-cluster",
        SELF_FL | {"clusters": "variance", "num_clusters": 2},
        twins.run_self_fl,
        AS_SELF_FL | {"clusters": "variance", "num_clusters": 2, "others": "all"},
    ),
    "self-fl-sums": ("self-fl-sums", SELF_FL, twins.run_self_fl_sums, AS_SELF_FL),
    "self-fl, start alone": (
        "self-fl",
        SELF_FL | {"adaptive_steps": False, "uncertainty_weights": False},
        twins.run_self_fl,
        AS_SELF_FL | {"adaptive_steps": False, "uncertainty_weights": False},
    ),
    "local": ("local", STEPS, twins.run_local, STEPS),
    "fedavg": ("fedavg", STEPS, twins.run_fedavg, STEPS),
    "fedavg-equal": ("fedavg-equal", STEPS, twins.run_fedavg, STEPS | {"weighting": "equal"}),
    "fedprox": ("fedprox", STEPS, twins.run_fedprox, STEPS | {"penalty": 1.0}),
    "scaffold": ("scaffold", STEPS, twins.run_scaffold, STEPS),
    "ditto": ("ditto", STEPS, twins.run_ditto, STEPS | {"penalty": 1.0}),
    "ditto-equal": ("ditto-equal", STEPS, twins.run_ditto, STEPS | {"penalty": 1.0, "weighting": "equal"}),
    "pfedme": ("pfedme", STEPS | {"penalty": 2.0}, twins.run_pfedme, STEPS | RATES | {"penalty": 2.0}),
    "pfedbayes": (
        "pfedbayes",
        STEPS | {"adam_learning_rate": 0.02},
        twins.run_pfedbayes,
        STEPS | {"rate": 0.02},
    ),
    "perfedavg": ("perfedavg", STEPS, twins.run_perfedavg, STEPS | INNER),
    "perfedavg, hessian-free": (
        "perfedavg",
        STEPS | {"order": "hessian-free"},
        twins.run_perfedavg,
        STEPS | INNER | {"hessian_free": True},
    ),
    "apfl": ("apfl", STEPS, twins.run_apfl, STEPS),
    "fedala": ("fedala", STEPS, twins.run_fedala, STEPS),
    "fedala, half of the rows": (
        "fedala",
        STEPS | {"row_share": 0.5, "mixing_rate": 9.0, "first_passes": 3},
        twins.run_fedala,
        STEPS | {"share": 0.5, "mixing_rate": 9.0, "first_passes": 3},
    ),
    "fedbabu": ("fedbabu", STEPS | {"fine_tune_epochs": 2}, twins.run_fedbabu, STEPS | {"epochs": 2}),
    "fedbn, without BatchNorm": ("fedbn", STEPS, twins.run_fedavg, STEPS),
    "feddpa": ("feddpa", STEPS, twins.run_feddpa, STEPS),
    "feddbe": ("feddbe", STEPS | {"penalty": 5.0}, twins.run_feddbe, STEPS | {"penalty": 5.0}),
    "feddbe, equal": (
        "feddbe",
        STEPS | {"penalty": 0.5, "weighting": "equal"},
        twins.run_feddbe,
        STEPS | {"penalty": 0.5, "weighting": "equal"},
    ),
    "fedper": ("fedper", STEPS, twins.run_fedper, STEPS),
    "fedpac": ("fedpac", STEPS | {"head_steps": 2}, twins.run_fedpac, STEPS | {"head_steps": 2}),
    "fedpac, aligned": (
        "fedpac",
        STEPS | {"head_steps": 1, "alignment": 20.0, "head_learning_rate": 0.5},
        twins.run_fedpac,
        STEPS | {"head_steps": 1, "alignment": 20.0, "head_rate": 0.5},
    ),
    "fedrod": ("fedrod", STEPS, twins.run_fedrod, STEPS),
    "fedrod, equal": (
        "fedrod",
        STEPS | {"weighting": "equal"},
        twins.run_fedrod,
        STEPS | {"weighting": "equal"},
    ),
    "fedrep": (
        "fedrep",
        STEPS | {"head_steps": 2},
        twins.run_fedper,
        STEPS | {"head_steps": 2, "weighting": "equal"},
    ),
}


def test_every_method_has_a_case():
    assert {name for name, *_ in CASES.values()} == set(ALGORITHMS)


LONG = ("self-fl-auto", "self-fl-auto, longer")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case in LONG else []) for case in CASES]
)
def test_a_network_trained_by_a_method_equals_its_twin(case):
    name, options, twin, told = CASES[case]
    module = network()
    source, reports = source_of(module), []
    state, personal, closed = trained(algorithm(name, **options), source, reports.append)
    expected = twin(as_problem(source, module), **told)
    for report, model in zip(reports, expected["history"], strict=True):
        assert report.server.params.tolist() == pytest.approx(model, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(personal, torch.tensor(expected["personal"], dtype=torch.float64), rtol=1e-9, atol=1e-12)
    wanted = torch.tensor(expected.get("closed", expected["personal"]), dtype=torch.float64)
    torch.testing.assert_close(closed, wanted, rtol=1e-9, atol=1e-12)
    if "of_group" in expected:
        assert ((closed - personal).norm(dim=-1) > 1e-2).equal(state.num_rounds > 0)
        assert state.server.score_factors.tolist() == pytest.approx(expected["factors"], rel=1e-9)
        variances = (state.server.inter_variance * state.server.variance_ratios).tolist()
        assert variances == pytest.approx(expected["trained_of_group"], rel=1e-7)
        interval = [end.item() for end in algorithm(name).inter_variance_interval(state.server)]
        assert interval == pytest.approx(expected["interval"], rel=1e-6)
        assert len(set(expected["trained_of_group"])) > 1
        assert_closing_spread(state.server, expected, 1e-6)
    spent = [0] * len(SIZES)
    for report, counts in zip(reports, expected["gradients"], strict=True):
        for m, count in zip(report.clients.tolist(), counts, strict=True):
            spent[m] += count
    assert state.num_gradients.tolist() == spent
    moved = (personal - source.model.params).norm(dim=-1)
    assert (moved > 0.1).all()


def test_the_twins_case_for_self_fl_reaches_its_rules():
    """Variances become known, steps differ and some clients of the augmented method stop before the bound."""
    source = source_of(network())
    problem = as_problem(source, network())
    plain = twins.run_self_fl(problem, **AS_SELF_FL)
    assert sum(value is not None for value in plain["reported"]) >= 4
    assert len({count for counts in plain["steps"] for count in counts}) > 1
    long = twins.run_self_fl(problem, **CASES["self-fl-augmented"][3])
    spent = {
        count - steps
        for pair in zip(long["gradients"], long["steps"], strict=True)
        for count, steps in zip(*pair, strict=True)
    }
    assert 26 in spent
    assert len(spent) > 2


def test_fedavg_by_the_book():
    """With deep copies, `torch.optim.SGD` and state dicts, as anybody would write it."""
    module = network()
    source = source_of(module)
    state, *_ = trained(algorithm("fedavg", num_local_steps=5), source)
    shared = copy.deepcopy(module)
    for t in range(ROUNDS):
        cohort = sample_cohort(SEED, t + 1, len(SIZES), PARTICIPATION).tolist()
        copies = []
        for m in cohort:
            own, batch = copy.deepcopy(shared), minibatches(source, t, m)
            optimiser = torch.optim.SGD(own.parameters(), lr=RATE)
            for draw in range(5):
                features, labels = batch(draw)
                optimiser.zero_grad()
                CROSS_ENTROPY(own(features), labels).backward()
                optimiser.step()
            copies.append(own.state_dict())
        total = sum(SIZES[m] for m in cohort)
        shared.load_state_dict(
            {
                key: sum(SIZES[m] / total * part[key] for m, part in zip(cohort, copies, strict=True))
                for key in shared.state_dict()
            }
        )
    assert state.server.params.tolist() == pytest.approx(unload(shared), rel=1e-9, abs=1e-12)


# -------------------------------------------------------------------------------------- what other libraries got wrong


def test_pfedme_evaluates_theta_which_moves_with_every_round():
    source = source_of(network())
    state, personal, _ = trained(PFedMe(num_local_steps=3, penalty=2.0), source)
    assert torch.equal(personal, state.memory.params)
    assert ((personal - state.server.params).norm(dim=-1) > 0.05).all()
    engine = CohortEngine(PFedMe(num_local_steps=3, penalty=2.0), source)
    first = engine.advance(engine.start(source.model.params), 1)
    second = engine.advance(first, 1)
    assert ((engine.personal(second) - engine.personal(first)).norm(dim=-1) > 0.05).all()


@pytest.mark.parametrize(("name", "weak", "strong"), [("pfedme", 0.5, 3.0), ("ditto", 0.1, 3.0), ("fedprox", 0.1, 3.0)])
def test_a_penalty_moves_the_weights_of_a_network(name, weak, strong):
    """The stronger, the nearer what a client trains to the model that it received."""
    source, clients = source_of(network()), torch.arange(len(SIZES))
    gaps = []
    for penalty in (0.0, weak, strong):
        method = algorithm(name, num_local_steps=4, penalty=penalty)
        server = method.start(source.model.params, source.population)
        memory = method.newcomer(server.params.expand(len(SIZES), -1))
        upload, kept = method.client_round(method.broadcast(server, clients), memory, source.task(clients, 1))
        own = kept.params if method.personalises == "model" else sent_models(server.params, upload)
        gaps.append((own - server.params).norm(dim=-1))
    assert (gaps[1] < gaps[0]).all()
    assert (gaps[2] < 0.95 * gaps[1]).all()


def test_the_hessian_free_meta_gradient_of_a_network_is_autograds():
    """(I − αH(w; B3)) ∇f(w − α∇f(w; B1); B2), with H times that gradient differentiated exactly."""
    module = network()
    source, clients = source_of(module), torch.arange(len(SIZES))
    params = source.model.params.expand(len(SIZES), -1)
    for draw in (0, 3):
        exact = []
        for m in range(len(SIZES)):
            (x1, y1), (x2, y2), (x3, y3) = map(minibatches(source, 0, m), range(draw, draw + 3))
            parts = list(module.parameters())
            inner = torch.autograd.grad(CROSS_ENTROPY(module(x1), y1), parts)
            adapted = copy.deepcopy(module)
            with torch.no_grad():
                for part, slope in zip(adapted.parameters(), inner, strict=True):
                    part -= RATE * slope
            outer = torch.autograd.grad(CROSS_ENTROPY(adapted(x2), y2), list(adapted.parameters()))
            slopes = torch.autograd.grad(CROSS_ENTROPY(module(x3), y3), parts, create_graph=True)
            curved = torch.autograd.grad(slopes, parts, grad_outputs=outer)
            exact.append(torch.cat([(g - RATE * c).flatten() for g, c in zip(outer, curved, strict=True)]))
        found = PerFedAvg(order="hessian-free").meta_gradient(params, source.task(clients, 1), clients, draw)
        first = PerFedAvg().meta_gradient(params, source.task(clients, 1), clients, draw)
        torch.testing.assert_close(found, torch.stack(exact), rtol=0, atol=1e-5)
        assert (first - torch.stack(exact)).abs().max() > 1e-3


@pytest.mark.parametrize(("given", "full", "mini"), [(None, 1e-6, 1e-4), (0.02, 0.02, 0.02)])
def test_what_counts_as_converged_depends_on_whether_there_are_minibatches(given, full, mini, monkeypatch):
    found = []

    def listen(task, start, *, tolerance, max_steps, first_draw):
        found.append(tolerance)
        return start

    monkeypatch.setattr(self_fl_augmented, "descend_to_convergence", listen)
    whole, parts = federation(6), source_of(network())
    for source, start in ((whole, starting_point(whole)), (parts, parts.model.params)):
        engine = CohortEngine(algorithm("self-fl-augmented", tolerance=given), source)
        engine.advance(engine.start(start), 1)
    assert found == [full, mini]
