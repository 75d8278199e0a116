"""Every method through the cohort engine equals its plain-Python twin, round by round."""

import math
from collections import Counter
from functools import cache
from itertools import chain

import pytest
import torch
import twins
from federations import AUTO, assert_closing_spread, federation, run, starting_point

from selffl.algorithms import algorithm
from selffl.engines.cohort import sample_cohort
from selffl.engines.limits import NOT_PRIVATE, PrivacyOptions
from selffl.randomness import normal, uniform

ROUNDS = 9  # Self-FL estimates a client's variance from its third round on: everywhere somebody takes part as often
BASELINE_ROUNDS = 6

# name: (federation options, participation)
SETTINGS = {
    "all take part": ({"num_clients": 6, "num_params": 3}, 1.0),
    "three of ten": ({"num_clients": 10, "num_params": 2, "seed": 1}, 0.3),
    "two of seven, where C·M is not whole": ({"num_clients": 7, "num_params": 1, "seed": 2}, 0.3),
    "one at a time": ({"num_clients": 4, "num_params": 3, "seed": 3, "resample": True}, 0.25),
    "one at a time of two": ({"num_clients": 2, "num_params": 2, "seed": 4}, 0.5),
    "a lone client": ({"num_clients": 1, "num_params": 3, "seed": 5}, 1.0),
    "a lone client, data drawn anew": ({"num_clients": 1, "num_params": 2, "seed": 5, "resample": True}, 1.0),
    "rates differ, data drawn anew": (
        {"num_clients": 6, "num_params": 3, "seed": 6, "rates_differ": True, "resample": True},
        0.5,
    ),
    "some overshoot": ({"num_clients": 8, "num_params": 2, "seed": 7, "rate": 4e-3, "resample": True}, 0.5),
    "all overshoot, one at a time": (
        {"num_clients": 3, "num_params": 2, "seed": 8, "examples": (26, 40), "rate": 4e-3, "resample": True},
        0.34,
    ),
}


@cache
def source_and_problem(setting, rounds=ROUNDS, **more):
    """The federation of a setting, and the same as plain lists; nobody alters them."""
    federation_options, participation = SETTINGS[setting]
    source = federation(**federation_options, **more)
    return source, as_problem(source, participation, rounds)


def as_problem(source, participation, rounds, seed=0):
    """The same federation as plain lists."""
    num_clients = source.population.num_clients
    everyone = torch.arange(num_clients)
    estimates = [source.task(everyone, number).batch(0, everyone)[0].tolist() for number in range(1, rounds + 5)]
    variances, rate, stated = source.intra_variance.tolist(), source.learning_rate, source.population

    def gradient(t, m):
        """∇f_m: θ ↦ (θ − z_m) / σ_m², whatever the draw."""
        return lambda model, draw: [(x - z) / variances[m] for x, z in zip(model, estimates[t][m], strict=True)]

    def noise(t, m):
        task = source.task(torch.tensor([m]), t + 1)
        return lambda draw: task.noise(draw, torch.tensor([0]), source.global_params.unsqueeze(0))[0].tolist()

    def halves_of(t, m, split):
        """Estimates of both halves: means of the first half of the rows, or of rows by lot, and of the others; else
        z_m ± its noise."""
        key = (split,) if split else ()
        if source.data is None:
            noise = normal(source.seeds, "halves", *key, m, torch.arange(len(estimates[t][m]))).tolist()
            pairs = list(zip(estimates[t][m], noise, strict=True))
            return [[z + sign * variances[m] ** 0.5 * e for z, e in pairs] for sign in (1, -1)]
        rows = source.data[m, : int(source.num_examples[m])]
        if split:
            rows = rows[uniform(source.seeds, "halves", split, m, torch.arange(len(rows))).argsort()]
        cut = (len(rows) + 1) // 2
        return [rows[:cut].mean(0).tolist(), rows[cut:].mean(0).tolist()]

    def half_gradient(t, m, split=0):
        return [
            lambda model, draw, short=False, own=own: [(x - z) / variances[m] for x, z in zip(model, own, strict=True)]
            for own in halves_of(t, m, split)
        ]

    def half_terms(m):
        count = int(source.num_examples[m])
        return (0.5, 0.5) if source.data is None else ((count + 1) // 2 / count, count // 2 / count)

    return {
        "half_gradient": half_gradient,
        "half_terms": [half_terms(m) for m in range(num_clients)],
        "terms": [1.0] * num_clients,
        "start": starting_point(source).tolist(),
        "cohorts": [sample_cohort(seed, t + 1, num_clients, participation).tolist() for t in range(rounds)],
        "gradient": gradient,
        "noise": noise,
        "variances": variances,
        "rates": rate.tolist() if isinstance(rate, torch.Tensor) else [rate] * num_clients,
        "examples": [float(count) for count in source.num_examples.tolist()],
        "batch_size": None,
        "clusters": stated.cluster.tolist(),
        "head": list(range(stated.layers[-1].start, stated.layers[-1].stop)),
        "groups": list(stated.group_sizes),
        "closing": rounds,
    }


def compared(
    name, options, setting, twin, *, rounds=ROUNDS, federation_options=None, privacy=NOT_PRIVATE, **twin_options
):
    """Both runs, compared with each other in all that every method has; the code's reports, and both outcomes."""
    source, problem = source_and_problem(setting, rounds, **(federation_options or {}))
    reports = []
    engine, state, personal = run(
        algorithm(name, **options),
        source,
        rounds,
        participation=SETTINGS[setting][1],
        on_round=reports.append,
        privacy=privacy,
    )
    expected = twin(problem, **{key: give(problem) if callable(give) else give for key, give in twin_options.items()})

    assert [report.clients.tolist() for report in reports] == problem["cohorts"]
    for report, model in zip(reports, expected["history"], strict=True):
        assert report.server.params.tolist() == pytest.approx(model, rel=1e-10, abs=0)
    torch.testing.assert_close(
        personal, torch.tensor(expected["personal"], dtype=torch.float64), rtol=1e-10, atol=1e-10
    )
    concluded = engine.conclude(state)
    closed = engine.personal(concluded, is_over=True)
    if "of_closing" in expected:
        assert_closing_spread(concluded.server, expected, 1e-8)
    if "closed" in expected:
        torch.testing.assert_close(closed, torch.tensor(expected["closed"], dtype=torch.float64), rtol=1e-9, atol=1e-10)
    else:
        assert torch.equal(closed, personal)
    spent = [0] * source.population.num_clients
    for cohort, counts in zip(problem["cohorts"], expected["gradients"], strict=True):
        for m, count in zip(cohort, counts, strict=True):
            spent[m] += count
    assert state.num_gradients.tolist() == spent
    return reports, state, expected


def rates_of(problem):
    return problem["rates"]


def constant_rate(rate):
    return lambda problem: [rate] * len(problem["rates"])


BASELINES = [
    ("fedavg", {"num_local_steps": 4}, twins.run_fedavg, {"num_local_steps": 4}),
    (
        "fedprox",
        {"num_local_steps": 4, "penalty": 30.0},
        twins.run_fedprox,
        {"num_local_steps": 4, "penalty": 30.0},
    ),
    ("fedavg-equal", {"num_local_steps": 4}, twins.run_fedavg, {"num_local_steps": 4, "weighting": "equal"}),
    ("local", {"num_local_steps": 3}, twins.run_local, {"num_local_steps": 3}),
    ("scaffold", {"num_local_steps": 4}, twins.run_scaffold, {"num_local_steps": 4}),
    (
        "scaffold",
        {"num_local_steps": 3, "global_learning_rate": 0.6},
        twins.run_scaffold,
        {"num_local_steps": 3, "global_rate": 0.6},
    ),
    ("ditto", {"num_local_steps": 4}, twins.run_ditto, {"num_local_steps": 4, "penalty": 1.0}),
    (
        "ditto-equal",
        {"num_local_steps": 3, "penalty": 25.0},
        twins.run_ditto,
        {"num_local_steps": 3, "penalty": 25.0, "weighting": "equal"},
    ),
    ("pfedme", {"num_local_steps": 4}, twins.run_pfedme, {"num_local_steps": 4, "personal_rates": rates_of}),
    (
        "pfedme",
        {
            "num_local_steps": 3,
            "num_inner_steps": 2,
            "penalty": 40.0,
            "mixing": 0.7,
            "personal_learning_rate": 2e-3,
        },
        twins.run_pfedme,
        {
            "num_local_steps": 3,
            "inner_steps": 2,
            "penalty": 40.0,
            "mixing": 0.7,
            "personal_rates": constant_rate(2e-3),
        },
    ),
    ("pfedbayes", {"num_local_steps": 4}, twins.run_pfedbayes, {"num_local_steps": 4}),
    (
        "pfedbayes",
        {"num_local_steps": 2, "adam_learning_rate": None},
        twins.run_pfedbayes,
        {"num_local_steps": 2, "rate": rates_of},
    ),
    (
        "pfedbayes",
        {
            "num_local_steps": 3,
            "num_inner_steps": 2,
            "tempering": 0.5,
            "adam_learning_rate": 0.02,
            "initial_deviation": 0.4,
            "mixing": 0.6,
        },
        twins.run_pfedbayes,
        {"num_local_steps": 3, "inner_steps": 2, "tempering": 0.5, "rate": 0.02, "deviation": 0.4, "mixing": 0.6},
    ),
    ("perfedavg", {"num_local_steps": 4}, twins.run_perfedavg, {"num_local_steps": 4, "inner_rates": rates_of}),
    ("apfl", {"num_local_steps": 4}, twins.run_apfl, {"num_local_steps": 4}),
    ("apfl", {"num_local_steps": 3, "mixing": 0.9}, twins.run_apfl, {"num_local_steps": 3, "mixing": 0.9}),
    (
        "apfl",
        {"num_local_steps": 3, "mixing": 0.2, "adaptive": False},
        twins.run_apfl,
        {"num_local_steps": 3, "mixing": 0.2, "adaptive": False},
    ),
    ("feddpa", {"num_local_steps": 4}, twins.run_feddpa, {"num_local_steps": 4}),
    (
        "feddpa",
        {"num_local_steps": 3, "mixing": 0.8, "weighting": "equal"},
        twins.run_feddpa,
        {"num_local_steps": 3, "mixing": 0.8, "weighting": "equal"},
    ),
    ("fedper", {"num_local_steps": 4}, twins.run_fedper, {"num_local_steps": 4}),
    (
        "fedper",
        {"num_local_steps": 3, "weighting": "equal", "head": "head"},
        twins.run_fedper,
        {"num_local_steps": 3, "weighting": "equal"},
    ),
    ("fedala", {"num_local_steps": 4}, twins.run_fedala, {"num_local_steps": 4}),
    (
        "fedala",
        {"num_local_steps": 3, "mixing_rate": 0.02, "first_passes": 2, "row_share": 0.5, "weighting": "equal"},
        twins.run_fedala,
        {"num_local_steps": 3, "mixing_rate": 0.02, "first_passes": 2, "share": 0.5, "weighting": "equal"},
    ),
    ("fedbabu", {"num_local_steps": 4}, twins.run_fedbabu, {"num_local_steps": 4, "epochs": 5}),
    (
        "fedbabu",
        {"num_local_steps": 3, "weighting": "examples", "head": "head", "fine_tune_epochs": 2},
        twins.run_fedbabu,
        {"num_local_steps": 3, "weighting": "examples", "epochs": 2},
    ),
    # What is kept is the federation's to say: its last layer.
    ("fedbn", {"num_local_steps": 4}, twins.run_fedper, {"num_local_steps": 4}),
    (
        "fedbn",
        {"num_local_steps": 3, "weighting": "equal"},
        twins.run_fedper,
        {"num_local_steps": 3, "weighting": "equal"},
    ),
    (
        "fedrep",
        {"num_local_steps": 2, "head_steps": 5},
        twins.run_fedper,
        {"num_local_steps": 2, "head_steps": 5, "weighting": "equal"},
    ),
    (
        "perfedavg",
        {"num_local_steps": 3, "inner_learning_rate": 2e-3, "adaptation_steps": 3},
        twins.run_perfedavg,
        {"num_local_steps": 3, "inner_rates": constant_rate(2e-3), "adaptation_steps": 3},
    ),
    (
        "perfedavg",
        {"num_local_steps": 3, "order": "hessian-free"},
        twins.run_perfedavg,
        {"num_local_steps": 3, "inner_rates": rates_of, "hessian_free": True},
    ),
    (
        "perfedavg",
        {"num_local_steps": 3, "order": "hessian-free", "inner_learning_rate": 1.5e-3, "difference": 1e-2},
        twins.run_perfedavg,
        {"num_local_steps": 3, "inner_rates": constant_rate(1.5e-3), "hessian_free": True, "difference": 1e-2},
    ),
]


def alternating(cases, first=0):
    """Pairs with settings: every case in half of the settings, every setting with half of the cases."""
    return [
        (case, setting) for i, case in enumerate(cases) for j, setting in enumerate(SETTINGS) if (i + j) % 2 == first
    ]


@pytest.mark.parametrize(("number", "setting"), alternating(range(len(BASELINES))))
def test_a_baseline_equals_its_twin(number, setting):
    name, options, twin, twin_options = BASELINES[number]
    if twin in (twins.run_fedper, twins.run_fedbabu) and SETTINGS[setting][0]["num_params"] == 1:
        pytest.skip("one coordinate is no body and head")
    compared(name, options, setting, twin, rounds=BASELINE_ROUNDS, **twin_options)


SELF_FL = {
    "defaults": {},
    "mean": {"variance_scale": "mean"},
    "no smoothing": {"smoothing": 1},
    "smoothing 0.4": {"smoothing": 0.4},
    "all others": {"others": "all"},
    "short": {"initial_steps": 7, "max_local_steps": 5},
    "long": {"initial_steps": 2, "max_local_steps": 150, "variance_scale": "mean", "smoothing": 0.8},
    "all others, mean": {"others": "all", "variance_scale": "mean", "smoothing": 1.0, "initial_steps": 3},
    "known": {"variances": "known", "max_local_steps": 120},
    "known, all others": {"variances": "known", "others": "all", "smoothing": 1, "max_local_steps": 120},
    "start alone": {"adaptive_steps": False, "uncertainty_weights": False, "smoothing": 1, "initial_steps": 6},
    "steps alone": {"adaptive_start": False, "uncertainty_weights": False, "max_local_steps": 90},
    "weights alone": {"adaptive_start": False, "adaptive_steps": False, "initial_steps": 5},
    "known, capped": {"variances": "known", "max_local_steps": 9, "smoothing": 0.5, "initial_steps": 3},
}


TWIN_OF_VARIANT = {  # what the twin has to be told of a variant, beside its options
    "self-fl-exact": {"form": "exact"},
    "self-fl-augmented": {"augmented": True},
    "self-fl-cluster": {"clusters": "column"},
}


def self_fl_twin_options(setting, options, name):
    """The options of the twin that mean the same; smoothing by participation is the share of clients in a cohort."""
    federation_options, participation = SETTINGS[setting]
    num_clients = federation_options["num_clients"]
    smoothing = options.get("smoothing", "participation")
    if smoothing == "participation":
        smoothing = max(math.floor(participation * num_clients), 1) / num_clients
    known = options.get("variances") == "known"
    variant = TWIN_OF_VARIANT.get(name, {})
    clusters = options.get("clusters", variant.get("clusters"))
    augmented = variant.get("augmented", False)
    return {
        "smoothing": smoothing,
        "max_local_steps": options.get("max_local_steps", 40),
        "initial_steps": options.get("initial_steps", 20),
        "form": options.get("form", variant.get("form", "paper")),
        "known_inter": source_and_problem(setting)[0].inter_variance.item() if known else None,
        "variance_scale": options.get("variance_scale", "sum"),
        "others": options.get("others", "all" if clusters else "cohort"),
        "adaptive_start": options.get("adaptive_start", True),
        "adaptive_steps": options.get("adaptive_steps", True),
        "uncertainty_weights": options.get("uncertainty_weights", True),
        "clusters": clusters,
        "num_clusters": options.get("num_clusters", 5),
        "augmented": augmented,
        "tolerance": options.get("tolerance", 1e-6) if augmented else 0.0,
        "max_convergence_steps": options.get("max_convergence_steps", 2000) if augmented else 0,
    }


def assert_self_fl_agrees(reports, state, expected):
    """What only Self-FL has: the steps of every round, and what the server holds at the end."""
    assert [report.upload.num_local_steps.tolist() for report in reports] == expected["steps"]
    reported = [math.nan if value is None else value for value in expected["reported"]]
    assert state.server.intra_variance.tolist() == pytest.approx(reported, rel=1e-10, abs=0, nan_ok=True)
    assert state.server.inter_variance.item() == pytest.approx(expected["inter_variance"], rel=1e-10, abs=0)


def assert_self_fl_equals_its_twin(name, options, setting):
    agreed = compared(name, options, setting, twins.run_self_fl, **self_fl_twin_options(setting, options, name))
    assert_self_fl_agrees(*agreed)


# The exact form differs in one formula: each case and setting in one form or the other.
@pytest.mark.parametrize(("case", "setting"), alternating(SELF_FL, first=1))
def test_self_fl_equals_its_twin(case, setting):
    assert_self_fl_equals_its_twin("self-fl", SELF_FL[case], setting)


@pytest.mark.parametrize(("case", "setting"), alternating(SELF_FL))
def test_exact_self_fl_equals_its_twin(case, setting):
    assert_self_fl_equals_its_twin("self-fl-exact", SELF_FL[case], setting)


SUMS = {
    "as Self-FL's": {"initial_steps": 5},
    "exact, mean": {"form": "exact", "variance_scale": "mean", "max_local_steps": 90, "smoothing": 1},
    "all others": {"others": "all", "smoothing": 0.5, "initial_steps": 3},
}
BOUNDS = {"clip": 0.05, "max_weight": 1.0}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("case", SUMS)
def test_self_fl_by_sums_equals_its_twin(case, setting):
    options, name = SUMS[case], "self-fl-sums"
    told = self_fl_twin_options(setting, options, name)
    told = {key: told[key] for key in ("smoothing", "max_local_steps", "initial_steps", "form", "variance_scale")}
    told["others"] = options.get("others", "cohort")
    assert_sums_equal_their_twin(options, setting, told)


@pytest.mark.parametrize("setting", SETTINGS)
def test_bounded_sums_equal_their_twin(setting):
    options = {"initial_steps": 5}
    told = self_fl_twin_options(setting, options, "self-fl-sums")
    told = {key: told[key] for key in ("smoothing", "max_local_steps", "initial_steps", "form", "variance_scale")}
    assert_sums_equal_their_twin(options, setting, told | BOUNDS | {"others": "cohort"}, PrivacyOptions(**BOUNDS))


def assert_sums_equal_their_twin(options, setting, told, privacy=NOT_PRIVATE):
    _, state, expected = compared("self-fl-sums", options, setting, twins.run_self_fl_sums, privacy=privacy, **told)
    scale = max(expected["inter_variance"], expected["usual"])
    assert state.server.inter_variance.item() == pytest.approx(expected["inter_variance"], rel=1e-9, abs=1e-12)
    assert state.server.intra_variance.item() == pytest.approx(expected["usual"], rel=1e-9, abs=1e-9 * scale)


# Every kind of federation with a few steps; a single step and more of them where there are rows and groups.
AUTO_KINDS = [(is_grouped, with_rows, 4) for is_grouped in (False, True) for with_rows in (False, True)]


# How many steps there are and who takes part have nothing to do with each other: three settings are enough for that.
OTHER_STEPS = [
    (*kind, setting)
    for kind in ((True, True, 1), (True, True, 7), (False, False, 1))
    for setting in ("all take part", "one at a time", "rates differ, data drawn anew")
]


@pytest.mark.parametrize(
    ("is_grouped", "with_rows", "num_local_steps", "setting"),
    [*((*kind, setting) for kind, setting in alternating(AUTO_KINDS)), *OTHER_STEPS],
)
def test_self_fl_auto_equals_its_twin(is_grouped, with_rows, num_local_steps, setting):
    options, name = {"num_local_steps": num_local_steps}, "self-fl-auto"
    kind = {"with_rows": with_rows, "is_grouped": is_grouped}
    _, state, expected = compared(
        name, options, setting, twins.run_self_fl_auto, federation_options=kind, **options, **AUTO
    )
    server = state.server
    assert server.inter_variance.item() == pytest.approx(expected["trained_inter_variance"], rel=1e-7, abs=0)
    variances = (server.inter_variance * server.variance_ratios).tolist()
    assert variances == pytest.approx(expected["trained_of_group"], rel=1e-7, abs=0)
    interval = [end.item() for end in algorithm(name).inter_variance_interval(server)]
    if expected["trained_interval"] is None:
        assert all(map(math.isnan, interval))
    else:
        assert interval == pytest.approx(expected["trained_interval"], rel=1e-6, abs=1e-12)
    if expected["trained_prior_rows"] is None:  # nothing has been decided yet
        assert server.prior_rows.isnan()
        return
    assert server.prior_rows.item() == pytest.approx(expected["trained_prior_rows"], rel=1e-7, abs=0)
    rows = torch.tensor([2.0, 50.0], dtype=torch.float64)
    found = algorithm(name).intra_variance(server, torch.tensor([0, 0]), {"num_examples": rows})
    of_one_row = expected["trained_inter_variance"] * expected["trained_prior_rows"]
    assert found.tolist() == pytest.approx([of_one_row / 2, of_one_row / 50], rel=1e-7, abs=0)


AUGMENTED = {
    "tight": {"tolerance": 1e-4, "max_convergence_steps": 400, "smoothing": 1},
    "loose": {"tolerance": 3e-3, "max_convergence_steps": 35, "others": "all"},
    "never looked at": {"tolerance": 1e-9, "max_convergence_steps": 7, "variance_scale": "mean"},
    "known, exact": {"tolerance": 1e-3, "max_convergence_steps": 60, "variances": "known", "form": "exact"},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("case", AUGMENTED)
def test_augmented_self_fl_equals_its_twin(case, setting):
    assert_self_fl_equals_its_twin("self-fl-augmented", AUGMENTED[case], setting)


CLUSTERS = {
    "column": {"initial_steps": 5},
    "column, those of the cohort": {"others": "cohort", "smoothing": 1, "variance_scale": "mean"},
    "column, exact": {"form": "exact", "initial_steps": 3, "max_local_steps": 90, "smoothing": 0.6},
    "column, by examples": {"uncertainty_weights": False, "initial_steps": 5},
    "column, known": {"variances": "known", "smoothing": 1},
    "quantiles": {"clusters": "variance", "num_clusters": 3, "initial_steps": 5, "smoothing": 1},
    "quantiles, all one": {"clusters": "variance", "num_clusters": 1},
    "quantiles, more than clients": {"clusters": "variance", "num_clusters": 12, "others": "cohort"},
    "quantiles, known": {"clusters": "variance", "num_clusters": 2, "variances": "known"},
}


@pytest.mark.parametrize(("case", "setting"), alternating(CLUSTERS))
def test_cluster_self_fl_equals_its_twin(case, setting):
    assert_self_fl_equals_its_twin("self-fl-cluster", CLUSTERS[case], setting)


def test_the_cases_reach_what_they_are_for():
    """Steps that differ, that sit at the cap, that are one for overshooting; clients unknown to the end."""
    steps, unknown = set(), 0
    for setting in SETTINGS:
        _, problem = source_and_problem(setting)
        assert max(Counter(chain(*problem["cohorts"])).values()) >= 3
        for options in SELF_FL.values():
            expected = twins.run_self_fl(problem, **self_fl_twin_options(setting, options, "self-fl"))
            steps |= {count for counts in expected["steps"] for count in counts}
            unknown += sum(value is None for value in expected["reported"])
    assert {1, 5, 40} < steps
    assert len(steps) > 20
    assert unknown > 0
