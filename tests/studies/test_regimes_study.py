"""Clients of which it is known what differs: which cells there are, what is chosen on which rows, and the verdicts."""

import math
from dataclasses import replace

import numpy as np
import pytest

from selffl.data import regimes as data
from selffl.data.regimes import KINDS, regime
from selffl.studies import regime_results, regimes
from selffl.studies.arms import Outcome
from selffl.studies.auto import AUTO
from selffl.studies.comparison import TUNED_DITTO, TUNED_FEDAVG, take_fine_tuned
from selffl.studies.regime_results import BASELINES, FEDAVG, LOCAL, OWN_GLOBAL, Cell, CellResult
from selffl.studies.regimes import DESIGNS
from selffl.studies.result import Job
from selffl.studies.tuning import score_after

BY_NAME = {design.pictures: design for design in DESIGNS}


# ----------------------------------------------------------------------------------------------------------- the design


def test_every_kind_meets_every_model_and_four_come_again_with_everybody():
    assert {name: len(design.cells) for name, design in BY_NAME.items()} == {
        "digits": 20,
        "letters": 20,
        "mnist": 20,
        "cifar10": 12,
    }
    for design in DESIGNS:
        assert len(set(design.cells)) == len(design.cells)
        some = [cell for cell in design.cells if cell.participation < 1]
        assert {(cell.kind, cell.model) for cell in some} == {(k, m) for k in KINDS for m in design.models}
        sizes = {cell.kind: cell.sizes for cell in some}
        assert {kind for kind in KINDS if sizes[kind] == "even"} == {"alike", "dirichlet-0.1", "dirichlet-1", "tiny"}
        everybody = [cell for cell in design.cells if cell.participation == 1]
        assert [cell.kind for cell in everybody] == ["alike", "shifted", "dirichlet-0.3", "exchanged"]
        for cell in everybody:
            assert cell.sizes != sizes[cell.kind]
            assert cell.rounds * 5 == design.rounds
            assert cell.model == design.models[0]


def test_a_problem_is_the_cells_and_its_rows_are_flat_where_the_model_wants_that(monkeypatch):
    design = BY_NAME["digits"]
    cell = Cell("exchanged", "mlp", "lognormal", 0.25, 60)
    problem = design.problem(cell)
    found = problem.federation(3, 0.2)
    assert found is problem.federation(3, 0.2)  # kept: the next run of the seed has the same
    expected = regime("digits", "exchanged", "lognormal", is_flat=True, seed=3, validation_fraction=0.2)
    assert found.fingerprint() == expected.fingerprint()
    assert (problem.rounds, problem.participation, problem.learning_rate, problem.batch_size) == (60, 0.25, 0.05, 10)
    assert problem.content(0) != design.problem(replace(cell, sizes="even")).content(0)
    asked = []
    monkeypatch.setattr(
        "selffl.studies.regime_problem.regime", lambda *names, **options: asked.append((names, options))
    )
    BY_NAME["mnist"].problem(Cell("few", "cnn", "even", 0.1, 7)).federation(11)
    BY_NAME["mnist"].problem(Cell("few", "softmax", "even", 0.1, 7)).federation(11)
    assert [options["is_flat"] for _, options in asked] == [False, True]
    assert asked[0][0] == ("mnist", "few", "even")


def test_pictures_of_cifar_train_the_network_with_everything_that_is_looked_at(monkeypatch):
    """Made-up pictures: each class has a brightness of its own."""
    labels = (np.arange(600) % 10).astype(np.uint8)
    images = (25 * labels)[:, None].repeat(3072, 1).reshape(-1, 3, 32, 32)
    monkeypatch.setattr(data.cifar10, "images_and_labels", lambda: (images, labels))
    monkeypatch.setitem(data.PICTURES, "cifar10", data.Pictures(6, 40, 10, 3))
    design = BY_NAME["cifar10"]
    assert {cell.model for cell in design.cells} == {"cnn"}
    problem = replace(design.problem(design.cells[5]), rounds=1, num_local_steps=2, participation=1.0)
    run = problem.run(AUTO, {}, seed=77, class_frequencies=True, fine_tune=(1,))
    assert problem.federation(77).train.features.shape[1:] == (3, 32, 32)
    assert 0 <= run.summary["global_with_classes_after_1_weighted_accuracy"] <= 1
    assert run.clients[0]["predicted_gain"] is None or run.clients[0]["predicted_gain"] >= 1


# --------------------------------------------------------------------------------------------------- choosing and views


def summary(**scores):
    return Outcome(0, scores | {"status": "finished", "algorithm": "fedavg"}, [dict(scores)], [], 1)


def test_fine_tuning_with_class_frequencies_has_views_of_its_own():
    found = summary(
        global_accuracy=0.9,
        global_after_5_weighted_accuracy=0.95,
        global_after_20_weighted_accuracy=0.8,
        global_with_classes_weighted_accuracy=0.7,
        global_with_classes_after_5_weighted_accuracy=0.75,
        global_with_classes_after_20_weighted_accuracy=0.78,
    )
    for start, scores in (("global", (90, 95, 80)), ("global+classes", (70, 75, 78))):
        assert [found.score(score_after(start, steps)) for steps in (0, 5, 20)] == pytest.approx(scores)
    assert take_fine_tuned(found, 20, "global+classes").score("weighted_accuracy") == pytest.approx(78)
    assert take_fine_tuned(found, 0, "global+classes").score("weighted_accuracy") == pytest.approx(70)
    assert take_fine_tuned(found, 0) is found


# ----------------------------------------------------------------------------------------- verdicts, nothing is trained

LEVEL = (0.80, 0.81, 0.82, 0.83, 0.84)


def runs(scores, *, precision=None, clients=()):
    """One run for each seed; one that diverged where there is no score."""
    status = ["diverged" if score is None else "finished" for score in scores]
    learned = {} if precision is None else {"inter_variance": 1.0 / precision}
    rows = [
        {"num_train": 90, "num_test": 30, "accuracy": 0.5, "predicted_gain": None, **row} for row in clients or [{}]
    ]
    return [
        Outcome(seed, {"weighted_accuracy": score, "status": state} | learned, [], [], 1, clients=rows)
        for seed, (score, state) in enumerate(zip(scores, status, strict=True))
    ]


def plus(points, noise=0.0):
    """Scores so many points above the usual, by seed."""
    signs = (1, -1, 1, -1, 0)
    return [score + (points + noise * sign) / 100 for score, sign in zip(LEVEL, signs, strict=True)]


def made(ours=0.0, own_global=-5.0, grid=(-3.0, -2.0), kind="alike", clients=(), noise=0.0, alone=(), **others):
    """A cell where everybody is so many points above the usual level; baselines are far below unless said otherwise."""
    names = dict(zip(("fedavg", "classes", "tuned", "tuned_classes", "ditto", "local"), BASELINES, strict=True))
    outcomes = {AUTO: runs(plus(ours, noise), precision=50.0, clients=clients), OWN_GLOBAL: runs(plus(own_global))}
    outcomes |= {regime_results.at_precision(10.0**n): runs(plus(value)) for n, value in enumerate(grid)}
    outcomes |= {label: runs(plus(others.get(name, -9.0))) for name, label in names.items()}
    if alone:
        outcomes[LOCAL] = runs(plus(-9.0), clients=alone)
    precisions = {regime_results.at_precision(10.0**n): 10.0**n for n in range(len(grid))}
    return CellResult(Cell(kind, "softmax", "even", 0.1, 5), outcomes, precisions, {TUNED_DITTO: "λ = 1"})


def verdicts(*results):
    return [claim.verdict for claim in regime_results.claims_of(results)]


@pytest.mark.parametrize(
    ("gap", "noise", "verdict"),
    [
        (-0.1, 0.01, "holds"),
        (-0.3, 0.01, "does not hold"),
        (-0.1, 0.5, "inconclusive"),  # above the margin on average, and it may be chance
    ],
)
def test_the_own_global_model_may_be_missed_by_a_fifth_of_a_point(gap, noise, verdict):
    results = made(1.0, own_global=0.0), made(gap, own_global=0.0, grid=(-9.0,), kind="few", noise=noise)
    claim = regime_results.claims_of(results)[0]
    assert claim.verdict == verdict
    assert f"{'−' if gap < 0 else '+'}{abs(gap):.2f} ±" in claim.evidence
    assert "(few, softmax, even sizes, C = 0.1)" in claim.evidence
    assert f"in {2 if gap > -0.2 else 1} of 2 cells" in claim.evidence


@pytest.mark.parametrize(("gap", "verdict"), [(-0.3, "holds"), (-0.5, "does not hold")])
def test_the_oracle_may_be_missed_by_two_fifths_and_is_the_best_of_the_grid(gap, verdict):
    results = made(gap, own_global=-9.0, grid=(-1.0, 0.0, -2.0)), made(2.0)
    assert results[0].oracle == regime_results.at_precision(10.0)
    claim = regime_results.claims_of(results)[1]
    assert claim.verdict == verdict
    assert f"−{abs(gap):.2f} ± 0.00 points, against {results[0].oracle} (alike" in claim.evidence


@pytest.mark.parametrize(
    ("missed", "by", "noise", "verdict"),
    [
        (0, 0.0, 0.0, "holds"),
        (2, 0.3, 0.0, "holds"),  # by less than half a point
        (1, 0.6, 0.0, "does not hold"),  # one of ten, and by more
        (1, 0.3, 1.0, "inconclusive"),
        (1, 0.6, 2.0, "inconclusive"),  # which used to be counted
    ],
)
def test_every_baseline_may_be_missed_by_half_a_point(missed, by, noise, verdict):
    results = [made(0.0, ditto=by, kind="tiny", noise=noise) for _ in range(missed)]
    results += [made(0.0, fedavg=-0.1) for _ in range(10 - missed)]
    claim = regime_results.claims_of(results)[2]
    assert claim.verdict == verdict
    assert claim.text == "Target: in every cell at least every baseline, less 0.5 points."
    assert claim.evidence.startswith(f"The mean is so in {10 - missed * (by > 0.5)} of 10 cells")
    assert (f"against {TUNED_DITTO} (tiny" in claim.evidence) == (missed > 0)


def test_one_seed_has_no_standard_error_and_decides_nothing():
    found = made()
    one = replace(found, outcomes={label: group[:1] for label, group in found.outcomes.items()})
    assert verdicts(one)[:3] == ["inconclusive"] * 3


def test_runs_that_diverged_are_neither_the_best_nor_overlooked():
    found = made(0.0, grid=(-1.0, 5.0), fedavg=-1.0, ditto=5.0)
    lost = runs([0.9, None, 0.9, 0.9, 0.9])
    found = replace(found, outcomes=found.outcomes | {TUNED_DITTO: lost, regime_results.at_precision(10.0): lost})
    assert found.oracle == regime_results.at_precision(1.0)
    assert found.baseline == FEDAVG
    assert TUNED_DITTO not in found.baseline_gaps
    assert verdicts(found)[:3] == ["holds"] * 3
    # Ours in one of ten cells: nothing is met.
    ours = replace(found, outcomes=found.outcomes | {AUTO: lost})
    assert verdicts(ours, *[made()] * 9)[:3] == ["inconclusive"] * 3
    assert regime_results.claims_of([ours, *[made()] * 9])[2].evidence.startswith("The mean is so in 9 of 10 cells")
    assert "self-fl-auto, which diverged, against" in regime_results.claims_of([ours])[0].evidence
    line = regime_results.table_line(1, ours)
    assert (line[AUTO], line["above the oracle"]) == ("diverged", "–")
    no_grid = replace(found, outcomes=found.outcomes | dict.fromkeys(found.precisions, lost))
    claim = regime_results.claims_of([no_grid, made()])[1]
    assert (claim.verdict, claim.evidence[-12:]) == ("holds", "diverged: 1.")
    nobody = replace(found, outcomes=dict.fromkeys(found.outcomes, lost))
    assert verdicts(nobody)[:3] == ["inconclusive"] * 3
    assert regime_results.table_line(1, nobody)["which"] == "–"


def order(predicted, gained, num_test=30):
    """Clients whose gain over 0.5 alone is given."""
    return [
        {"predicted_gain": p, "accuracy": 0.5 + g, "num_test": num_test} for p, g in zip(predicted, gained, strict=True)
    ]


def test_the_predicted_gain_is_held_against_what_is_gained_over_local_training():
    gains = order([1.0, 2.0, 4.0, 8.0], [0.2, 0.0, 0.1, 0.3])
    others = order([None, 9.0], [0.3, -0.3], num_test=9)  # too few test rows to count
    alone = [{"accuracy": 0.5, "num_test": row["num_test"]} for row in gains + others]
    found = made(clients=gains + others, alone=alone)
    # Ranks 1 2 3 4 against 3 1 2 4: 1 − 6 · 6 / 60.
    assert found.rank_correlations == pytest.approx([0.4] * 5)
    # Whose gain is the same for all cannot be ordered, and is left out.
    same = made(clients=order([2.0] * 4, [0.1, 0.2, 0.3, 0.4]), alone=alone[:4], kind="few")
    assert same.rank_correlations == [None] * 5
    claim = regime_results.claims_of([found, same])[3]
    assert claim.verdict == "holds"
    assert "+0.40 ± 0.00, the mean of 1 of 2 cells" in claim.evidence
    backwards = made(clients=order([1.0, 2.0, 3.0], [0.3, 0.2, 0.1]), alone=alone[:3], kind="tiny")
    claim = regime_results.claims_of([backwards, found])[3]
    assert claim.verdict == "does not hold"
    assert "the lowest is −1.00 (tiny" in claim.evidence
    assert regime_results.claims_of([same])[3].verdict == "inconclusive"


def test_a_table_has_a_line_for_each_cell_and_the_long_one_every_arm():
    results = [made(0.5, own_global=0.0, grid=(0.0, 1.0), tuned=0.25), made(kind="few")]
    found = regimes.report(BY_NAME["digits"], results)
    line = found.table[0]
    assert line[AUTO] == "82.5 ± 0.7"
    assert (line["c learned"], line["oracle"], line["its c"]) == ("50", "83.0 ± 0.7", "10")
    assert (line["best baseline"], line["which"]) == ("82.2 ± 0.7", TUNED_FEDAVG)
    assert (line["above the oracle"], line["above best baseline"]) == ("−0.50 ± 0.00", "+0.25 ± 0.00")
    assert line["above own global model"] == "+0.50 ± 0.00"
    assert len(found.rows) == 2 * 5 * (2 + 2 + len(BASELINES))
    assert {row["method"] for row in found.rows if row["is_oracle"]} == {regime_results.at_precision(10.0)}
    first, second = found.figures[0].charts
    assert (first.kind, second.kind) == ("points", "points")
    assert [len(series.x) for chart in (first, second) for series in chart.series] == [2] * 5
    assert first.series[1].y == pytest.approx([-0.5, 2.0])
    assert second.series[1].y[0] == pytest.approx(0.5)


# ----------------------------------------------------------------------------------------------------- all of it, small


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Two cells of digits, two rounds; and where the runs lie."""
    place = tmp_path_factory.mktemp("regimes")
    design = replace(BY_NAME["digits"], rounds=10, precisions=(10.0, 1e3), penalties=(0.1, 1.0), fine_tune=(2,))
    steps = []
    result = regimes.regimes_study(design, Job(True, lambda *step: steps.append(step), place))
    return design, result, place, steps


@pytest.mark.slow
def test_a_quick_look_trains_two_cells_with_two_seeds(small):
    _, result, place, steps = small
    assert [(line["clients"], line["model"]) for line in result.table] == [("alike", "softmax"), ("shifted", "softmax")]
    assert [claim.verdict for claim in result.claims]
    each = {(row["cell"], row["method"], row["seed"]) for row in result.rows}
    methods = {AUTO, OWN_GLOBAL, *BASELINES, regime_results.at_precision(10.0), regime_results.at_precision(1e3)}
    assert each == {(cell, method, seed) for cell in (1, 2) for method in methods for seed in (0, 1)}
    assert len(each) == len(result.rows)
    assert all(0 < row["accuracy"] <= 100 for row in result.rows)
    by = {(row["method"], row["seed"]): row for row in result.rows if row["cell"] == 1}
    assert by[regime_results.at_precision(1e3), 0]["precision"] == pytest.approx(1e3)
    assert math.isfinite(by[AUTO, 0]["precision"])
    assert by[TUNED_DITTO, 0]["chosen"] in ("λ = 0.1 (2 tried; at the edge)", "λ = 1 (2 tried; at the edge)")
    assert by[TUNED_FEDAVG, 0]["chosen"] in ("k = 0 (2 tried)", "k = 2 (2 tried; at the edge)")
    # Six arms besides ditto with two seeds, ditto with two, three to choose by: in each of two cells.
    num_runs = 2 * (5 * 2 + 2 + 3)
    assert steps[-1][:2] == (num_runs, num_runs)
    assert len(list(place.glob("*/summary.json"))) == num_runs
    assert not list(place.rglob("federation.safetensors"))


@pytest.mark.slow
def test_accuracies_are_those_of_the_models(small):
    """Of one run, trained once more and asked row by row."""
    design, result, _, _ = small
    problem = replace(design.problem(design.cells[1]), rounds=2)
    run, fed = problem.run(AUTO, {}, 1), problem.federation(1)
    rows = {row["method"]: row for row in result.rows if (row["cell"], row["seed"]) == (2, 1)}
    right = 0
    for place, client in enumerate(fed.clients):
        low, high = fed.test.offset[place : place + 2].tolist()
        answers = run.personal_model(client)(fed.test.features[low:high]).argmax(1)
        right += int((answers == fed.test.labels[low:high]).sum())
    assert rows[AUTO]["accuracy"] == pytest.approx(100 * right / len(fed.test.labels))
    view = run.evaluate(class_frequencies=True).weighted("accuracy", "global+classes")
    assert rows[OWN_GLOBAL]["accuracy"] == pytest.approx(100 * view)
    assert rows[AUTO]["precision"] == pytest.approx(1.0 / run.summary["inter_variance"])


@pytest.mark.slow
def test_runs_that_are_there_are_not_made_again(small, monkeypatch):
    design, result, place, _ = small
    monkeypatch.setattr(regimes.RegimeProblem, "run", lambda *_, **__: pytest.fail("it is there already"))
    again = regimes.regimes_study(design, Job(True, folder=place))
    assert again.rows == result.rows
