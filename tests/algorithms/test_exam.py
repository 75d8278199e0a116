"""The common exam: what every method must do, whatever it computes."""

import math
from dataclasses import fields, replace
from fractions import Fraction
from functools import cache

import pytest
import torch
from federations import federation, gathered, network_federation, run, starting_point
from torch import nn

from needs import NEEDS_HEAD
from selffl.algorithms import ALGORITHMS, Population, algorithm
from selffl.algorithms.records import map_tensors, tensors_of
from selffl.engines.cohort import CohortEngine
from selffl.training.gaussian import GaussianFederation

QUICK = {
    "self-fl": {"initial_steps": 4},
    "self-fl-exact": {"initial_steps": 4},
    "self-fl-augmented": {"initial_steps": 4, "tolerance": 1e-3, "max_convergence_steps": 25},
    "self-fl-cluster": {"initial_steps": 4},
    "self-fl-sums": {"initial_steps": 4},
    "fedpac": {"num_local_steps": 3, "head_steps": 3},
    "fedrep": {"num_local_steps": 3, "head_steps": 3},
    "pfedbayes": {"num_local_steps": 3, "adam_learning_rate": 3e-3},
}
VARIANTS = {name: (name, QUICK.get(name, {"num_local_steps": 3})) for name in ALGORITHMS} | {
    "self-fl, known": ("self-fl", {"variances": "known"}),
    "self-fl, all, mean, smoothed": ("self-fl", {"others": "all", "variance_scale": "mean", "smoothing": 0.5}),
    "self-fl-augmented, known": (
        "self-fl-augmented",
        {"variances": "known", "tolerance": 1e-3, "max_convergence_steps": 25},
    ),
    "self-fl, weights alone": ("self-fl", {"initial_steps": 4, "adaptive_start": False, "adaptive_steps": False}),
    "self-fl-cluster, by variance": (
        "self-fl-cluster",
        {"initial_steps": 4, "clusters": "variance", "num_clusters": 3, "others": "cohort"},
    ),
    "pfedme, mixed": ("pfedme", {"num_local_steps": 2, "num_inner_steps": 3, "mixing": 0.5}),
    "perfedavg, hessian-free": ("perfedavg", {"num_local_steps": 2, "order": "hessian-free"}),
}
MOVED_BEFORE_USE = {"perfedavg"}  # a personal model is the global one after a step on the client's own rows
NEAR_OPTIMUM = {"pfedbayes": 0.05}  # its gradients are those of models drawn around its own
MIXED = {"fedala"}  # a mixture may be the global model: wherever that is nearer to what the client wants
every_method = pytest.mark.parametrize("variant", VARIANTS)
# Methods that need features sit what makes sense of a Gaussian estimate on a network, in tests of their own.
ON_NETWORKS = [name for name in VARIANTS if VARIANTS[name][0] in NEEDS_HEAD]
on_estimates = pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in ON_NETWORKS])
on_networks = pytest.mark.parametrize("variant", ON_NETWORKS)


def method(variant):
    name, options = VARIANTS[variant]
    return algorithm(name, **options)


def federation_for(variant, num_clients, **options):
    """A Gaussian federation, or a network with rows where the method needs features."""
    return (network_federation if variant in ON_NETWORKS else federation)(num_clients, **options)


def copy_of(record):
    return map_tensors(torch.clone, record)


def assert_same(record, other, rtol=0.0):
    """Every tensor of two records is equal: bit for bit, or up to rounding."""
    mine, theirs = tensors_of(record), tensors_of(other)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=rtol, atol=rtol, equal_nan=True, msg=name)


def take(record, places):
    """The record of some of the cohort's clients; every tensor of it has the clients on its first axis."""
    return map_tensors(lambda tensor: tensor[places], record)


@cache
def run_of_five_rounds(variant, **federation_options):
    source = federation_for(variant, 8, **federation_options)
    return source, run(method(variant), source, 5, participation=0.5)[1]


def after_some_rounds(variant, **federation_options):
    """A run in the middle, trained once: some clients have taken part several times, others never."""
    source, state = run_of_five_rounds(variant, **federation_options)
    return method(variant), copy_of(source), copy_of(state)


# ------------------------------------------------------------------------------------------------------------- values


@every_method
def test_no_function_alters_what_it_is_given(variant):
    chosen, source, state = after_some_rounds(variant)
    clients = torch.tensor([1, 3, 4, 7])
    before, params = copy_of(state), starting_point(source)
    kept_params, kept_source = params.clone(), copy_of(source)

    chosen.start(params, source.population)
    chosen.newcomer(params.expand(8, -1))
    assert torch.equal(params, kept_params)

    memory = take(state.memory, clients)
    kept_memory = copy_of(memory)
    broadcast = chosen.broadcast(state.server, clients)
    kept_broadcast = copy_of(broadcast)
    upload, new_memory = chosen.client_round(broadcast, memory, source.task(clients, 6))
    kept_upload, kept_new_memory = copy_of(upload), copy_of(new_memory)
    chosen.server_round(state.server, clients, gathered(chosen, upload))
    chosen.personal(state.server.params, state.memory, source.task(torch.arange(8), 6))

    assert_same(state, before)
    assert_same(memory, kept_memory)
    assert_same(broadcast, kept_broadcast)
    assert_same(upload, kept_upload)
    assert_same(new_memory, kept_new_memory)
    assert_same(source, kept_source)
    assert clients.tolist() == [1, 3, 4, 7]


@every_method
def test_what_is_sent_and_kept_has_the_client_axis(variant):
    chosen, source, state = after_some_rounds(variant)
    clients = torch.tensor([1, 3, 4])
    broadcast = chosen.broadcast(state.server, clients)
    upload, memory = chosen.client_round(broadcast, take(state.memory, clients), source.task(clients, 6))
    for record in (broadcast, upload, memory):
        for name, tensor in tensors_of(record).items():
            assert tensor.shape[0] == 3, name
    assert tensors_of(memory).keys() == tensors_of(state.memory).keys()


@every_method
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_dtype_is_kept(variant, dtype):
    source = federation_for(variant, 6, dtype=dtype, rates_differ=True)
    engine, state, personal = run(method(variant), source, 4, participation=0.5)
    assert state.server.params.dtype == personal.dtype == dtype
    broadcast, clients = engine.algorithm.broadcast(state.server, torch.arange(6)), torch.arange(6)
    upload, _ = engine.algorithm.client_round(broadcast, state.memory, source.task(clients, 5))
    for record in (state.server, state.memory, upload, broadcast):
        for name, tensor in tensors_of(record).items():
            counts = name in (
                "num_local_steps",
                "cluster",
                "is_head",
                "is_mixed",
                "is_known",
                "group_sizes",
                "coefficient_order",
            )
            assert not tensor.is_floating_point() if counts else tensor.dtype == dtype, name
    assert torch.isfinite(personal).all()


# --------------------------------------------------------------------------------------------------------- randomness


@every_method
def test_the_same_seed_gives_the_same_bits(variant):
    source = federation_for(variant, 8, resample=True)
    runs = [run(method(variant), source, 4, participation=0.4, seed=11) for _ in range(2)]
    assert_same(runs[0][1], runs[1][1])
    assert torch.equal(runs[0][2], runs[1][2])


@every_method
def test_another_seed_gives_another_run_where_clients_are_sampled(variant):
    source = federation_for(variant, 8)
    personal = [run(method(variant), source, 4, participation=0.4, seed=seed)[2] for seed in (11, 12)]
    assert not torch.allclose(*personal, rtol=1e-3)
    personal = [run(method(variant), source, 2, seed=seed)[2] for seed in (11, 12)]
    assert torch.equal(*personal)  # everybody takes part, and the data are the same


@every_method
def test_stopping_and_resuming_changes_no_bit(variant):
    source = federation_for(variant, 7, resample=True)
    engine, straight, personal = run(method(variant), source, 7, participation=0.5)
    halfway = engine.advance(engine.start(starting_point(source)), 3)
    assert halfway.round_number == 3
    again = CohortEngine(method(variant), source, participation=0.5)
    resumed = again.advance(copy_of(halfway), 4)
    assert resumed.round_number == straight.round_number == 7
    assert_same(resumed, straight)
    assert torch.equal(again.personal(resumed), personal)


# -------------------------------------------------------------------------------------------------- few or no others


@on_estimates
@pytest.mark.parametrize("resample", [False, True])
def test_a_lone_client_stays_finite_and_learns(variant, resample):
    source = federation(1, resample=resample)
    _, state, personal = run(method(variant), source, 15)
    # NaN may stand for unknown: clusters that nobody is in, and what closing rounds say before there are any.
    unknown = ("server.cluster_", "server.closing.")
    for name, tensor in tensors_of(state).items():
        assert not (tensor.isinf() if name.startswith(unknown) else ~tensor.isfinite()).any(), name
    before = (starting_point(source) - source.local_estimate[0]).norm()
    assert (personal[0] - source.local_estimate[0]).norm() < 0.7 * before


@pytest.mark.parametrize("variant", [name for name in VARIANTS if "noise" not in name and name not in ON_NETWORKS])
def test_clients_that_agree_exactly_stay_finite(variant):
    """All at their common optimum: every variance that can be estimated is zero."""
    source = federation(4)
    source = replace(source, local_estimate=starting_point(source).expand(4, -1).clone())
    _, state, personal = run(method(variant), source, 8)
    near = NEAR_OPTIMUM.get(variant, 1e-12)
    torch.testing.assert_close(personal, source.local_estimate, rtol=0, atol=near)
    torch.testing.assert_close(state.server.params, starting_point(source), rtol=0, atol=near)


@pytest.mark.parametrize("others", ["cohort", "all"])
def test_a_client_without_uncertainty_among_clients_that_do_not_differ_stays_finite(others):
    """σ_0² = 0 and one σ_m² = 0: its weight is infinite, but it starts where everybody starts."""
    clients = torch.arange(4)
    method = algorithm("self-fl", variances="known", others=others)
    source = federation(4, inter_variance=0.0)
    stated = replace(source.population, intra_variance=torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=torch.float64))
    server = method.start(starting_point(source), stated)
    memory = method.newcomer(server.params.expand(4, -1))
    upload, _ = method.client_round(method.broadcast(server, clients), memory, source.task(clients, 1))
    assert torch.isfinite(upload.params).all()


@on_estimates
def test_a_client_never_sampled_has_the_global_model(variant):
    source = federation(20)
    seen = set()
    chosen = method(variant)
    engine, state, personal = run(
        chosen, source, 3, participation=0.1, on_round=lambda report: seen.update(report.clients.tolist())
    )
    unseen = [client for client in range(20) if client not in seen]
    assert 0 < len(seen) <= 6
    expected = state.server.params.expand(len(unseen), -1)
    if chosen.name in MOVED_BEFORE_USE:
        slope = (expected - source.local_estimate[unseen]) / source.intra_variance[unseen].unsqueeze(-1)
        torch.testing.assert_close(personal[unseen], expected - source.learning_rate * slope, rtol=1e-14, atol=0)
    else:
        assert torch.equal(personal[unseen], expected)
    if chosen.has_closing_visit:  # nor does it go on by itself when training is over
        personal = engine.personal(state, is_over=True)
        assert torch.equal(personal[unseen], expected)
    if chosen.personalises == "layers":  # only the head, the last coordinate, is personal
        assert torch.equal(personal[sorted(seen), :-1], state.server.params[:-1].expand(len(seen), -1))
        assert torch.equal(state.server.params[-1], starting_point(source)[-1]) is not chosen.has_global_model
        personal = personal[:, -1:]
    if chosen.personalises != "nothing":
        is_shared = torch.isclose(personal[sorted(seen)], state.server.params, rtol=1e-6)
        assert not (is_shared.all() if chosen.name in MIXED else is_shared.any())


@on_networks
def test_a_lone_client_learns_its_rows(variant):
    """On average over its minibatches the personal model has a lower loss than the first one."""
    source = network_federation(1)
    _, state, personal = run(method(variant), source, 15)
    assert all(tensor.isfinite().all() for tensor in tensors_of(state).values())
    made = source.source
    first, last = (
        nn.functional.cross_entropy(made.model(params, source.features), source.labels)
        for params in (source.params, personal[0])
    )
    assert last < 0.7 * first


@on_networks
def test_a_client_never_sampled_has_the_global_network(variant):
    source, cohorts = network_federation(20), []
    engine, state, personal = run(
        method(variant), source, 3, participation=0.1, on_round=lambda report: cohorts.append(report.clients)
    )
    unseen = [client for client in range(20) if client not in torch.cat(cohorts)]
    assert len(unseen) >= 14
    assert torch.equal(personal[unseen], state.server.params.expand(len(unseen), -1))
    head, shared = source.population.head, state.server.params
    if method(variant).personalises == "layers":
        assert torch.equal(personal[:, : head.start], shared[: head.start].expand(20, -1))
    closed = engine.personal(state, is_over=True)[cohorts[-1]]
    assert (closed - shared)[:, head.start :].norm(dim=-1).min() > 1e-4


@on_estimates
def test_a_warm_start_is_a_start_like_any_other(variant):
    """Wherever the numbers begin: with data and first model moved by the same vector, everything moves by it."""
    name, options = VARIANTS[variant]
    if "tolerance" in vars(algorithm(name)):  # it is relative to the model, and does know where zero is
        options = options | {"tolerance": 1e-15}
    source, shift = federation(7, resample=True), torch.tensor([30.0, -50.0, 80.0], dtype=torch.float64)
    moved = replace(source, local_estimate=source.local_estimate + shift, global_params=source.global_params + shift)
    _, here, personal = run(algorithm(name, **options), source, 6, participation=0.5)
    _, there, shifted = run(algorithm(name, **options), moved, 6, participation=0.5)
    torch.testing.assert_close(there.server.params - shift, here.server.params, rtol=1e-8, atol=0)
    torch.testing.assert_close(shifted - shift, personal, rtol=1e-8, atol=0)
    assert there.num_gradients.tolist() == here.num_gradients.tolist()


# ----------------------------------------------------------------------------------- the client axis is only an axis


@every_method
def test_the_order_of_the_clients_is_irrelevant(variant):
    chosen, source, state = after_some_rounds(variant, rates_differ=True)
    clients, order = torch.tensor([1, 2, 3, 5, 7]), torch.tensor([3, 0, 4, 2, 1])
    results = []
    for cohort in (clients, clients[order]):
        broadcast = chosen.broadcast(state.server, cohort)
        upload, memory = chosen.client_round(broadcast, take(state.memory, cohort), source.task(cohort, 6))
        server = chosen.server_round(state.server, cohort, gathered(chosen, upload))
        results.append((broadcast, upload, memory, server))
    for mine, theirs in zip(results[0][:3], results[1][:3], strict=True):
        assert_same(take(mine, order), theirs, rtol=1e-12)
    assert_same(results[0][3], results[1][3], rtol=1e-12)


@every_method
def test_the_order_of_the_uploads_is_irrelevant(variant):
    chosen, source, state = after_some_rounds(variant)
    clients, order = torch.tensor([0, 2, 3, 5, 6]), torch.tensor([4, 2, 0, 1, 3])
    broadcast = chosen.broadcast(state.server, clients)
    upload, _ = chosen.client_round(broadcast, take(state.memory, clients), source.task(clients, 6))
    server = chosen.server_round(state.server, clients, gathered(chosen, upload))
    in_order = gathered(chosen, take(upload, order))
    assert_same(chosen.server_round(state.server, clients[order], in_order), server, rtol=1e-12)


ADDING = [variant for variant in VARIANTS if method(variant).uploads_add]


@pytest.mark.parametrize("variant", ADDING)
def test_a_server_of_uploads_that_add_needs_nothing_but_their_sum(variant):
    """Whatever clients hand from one to another before they send, as the masks of a secure sum do."""
    chosen, source, state = after_some_rounds(variant)
    clients = torch.tensor([0, 2, 3, 5, 6])
    broadcast = chosen.broadcast(state.server, clients)
    upload, _ = chosen.client_round(broadcast, take(state.memory, clients), source.task(clients, 6))
    generator = torch.Generator().manual_seed(1)

    def masked(tensor):
        mask = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        return tensor + mask - mask.roll(1, 0)

    expected = chosen.server_round(state.server, clients, gathered(chosen, upload))
    found = chosen.server_round(state.server, clients, gathered(chosen, map_tensors(masked, upload)))
    assert_same(found, expected, rtol=1e-8)


@every_method
def test_uploads_are_gathered_in_any_parts(variant):
    """A tree of aggregators: parts of a cohort first, one client at a time at the last."""
    chosen, source, state = after_some_rounds(variant)
    clients = torch.tensor([0, 2, 3, 5, 6])
    broadcast = chosen.broadcast(state.server, clients)
    upload, _ = chosen.client_round(broadcast, take(state.memory, clients), source.task(clients, 6))
    whole = gathered(chosen, upload)
    for sizes in ((2, 3), (1, 1, 1, 1, 1), (4, 1)):
        assert_same(gathered(chosen, *(take(upload, part) for part in torch.arange(5).split(sizes))), whole, rtol=1e-13)


@every_method
def test_one_client_at_a_time_equals_the_whole_cohort(variant):
    """A real client is a cohort of one."""
    chosen, source, state = after_some_rounds(variant, rates_differ=True, resample=True)
    clients = torch.tensor([0, 1, 4, 6, 7])
    broadcast, memory = chosen.broadcast(state.server, clients), take(state.memory, clients)
    task = source.task(clients, 6)
    together = chosen.client_round(broadcast, memory, task)
    for place in range(5):
        alone = slice(place, place + 1)
        own_task = source.task(clients[alone], 6)
        upload, kept = chosen.client_round(take(broadcast, alone), take(memory, alone), own_task)
        assert_same(upload, take(together[0], alone), rtol=1e-12)
        assert_same(kept, take(together[1], alone), rtol=1e-12)
        assert own_task.num_gradients.tolist() == task.num_gradients[alone].tolist()


def stacked(federations):
    """Several federations side by side, [R, ...]."""
    kind = type(federations[0])
    columns = {field.name: [getattr(one, field.name) for one in federations] for field in fields(kind)}
    merged = {
        name: torch.stack(values) if isinstance(values[0], torch.Tensor) else values[0]
        for name, values in columns.items()
    }
    return kind(**merged)


@on_estimates
def test_repeats_side_by_side_equal_the_runs_one_at_a_time(variant):
    singles = [federation(7, seed=seed, rates_differ=True, resample=True) for seed in (1, 2, 3)]
    together, seeds = stacked(singles), torch.tensor([5, 6, 7])
    _, batch, personal = run(method(variant), together, 6, participation=0.5, seed=seeds)
    for place, (source, seed) in enumerate(zip(singles, seeds.tolist(), strict=True)):
        _, alone, own = run(method(variant), source, 6, participation=0.5, seed=seed)
        assert_same(take(batch.server, place), alone.server, rtol=1e-12)
        assert_same(take(batch.memory, place), alone.memory, rtol=1e-12)
        assert batch.num_gradients[place].tolist() == alone.num_gradients.tolist()
        torch.testing.assert_close(personal[place], own, rtol=1e-12, atol=0)


# ------------------------------------------------------------------------------------------------------ what it costs


@pytest.mark.parametrize(
    ("name", "options", "per_round"),
    [
        ("fedavg", {"num_local_steps": 7}, 7),
        ("fedavg-equal", {"num_local_steps": 7}, 7),
        ("fedprox", {"num_local_steps": 7}, 7),
        ("local", {"num_local_steps": 7}, 7),
        ("scaffold", {"num_local_steps": 7}, 7),
        ("ditto", {"num_local_steps": 7}, 7 + 7),
        ("ditto-equal", {"num_local_steps": 4}, 4 + 4),
        ("pfedme", {"num_local_steps": 7}, 7 * 5),
        ("pfedme", {"num_local_steps": 7, "num_inner_steps": 2}, 7 * 2),
        ("pfedbayes", {"num_local_steps": 7}, 7 * 5),
        ("perfedavg", {"num_local_steps": 7}, 7 * 2),
        ("perfedavg", {"num_local_steps": 7, "order": "hessian-free"}, 7 * (1 + 1 + 2)),
        ("apfl", {"num_local_steps": 7}, 7 * 2),
        ("feddpa", {"num_local_steps": 7}, 7 + 7),
        ("fedper", {"num_local_steps": 7}, 7),
        ("fedbabu", {"num_local_steps": 7}, 7),
        ("fedbn", {"num_local_steps": 7}, 7),
        ("fedrep", {"num_local_steps": 7, "head_steps": 4}, 4 + 7),
        ("self-fl-auto", {"num_local_steps": 7}, 7 + 7),
        ("self-fl", {"initial_steps": 6}, 6),
        ("self-fl-cluster", {"initial_steps": 6}, 6),
        ("self-fl-sums", {"initial_steps": 6}, 6),
        ("self-fl-exact", {"initial_steps": 6}, 6),
        ("self-fl", {"initial_steps": 6, "max_local_steps": 5}, 5),
        (
            "self-fl-augmented",
            {"initial_steps": 6, "tolerance": 1e-12, "max_convergence_steps": 13},
            6 + 13,
        ),
    ],
)
def test_gradients_are_counted(name, options, per_round):
    """Over two rounds; Self-FL does not know its variances yet, and takes its initial steps."""
    rounds_of = torch.zeros(5, dtype=torch.int64)

    def note(report):
        rounds_of[report.clients] += 1

    _, state, _ = run(algorithm(name, **options), federation(5), 2, participation=0.6, on_round=note)
    assert rounds_of.sum() == 6
    assert state.num_gradients.tolist() == (per_round * rounds_of).tolist()


def test_gradients_of_self_fl_are_its_steps():
    spent = torch.zeros(6, dtype=torch.int64)

    def note(report):
        spent[report.clients] += report.upload.num_local_steps

    _, state, _ = run(algorithm("self-fl"), federation(6), 10, participation=0.5, on_round=note)
    assert state.num_gradients.tolist() == spent.tolist()


@pytest.mark.parametrize(
    ("name", "options", "draws"),
    [
        ("fedavg", {"num_local_steps": 3}, [0, 1, 2]),
        ("local", {"num_local_steps": 3}, [0, 1, 2]),
        ("ditto", {"num_local_steps": 3}, [0, 1, 2, 0, 1, 2]),  # both models on the same minibatches
        ("pfedme", {"num_local_steps": 3, "num_inner_steps": 2}, [0, 1, 2]),  # one for all inner steps
        ("pfedbayes", {"num_local_steps": 3}, [0, 1, 2]),  # one for all inner steps
        ("perfedavg", {"num_local_steps": 2}, [0, 1, 2, 3]),
        ("perfedavg", {"num_local_steps": 2, "order": "hessian-free"}, [0, 1, 2, 3, 4, 5]),
        ("apfl", {"num_local_steps": 3}, [0, 1, 2]),  # one for both gradients
        ("feddpa", {"num_local_steps": 3}, [0, 1, 2, 0, 1, 2]),  # both on the same minibatches
        ("fedper", {"num_local_steps": 3}, [0, 1, 2]),
        ("fedala", {"num_local_steps": 3}, [0, 1, 2]),  # nothing to mix yet
        ("fedbabu", {"num_local_steps": 3}, [0, 1, 2]),
        ("fedbn", {"num_local_steps": 3}, [0, 1, 2]),
        ("fedrep", {"num_local_steps": 2, "head_steps": 3}, [0, 1, 2, 3, 4]),
        # halves, the client's own model, and what is measured
        ("self-fl-auto", {"num_local_steps": 9}, [*range(9), 0, 1, 2, 0, 0]),
        ("self-fl", {"initial_steps": 3}, [0, 1, 2]),
        ("self-fl-cluster", {"initial_steps": 3}, [0, 1, 2]),
        ("self-fl-sums", {"initial_steps": 3}, [0, 1, 2]),
        (  # the steps to convergence are on minibatches that no planned step can have seen
            "self-fl-augmented",
            {"initial_steps": 3, "max_local_steps": 5, "max_convergence_steps": 4},
            [0, 1, 2, 5, 6, 7, 8],
        ),
    ],
)
def test_every_step_has_its_minibatch(name, options, draws, monkeypatch):
    source, clients, asked = federation(4), torch.arange(4), []
    task = source.task(clients, 1)
    answer = type(task).batch

    def listen(self, draw, rows):
        asked.append(draw)
        return answer(self, draw, rows)

    monkeypatch.setattr(type(task), "batch", listen)  # for the halves of the rows as well
    chosen = algorithm(name, **options)
    server = chosen.start(starting_point(source), source.population)
    chosen.client_round(chosen.broadcast(server, clients), chosen.newcomer(server.params.expand(4, -1)), task)
    assert asked == draws


# ------------------------------------------------------------------------------------------------------ worked by hand


def two_clients(estimates, variances, examples, inter_variance, rate):
    one = torch.tensor([0.0], dtype=torch.float64)
    column = torch.tensor(estimates, dtype=torch.float64).unsqueeze(-1)
    return GaussianFederation(
        global_params=one,
        personal_params=torch.zeros_like(column),
        local_estimate=column,
        intra_variance=torch.tensor(variances, dtype=torch.float64),
        inter_variance=torch.tensor(inter_variance, dtype=torch.float64),
        num_examples=torch.tensor(examples),
        seeds=torch.tensor(0),
        learning_rate=rate,
    )


def test_two_clients_of_fedavg_by_hand():
    """η = 1/2; client 1 halves its distance to 4 at each step, client 2 (σ² = 2) takes three quarters of its to −8.

    Two steps from 0: 4 − 4/4 = 3 and −8 + 8·9/16 = −7/2. Weights 1 and 3: (3 − 21/2)/4 = −15/8; equal: −1/4.
    Then from −15/8: 4 − (47/8)/4 = 81/32 and −8 + (49/8)·9/16 = −583/128; (81/32 − 3·583/128)/4 = −1425/512.
    """
    source = two_clients([4.0, -8.0], [1.0, 2.0], [1, 3], 1.0, 0.5)
    origin = torch.zeros(1, dtype=torch.float64)
    first = run(algorithm("fedavg", num_local_steps=2), source, 1, start=origin)[1]
    assert first.server.params.tolist() == [-15 / 8]
    equal = run(algorithm("fedavg-equal", num_local_steps=2), source, 1, start=origin)[1]
    assert equal.server.params.tolist() == [-1 / 4]
    _, second, personal = run(algorithm("fedavg", num_local_steps=2), source, 2, start=origin)
    assert second.server.params.tolist() == [-1425 / 512]
    assert personal.tolist() == [[-1425 / 512]] * 2


def test_two_clients_of_self_fl_by_hand():
    """σ_0² = 1, σ² = (1, 3): w = (1/2, 1/4), S = (1/4, 1/2), η = 1/2.

    Steps: (1/2)^ℓ = (1/4)/(1 + 1/4) = 1/5, ℓ = 2.32, so 2; (5/6)^ℓ = (1/2)/(1/3 + 1/2) = 3/5, ℓ = 2.80, so 3.
    Round 1 starts at 0 (nobody has a model yet): 4 − 4/4 = 3 and −21.6 (1 − 125/216) = −9.1; the weights 2 : 1 give
    the global model (6 − 9.1)/3 = −31/30. Round 2: with one other client, the model less the client's own part *is*
    the other's model, so that client 1 starts at −9.1 and client 2 at 3.
    """
    source = two_clients([4.0, -21.6], [1.0, 3.0], [5, 5], 1.0, 0.5)
    reports = []
    _, state, personal = run(
        algorithm("self-fl", variances="known"),
        source,
        2,
        start=torch.zeros(1, dtype=torch.float64),
        on_round=reports.append,
    )
    assert [report.upload.num_local_steps.tolist() for report in reports] == [[2, 3], [2, 3]]
    assert reports[0].upload.params.flatten().tolist() == pytest.approx([3.0, -9.1], rel=1e-14)
    assert reports[0].server.params.item() == pytest.approx(-31 / 30, rel=1e-14)
    first = 4 + Fraction(-91 - 40, 10) / 4
    second = Fraction(-216, 10) + (3 + Fraction(216, 10)) * Fraction(125, 216)
    assert personal.flatten().tolist() == pytest.approx([float(first), float(second)], rel=1e-13)
    assert state.server.params.item() == pytest.approx(float((2 * first + second) / 3), rel=1e-13)


def test_two_clients_of_exact_self_fl_by_hand():
    """The same clients: P = 1/(1 + 4) = 1/5 and 1/(1 + 2) = 1/3.

    (1/2)^ℓ = (1/5)/(6/5) = 1/6, ℓ = 2.58, so 3; (5/6)^ℓ = (1/3)/(2/3) = 1/2, ℓ = 3.80, so 4.
    """
    source = two_clients([4.0, -21.6], [1.0, 3.0], [5, 5], 1.0, 0.5)
    chosen = algorithm("self-fl-exact", variances="known")
    _, _, personal = run(chosen, source, 1, start=torch.zeros(1, dtype=torch.float64))
    expected = [4 * (1 - 1 / 8), -21.6 * (1 - (5 / 6) ** 4)]
    assert personal.flatten().tolist() == pytest.approx(expected, rel=1e-14)


def test_two_clients_of_self_fl_with_estimated_variances_by_hand():
    """Three rounds of η/σ² = 1/2 and one initial step; smoothing is off, everybody takes part.

    From 0 towards (4, −8): models (2, −4), equal weights while nothing is known: −1. Round 2: (3/2, −9/2), mean −3/2.
    Round 3: the variances are now known to the clients, ((1/4)², (1/4)²) = (1/16, 1/16), but not to the server, so it
    is one more initial round: (5/4, −19/4). The server hears of them only now; they are equal: −7/4, and
    σ_0² = 2·3² = 18. Round 4: σ² over (2, 3/2, 5/4) = 7/72, w = 1/(18 + 7/72), S = 1/(18 + 1/16).
    η/σ² = 72/7/2 > 1, so one step: start −7/4 − w/S·(5/4 + 7/4), then half of the way to 4.
    """
    source = two_clients([4.0, -8.0], [1.0, 1.0], [1, 1], 1.0, 0.5)
    reports = []
    method_by_hand = algorithm("self-fl", initial_steps=1, smoothing=1)
    run(method_by_hand, source, 4, start=torch.zeros(1, dtype=torch.float64), on_round=reports.append)
    assert [report.server.params.item() for report in reports[:3]] == [-1.0, -1.5, -1.75]
    assert [report.upload.intra_variance.isnan().all().item() for report in reports] == [True, True, False, False]
    assert reports[2].upload.intra_variance.tolist() == [1 / 16, 1 / 16]
    assert reports[2].server.inter_variance.item() == 18.0
    assert reports[3].upload.intra_variance.tolist() == pytest.approx([7 / 72, 7 / 72], rel=1e-14)
    assert reports[3].upload.num_local_steps.tolist() == [1, 1]
    ratio = (18 + 1 / 16) / (18 + 7 / 72)
    starts = [-1.75 - ratio * 3, -1.75 + ratio * 3]
    expected = [(starts[0] + 4) / 2, (starts[1] - 8) / 2]
    assert reports[3].upload.params.flatten().tolist() == pytest.approx(expected, rel=1e-14)


def test_the_server_of_self_fl_counts_the_unknown_as_the_mean_of_the_known():
    """Four clients with variances (1, 3, unknown, 8), σ_0² = 2: the third counts as 4 in everybody else's sum."""
    chosen = algorithm("self-fl")
    server = chosen.start(torch.zeros(1, dtype=torch.float64), Population(4))
    server = replace(
        server,
        inter_variance=torch.tensor(2.0, dtype=torch.float64),
        intra_variance=torch.tensor([1.0, 3.0, math.nan, 8.0], dtype=torch.float64),
    )
    total = [1 / 3, 1 / 5, 1 / 6, 1 / 10]
    broadcast = chosen.broadcast(server, torch.tensor([0, 2]))
    assert broadcast.others_variance.tolist() == pytest.approx([6.0, 3.0], rel=1e-14)
    everyone = replace(chosen, others="all").broadcast(server, torch.tensor([0, 2]))
    expected = [1 / (sum(total) - 1 / 3), 1 / (sum(total) - 1 / 6)]
    assert everyone.others_variance.tolist() == pytest.approx(expected, rel=1e-14)
    assert broadcast.intra_variance.isnan().all()
