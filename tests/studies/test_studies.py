"""The studies: how a number gets its error, a claim its verdict, and what each study finds when it runs."""

import csv
import dataclasses
import json
import math
import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from selffl.algorithms import FedAvg
from selffl.engines.cohort import CohortEngine
from selffl.maths.significance import FRESH_DRAWS
from selffl.reports.record import save_study
from selffl.reports.runner import run_studies
from selffl.studies import DEMO, STUDIES, arms, convergence, limits, synthetic
from selffl.studies.result import (
    Estimate,
    Job,
    above_zero,
    all_above_zero,
    in_every_case,
    in_parts,
    sign,
    verdict_word,
    whose,
    within,
)
from selffl.studies.synthetic import HETEROGENEOUS, HOMOGENEOUS, is_lower, lead, limit, methods, paired, run_method


def by_hand(estimate, variance, inter_variance, form):
    """Eqs. (2) and (3) for one federation, client by client, and their exact counterparts (D11)."""
    weight = 1 / (inter_variance + variance)
    others = np.array([sum(weight[k] for k in range(len(weight)) if k != m) for m in range(len(weight))])
    start = np.array([sum(weight[k] * estimate[k] for k in range(len(weight)) if k != m) for m in range(len(weight))])
    start = start / others
    precision = others if form == "paper" else 1 / (inter_variance + 1 / others)
    mean = (estimate / variance + precision * start) / (1 / variance + precision)
    return SimpleNamespace(
        weight=weight,
        others=others,
        centre=(weight * estimate).sum() / weight.sum(),
        mean=mean,
        gain=1 + variance * precision,
        right_side=precision / (1 / variance + precision),
    )


# ------------------------------------------------------------------------------------------------ numbers and verdicts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_estimate_is_the_mean_and_its_standard_error(dtype):
    values = 3.0 + torch.randn(57, generator=torch.Generator().manual_seed(1), dtype=dtype)
    found, exact = Estimate.of(values), values.to(torch.float64).numpy()
    assert found.mean == pytest.approx(exact.mean(), rel=1e-14)
    assert found.error == pytest.approx(exact.std(ddof=1) / math.sqrt(57), rel=1e-14)


def test_an_estimate_of_whole_numbers():
    found = Estimate.of(torch.tensor([1, 2, 6]))
    assert found.mean == 3.0
    assert found.error == pytest.approx(math.sqrt(7 / 3))


def test_one_repeat_has_no_standard_error():
    found = Estimate.of(torch.tensor([4.0]))
    assert found.mean == 4.0
    assert math.isnan(found.error)


@pytest.mark.parametrize(
    ("mean", "error", "text"),
    [
        (0.123456, 0.00098, "0.1235 ± 0.0010"),
        (-2.0, 0.5, "-2.0000 ± 0.5000"),
        (999.9, 1.0, "999.9000 ± 1.0000"),
        (123456.0, 789.0, "1.23e+05 ± 7.9e+02"),
        (-1000.0, 1.0, "-1.00e+03 ± 1.0e+00"),
        (0.00151, 0.000066, "1.51e-03 ± 6.6e-05"),
        (-1.2415e-05, 4.4677e-06, "-1.24e-05 ± 4.5e-06"),
    ],
)
def test_an_estimate_as_text(mean, error, text):
    assert str(Estimate(mean, error)) == text


def drawn(mean, error, count):
    return Estimate(mean, error, count, FRESH_DRAWS)


def test_an_estimate_is_significant_beyond_students_t():
    assert drawn(2.8, 1.0, 5).is_significant  # t of four degrees of freedom: 2.776
    assert not drawn(2.7, 1.0, 5).is_significant
    assert drawn(-1.98, 1.0, 200).is_significant  # of 199: 1.972
    assert not drawn(-1.96, 1.0, 200).is_significant
    assert not Estimate.of(torch.tensor([9.0]), test_per_train=FRESH_DRAWS).is_significant
    assert not drawn(9.0, math.nan, 5).is_significant


def test_repeats_that_split_the_same_rows_need_a_larger_difference():
    error = math.sqrt(1 + 5 / 9)  # times the plain one
    assert Estimate(2.8 * error, 1.0, 5, 1 / 9).is_significant
    assert not Estimate(2.7 * error, 1.0, 5, 1 / 9).is_significant
    assert drawn(2.8, 1.0, 5).is_significant
    assert not Estimate(2.8, 1.0, 5, 1 / 9).is_significant


def test_an_estimate_that_does_not_say_what_repeats_share_cannot_be_tested():
    with pytest.raises(ValueError, match="expected test_per_train"):
        _ = Estimate(2.8, 1.0, 5).p_value
    # Shifted or scaled, it is still the same repeats.
    assert Estimate(1.0, 1.0, 5, 0.25).shift_by(1.0).scale_by(2.0) == Estimate(4.0, 2.0, 5, 0.25)


def test_several_differences_are_decided_together():
    one = drawn(3.2, 1.0, 5)  # p = 0.033
    assert above_zero([one]) == ["holds"]
    assert above_zero([one, drawn(-9.0, 1.0, 5)]) == ["holds", "does not hold"]
    assert above_zero([one, drawn(0.1, 1.0, 5), drawn(math.nan, math.nan, 5)]) == ["inconclusive"] * 3
    assert all_above_zero([drawn(9.0, 1.0, 5)] * 2) == "holds"
    assert all_above_zero([drawn(9.0, 1.0, 5), drawn(0.1, 1.0, 5)]) == "inconclusive"
    assert all_above_zero([drawn(9.0, 1.0, 5), drawn(-9.0, 1.0, 5)]) == "does not hold"


@pytest.mark.parametrize(
    ("verdicts", "parts", "every"),
    [
        (["holds", "holds"], "holds", "holds"),
        (["holds", "inconclusive"], "holds in part", "inconclusive"),
        (["holds", "does not hold"], "holds in part", "does not hold"),
        (["inconclusive", "does not hold"], "does not hold", "does not hold"),
        (["holds in part", "does not hold"], "holds in part", "does not hold"),
        (["inconclusive"], "inconclusive", "inconclusive"),
    ],
)
def test_statements_of_several_parts_and_about_every_case(verdicts, parts, every):
    assert (in_parts(verdicts), in_every_case(verdicts)) == (parts, every)


def test_a_statement_is_decided_by_its_interval_on_either_side():
    """By the interval itself: the mean ± 2.776 standard errors, of four degrees of freedom."""
    for mean in (-9.0, -3.1, -2.7, 0.0, 2.7, 3.1, 9.0):
        gap, (low, high) = drawn(mean, 1.0, 5), (mean - 2.776, mean + 2.776)
        assert sign(gap) == ("holds" if low > 0 else "does not hold" if high < 0 else "inconclusive")
        inside, outside = low > -6 and high < 6, low > 6 or high < -6
        assert within(gap, 6.0) == ("holds" if inside else "does not hold" if outside else "inconclusive")


def test_whose_a_statement_is_and_how_its_verdict_is_called():
    assert whose("figure 1", "One.") == "paper"
    assert whose("figure 1", "Not in the paper: two.") == whose("beyond the paper", "Three.") == "own"
    assert whose("not in the paper", "Target: four.") == "target"
    assert [verdict_word("Target: x.", verdict) for verdict in ("holds", "does not hold", "inconclusive")] == [
        "met",
        "not met",
        "inconclusive",
    ]
    assert verdict_word("One.", "holds") == "holds"


def test_only_self_fl_auto_has_targets_and_its_own_studies_have_nothing_else():
    of_targets = [name for name in STUDIES if name.startswith(("auto-", "regimes-"))]
    assert len(of_targets) == 10
    assert all(STUDIES[name].paper == "not in the paper" for name in of_targets)


def test_pairing_cancels_what_repeats_share():
    shared = 100 * torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = 0.01 * torch.randn(50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = paired(shared, shared + 0.5 + noise)
    assert found.mean == pytest.approx(-0.5, abs=0.01)
    assert found.error < 0.002
    assert is_lower(found)
    assert not is_lower(paired(shared + 0.5 + noise, shared))


def test_lower_is_significantly_below_zero():
    assert is_lower(drawn(-2.8, 1.0, 5))
    assert not is_lower(drawn(-2.7, 1.0, 5))
    assert not is_lower(drawn(2.8, 1.0, 5))
    assert not is_lower(drawn(0.0, 0.0, 5))


OURS = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
WOBBLE = torch.tensor([0.1, -0.1, 0.1, -0.1], dtype=torch.float64)
FAR_ABOVE, FAR_BELOW, LEVEL = OURS + 1 + WOBBLE, OURS - 1 + WOBBLE, OURS + WOBBLE
NEAR = OURS + WOBBLE / 100  # surely


@pytest.mark.parametrize(
    ("baselines", "verdict"),
    [
        ([FAR_ABOVE], "holds"),
        ([FAR_ABOVE, FAR_ABOVE + 3], "holds"),
        ([LEVEL], "inconclusive"),
        ([FAR_ABOVE, LEVEL], "inconclusive"),
        ([FAR_BELOW], "does not hold"),
        ([FAR_ABOVE, FAR_BELOW], "does not hold"),
        ([LEVEL, FAR_BELOW, FAR_ABOVE], "does not hold"),
    ],
)
def test_a_lead_is_over_all_baselines(baselines, verdict):
    assert lead(OURS, baselines) == verdict


def test_a_lead_in_a_single_repeat_is_not_decided():
    assert lead(OURS[:1], [FAR_ABOVE[:1]]) == "inconclusive"
    assert lead(OURS[:1], [FAR_BELOW[:1]]) == "inconclusive"


def outcome(local_squared_error, local_error=OURS, global_error=OURS):
    return synthetic.Outcome(global_error, local_error, local_squared_error, torch.zeros(4), torch.zeros(0))


@pytest.mark.parametrize(
    ("local", "verdict"),
    [(FAR_BELOW, "does not hold"), (NEAR, "holds"), (LEVEL, "inconclusive"), (FAR_ABOVE, "does not hold")],
)
def test_the_papers_form_has_to_be_alike_to_learning_alone(local, verdict):
    outcomes = {(name, rate): outcome(OURS) for name in ("self-fl", "self-fl-exact") for rate in (0.1, 1.0)}
    outcomes["local", 1.0] = outcome(local)
    steady, alone = synthetic.heterogeneous_claims(HETEROGENEOUS, outcomes)
    assert steady.verdict == "holds"  # nothing changes with participation here
    assert alone.verdict == verdict


@pytest.mark.parametrize(
    ("sparse", "verdict"),
    [
        ((NEAR, NEAR), "holds"),
        ((NEAR, FAR_ABOVE), "holds in part"),
        ((FAR_BELOW, FAR_ABOVE), "does not hold"),
        ((LEVEL, LEVEL), "inconclusive"),  # no difference is seen, and a twentieth might be there
    ],
)
def test_insensitive_means_within_a_twentieth_in_both_errors(sparse, verdict):
    outcomes = {(name, 1.0): outcome(OURS) for name in ("self-fl", "self-fl-exact", "local")}
    outcomes |= {(name, 0.1): outcome(OURS, *sparse) for name in ("self-fl", "self-fl-exact")}
    assert synthetic.heterogeneous_claims(HETEROGENEOUS, outcomes)[0].verdict == verdict


@pytest.mark.parametrize(
    ("baselines", "perfedavg", "verdicts"),
    [
        (FAR_ABOVE, LEVEL, ["holds", "inconclusive"]),  # at full participation the two lead together
        (FAR_ABOVE, FAR_ABOVE + 1, ["holds in part", "holds"]),
        (FAR_BELOW, LEVEL, ["does not hold", "does not hold"]),
        (LEVEL, LEVEL, ["inconclusive", "inconclusive"]),
    ],
)
def test_the_homogeneous_claims_compare_with_every_baseline(baselines, perfedavg, verdicts):
    values = {"self-fl": OURS, "self-fl-exact": OURS, "perfedavg": perfedavg}
    values |= dict.fromkeys(("fedavg", "ditto", "pfedme"), baselines)
    outcomes = {(name, rate): outcome(value, value, value) for name, value in values.items() for rate in (0.1, 1.0)}
    assert [claim.verdict for claim in synthetic.homogeneous_claims(HOMOGENEOUS, outcomes)] == verdicts


# --------------------------------------------------------------------------------------------------------------- limits


@pytest.fixture(scope="module")
def limits_result():
    steps = []
    result = STUDIES["limits"].run(Job(quick=True, progress=lambda *step: steps.append(step)))
    assert [done for done, _, _ in steps] == list(range(7))
    assert {total for _, total, _ in steps} == {6}
    return result


def test_the_remarks_hold_where_they_do(limits_result):
    verdicts = {claim.text: claim.verdict for claim in limits_result.claims}
    assert [text[:10] for text in verdicts] == [f"Remark 2.{n}" for n in (1, 2, 3)]
    assert list(verdicts.values()) == ["holds in part", "holds", "holds"]
    assert "Of the exact form the same is true in 3 of 6." in limits_result.claims[2].evidence


def test_the_rows_say_which_check_fails(limits_result):
    failed = [(row["remark"], row["form"]) for row in limits_result.rows if not row["holds"]]
    assert failed == [("2.1", "paper"), ("2.1", "exact"), ("2.3", "exact"), ("2.3", "exact"), ("2.3", "exact")]
    for row in limits_result.rows:
        gap = abs(row["found"] - row["expected"]) / abs(row["expected"])
        assert row["relative_gap"] == pytest.approx(gap, rel=1e-12)
        assert row["holds"] == (gap <= row["tolerance"])
    assert [row["holds"] for row in limits_result.table] == ["yes" if r["holds"] else "no" for r in limits_result.rows]


@pytest.mark.parametrize("form", ["paper", "exact"])
def test_the_checks_of_remark_2_1_equal_plain_numpy(limits_result, form):
    rng = np.random.default_rng(0)
    estimate, variance = rng.normal(1.6, 1.0, 20), rng.uniform(0.5, 2.0, 20)
    sure = np.concatenate([[1e-6], variance[1:]])
    far, same = by_hand(estimate, variance, 1e9, form), by_hand(estimate, variance, 0.0, form)
    expert, shared = by_hand(estimate, sure, 0.5, form), by_hand(estimate, sure, 0.0, form)
    expected = [
        far.mean[0],
        variance[0] / far.gain[0],
        far.gain[0],
        far.centre,
        same.mean[0],
        same.centre,
        expert.mean[0],
        expert.gain[0],
        min(shared.gain[1], sure[1] / sure[0]),
        expert.gain[1],
    ]
    found = [row["found"] for row in limits_result.rows if (row["remark"], row["form"]) == ("2.1", form)]
    assert found == pytest.approx(expected, rel=1e-9)


def test_the_figure_shows_what_the_formula_says(limits_result):
    estimate = np.array([0.2, 0.9, 1.4, 1.8, 2.6, 3.2])
    variance = np.array([0.05, 0.4, 0.1, 0.8, 0.2, 0.4])
    for form, chart in zip(("paper", "exact"), limits_result.figures[0].charts, strict=True):
        assert form in chart.title
        *clients, centre = chart.series
        assert centre.is_reference
        for index, inter_variance in enumerate(centre.x):
            expected = by_hand(estimate, variance, inter_variance, form)
            assert [line.y[index] for line in clients] == pytest.approx(expected.mean.tolist(), rel=1e-9)
            assert centre.y[index] == pytest.approx(expected.centre, rel=1e-9)


def test_a_check_holds_up_to_its_tolerance():
    check = limits.Check("2.1", "", "", "paper", found=1.01, expected=1.0, tolerance=0.0101)
    assert check.gap == pytest.approx(0.01)
    assert check.holds
    assert not dataclasses.replace(check, tolerance=0.0099).holds
    assert not dataclasses.replace(check, found=math.nan).holds
    assert dataclasses.replace(check, found=0.0, expected=0.0).holds


# ---------------------------------------------------------------------------------------------------------- convergence

SMALL = convergence.Setting(num_clients=(5, 12), num_repeats=6)


@pytest.mark.parametrize("regime", convergence.REGIMES)
@pytest.mark.parametrize("num_clients", [5, 12, 40])
def test_q_is_the_largest_right_side_of_the_step_equation(regime, num_clients):
    clients = convergence.federation(SMALL, regime, num_clients)
    found = convergence.measure(SMALL, regime, num_clients)
    variance = clients.intra_variance.numpy()
    for repeat in range(SMALL.num_repeats):
        weight = 1 / (1.0 + variance[repeat])
        others = weight.sum() - weight
        q = (others / (1 / variance[repeat] + others)).max()  # Eq. (15)
        assert found.contraction[repeat].item() == pytest.approx(q, rel=1e-12)
    assert (found.decay <= found.contraction).all()
    assert (found.decay > 0).all()


@pytest.mark.parametrize(("regime", "low", "high"), [("constant", 0.03, 0.09), ("shrinking", 1 / 40, 3 / 40)])
def test_the_regimes_have_the_variances_they_promise(regime, low, high):
    variance = convergence.federation(SMALL, regime, 40).intra_variance
    assert low <= variance.min() < low + 0.1 * (high - low)
    assert high - 0.1 * (high - low) < variance.max() <= high


def plain_self_fl(estimate, variance, inter_variance, start, num_rounds):
    """Self-FL with variances known and one step each that lands on Eq. (8); models and global model by round."""
    weight = 1 / (inter_variance + variance)
    others = weight.sum() - weight
    keep = others / (1 / variance + others)
    model, personal, history = start, np.full(len(estimate), start), []
    for _ in range(num_rounds):
        begin = model - weight / others * (personal - model)
        personal = estimate + keep * (begin - estimate)
        model = (weight * personal).sum() / weight.sum()
        history.append((personal, model))
    return history


@pytest.mark.parametrize("regime", convergence.REGIMES)
def test_a_trajectory_equals_plain_numpy(regime):
    setting = convergence.Setting(num_repeats=4, smallest=1e-9)
    clients, found = convergence.federation(setting, regime, 8), convergence.measure(setting, regime, 8)
    errors = np.zeros(len(found.errors))
    for repeat in range(4):
        estimate, variance = clients.local_estimate[repeat, :, 0].numpy(), clients.intra_variance[repeat].numpy()
        goal = by_hand(estimate, variance, 1.0, "paper")
        history = plain_self_fl(estimate, variance, 1.0, 0.0, 1000)
        last, centre = history[-1]
        assert found.personal_floor[repeat].item() == pytest.approx(abs(last - goal.mean).max(), rel=1e-6)
        assert found.global_floor[repeat].item() == pytest.approx(abs(centre - goal.centre), rel=1e-6)
        errors += [abs(personal - goal.mean).max() / 4 for personal, _ in history[: len(errors)]]
    np.testing.assert_allclose(found.errors.numpy(), errors, rtol=1e-9)


def test_a_slope_is_the_power_it_was_made_from():
    sizes = (10, 30, 100, 300)
    noise = 1 + 0.01 * torch.randn(4, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = convergence.Slope.of(sizes, [3.0 * size**-0.7 * noise[i] for i, size in enumerate(sizes)])
    assert found.value == pytest.approx(-0.7, abs=0.01)
    assert found.low < -0.7 < found.high
    assert found.high - found.low < 0.01
    assert str(convergence.Slope(-0.512, -0.6, -0.401)) == "-0.51 [-0.60, -0.40]"


@pytest.fixture(scope="module")
def convergence_result():
    return STUDIES["convergence"].run(Job(quick=True))


@pytest.mark.slow
def test_the_decay_holds_and_a_quick_run_cannot_decide_the_rest(convergence_result):
    assert [claim.verdict for claim in convergence_result.claims] == ["holds", "inconclusive", "inconclusive"]
    assert "120 of 120 runs" in convergence_result.claims[0].evidence


def test_no_run_decays_slower_than_q(convergence_result):
    assert [(row["regime"], row["num_clients"]) for row in convergence_result.rows] == [
        (regime, size) for regime in ("constant", "shrinking") for size in (20, 60, 200)
    ]
    for row in convergence_result.rows:
        assert row["share_within_q"] == 1.0
        assert 0 < row["fitted_decay"] < row["q"] < 1
        assert row["repeats"] == 20


def test_a_decay_above_q_would_be_reported(monkeypatch):
    def slow(setting, regime, num_clients):
        repeats = torch.ones(setting.num_repeats, dtype=torch.float64)
        decay = torch.where(torch.arange(setting.num_repeats) == 3, 0.91, 0.8).to(torch.float64)
        return convergence.Trajectory(0.9 * repeats, decay, repeats / num_clients, repeats / num_clients, repeats[:5])

    monkeypatch.setattr(convergence, "measure", slow)
    result = STUDIES["convergence"].run(Job(quick=True))
    assert [claim.verdict for claim in result.claims] == ["does not hold", "holds", "holds"]
    assert "114 of 120" in result.claims[0].evidence
    assert [row["share_within_q"] for row in result.rows] == [0.95] * 6


def test_an_error_that_stays_would_be_reported(monkeypatch):
    def stuck(setting, regime, num_clients):
        repeats = torch.ones(setting.num_repeats, dtype=torch.float64)
        floor = repeats * num_clients ** (-0.3 if regime == "constant" else -0.9)
        return convergence.Trajectory(0.9 * repeats, 0.8 * repeats, floor, floor, repeats[:5])

    monkeypatch.setattr(convergence, "measure", stuck)
    result = STUDIES["convergence"].run(Job(quick=True))
    assert [claim.verdict for claim in result.claims] == ["holds", "does not hold", "holds"]


# ------------------------------------------------------------------------------------------------------------ synthetic


def test_errors_are_measured_against_the_truth():
    federation = SimpleNamespace(
        global_params=torch.tensor([[1.6]]), personal_params=torch.tensor([[[1.0], [2.0], [4.0]]])
    )
    found = synthetic.Outcome.of(
        federation, torch.tensor([[1.0]]), torch.tensor([[[1.5], [2.0], [2.0]]]), torch.zeros(1), torch.zeros(0)
    )
    assert found.global_error.tolist() == pytest.approx([0.6])
    assert found.local_error.tolist() == pytest.approx([2.5 / 3])
    assert found.local_squared_error.tolist() == pytest.approx([4.25 / 3])


@pytest.mark.parametrize("form", ["paper", "exact"])
@pytest.mark.parametrize("setting", [HOMOGENEOUS, HETEROGENEOUS])
def test_the_limit_is_the_posterior_mean(setting, form):
    setting = dataclasses.replace(setting, num_repeats=5)
    federation = setting.federation()
    found = limit(federation, form)
    for repeat in range(5):
        expected = by_hand(
            federation.local_estimate[repeat, :, 0].numpy(),
            federation.intra_variance[repeat].numpy(),
            setting.inter_variance,
            form,
        )
        gap = expected.mean - federation.personal_params[repeat, :, 0].numpy()
        assert found.local_error[repeat].item() == pytest.approx(abs(gap).mean(), rel=1e-9)
        assert found.local_squared_error[repeat].item() == pytest.approx((gap**2).mean(), rel=1e-9)
        assert found.global_error[repeat].item() == pytest.approx(abs(expected.centre - 1.6), rel=1e-9)


def tiny(setting):
    return dataclasses.replace(
        setting,
        num_clients=6,
        num_rounds=4,
        num_local_steps=3,
        max_local_steps=20,
        num_repeats=4,
        participation=(0.5, 1.0),
    )


TINY = tiny(HETEROGENEOUS)


def test_a_method_is_run_on_every_repeat_and_its_cost_counted():
    federation = TINY.federation()
    for rate in TINY.participation:
        found = run_method(TINY, federation, FedAvg(3), rate)
        engine = CohortEngine(FedAvg(3), federation, rate, TINY.seeds)
        state = engine.advance(engine.start(torch.zeros_like(federation.global_params)), 4)
        gap = state.server.params.unsqueeze(-2) - federation.personal_params  # FedAvg: one model for everybody
        torch.testing.assert_close(found.local_error, gap.abs().mean((-2, -1)))
        torch.testing.assert_close(found.global_error, (state.server.params - 1.6).abs().squeeze(-1))
        assert found.trace.shape == (4,)
        assert found.trace[-1].item() == pytest.approx(found.global_error.mean().item())
        assert found.num_gradients.tolist() == pytest.approx([3.0] * 4)  # per client and round it took part in


@pytest.mark.parametrize(("case", "num_claims"), [("homogeneous", 6), ("heterogeneous", 6)])
def test_a_tiny_synthetic_study_is_complete(case, num_claims):
    steps = []
    result = synthetic.synthetic_study(TINY, case, Job(progress=lambda *step: steps.append(step)))
    names = [*methods(TINY), "self-fl-auto"]
    assert steps[-1][:2] == (21, 21)
    assert [done for done, _, _ in steps] == list(range(22))
    assert len(result.rows) == len(names) * 2 + 3 + 2 + 2 * 2  # methods, smoothing, estimated, limits
    assert [row["method"] for row in result.table] == [*names, "limit, paper posterior", "limit, exact posterior"]
    assert all(math.isfinite(row["local_error"]) and row["repeats"] == 4 for row in result.rows)
    assert [figure.name for figure in result.figures] == ["errors", "global-error-by-round"]
    assert len(result.claims) == num_claims
    assert result.config["num_repeats"] == 4
    # the table, the figure and the rows show the same numbers
    row = next(row for row in result.rows if (row["method"], row["participation"]) == ("ditto", 0.5))
    cell = next(line for line in result.table if line["method"] == "ditto")["local ℓ1, C=0.5"]
    line = next(line for line in result.figures[0].charts[1].series if line.name == "ditto")
    assert cell == str(Estimate(row["local_error"], row["local_error_se"]))
    assert (line.y[0], line.error[0]) == (row["local_error"], row["local_error_se"])


def test_the_settings_are_the_papers():
    assert (HOMOGENEOUS.inter_variance, HOMOGENEOUS.num_examples) == (0.001, (10, 20))
    assert (HETEROGENEOUS.inter_variance, HETEROGENEOUS.num_examples) == (1.0, (10, 200))
    for setting in (HOMOGENEOUS, HETEROGENEOUS):
        assert (setting.num_clients, setting.global_mean, setting.row_variance) == (20, 1.6, 0.1)
        assert (setting.learning_rate, setting.num_rounds, setting.num_local_steps) == (1e-4, 200, 50)
        assert (setting.participation, setting.num_repeats) == ((0.1, 0.2, 0.5, 0.8, 1.0), 200)


@pytest.mark.slow
def test_on_heterogeneous_data_the_papers_form_is_worse_than_learning_alone_and_the_exact_one_is_not():
    """Decision D11's numbers, at full participation."""
    setting = dataclasses.replace(HETEROGENEOUS, participation=(1.0,), num_repeats=200, num_rounds=60)
    federation = setting.federation()
    named = methods(setting)
    found = {name: run_method(setting, federation, named[name], 1.0) for name in ("self-fl", "self-fl-exact", "local")}
    paper, exact, local = (found[name].local_squared_error for name in ("self-fl", "self-fl-exact", "local"))
    assert 0.0024 < paper.mean() < 0.0034
    assert 0.0012 < exact.mean() < 0.0018
    assert 0.0012 < local.mean() < 0.0018
    assert is_lower(paired(1.5 * local, paper))
    assert not is_lower(paired(local, exact))
    for name, form in (("self-fl", "paper"), ("self-fl-exact", "exact")):
        bound = limit(federation, form)
        # Self-FL ends at the posterior mean it aims at, up to rounding of ℓ and what 60 rounds leave
        for attribute, tolerance in (("local_squared_error", 0.02), ("local_error", 0.02), ("global_error", 0.02)):
            reached, goal = getattr(found[name], attribute), getattr(bound, attribute)
            assert reached.mean().item() == pytest.approx(goal.mean().item(), rel=tolerance), (name, attribute)
            assert (reached - goal).abs().mean() < 0.05 * goal.mean(), (name, attribute)


@pytest.mark.parametrize(
    ("intervals", "verdict"),
    [
        ([(-0.7, -0.55), (-0.6, -0.5)], "holds"),
        ([(-0.7, -0.55), (-0.6, -0.4)], "inconclusive"),
        ([(-0.7, -0.55), (-0.45, -0.3)], "does not hold"),
    ],
)
def test_an_interval_around_the_bound_decides_nothing(intervals, verdict):
    slopes = [convergence.Slope((low + high) / 2, low, high) for low, high in intervals]
    assert convergence.bound_verdict(slopes) == verdict


# ----------------------------------------------------------------------------------------------------------- the runner


def test_every_study_has_a_name_of_its_own():
    assert list(STUDIES) == [
        "limits",
        "convergence",
        "synthetic-homogeneous",
        "synthetic-heterogeneous",
        "augmented-synthetic",
        "mnist",
        "femnist",
        "femnist-ablation",
        "cifar10",
        "augmented-images",
        "mnist-sparse",
        "step-histogram",
        "step-trajectory",
        "sent140-warmstart",
        "sent140",
        "wakeword-global",
        "wakeword-personal",
        "augmented-wakeword",
        "wakeword-clusters",
        "wakeword-participation",
        "sums",
        "sums-noise",
        "auto-digits",
        "auto-mnist",
        "auto-femnist",
        "auto-cifar10",
        "auto-sent140",
        "auto-wakeword",
        "regimes-digits",
        "regimes-letters",
        "regimes-mnist",
        "regimes-cifar10",
        "newcomers",
        "multilevel",
        "attacks",
        "published-mnist-pfedbayes",
        "published-cifar10-fedkddc",
        "published-cifar10-fedlmi",
        "published-cifar10-knnper",
        "adapters-speech",
        "adapters-text",
        "adapters-images",
    ]
    assert all(study.id == name for name, study in STUDIES.items())
    assert DEMO.id not in STUDIES


def assert_the_record_lies_there(folder, record):
    with (folder / "results.csv").open(encoding="utf-8", newline="") as file:
        assert len(list(csv.DictReader(file))) >= len(record.table) - 2
    assert len((folder / "table.md").read_text(encoding="utf-8").splitlines()) == 2 + len(record.table)
    written = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    assert written == json.loads(json.dumps(dataclasses.asdict(record)))
    assert record.claims
    assert record.figures
    for figure in record.figures:
        assert (folder / f"{figure['name']}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (folder / f"{figure['name']}.svg").read_text(encoding="utf-8")
    assert not list(folder.glob("*.part"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in STUDIES if "synthetic" in name])
def test_every_synthetic_study_leaves_a_record(name, tmp_path):
    """At a size that takes a moment; the others are quick enough for the runner."""
    steps = []
    result = STUDIES[name].run(Job(quick=True, progress=lambda *step: steps.append(step)), shorten=tiny)
    assert [done for done, _, _ in steps] == list(range(steps[-1][1] + 1))
    record = save_study(STUDIES[name], result, tmp_path / name, command="c", is_quick=True, seconds=1.0)
    assert record.id == name
    assert_the_record_lies_there(tmp_path / name, record)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12, where there are threads
def test_the_runner_leaves_records_and_tells_how_far_it_is(tmp_path, monkeypatch, convergence_result, forked_workers):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)  # a process for each
    names = ("limits", "convergence")  # all five take well over a minute on two cores
    progress, records, threads = {}, {}, set()

    def note(name, done, total, now):
        progress.setdefault(name, []).append((done, total))
        threads.add(threading.current_thread())

    run_studies(
        names,
        tmp_path,
        quick=True,
        on_progress=note,
        on_record=lambda record: records.setdefault(record.id, record),
    )
    assert threading.main_thread() not in threads  # news come from elsewhere
    assert set(records) == set(progress) == set(names)
    for name, record in records.items():
        counts = [done for done, _ in progress[name]]
        assert counts[0] == 0
        assert counts == sorted(counts)
        assert record.is_quick
        assert record.command == f"selffl paper run {name} --quick"
        assert_the_record_lies_there(tmp_path / name, record)
    # Another process, the same numbers.
    assert records["convergence"].table == list(convergence_result.table)
    assert records["convergence"].claims == [dataclasses.asdict(claim) for claim in convergence_result.claims]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12, where there are threads
def test_runs_of_a_study_share_their_processes(forked_workers):
    """Two batches of runs within one study, by the processes that were started for the first."""
    batches = []
    with arms.shared_workers(1):
        for _ in range(2):
            found = {}
            arms.run_side_by_side(os.getpid, {0: (), 1: ()}, 2, found.__setitem__)
            batches.append(set(found.values()))
    assert os.getpid() not in batches[0]
    assert len(batches[0]) == 1
    assert batches[0] == batches[1]
    after = {}
    arms.run_side_by_side(os.getpid, {0: (), 1: ()}, 2, after.__setitem__)
    assert not set(after.values()) & batches[0]


def lacks_memory_beside_others(number, place):
    """As a run on a GPU that others have filled: the second time it has room."""
    with (place / f"began {number}").open("a") as file:
        file.write("x")
    if number == 1 and len((place / "began 1").read_text()) == 1:
        raise torch.OutOfMemoryError("CUDA out of memory.")
    return [path.name for path in place.glob("began *")]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_run_without_memory_is_done_again_once_the_others_are_done(forked_workers, tmp_path):
    found = {}
    tasks = {number: (number, tmp_path) for number in range(4)}
    arms.run_side_by_side(lacks_memory_beside_others, tasks, 2, found.__setitem__)
    assert list(found)[-1] == 1
    assert len(found[1]) == 4  # all others had begun
    assert (tmp_path / "began 1").read_text() == "xx"


def never_has_memory():
    raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_run_that_alone_has_too_little_memory_says_so(forked_workers):
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        arms.run_side_by_side(never_has_memory, {0: (), 1: ()}, 2, lambda *_: None)
