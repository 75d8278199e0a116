"""Penalties move the weights, and methods fall together where they should."""

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from federations import federation, network_federation, run, sent_models, starting_point
from torch import nn

from selffl.algorithms import (
    APFL,
    Ditto,
    FedALA,
    FedAvg,
    FedBABU,
    FedDBE,
    FedPer,
    FedProx,
    FedRep,
    FedRoD,
    Local,
    PerFedAvg,
    PFedBayes,
    PFedMe,
    Scaffold,
    SelfFL,
    SelfFLCluster,
    algorithm,
)
from selffl.algorithms.optimisers import Adam
from selffl.algorithms.population import Population
from selffl.algorithms.solver import descend
from selffl.data import load
from selffl.engines.cohort import CohortEngine
from selffl.training.flat import FlatModel
from selffl.training.model import ModelSource


def one_round(method, source, clients=None):
    """What a cohort of newcomers uploads and keeps after one round from the common start."""
    clients = torch.arange(source.population.num_clients) if clients is None else clients
    server = method.start(starting_point(source), source.population)
    memory = method.newcomer(server.params.expand(len(clients), -1))
    return method.client_round(method.broadcast(server, clients), memory, source.task(clients, 1))


def distance(params, other):
    return (params - other).norm(dim=-1)


def test_dittos_penalty_pulls_the_personal_model_towards_the_global_one():
    source = federation(5)
    gaps = []
    for penalty in (0.0, 1.0, 100.0, 500.0):
        _, kept = one_round(Ditto(num_local_steps=10, penalty=penalty), source)
        gaps.append(distance(kept.params, starting_point(source)))
    for free, pulled in itertools.pairwise(gaps):
        assert (pulled < free).all()
    assert (gaps[3] < 0.9 * gaps[0]).all()


def test_dittos_penalty_leaves_the_global_model_alone():
    source = federation(5)
    weak, strong = (run(Ditto(num_local_steps=5, penalty=penalty), source, 4)[1] for penalty in (0.0, 300.0))
    shared = run(FedAvg(num_local_steps=5), source, 4)[1]
    assert torch.equal(weak.server.params, strong.server.params)
    assert torch.equal(weak.server.params, shared.server.params)


@pytest.mark.parametrize("participation", [1.0, 0.4])
def test_ditto_without_a_penalty_trains_each_client_alone(participation):
    """They differ only in where a client first began: at full participation, everybody at the first model."""
    source = federation(5)
    pulled = run(Ditto(num_local_steps=4, penalty=0.0), source, 6, participation=participation)[2]
    alone = run(Local(num_local_steps=4), source, 6, participation=participation)[2]
    if participation == 1.0:
        torch.testing.assert_close(pulled, alone, rtol=1e-14, atol=0)
    else:
        assert not torch.allclose(pulled, alone, rtol=1e-6)


def test_dittos_anchor_is_the_global_model_of_this_round():
    """With an overwhelming pull the personal model goes where the *received* model is, not where it was at first."""
    source = federation(4, rate=1e-4)
    _, before, _ = run(Ditto(num_local_steps=30, penalty=5000.0), source, 5)
    _, _, personal = run(Ditto(num_local_steps=30, penalty=5000.0), source, 6)
    received = before.server.params
    assert (distance(personal, received) < 0.2 * distance(starting_point(source), received)).all()


def test_fedprox_without_a_penalty_is_fedavg():
    source = federation(5)
    held, free = run(FedProx(num_local_steps=4, penalty=0.0), source, 5), run(FedAvg(num_local_steps=4), source, 5)
    torch.testing.assert_close(held[1].server.params, free[1].server.params, rtol=1e-14, atol=0)


def test_fedprox_holds_clients_near_the_model_they_received():
    source = federation(5)
    start = starting_point(source)
    moved = [
        distance(sent_models(start, one_round(FedProx(num_local_steps=4, penalty=penalty), source)[0]), start)
        for penalty in (0.0, 50.0, 400.0)
    ]
    assert (moved[1] < moved[0]).all()
    assert (moved[2] < moved[1]).all()


def test_scaffold_with_one_step_of_everybody_is_fedavg():
    """The corrections c - c_i of a whole federation cancel in the mean of one step."""
    source = federation(5)
    corrected, plain = (run(method, source, 6) for method in (Scaffold(1), FedAvg(1, weighting="equal")))
    torch.testing.assert_close(corrected[1].server.params, plain[1].server.params, rtol=1e-12, atol=0)


def test_scaffold_goes_to_the_optimum_of_all_and_fedavg_to_one_of_the_fast():
    """Sum of quadratics 1/sigma_m^2 (x - z_m)^2: many local steps draw FedAvg away, the corrections do not (Sec. 4)."""
    source = federation(5, rate=4e-4)
    precision = 1.0 / source.intra_variance.unsqueeze(-1)
    best = (precision * source.local_estimate).sum(0) / precision.sum()
    gaps = [
        distance(run(method, source, 200)[1].server.params, best).item()
        for method in (Scaffold(10), FedAvg(10, weighting="equal"))
    ]
    assert gaps[0] < 1e-6 < 1e-3 < gaps[1]


def test_pfedbayes_without_noise_and_pull_trains_each_client_alone():
    """A distribution that is a point, on which the shared one has no hold: Adam's steps on the client's own rows."""
    source = federation(5)
    clients, point = torch.arange(5), {"tempering": 0.0, "initial_deviation": 1e-12, "num_inner_steps": 1}
    _, kept = one_round(PFedBayes(num_local_steps=6, adam_learning_rate=0.02, **point), source)
    task = source.task(clients, 1)
    task.optimiser, task.learning_rate = Adam(), 0.02
    alone = descend(task, starting_point(source).expand(5, -1), 6)
    torch.testing.assert_close(kept.own.params, alone, rtol=1e-9, atol=0)


def test_pfedbayes_tempering_holds_clients_near_what_they_share():
    source = federation(5)
    gaps = []
    for tempering in (0.0, 1.0, 20.0):
        method = PFedBayes(num_local_steps=40, adam_learning_rate=0.02, tempering=tempering)
        upload, kept = one_round(method, source)
        gaps.append(distance(kept.own.params, starting_point(source) + upload.change))
    assert (gaps[1] < 0.95 * gaps[0]).all()
    assert (gaps[2] < 0.95 * gaps[1]).all()


@pytest.mark.parametrize(("zeta", "num_local_steps"), [(0.7, 300), (2.0, 200)])
def test_pfedbayes_finds_the_posterior_of_a_quadratic_loss(zeta, num_local_steps):
    """At w = N(nu, tau^2) the best q has precision 1/tau^2 + 1/(zeta s^2), and leans towards nu by zeta s^2 over
    (tau^2 + zeta s^2); w follows q by one step for its twenty, and is taken as it is in the end.
    """
    source = federation(60, examples=(2, 4))
    method = PFedBayes(num_local_steps=num_local_steps, num_inner_steps=20, tempering=zeta, initial_deviation=0.5)
    upload, kept = one_round(method, source)
    nu = starting_point(source) + upload.change
    tau = torch.nn.functional.softplus(method.start(nu[0], source.population).rho + upload.rho_change)
    noise = zeta * source.intra_variance.unsqueeze(-1)
    deviation = (1 / tau**2 + 1 / noise).rsqrt()
    assert (deviation / tau).mean() < 0.6
    assert torch.nn.functional.softplus(kept.rho).mean() == pytest.approx(deviation.mean().item(), rel=0.12)
    # Each mean is noisy; all of them together lean as far as they should.
    gap = nu - source.local_estimate
    found = ((kept.own.params - source.local_estimate) * gap).sum() / gap.square().sum()
    exact = (noise / (tau**2 + noise) * gap.square()).sum() / gap.square().sum()
    assert found.item() == pytest.approx(exact.item(), abs=0.015)


def test_pfedmes_penalty_moves_the_personal_model():
    source = federation(5)
    gaps = []
    for penalty in (0.0, 15.0, 200.0):
        upload, kept = one_round(PFedMe(num_local_steps=3, penalty=penalty), source)
        gaps.append(distance(kept.params, sent_models(starting_point(source), upload)))
    assert (gaps[1] < gaps[0]).all()
    assert (gaps[2] < gaps[1]).all()


def test_pfedme_keeps_theta_which_is_neither_its_w_nor_plain_descent():
    source = federation(5)
    method = PFedMe(num_local_steps=3)
    upload, kept = one_round(method, source)
    clients, start = torch.arange(5), starting_point(source).expand(5, -1)
    plain, sent = descend(source.task(clients, 1), start, 3 * method.num_inner_steps), sent_models(start, upload)
    assert (distance(kept.params, sent) > 1e-3).all()
    assert (distance(kept.params, plain) > 1e-5).all()
    assert (distance(sent, start) > 1e-5).all()
    # θ is ahead of w on the way to the client's own optimum; w follows it
    own = source.local_estimate
    assert (distance(kept.params, own) < distance(sent, own)).all()
    assert (distance(sent, own) < distance(start, own)).all()


def test_pfedme_evaluates_theta():
    source = federation(5)
    _, state, personal = run(PFedMe(num_local_steps=3), source, 4)
    assert torch.equal(personal, state.memory.params)
    assert (distance(personal, state.server.params) > 1e-3).all()


def test_pfedme_without_a_penalty_is_plain_descent_and_leaves_w_alone():
    source = federation(5)
    upload, kept = one_round(PFedMe(num_local_steps=3, num_inner_steps=4, penalty=0.0), source)
    start = starting_point(source).expand(5, -1)
    assert (upload.change == 0).all()
    expected = descend(source.task(torch.arange(5), 1), start, 12)
    torch.testing.assert_close(kept.params, expected, rtol=1e-14, atol=0)


def test_pfedmes_inner_steps_reach_the_moreau_envelopes_minimiser():
    """θ of one long inner problem: (z/σ² + λw) / (1/σ² + λ)."""
    source = federation(5)
    _, kept = one_round(PFedMe(num_local_steps=1, num_inner_steps=2000, penalty=15.0), source)
    precision = 1.0 / source.intra_variance.unsqueeze(-1)
    expected = (precision * source.local_estimate + 15.0 * starting_point(source)) / (precision + 15.0)
    torch.testing.assert_close(kept.params, expected, rtol=1e-12, atol=0)


def test_perfedavg_is_not_fedavg_nor_two_of_its_steps():
    source = federation(5)
    clients, start = torch.arange(5), starting_point(source).expand(5, -1)
    upload, _ = one_round(PerFedAvg(num_local_steps=3), source)
    for steps in (3, 6):
        plain = descend(source.task(clients, 1), start, steps)
        assert (distance(sent_models(start, upload), plain) > 1e-4).all()


def test_perfedavg_restores_w_after_the_inner_step():
    """One step: w − β∇f(w − α∇f(w)); with f quadratic, the distance to z shrinks by 1 − c(1 − c), c = η/σ²."""
    source = federation(5)
    upload, _ = one_round(PerFedAvg(num_local_steps=1), source)
    share = source.learning_rate / source.intra_variance.unsqueeze(-1)
    gap = starting_point(source) - source.local_estimate
    expected = source.local_estimate + gap * (1 - share * (1 - share))
    torch.testing.assert_close(sent_models(starting_point(source), upload), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("form", ["paper", "exact"])
@pytest.mark.parametrize("variances", ["estimated", "known"])
def test_smoothing_by_participation_is_none_where_everybody_takes_part(form, variances):
    source = federation(6)
    smoothed, plain, half = (
        run(SelfFL(form=form, variances=variances, smoothing=smoothing), source, 8)
        for smoothing in ("participation", 1.0, 0.5)
    )
    assert torch.equal(smoothed[1].server.params, plain[1].server.params)
    assert torch.equal(smoothed[2], plain[2])
    assert not torch.allclose(half[1].server.params, plain[1].server.params, rtol=1e-6)


def test_smoothing_by_participation_is_the_share_of_clients_that_answered():
    source = federation(10)
    clients = torch.tensor([0, 4, 5])
    named, number = (SelfFL(smoothing=smoothing) for smoothing in ("participation", 0.3))
    upload, _ = one_round(named, source, clients)
    server = named.start(starting_point(source), source.population)
    mine = named.server_round(server, clients, upload).params
    assert torch.equal(mine, number.server_round(server, clients, upload).params)
    mean = upload.params.mean(0)  # nothing is known yet, so equal weights
    torch.testing.assert_close(mine, 0.7 * server.params + 0.3 * mean, rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", ["self-fl", "self-fl-exact", "self-fl-augmented"])
@pytest.mark.parametrize("variances", ["estimated", "known"])
def test_all_others_are_the_cohort_where_everybody_takes_part(name, variances):
    source = federation(6)
    cohort, everyone = (
        run(algorithm(name, others=others, variances=variances), source, 8) for others in ("cohort", "all")
    )
    torch.testing.assert_close(everyone[2], cohort[2], rtol=1e-12, atol=0)
    torch.testing.assert_close(everyone[1].server.params, cohort[1].server.params, rtol=1e-12, atol=0)
    sampled = [
        run(algorithm(name, others=others, variances=variances), source, 8, participation=0.5)[2]
        for others in ("cohort", "all")
    ]
    assert not torch.allclose(*sampled, rtol=1e-6)


def test_both_forms_agree_where_clients_do_not_differ():
    """D11: at σ_0² = 0 the paper's form is the exact one."""
    source = federation(6, inter_variance=0.0)
    paper, exact = (run(SelfFL(form=form, variances="known"), source, 8)[2] for form in ("paper", "exact"))
    assert torch.equal(paper, exact)
    source = federation(6, inter_variance=0.5)
    paper, exact = (run(SelfFL(form=form, variances="known"), source, 8)[2] for form in ("paper", "exact"))
    assert not torch.allclose(paper, exact, rtol=1e-6)


def test_exact_self_fl_takes_more_steps_than_the_papers_form_where_clients_differ():
    """P_m < S_m: others are worth less, so that the client goes further on its own rows."""
    source = federation(6, inter_variance=0.5)
    steps = []
    for form in ("paper", "exact"):
        upload, _ = one_round(SelfFL(form=form, variances="known", max_local_steps=1000), source)
        steps.append(upload.num_local_steps)
    assert (steps[1] > steps[0]).all()


def test_self_fl_comes_near_the_fl_optimum():
    """Proposition 1: with everybody in and known variances, θ_m tends to Eq. (3)'s mean, but for O(M^-1/2)."""
    source = federation(40, num_params=1, inter_variance=0.05, rate=1e-5)
    method = SelfFL(variances="known", max_local_steps=10**6)
    _, _, personal = run(method, source, 15)
    estimate, intra = source.local_estimate, source.intra_variance.unsqueeze(-1)
    weight = 1.0 / (source.inter_variance + intra)
    others, mean = weight.sum() - weight, (weight * estimate).sum() - weight * estimate
    expected = (estimate / intra + mean) / (1.0 / intra + others)
    error = (personal - expected).abs().mean()
    assert error < 0.25 * (estimate - expected).abs().mean()  # the local optimum is no answer
    assert error < 0.1 * (starting_point(source) - expected).abs().mean()


def test_augmented_self_fl_uploads_its_optimum_and_evaluates_the_early_stopped_model():
    source = federation(5)
    method = algorithm("self-fl-augmented", initial_steps=3, tolerance=1e-9)
    upload, kept = one_round(method, source)
    torch.testing.assert_close(upload.params, source.local_estimate, rtol=1e-6, atol=0)
    early = descend(source.task(torch.arange(5), 1), starting_point(source).expand(5, -1), 3)
    torch.testing.assert_close(kept.personal_params, early, rtol=1e-14, atol=0)
    assert torch.equal(upload.personal_params, kept.personal_params)
    personal = method.personal(starting_point(source), kept, source.task(torch.arange(5), 1))
    assert torch.equal(personal, kept.personal_params)


def test_a_cohort_of_one_keeps_the_last_inter_variance():
    source = federation(4)
    method = SelfFL()
    together, alone = torch.arange(4), torch.tensor([2])
    upload, _ = one_round(method, source)
    server = method.server_round(method.start(starting_point(source), Population(4)), together, upload)
    assert server.inter_variance > 0
    upload, _ = one_round(method, source, alone)
    assert method.server_round(server, alone, upload).inter_variance == server.inter_variance


def test_known_variances_stay_known():
    source = federation(6)
    _, state, _ = run(SelfFL(variances="known"), source, 5, participation=0.5)
    assert torch.equal(state.server.inter_variance, source.inter_variance)
    assert torch.equal(state.server.intra_variance, source.intra_variance)


# ------------------------------------------------------------------------------------------------ Self-FL's components

OFF = {"adaptive_start": False, "adaptive_steps": False, "uncertainty_weights": False}


def global_models(method, source, rounds=8, participation=0.5):
    """After every round."""
    found = []
    run(method, source, rounds, participation=participation, on_round=lambda report: found.append(report.server.params))
    return torch.stack(found)


@pytest.mark.parametrize("participation", [1.0, 0.5, 0.15])
@pytest.mark.parametrize("variances", ["estimated", "known"])
def test_self_fl_without_its_components_is_fedavg(variances, participation):
    """D13, but for the order in which models are added."""
    source = federation(7, rates_differ=True, resample=True)
    bare = SelfFL(variances=variances, initial_steps=6, smoothing=1, **OFF)
    plain = FedAvg(num_local_steps=6)
    found = (global_models(method, source, participation=participation) for method in (bare, plain))
    torch.testing.assert_close(*found, rtol=1e-13, atol=0)


@pytest.mark.parametrize("component", OFF)
def test_each_component_of_self_fl_does_something(component):
    source = federation(7, resample=True)
    bare = SelfFL(initial_steps=6, smoothing=1, **OFF)
    one, all_but_one = replace(bare, **{component: True}), SelfFL(initial_steps=6, smoothing=1, **{component: False})
    for method, other in ((bare, one), (all_but_one, SelfFL(initial_steps=6, smoothing=1))):
        assert not torch.allclose(global_models(method, source), global_models(other, source), rtol=1e-6)


def test_self_fl_without_adaptive_steps_takes_its_initial_ones():
    reports = []
    run(SelfFL(initial_steps=7, adaptive_steps=False), federation(6), 8, on_round=reports.append)
    assert all(report.upload.num_local_steps.tolist() == [7] * 6 for report in reports)


# ------------------------------------------------------------------------------------------------------------ clusters


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"variances": "known"},
        {"form": "exact", "variance_scale": "mean", "smoothing": 0.5},
        {"uncertainty_weights": False},
    ],
)
@pytest.mark.parametrize("others", ["cohort", "all"])
def test_clusters_of_one_client_are_self_fl_where_everybody_takes_part(others, options):
    source = replace(federation(6, rates_differ=True, resample=True), num_clusters=6)
    single, plain = (
        run(kind(initial_steps=5, others=others, **options), source, 8)[1:] for kind in (SelfFLCluster, SelfFL)
    )
    torch.testing.assert_close(single[0].server.params, plain[0].server.params, rtol=1e-12, atol=0)
    torch.testing.assert_close(single[0].server.inter_variance, plain[0].server.inter_variance, rtol=1e-12, atol=0)
    torch.testing.assert_close(single[1], plain[1], rtol=1e-12, atol=0)
    grouped = run(SelfFLCluster(initial_steps=5, others=others, **options), replace(source, num_clusters=2), 8)[2]
    assert not torch.allclose(grouped, plain[1], rtol=1e-6)


def test_clusters_by_hand():
    """σ_0² = 1; clients 0 and 1 (σ² = 2 and 6) in cluster 0, client 2 (σ² = 3) in cluster 1.

    Both of cluster 0 answer, with 4 and 8: 1/2 : 1/6 gives 5, σ_c² = 3/2. Nobody else is there: the model is 5. Then
    client 2 answers with −4; cluster 0's representative is kept. Weights 2/5 and 1/4: (2 − 1)/(13/20) = 20/13. Then
    client 1 alone, with 2: its cluster is now 2 with σ_c² = 6, and weights 1/7 and 1/4 give (2/7 − 1)/(11/28) = −20/11.
    """
    stated = Population(
        3,
        torch.tensor([2.0, 6.0, 3.0], dtype=torch.float64),
        torch.tensor(1.0, dtype=torch.float64),
        torch.tensor([0, 0, 1]),
    )
    method = SelfFLCluster(variances="known", smoothing=1)
    server = method.start(torch.tensor([100.0], dtype=torch.float64), stated)
    assert server.cluster_variance.tolist() == [1.5, 3.0]
    upload, _ = one_round(SelfFL(variances="known"), federation(3, num_params=1))
    for clients, models, expected in (
        ([0, 1], [4.0, 8.0], 5.0),
        ([2], [-4.0], 20 / 13),
        ([1], [2.0], -20 / 11),
    ):
        answer = replace(
            upload,
            params=torch.tensor(models, dtype=torch.float64).unsqueeze(-1),
            intra_variance=stated.intra_variance[clients],
            num_examples=torch.ones(len(clients), dtype=torch.float64),
        )
        server = method.server_round(server, torch.tensor(clients), answer)
        assert server.params.item() == pytest.approx(expected, rel=1e-14)
    assert server.cluster_params.flatten().tolist() == [2.0, -4.0]
    assert server.cluster_variance.tolist() == [6.0, 3.0]
    # 1/S_m is the other cluster's σ_0² + σ_c²
    assert method.broadcast(server, torch.tensor([0, 2])).others_variance.tolist() == pytest.approx([4.0, 7.0])


def test_clusters_by_variance_follow_what_clients_report():
    """Nobody known: one cluster. Then shares of equal size by rank; and a client can move."""
    method = SelfFLCluster(clusters="variance", num_clusters=3)
    unknown = torch.nan
    for variances, clusters in (
        ([unknown] * 4, [0, 0, 0, 0]),
        ([5.0, 1.0, 3.0, 9.0, 2.0, 7.0], [1, 0, 1, 2, 0, 2]),
        ([5.0, 1.0, 3.0, 0.5, 2.0, 7.0], [2, 0, 1, 0, 1, 2]),
        ([5.0, unknown, 1.0, 6.0], [1, 1, 0, 2]),  # the mean of the known, 4, is below 5
        ([0.1] * 3 + [unknown], [0, 0, 0, 0]),  # whose mean rounds to more than 0.1
    ):
        assert method.quantiles(torch.tensor(variances, dtype=torch.float64)).tolist() == clusters
    seen = []
    run(method, federation(9, resample=True), 10, participation=0.5, on_round=lambda r: seen.append(r.server.cluster))
    assert seen[0].tolist() == [0] * 9
    assert sorted(set(seen[-1].tolist())) == [0, 1, 2]
    assert any((now != later).any() for now, later in itertools.pairwise(seen[-4:]))


# ----------------------------------------------------------------------------------------------------- body and head


@pytest.mark.parametrize("participation", [1.0, 0.4])
@pytest.mark.parametrize(
    ("mixed", "shared", "alone"),
    [
        (FedPer(num_local_steps=4), FedAvg(num_local_steps=4), Local(num_local_steps=4)),
        (FedRep(num_local_steps=4, head_steps=7), FedAvg(num_local_steps=4, weighting="equal"), Local(7)),
    ],
    ids=["fedper", "fedrep"],
)
def test_where_coordinates_do_not_mix_the_body_is_fedavgs_and_the_head_is_local(mixed, shared, alone, participation):
    """The Gaussian loss is a sum over coordinates; FedRep's head has its own number of steps, and the plain mean."""
    source = federation(6, rates_differ=True)
    runs = [run(method, source, 6, participation=participation) for method in (mixed, shared, alone)]
    body, head = slice(0, -1), slice(-1, None)
    torch.testing.assert_close(runs[0][1].server.params[body], runs[1][1].server.params[body], rtol=1e-13, atol=0)
    torch.testing.assert_close(runs[0][2][:, body], runs[1][2][:, body], rtol=1e-13, atol=0)
    torch.testing.assert_close(runs[0][2][:, head], runs[2][2][:, head], rtol=1e-13, atol=0)
    assert torch.equal(runs[0][1].server.params[head], starting_point(source)[head])


@pytest.mark.parametrize("name", ["fedper", "fedrep"])
def test_nothing_of_a_head_leaves_its_client(name):
    source, sent = federation(6), []
    run(algorithm(name, num_local_steps=4), source, 4, on_round=lambda report: sent.append(report.upload.change))
    for change in sent:
        assert change[-1] == 0


@pytest.mark.parametrize("weighting", ["examples", "equal"])
def test_fedbabu_is_fedavg_of_a_module_whose_head_is_frozen_and_then_fine_tuned(weighting):
    """The head does not require gradients, so that FedAvg neither trains nor sends it; then plain steps of all."""
    torch.manual_seed(4)
    module = nn.Sequential(nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 10)).double()
    fed = load("digits", num_clients=5, seed=2)
    fed = replace(fed, train=replace(fed.train, features=fed.train.features.double()))

    def source(module):
        return ModelSource(fed, FlatModel(module), nn.functional.cross_entropy, 0.1, 5, seed=1)

    frozen = copy.deepcopy(module)
    frozen[2].requires_grad_(False)
    whole, bodies = source(module), source(frozen)
    engine, state, _ = run(
        FedBABU(num_local_steps=4, weighting=weighting, fine_tune_epochs=2), whole, 3, start=whole.model.params
    )
    _, wanted, _ = run(FedAvg(4, weighting=weighting), bodies, 3, start=bodies.model.params)
    size = bodies.model.num_parameters
    torch.testing.assert_close(state.server.params[:size], wanted.server.params, rtol=1e-12, atol=1e-14)
    assert torch.equal(state.server.params[size:], whole.model.params[size:])
    everyone = torch.arange(5)
    task = whole.task(everyone, 4)
    tuned = descend(task, state.server.params.expand(5, -1), 2 * task.steps_per_epoch)
    torch.testing.assert_close(engine.personal(state, is_over=True), tuned, rtol=1e-12, atol=1e-14)
    assert torch.equal(engine.personal(state), state.server.params.expand(5, -1))


def test_the_head_is_the_last_layer_or_those_named():
    source = replace(federation(6), keeps_head=False)
    last, named, other = (
        run(FedPer(num_local_steps=4, head=head), source, 4)[1].server.params for head in ("", "head", "body")
    )
    start = starting_point(source)
    assert torch.equal(last, named)
    assert torch.equal(other[:-1], start[:-1])  # "body" names the module of the layer "body.0"
    assert not torch.isclose(other[-1], start[-1], rtol=1e-6)


# ----------------------------------------------------------------------------------------- features and their heads


def balanced_federation():
    """Four clients with twelve rows each, four of every class."""
    source = network_federation(4, seed=3)
    generator = torch.Generator().manual_seed(9)
    return replace(
        source,
        features=torch.randn(48, 4, generator=generator, dtype=torch.float64),
        labels=torch.arange(48) % 3,
        offset=torch.arange(0, 49, 12),
    )


def test_where_every_client_has_as_many_rows_of_each_class_fedrods_model_is_fedavgs():
    """A number that is added to all scores leaves softmax as it is."""
    source = balanced_federation()
    _, state, personal = run(FedRoD(num_local_steps=4), source, 4, participation=0.5)
    _, wanted, _ = run(FedAvg(num_local_steps=4), source, 4, participation=0.5)
    torch.testing.assert_close(state.server.params, wanted.server.params, rtol=1e-10, atol=1e-12)
    assert ((personal - state.server.params).norm(dim=-1) > 1e-2).equal(state.num_rounds > 0)
    uneven, shared = network_federation(4, seed=3), []
    for method in (FedRoD(num_local_steps=4), FedAvg(num_local_steps=4)):
        shared.append(run(method, uneven, 4, participation=0.5)[1].server.params)
    assert (shared[0] - shared[1]).norm() > 0.05


def test_rows_of_a_single_class_teach_fedrods_shared_model_nothing():
    """Balanced softmax is sure of them whatever the scores are; the personal head learns them."""
    source = balanced_federation()
    source = replace(source, labels=torch.full_like(source.labels, 2))
    upload, memory = one_round(FedRoD(num_local_steps=5), source)
    assert upload.change.abs().max() == 0.0
    assert (memory.offset.norm(dim=-1) > 0.05).all()


@pytest.mark.parametrize("weighting", ["examples", "equal"])
def test_the_first_round_of_feddbe_is_fedavgs_and_its_centre_is_the_mean_feature(weighting):
    source = network_federation(5)
    engine, state, personal = run(FedDBE(num_local_steps=4, weighting=weighting), source, 1)
    _, wanted, _ = run(FedAvg(num_local_steps=4, weighting=weighting), source, 1)
    assert torch.equal(state.server.params, wanted.server.params)
    assert torch.equal(personal, state.server.params.expand(5, -1))
    later = engine.advance(state, 3)
    assert torch.equal(later.server.centre, state.server.centre)
    # A client with as many rows as three minibatches hold sees each of them once in an epoch.
    sizes = source.offset.diff()
    whole = replace(source, offset=torch.arange(0, 16, 3)[: len(sizes) + 1])  # three rows each, one minibatch
    _, state, _ = run(FedDBE(num_local_steps=4, weighting=weighting), whole, 1)
    upload, _ = one_round(FedAvg(num_local_steps=4), whole)
    models = sent_models(whole.params, upload)
    model = whole.source.model
    means = [model.load(own)[:-1](whole.features[3 * m : 3 * m + 3]).mean(0).detach() for m, own in enumerate(models)]
    torch.testing.assert_close(state.server.centre, torch.stack(means).mean(0), rtol=1e-12, atol=1e-14)


def test_feddbes_penalty_pulls_mean_features_to_the_centre():
    """The stronger, the nearer is the mean feature of every client's rows, under the model that it sends."""
    source = network_federation(6, rate=0.05)
    state = run(FedDBE(num_local_steps=4), source, 1)[1]
    clients, gaps = torch.arange(6), []
    for penalty in (0.0, 1.0, 5.0):
        method = FedDBE(num_local_steps=30, penalty=penalty)
        upload, _ = method.client_round(method.broadcast(state.server, clients), state.memory, source.task(clients, 2))
        models = sent_models(state.server.params, upload)
        gaps.append((method.mean_features(models, source.task(clients, 2)) - state.server.centre).norm(dim=-1))
    assert (gaps[1] < gaps[0]).all()
    assert (gaps[2] < 0.9 * gaps[1]).all()


# ------------------------------------------------------------------------------------------------------------- mixing


@pytest.mark.parametrize("mixed_layers", [0, 1, 2])
def test_fedala_that_does_not_learn_its_mixture_is_fedavg(mixed_layers):
    """W begins at 1 everywhere, which is the global model."""
    source = federation(6, rates_differ=True)
    still = FedALA(num_local_steps=4, mixed_layers=mixed_layers, mixing_rate=1e-30)
    _, state, personal = run(still, source, 5, participation=0.5)
    _, wanted, _ = run(FedAvg(num_local_steps=4), source, 5, participation=0.5)
    torch.testing.assert_close(state.server.params, wanted.server.params, rtol=1e-13, atol=0)
    torch.testing.assert_close(personal, state.server.params.expand(6, -1), rtol=1e-14, atol=0)


def test_fedala_learns_the_mixture_that_is_nearest_to_what_the_client_wants():
    """Of the Gaussian loss: W = (z − θ)/(Θ − θ), number by number, where that is a mixture, else an end of it."""
    source = federation(40, seed=5)
    method = FedALA(num_local_steps=3, mixed_layers=0, mixing_rate=1e-2, first_passes=4000)
    engine = CohortEngine(method, source)
    state = engine.advance(engine.start(starting_point(source)), 1)
    own, shared = state.memory.params, state.server.params
    found = engine.personal(state)
    expected = own + (shared - own) * ((source.local_estimate - own) / (shared - own)).clamp(0.0, 1.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-3)
    is_end = [(found - end).abs() < 1e-9 for end in (own, shared)]
    assert all(each.sum() > 10 for each in (*is_end, ~is_end[0] & ~is_end[1]))


def test_fedala_is_evaluated_at_the_mixture_that_the_next_round_starts_from():
    source = network_federation(5)
    engine = CohortEngine(FedALA(num_local_steps=2), source)
    state = engine.advance(engine.start(source.params), 3)
    everyone, asked = torch.arange(5), []
    task = source.task(everyone, 4)
    learn = task.gradient
    task.gradient = lambda params, *more: (asked.append(params.clone()), learn(params, *more))[1]
    broadcast = engine.algorithm.broadcast(state.server, everyone)
    engine.algorithm.client_round(broadcast, state.memory, task)
    torch.testing.assert_close(asked[-2], engine.personal(state), rtol=1e-12, atol=1e-14)
    assert ((engine.personal(state) - state.server.params).norm(dim=-1) > 1e-3).all()


def test_apfl_with_nothing_of_its_own_is_fedavg():
    source = federation(6, rates_differ=True)
    mixed = run(APFL(num_local_steps=4, mixing=0, adaptive=False), source, 6, participation=0.5)
    shared = run(FedAvg(num_local_steps=4, weighting="equal"), source, 6, participation=0.5)
    assert torch.equal(mixed[1].server.params, shared[1].server.params)
    torch.testing.assert_close(mixed[2], shared[2], rtol=1e-14, atol=0)


def test_apfl_with_nothing_shared_is_local_training():
    source = federation(6, rates_differ=True)
    mixed = run(APFL(num_local_steps=4, mixing=1, adaptive=False), source, 6)[2]
    torch.testing.assert_close(mixed, run(Local(num_local_steps=4), source, 6)[2], rtol=1e-12, atol=0)


def test_apfls_share_goes_down_its_own_gradient():
    """α ← α − η ∂f(αv + (1 − α)w)/∂α, and v ← v − η ∂f(αv + (1 − α)w)/∂v, both by autograd."""
    source, clients = federation(5), torch.arange(5)
    method = APFL(num_local_steps=1, mixing=0.6)
    _, state, _ = run(replace(method, num_local_steps=4), source, 2)
    own, mixing = state.memory.own.params.requires_grad_(), state.memory.mixing.requires_grad_()
    mixture = mixing.unsqueeze(-1) * own + (1 - mixing.unsqueeze(-1)) * state.server.params
    loss = ((mixture - source.local_estimate).square().sum(-1) / source.intra_variance / 2).sum()
    slope, slope_of_share = torch.autograd.grad(loss, (own, mixing))
    with torch.no_grad():
        broadcast = method.broadcast(state.server, clients)
        _, kept = method.client_round(broadcast, state.memory, source.task(clients, 4))
        torch.testing.assert_close(kept.own.params, own - source.learning_rate * slope, rtol=1e-12, atol=0)
        torch.testing.assert_close(kept.mixing, mixing - source.learning_rate * slope_of_share, rtol=1e-12, atol=0)
        assert ((kept.mixing - mixing).abs() > 1e-4).all()
        assert ((kept.mixing > 0) & (kept.mixing < 1)).all()


def test_apfls_share_grows_where_clients_differ_within_bounds():
    shares = []
    for spread in (0.0, 1.0):
        source = federation(8, inter_variance=spread, examples=(30, 40), rate=5e-4)
        shares.append(run(APFL(num_local_steps=5), source, 12)[1].memory.mixing)
    assert (shares[0] < 0.5).all()
    assert (shares[1] > 0.7).all()
    assert shares[1].max() == 1
    assert shares[1].unique().numel() == 8
    fixed = run(APFL(num_local_steps=5, adaptive=False, mixing=0.3), federation(8), 4)[1]
    assert (fixed.memory.mixing == 0.3).all()
