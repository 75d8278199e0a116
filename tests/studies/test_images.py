"""The image studies: settings as the paper has them, arms that are run once, honest choices, verdicts that follow."""

import ast
import json
import math
from dataclasses import replace

import numpy as np
import pytest

from selffl.errors import ConfigError
from selffl.maths.significance import FRESH_DRAWS
from selffl.studies import DEMO, STUDIES, arms, comparison, images, tuning
from selffl.studies.arms import Arm, Outcome, run_arms
from selffl.studies.comparison import TUNED_DITTO, TUNED_FEDAVG, Comparison, study
from selffl.studies.problems import CIFAR10, DIGITS, EMNIST, LETTERS, MNIST, PROBLEMS
from selffl.studies.result import Estimate, Job, within

SMALL = replace(
    DIGITS, rounds=4, participation=0.5, data_options={"test_fraction": 0.3, "num_clients": 6}, num_local_steps=5,
    max_local_steps=10,
)  # fmt: skip
TEN = [Arm(name, name) for name in ("fedavg", "self-fl")]


def outcome(seed=0, status="finished", **scores):
    whole = {"weighted_accuracy": 0.5, "top10_accuracy": 0.5, "worst10_accuracy": 0.5, "global_accuracy": 0.5}
    summary = whole | scores | {"status": status, "gradient_evaluations": 800}
    rows = [{"num_train": 90, "num_test": 10}]
    return Outcome(seed, summary, [summary | {"round": 4}], [], 40, clients=rows)


# ------------------------------------------------------------------------------------------------------------- settings


def test_the_settings_are_the_papers():
    for problem, rate, batch, steps, cap, share in (
        (MNIST, 0.03, 10, 20, 40, 0.1),
        (LETTERS, 0.01, 10, 20, 40, 0.1),
        (EMNIST, 0.01, 10, 20, 40, 0.1),
        (CIFAR10, 0.01, 20, 40, 80, 0.25),
    ):
        assert (problem.learning_rate, problem.batch_size) == (rate, batch)
        assert problem.rounds == (100 if problem is CIFAR10 else 200)  # for CIFAR-10 the paper does not say
        assert (problem.num_local_steps, problem.max_local_steps, problem.participation) == (steps, cap, share)
        for name in ("fedavg", "ditto", "pfedme", "perfedavg", "local"):
            assert problem.method(name).num_local_steps == steps
        assert problem.method("self-fl").max_local_steps == cap
        assert problem.method("self-fl").initial_steps == steps
        assert problem.method("self-fl", max_local_steps=3).max_local_steps == 3
    with pytest.raises(ConfigError, match="unknown algorithm 'fedavgg'"):
        MNIST.method("fedavgg")


def test_every_problem_is_named_once_and_stand_ins_say_so():
    assert list(PROBLEMS) == ["digits", "mnist", "femnist", "cifar10", "sent140", "wakeword"]
    assert "stand-in" in LETTERS.title
    for name in ("femnist", "femnist-ablation", "augmented-images"):
        assert "stand-in" in STUDIES[name].title


# ----------------------------------------------------------------------------------------------------------------- arms


def work(seeds=(0, 1)):
    return [(arm, seed) for seed in seeds for arm in TEN]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12, where there are threads
def test_runs_in_several_processes_are_the_same_runs(forked_workers):
    def timeless(found):
        return {
            label: [
                [{k: v for k, v in row.items() if k != "seconds"} for row in (o.summary, *o.history)] for o in group
            ]
            for label, group in found.items()
        }

    alone = run_arms(SMALL, work(), Job(), 0, 4)
    apart = run_arms(SMALL, work(), Job(num_processes=2), 0, 4)
    assert timeless(alone) == timeless(apart)
    assert [o.seed for o in alone["fedavg"]] == [0, 1]
    assert alone["fedavg"][0].num_gradients == 5.0  # per client and round it took part in
    assert alone["fedavg"][0].summary != alone["fedavg"][1].summary


def test_what_is_done_is_not_done_again(tmp_path, monkeypatch):
    steps = []
    job = Job(folder=tmp_path / "runs", progress=lambda *step: steps.append(step))
    first = run_arms(SMALL, work((0,)), job, 0, 4)
    assert [done for done, _, _ in steps] == [0, 1, 2]
    places = {path.name: (path / "summary.json").stat().st_mtime_ns for path in (tmp_path / "runs").glob("[!.]*")}
    both = run_arms(SMALL, work((0, 1)), job, 0, 4)
    for name, written in places.items():
        assert (tmp_path / "runs" / name / "summary.json").stat().st_mtime_ns == written
    assert both["fedavg"][0] == first["fedavg"][0]
    assert len(list((tmp_path / "runs").glob("[!.]*"))) == 4
    # Other options and other code are other runs.
    run_arms(replace(SMALL, learning_rate=0.1), work((0,)), job, 0, 2)
    assert len(list((tmp_path / "runs").glob("[!.]*"))) == 6
    monkeypatch.setattr(arms, "source_digest", lambda: "edited")
    run_arms(SMALL, work((0,)), job, 0, 2)
    assert len(list((tmp_path / "runs").glob("[!.]*"))) == 8


def test_words_about_code_make_no_other_run():
    def digest(source):
        return ast.dump(arms._without_docstrings(source))

    code = 'class A:\n    """What."""\n\n    def f(self):\n        """Why."""\n        return 1  # one\n'
    assert digest(code) == digest("class A:\n    def f(self):\n        # first\n        return (1)\n")
    assert digest(code) != digest(code.replace("return 1", "return 2"))
    assert digest('x = "What."') != digest('x = "Why."')


def test_a_run_that_was_cut_off_is_made_again(tmp_path):
    job = Job(folder=tmp_path)
    first = run_arms(SMALL, work((0,)), job, 0, 2)
    place = next(path for path in tmp_path.glob("[!.]*") if path.name.startswith("fedavg"))
    summary = json.loads((place / "summary.json").read_text(encoding="utf-8"))
    (place / "summary.json").write_text(json.dumps(summary | {"status": "running"}), encoding="utf-8")
    again = run_arms(SMALL, work((0,)), job, 0, 2)
    assert again["fedavg"][0].score("weighted_accuracy") == first["fedavg"][0].score("weighted_accuracy")
    assert json.loads((place / "summary.json").read_text(encoding="utf-8"))["status"] == "finished"


@pytest.mark.parametrize("kept", [True, False])
def test_a_run_that_diverges_is_an_outcome(tmp_path, kept):
    hot = replace(SMALL, learning_rate=1e30)
    found = run_arms(hot, [(Arm("pfedme", "pfedme"), 0)], Job(folder=tmp_path if kept else None), 0, 1)["pfedme"][0]
    assert np.isnan(found.score("weighted_accuracy"))
    assert comparison.points(Estimate.of(arms.values([found], "weighted_accuracy"))) == "diverged"


# ---------------------------------------------------------------------------------------------------------- comparisons


def test_a_small_demo_is_complete(monkeypatch):
    names = ("self-fl", "ditto", "fedavg", "local")
    small = Comparison(SMALL, images.DEMO_COMPARISON.claims, names, is_tuned=False, num_seeds=2)
    result = study(small, Job())
    assert [(row["method"], row["seed"], row["round"]) for row in result.rows] == [
        (name, seed, number) for name in names for seed in (0, 1) for number in (1, 2, 3, 4)
    ]
    assert [row["method"] for row in result.table] == list(names)
    assert result.table[-1]["global model"] == "–"
    ends = [100 * row["weighted_accuracy"] for row in result.rows if (row["method"], row["round"]) == ("ditto", 4)]
    mean, error = np.mean(ends), np.std(ends, ddof=1) / 2**0.5
    assert result.table[1]["accuracy"] == f"{mean:.1f} ± {error:.1f}"
    line = result.figures[0].charts[0].series[1]
    assert (line.name, line.x) == ("ditto", [1, 2, 3, 4])
    assert line.y[-1] == pytest.approx(mean)
    baselines = set(images.DEMO_COMPARISON.claims) & set(names) - {"self-fl"}
    assert [claim.text for claim in result.claims] == [
        text for baseline, text in images.DEMO_COMPARISON.claims.items() if baseline in baselines
    ]
    assert result.config["problem"]["rounds"] == 4


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("kept", [True, False])
def test_a_seed_that_diverges_does_not_take_the_study_with_it(monkeypatch, lost, kept):
    def made_up(problem, pairs, job, done, total):
        found = {}
        for arm, seed in pairs:
            whole = outcome(seed)
            rows = [whole.summary | {"round": number} for number in (1, 2, 3, 4)]
            one = replace(whole, history=rows)
            if arm.label == "fedavg" and seed == lost:
                gone = {"status": "diverged"} | ({"gradient_evaluations": 100} if kept else {})
                one = replace(whole, summary=gone, history=rows[:2] if kept else [])
            found.setdefault(arm.label, []).append(one)
        return found

    for module in (comparison, tuning):
        monkeypatch.setattr(module, "run_arms", made_up)
    result = study(Comparison(SMALL, {"fedavg": "Better."}, num_seeds=2), Job())
    lines = {row["method"]: row for row in result.table}
    assert lines["fedavg"]["accuracy"] == "diverged"
    assert lines["ditto"]["accuracy"] == "50.0 ± 0.0"
    assert result.claims[0].verdict == "inconclusive"
    curve = next(series for series in result.figures[0].charts[0].series if series.name == "fedavg")
    assert list(curve.x) == [1, 2, 3, 4]
    assert np.isnan(curve.y[-1])


def test_an_arm_looks_at_the_global_model_with_each_clients_class_frequencies(tmp_path):
    arms = [Arm(label, "fedavg", fine_tune=(2,), keep_scores=True, class_frequencies=label == "c") for label in "pc"]
    found = run_arms(SMALL, [(arm, 0) for arm in arms], Job(folder=tmp_path), 0, 2)
    plain, with_classes = found["p"][0], found["c"][0]
    views = {"global+classes": "", "global+classes+2": "after_2_"}
    assert with_classes.scores.keys() - plain.scores.keys() == views.keys()
    for view, name in views.items():
        right = with_classes.scores[view].double().mean().item()
        assert with_classes.summary[f"global_with_classes_{name}weighted_accuracy"] == pytest.approx(right)
    assert with_classes.score("global_with_classes_weighted_accuracy") > plain.score("global_accuracy")


def test_baselines_are_tuned_on_validation_rows_and_never_on_test_rows(monkeypatch):
    """A made-up world: the best λ by validation is 0.3, by test it would be 3; likewise 20 steps against 320."""
    asked = []

    def made_up(problem, pairs, job, done, total):
        found = {}
        for arm, seed in pairs:
            asked.append((arm, seed))
            scores = {}
            if arm.algorithm == "ditto":
                best = 0.3 if arm.evaluate_on == "validation" else 3.0
                scores["weighted_accuracy"] = 0.9 if arm.options.get("penalty", 1.0) == best else 0.6
            for steps in arm.fine_tune:
                best = 20 if arm.evaluate_on == "validation" else 320
                scores |= {
                    f"global_after_{steps}_{part}_accuracy": 0.8 if steps == best else 0.55
                    for part in ("weighted", "top10", "worst10")
                }
            found.setdefault(arm.label, []).append(outcome(seed, **scores))
        return found

    monkeypatch.setattr(comparison, "run_arms", made_up)
    monkeypatch.setattr(tuning, "run_arms", made_up)
    result = study(Comparison(SMALL, {TUNED_DITTO: "a", TUNED_FEDAVG: "b"}, num_seeds=3), Job())
    lines = {row["method"]: row for row in result.table}
    assert lines[TUNED_DITTO]["chosen"] == "λ = 0.3, 0.3, 0.3 (5 tried)"
    assert lines[TUNED_DITTO]["accuracy"] == "60.0 ± 0.0"  # what the choice is worth on test rows, honestly
    assert lines[TUNED_FEDAVG]["chosen"] == "k = 20, 20, 20 (5 tried)"
    assert lines[TUNED_FEDAVG]["accuracy"] == "55.0 ± 0.0"
    # Self-FL spends 20 gradients a client-round here: ten steps of two models, four of five inner steps.
    equal = {arm.algorithm: arm.options["num_local_steps"] for arm, _ in asked if arm.label.endswith("equal gradients")}
    assert equal == {"fedavg": 20, "local": 20, "ditto": 10, "perfedavg": 10, "pfedme": 4}
    for arm, _ in asked:
        assert (arm.evaluate_on == "validation") == (arm.validation_fraction > 0)
    assert {row["method"] for row in result.table if row["method"].startswith("ditto ")} == set()


def tuner(monkeypatch, score, quick=False):
    """A tuner in a made-up world: what is scored by arm, seed and steps; with the list of what was run."""
    asked = []

    def made_up(problem, pairs, job, done, total):
        found = {}
        for arm, seed in pairs:
            asked.append((arm.label, seed, done, total))
            assert (arm.evaluate_on, arm.validation_fraction) == ("validation", 0.2)
            names = {steps: f"global_after_{steps}_weighted_accuracy" for steps in arm.fine_tune}
            names |= {f"classes {steps}": f"global_with_classes_{names[steps][7:]}" for steps in arm.fine_tune}
            names |= {0: "global_accuracy", "classes 0": "global_with_classes_weighted_accuracy"}
            names |= {"personal": "weighted_accuracy"}
            scores = {name: score(arm, seed, key) for key, name in names.items()}
            found.setdefault(arm.label, []).append(outcome(seed, **scores))
        return found

    monkeypatch.setattr(tuning, "run_arms", made_up)
    return tuning.Tuner(SMALL, Job(quick), 10, class_frequencies=True), asked


def test_a_baseline_whose_best_value_is_its_last_tries_more(monkeypatch):
    found, asked = tuner(monkeypatch, lambda arm, seed, _: 1 / (1 + abs(arm.options["penalty"] - 20)))
    search = found.search("ditto", "penalty", (0.3, 1.0, 3.0), (0, 1))
    labels = ["ditto 0.3", "ditto 1", "ditto 3", "ditto 9", "ditto 27", "ditto 81"]
    assert list(dict.fromkeys(label for label, *_ in asked)) == labels
    assert tuning.chosen_value(search) == 27
    assert tuning.note("λ", [search]) == "λ = 27 (6 tried)"
    assert [done for _, _, done, _ in asked] == [0] * 6 + [6, 6, 8, 8, 10, 10]
    assert (found.num_done, found.num_planned) == (12, 10 + 6)  # six runs more than planned


def test_every_baseline_may_try_eight_values_and_says_so_if_that_is_not_enough(monkeypatch):
    found, asked = tuner(monkeypatch, lambda arm, seed, _: arm.options["penalty"] / 1e9)
    search = found.search("pfedme", "penalty", (1.0, 5.0, 15.0), (0,))
    assert (len(search.trials), len(asked)) == (8, 8)
    assert tuning.note("λ", [search]) == "λ = 4500 (8 tried; at the edge)"
    quick, asked = tuner(monkeypatch, lambda arm, seed, _: arm.options["penalty"] / 1e9, quick=True)
    assert len(quick.search("pfedme", "penalty", (1.0, 5.0, 15.0), (0,)).trials) == len(asked) == 3


def test_values_are_chosen_over_the_seeds_that_are_asked_for(monkeypatch):
    grid, best = (0.1, 1.0, 10.0), {0: (0.1, 0.9, 0.2), 1: (0.95, 0.1, 0.2)}
    found, asked = tuner(monkeypatch, lambda arm, seed, _: best[seed][grid.index(arm.options["penalty"])], quick=True)
    chosen = [tuning.chosen_value(found.search("ditto", "penalty", grid, seeds)) for seeds in ([0], [1], [0, 1])]
    assert chosen == [1.0, 0.1, 0.1]
    assert len(asked) == 6  # each once


def test_steps_of_fine_tuning_are_looked_at_in_one_run_and_more_of_them_in_another(monkeypatch):
    def score(arm, seed, key):
        return {0: 0.5, 5: 0.6, 20: 0.7, 80: 0.9, 320: 0.8, "classes 0": 0.9}.get(key, 0.1)

    found, asked = tuner(monkeypatch, score)
    grid = ("fedavg", "fine_tune", (0, 5, 20), (0,))
    assert tuning.chosen_value(found.search(*grid)) == 80
    assert [label for label, *_ in asked] == ["fedavg choosing", "fedavg choosing, k = 80", "fedavg choosing, k = 320"]
    assert tuning.chosen_value(found.search(*grid, "global+classes")) == 0
    assert len(asked) == 3


def test_a_baseline_that_diverges_with_every_value_stops_nothing(monkeypatch):
    found, _ = tuner(monkeypatch, lambda arm, seed, _: math.nan)
    search = found.search("ditto", "penalty", (0.1, 1.0), (0,))
    assert tuning.note("λ", [search]) == "λ = 0.1 (2 tried)"


def test_fine_tuning_that_does_not_help_is_not_done(monkeypatch):
    found, _ = tuner(monkeypatch, lambda arm, seed, key: 0.9 if key == 0 else 0.1)
    assert tuning.chosen_value(found.search("fedavg", "fine_tune", (0, 5, 20), (0,))) == 0
    plain = outcome(global_accuracy=0.9)
    assert comparison.take_fine_tuned(plain, 0) is plain


@pytest.mark.slow
def test_a_tuned_comparison_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "PENALTIES", (0.1, 1.0))
    monkeypatch.setattr(comparison, "STEPS_AFTER", (2, 5))
    steps = []
    small = Comparison(SMALL, images._baselines("here"), ("self-fl", "ditto", "fedavg"), num_seeds=2, more_steps=3)
    result = study(small, Job(folder=tmp_path, progress=lambda *step: steps.append(step)))
    assert steps[-1][0] == steps[-1][1]
    assert [done for done, _, _ in steps] == sorted(done for done, _, _ in steps)
    labels = [row["method"] for row in result.table]
    assert labels[:3] == ["self-fl", "ditto", "fedavg"]
    assert {"ditto, L = 3", "pfedme, L = 3", TUNED_DITTO, TUNED_FEDAVG, "ditto, equal gradients"} <= set(labels)


@pytest.mark.parametrize(
    ("baseline", "verdict"), [((0.5, 0.51), "holds"), ((0.95, 0.955), "does not hold"), ((0.6, 0.99), "inconclusive")]
)
def test_verdicts_follow_the_paired_difference(baseline, verdict):
    found = {
        "self-fl": [outcome(seed, weighted_accuracy=(0.8, 0.81)[seed]) for seed in (0, 1)],
        "ditto": [outcome(seed, weighted_accuracy=baseline[seed]) for seed in (0, 1)],
    }
    assert comparison.better(found, "self-fl", {"ditto": "Better."})[0].verdict == verdict


def test_what_is_not_claimed_counts_among_the_comparisons_too():
    """The report's table corrects over every method: a claim below it must not say another thing."""

    def outcomes(*scores):
        return [outcome(seed, weighted_accuracy=score) for seed, score in enumerate(scores)]

    found = {"self-fl": outcomes(0.80, 0.82, 0.84), "ditto": outcomes(0.78, 0.79, 0.80)}
    assert comparison.better(found, "self-fl", {"ditto": "Better."})[0].verdict == "holds"
    found |= {"fedavg": outcomes(0.78, 0.79, 0.80), "local": outcomes(0.6, 0.9, 0.8)}
    assert comparison.better(found, "self-fl", {"ditto": "Better."})[0].verdict == "inconclusive"


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((0.2, 0.3, 0.25), "holds"),
        ((-0.2, 0.1, 0.0), "holds"),
        ((5.0, 5.1, 5.2), "does not hold"),
        ((-5.0, -5.1, -5.2), "does not hold"),
        ((0.9, 1.2, 0.8), "inconclusive"),
        ((-3.0, 3.0, 0.1), "inconclusive"),
    ],
)
def test_within_a_point_is_decided_by_the_interval(values, verdict):
    gap = Estimate.of(arms.torch.tensor(values), test_per_train=FRESH_DRAWS)
    assert within(gap, 1.0) == verdict


# ---------------------------------------------------------------------------------------------------- the other studies


LONGER = replace(SMALL, rounds=16, participation=1.0)  # for steps over rounds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("study_of", "problems", "claims", "lines"),
    [
        (images.ablation_study, [SMALL], 1, 5),
        (images.augmented_study, [SMALL, replace(SMALL, name="letters")], 2, 4),
        (images.sparse_study, [SMALL], 4, 6),
        (images.histogram_study, [LONGER], 2, 2),
        (images.trajectory_study, [LONGER], 2, 2),
    ],
)
def test_every_image_study_runs(study_of, problems, claims, lines, tmp_path):
    result = study_of(*problems, Job(folder=tmp_path, num_seeds=2))
    assert len(result.claims) == claims
    assert len(result.table) == lines
    assert result.rows
    assert result.figures
    assert "diverged" not in str(result.table)


def test_the_ablation_switches_one_component_at_a_time():
    on = {
        label: [key for key in images.PARTS_OFF if getattr(DIGITS.method("self-fl", **options), key)]
        for label, options in images.ABLATION.items()
    }
    assert on["full Self-FL"] == list(images.PARTS_OFF)
    assert on["initialisation only"] == ["adaptive_start"]
    assert on["adaptive steps only"] == ["adaptive_steps"]
    assert on["weighted aggregation only"] == ["uncertainty_weights"]
    assert on["none (FedAvg, smoothed)"] == []


def test_the_histogram_counts_the_steps_of_one_round(monkeypatch):
    def made_up(problem, pairs, job, done, total):
        found = {}
        for arm, seed in pairs:
            rows = [
                {"round": 20, "client": m, "num_local_steps": 1, "wanted_steps": wanted}
                for m, wanted in enumerate([0.4, 1.0, 3.0, 39.0, 41.0, 1e6, None])
            ]
            rows.append({"round": 21, "client": 0, "num_local_steps": 1, "wanted_steps": 5000.0})
            found.setdefault(arm.label, []).append(replace(outcome(seed), participation=rows))
        return found

    monkeypatch.setattr(comparison, "run_arms", made_up)
    result = images.histogram_study(replace(SMALL, rounds=40, max_local_steps=40), Job())
    bars = dict(zip(images.BINS, result.figures[0].charts[0].series[0].y, strict=True))
    sixth = 100 / 6
    assert bars == pytest.approx(
        {1: 2 * sixth, 2: sixth, 5: 0, 10: 0, 20: sixth, 40: sixth, 80: 0, 160: 0, 320: 0, 640: sixth}
    )
    assert result.table[0]["above ℓ_max = 40"] == "33 ± 0 %"
    assert result.claims[0].verdict == "holds"


def test_the_trajectory_sees_a_decreasing_trend(monkeypatch):
    def made_up(problem, pairs, job, done, total):
        found = {}
        for arm, seed in pairs:
            slope = -0.5 if arm.label == "self-fl" else 0.25
            rows = [
                {"round": number, "client": m, "num_local_steps": 1, "wanted_steps": 100 + slope * number}
                for number in range(1, 41)
                for m in range(3)
            ]
            found.setdefault(arm.label, []).append(replace(outcome(seed), participation=rows))
        return found

    monkeypatch.setattr(comparison, "run_arms", made_up)
    result = images.trajectory_study(replace(SMALL, rounds=40), Job())
    assert [claim.verdict for claim in result.claims] == ["holds", "does not hold"]
    assert "−0.5" in result.claims[0].evidence


def test_the_demo_takes_the_embedded_digits():
    assert DEMO.id == "demo"
    assert images.DEMO_COMPARISON.problem is DIGITS
    assert not images.DEMO_COMPARISON.is_tuned


def test_a_quick_look_at_a_comparison_is_short_and_untuned():
    whole = images.MNIST_COMPARISON
    quick = whole.quick()
    assert (quick.problem.rounds, quick.num_seeds, quick.is_tuned) == (40, 2, False)
    assert quick.methods == whole.methods
    assert replace(whole, quick_share=20).quick().problem.rounds == 10


def test_a_method_that_reports_no_steps_has_no_share_at_the_cap(tmp_path):
    chosen = Comparison(SMALL, {}, methods=("self-fl", "self-fl-auto"), is_tuned=False, num_seeds=1)
    found = study(chosen, Job(folder=tmp_path))
    shown = {line["method"]: line["steps at ℓ_max"] for line in found.table}
    assert shown["self-fl-auto"] == "–"
    assert shown["self-fl"].endswith(" %")
