"""Learning rates over rounds: torch's own schedulers, every method's twin, a plain loop, and runs that go on."""

import re

import pytest
import torch
from test_cnn_twins import (
    CASES,
    FEW_ROUNDS,
    RATE,
    SIZES,
    as_problem,
    images,
    network,
    plainly_trained,
    source_of,
    trained,
    unload,
)
from test_training_options import COHORTS, CROSS_ENTROPY, book_of, of_torch, settings, with_options

import selffl
from selffl.algorithms import algorithm
from selffl.algorithms.schedules import rate_in_round, schedule_of
from selffl.algorithms.training_options import TrainingOptions
from selffl.errors import ConfigError

OF_TORCH = torch.optim.lr_scheduler
KINDS = {
    "constant": lambda optimiser, rounds: OF_TORCH.ConstantLR(optimiser, 1.0),
    "cosine": lambda optimiser, rounds: OF_TORCH.CosineAnnealingLR(optimiser, rounds),
    "exponential 0.9": lambda optimiser, rounds: OF_TORCH.ExponentialLR(optimiser, 0.9),
    "exponential": lambda optimiser, rounds: OF_TORCH.ExponentialLR(optimiser, 0.99),
    "step 0.1 0.5 0.75": lambda optimiser, rounds: OF_TORCH.MultiStepLR(optimiser, [rounds / 2, 3 * rounds / 4], 0.1),
    "step": lambda optimiser, rounds: OF_TORCH.MultiStepLR(optimiser, [rounds / 2, 3 * rounds / 4], 0.1),
    "step 0.5 0.7": lambda optimiser, rounds: OF_TORCH.MultiStepLR(optimiser, [7 * rounds / 10], 0.5),
}
RELATIVE = [kind for kind in KINDS if kind.startswith(("cosine", "step"))]


def rates_of_torch(kind, rounds, number=None):
    """Of each round, by torch's own scheduler, stepped once a round."""
    optimiser = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    scheduler = KINDS[kind](optimiser, rounds)
    found = []
    for _ in range(number or rounds):
        found.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("step")])
@pytest.mark.parametrize("rounds", [1, 4, 20, 101])
def test_rates_are_those_of_torch(kind, rounds):
    found = [rate_in_round(0.3, kind, number, rounds) for number in range(1, rounds + 1)]
    assert found == pytest.approx(rates_of_torch(kind, rounds), rel=1e-12)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("step")])
@pytest.mark.parametrize("rounds", [4, 20, 40])
def test_steps_come_where_those_of_torch_do(kind, rounds):
    """With numbers of rounds of which the shares are whole: other milestones torch does not know."""
    found = [rate_in_round(0.3, kind, number, rounds) for number in range(1, rounds + 1)]
    if (rounds * 7) % 10 == 0 or kind != "step 0.5 0.7":
        assert found == pytest.approx(rates_of_torch(kind, rounds), rel=1e-12)
    assert found[0] == 0.3
    assert found[-1] < 0.3


def test_steps_by_hand():
    def factors(text, rounds):
        return [round(rate_in_round(1.0, text, number, rounds), 12) for number in range(1, rounds + 1)]

    assert factors("step 0.1 0.5 0.75", 4) == [1, 1, 0.1, 0.01]
    assert factors("step 0.1 0.5", 5) == [1, 1, 1, 0.1, 0.1]  # half of five rounds have been after the third
    assert factors("step 0.5 0.7", 10) == [1] * 7 + [0.5] * 3  # 0.7 * 10 is 7.000000000000001
    assert factors("  step   .5  5e-1 ", 2) == [1, 0.5]


@pytest.mark.parametrize("kind", RELATIVE)
def test_what_comes_after_the_last_round_has_the_first_rate(kind):
    assert rate_in_round(0.3, kind, 21, 20) == rate_in_round(0.3, kind, 25, 20) == 0.3
    assert 0 < rate_in_round(0.3, kind, 20, 20) < 0.2
    assert rate_in_round(0.3, kind, 10**9, 10**9) > 0


# --------------------------------------------------------------------------------------------------- in every method


class RatesOfRounds(list):
    """The same for every client, and another in each round: that of the cohort, or of the gradient, last asked for."""

    t = 0

    def __getitem__(self, m):
        return list.__getitem__(self, min(self.t, len(self) - 1))


# Methods whose equations have the rate in them, or that train on an objective of their own; of those that merely take
# steps by `descend`, which has the rate of its task, two are enough.
HAVE_A_RATE = [
    *("self-fl-exact", "self-fl-augmented", "self-fl-cluster", "self-fl-sums"),
    *("self-fl-auto", "self-fl-auto, longer", "scaffold", "pfedme", "perfedavg", "perfedavg, hessian-free"),
    *("apfl", "fedala", "fedpac", "feddbe", "fedrod", "fedavg", "ditto"),
]
LONG = ("self-fl-auto", "self-fl-auto, longer")
WITHOUT_AN_END = ("fedavg", "self-fl")  # enough for a schedule that others cannot tell


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        *(
            pytest.param(case, "step 0.3 0.5 0.75", marks=[pytest.mark.slow] if case in LONG else [])
            for case in HAVE_A_RATE
        ),
        *((case, "exponential 0.8") for case in WITHOUT_AN_END),
    ],
)
def test_a_method_equals_its_twin(case, kind):
    """Eq. (19) of Self-FL has the rate of the round in it, as have control variates and held steps."""
    name, options, twin, told = CASES[case]
    plan = TrainingOptions(rounds=FEW_ROUNDS, learning_rate_schedule=kind)
    source = with_options(source_of(network()), plan)
    state, personal, closed = trained(algorithm(name, **options), source, rounds=FEW_ROUNDS)
    problem = as_problem(source, network(), FEW_ROUNDS)
    rates = {
        "exponential 0.8": [RATE * 0.8**t for t in range(FEW_ROUNDS + 10)],
        "step 0.3 0.5 0.75": [RATE] * 2 + [RATE * 0.3, RATE * 0.09, RATE],
    }[kind]
    problem["rates"] = RatesOfRounds(rates)
    plain, plain_halves = problem["gradient"], problem["half_gradient"]

    def gradient(t, m, *half):
        problem["rates"].t = t
        return plain(t, m, *half)

    def half_gradient(t, m, *split):
        problem["rates"].t = t
        return plain_halves(t, m, *split)

    class Cohorts(list):
        def __iter__(self):
            for problem["rates"].t, cohort in enumerate(list.__iter__(self)):
                yield cohort

    problem["gradient"], problem["half_gradient"] = gradient, half_gradient
    problem["cohorts"] = Cohorts(problem["cohorts"])
    told = told | {key: problem["rates"] for key in ("inner_rates", "personal_rates") if key in told}
    expected = twin(problem, **told)
    assert state.server.params.tolist() == pytest.approx(expected["global"], rel=1e-8, abs=1e-10)
    torch.testing.assert_close(personal, torch.tensor(expected["personal"], dtype=torch.float64), rtol=1e-8, atol=1e-10)
    wanted = torch.tensor(expected.get("closed", expected["personal"]), dtype=torch.float64)
    torch.testing.assert_close(closed, wanted, rtol=1e-8, atol=1e-10)
    assert (personal - plainly_trained(case)).norm(dim=-1).max() > 1e-3


# ------------------------------------------------------------------------------------------------------------- in runs


@pytest.mark.parametrize(
    ("kind", "optimiser"), [("cosine", "sgd"), ("exponential 0.9", "adam"), ("step 0.1 0.5 0.75", "sgd")]
)
def test_a_run_equals_a_plain_loop(kind, optimiser):
    method = algorithm("fedavg", num_local_steps=5)
    given = settings(learning_rate=0.3, learning_rate_schedule=kind, rounds=4)
    run = selffl.train(network(), images(), method, loss=CROSS_ENTROPY, optimiser=optimiser, **given)
    rates = rates_of_torch(kind, 4)
    book = book_of(of_torch(optimiser), rate=lambda t: rates[t]).run("fedavg", COHORTS[:4], num_steps=5)
    assert unload(run.global_model()) == pytest.approx(unload(book.shared), rel=1e-6, abs=1e-9)


DITTO = algorithm("ditto", num_local_steps=3)


def models(run):
    return torch.tensor([unload(run.personal_model(m)) for m in range(len(SIZES))])


def go(folder=None, **given):
    return selffl.train(network(), images(), DITTO, loss=CROSS_ENTROPY, out=folder, **settings(**given))


@pytest.mark.parametrize("kind", ["cosine", "exponential 0.9"])  # one that depends on the rounds, one that does not
def test_a_run_that_is_stopped_goes_on_with_the_same_rates(kind, tmp_path):
    def stop(row):
        if row["round"] == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        selffl.train(
            network(), images(), DITTO, loss=CROSS_ENTROPY, out=tmp_path / "run", on_round=stop,
            **settings(learning_rate_schedule=kind, checkpoint_every=3),
        )  # fmt: skip
    run = selffl.resume(tmp_path / "run", model=network(), federation=images(), loss=CROSS_ENTROPY)
    assert torch.equal(models(run), models(go(learning_rate_schedule=kind)))
    assert run.config.learning_rate_schedule == kind


def test_a_longer_run_is_the_same_where_its_rates_do_not_depend_on_its_length(tmp_path):
    go(tmp_path / "run", learning_rate_schedule="exponential 0.9", rounds=3)
    run = selffl.resume(tmp_path / "run", model=network(), federation=images(), loss=CROSS_ENTROPY, rounds=6)
    assert torch.equal(models(run), models(go(learning_rate_schedule="exponential 0.9", rounds=6)))


@pytest.mark.parametrize("kind", RELATIVE)
def test_a_longer_or_shorter_run_is_refused_where_they_do(kind, tmp_path):
    go(tmp_path / "run", learning_rate_schedule=kind, rounds=2)
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    given = {"model": network(), "federation": images(), "loss": CROSS_ENTROPY}
    for rounds in (1, 9):
        refusal = f"^rounds is {rounds}, and the run's learning rates were laid out over 2 rounds .*; expected 2. Trai"
        with pytest.raises(ConfigError, match=refusal) as caught:
            selffl.resume(tmp_path / "run", rounds=rounds, **given)
        assert "\n" not in str(caught.value)
        assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
    selffl.resume(tmp_path / "run", rounds=2, **given)


def test_a_new_client_visits_at_the_rate_of_the_round_that_would_come_next():
    """However often: the server is at rest, and a rate that falls with every visit would settle too early."""
    run = go(learning_rate=0.3, learning_rate_schedule="exponential 0.5", rounds=3)
    fixed = go(learning_rate=0.3 * 0.5**3, rounds=3)
    rows = images().train
    x, y = rows.features[: SIZES[0]], rows.labels[: SIZES[0]]
    found = run.welcome((x, y))
    fixed._state.server.params.copy_(run._state.server.params)
    expected = fixed.welcome((x, y))
    assert unload(found) == pytest.approx(unload(expected), rel=1e-9)


def test_a_rate_that_vanishes_is_refused():
    with pytest.raises(ConfigError, match=r"'exponential 0.1', which leaves nothing of the learning rate in round 60"):
        selffl.train(network(), images(), "fedavg", learning_rate_schedule="exponential 0.1", rounds=60)
    selffl.runs.recipe.check_settings({"learning_rate_schedule": "exponential 0.1", "rounds": 30})


@pytest.mark.parametrize("text", ["", "  ", 3, None, "cosine 0.5", "step 0.1 0.7 0.5", "exponential 1.0", "step x"])
def test_what_describes_no_schedule_is_refused_in_one_line(text):
    with pytest.raises(ConfigError, match=rf"^learning_rate_schedule is {re.escape(repr(text))}; .*$"):
        schedule_of(text)
