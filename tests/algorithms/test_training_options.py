"""Weight decay and clipping: every method equals its twin with both, and torch.optim's own step for step."""

import pytest
import torch
from by_the_book import Book
from test_cnn_twins import (
    CASES,
    CROSS_ENTROPY,
    FEW_ROUNDS,
    PARTICIPATION,
    ROUNDS,
    SEED,
    SIZES,
    as_problem,
    images,
    minibatches,
    network,
    plainly_trained,
    source_of,
    trained,
    unload,
)
from torch import nn

import selffl
from needs import LEARNS_VARIANCES
from selffl.algorithms import LocalTask, algorithm
from selffl.algorithms.training_options import TrainingOptions, augmentations_of
from selffl.engines.cohort import sample_cohort
from selffl.errors import ConfigError

DECAY, LONGEST = 0.05, 0.4
OPTIONS = {
    "decay": TrainingOptions(weight_decay=DECAY),
    "clipping": TrainingOptions(max_gradient_norm=LONGEST),
    "both": TrainingOptions(weight_decay=DECAY, max_gradient_norm=LONGEST),
}
NEITHER = {"fedrod", "feddbe", "fedpac", *LEARNS_VARIANCES}  # a prior or loss of their own
WHOLE_GRADIENTS = {"perfedavg", *NEITHER}  # which cannot be clipped
COHORTS = [sample_cohort(SEED, t + 1, len(SIZES), PARTICIPATION).tolist() for t in range(ROUNDS)]


def with_options(source, options):
    return type(source)(**{**vars(source), "options": options})


def clipped_and_decayed(problem, options):
    """The problem with gradients that torch has shortened, and to which λθ has been added."""

    def gradient(t, m, half=None):
        slope = problem["gradient"](t, m, half)

        def changed(model, draw, *short):
            part = nn.Parameter(torch.zeros(len(model), dtype=torch.float64))
            part.grad = torch.tensor(slope(model, draw, *short), dtype=torch.float64)
            if options.max_gradient_norm is not None:
                nn.utils.clip_grad_norm_([part], options.max_gradient_norm)
            return [g + options.weight_decay * p for g, p in zip(part.grad.tolist(), model, strict=True)]

        return changed

    return problem | {"gradient": gradient}


# Twins of FedRep and FedBABU take whole gradients where torch clips those of a part: a module is held below.
ONLY_DECAY = {"fedrep", "fedbabu", *WHOLE_GRADIENTS}
# Both at once where a method takes both; each by itself where a gradient is used once, and where it is used twice.
TAKEN = [
    (case, "decay" if name in ONLY_DECAY else "both") for case, (name, *_) in CASES.items() if name not in NEITHER
] + [(case, kind) for case in ("fedavg", "ditto") for kind in ("decay", "clipping")]


@pytest.mark.parametrize(("case", "kind"), TAKEN)
def test_a_method_equals_its_twin(case, kind):
    name, options, twin, told = CASES[case]
    source = with_options(source_of(network()), OPTIONS[kind])
    state, personal, _ = trained(algorithm(name, **options), source, rounds=FEW_ROUNDS)
    problem = as_problem(source, network(), FEW_ROUNDS)
    expected = twin(clipped_and_decayed(problem, OPTIONS[kind]), **told)
    assert state.server.params.tolist() == pytest.approx(expected["global"], rel=1e-8, abs=1e-10)
    torch.testing.assert_close(personal, torch.tensor(expected["personal"], dtype=torch.float64), rtol=1e-8, atol=1e-10)
    assert (personal - plainly_trained(case)).norm(dim=-1).min() > 1e-3


def of_torch(name, **options):
    kinds = {"sgd": torch.optim.SGD, "momentum": torch.optim.SGD, "adam": torch.optim.Adam}
    beside = {"momentum": 0.9} if name == "momentum" else {}
    return lambda params: kinds[name](params, lr=1.0, **beside, **options)


def assert_run_is(run, book, personal=None):
    assert unload(run.global_model()) == pytest.approx(unload(book.shared), rel=1e-7, abs=1e-9)
    for m in range(len(SIZES)) if personal else ():
        if (personal, m) in book.own:
            expected = book.own[personal, m]
            assert unload(run.personal_model(m)) == pytest.approx(unload(expected), rel=1e-7, abs=1e-9)


def settings(**more):
    return {
        "rounds": ROUNDS, "participation": PARTICIPATION, "batch_size": 4, "seed": SEED, "dtype": "float64",
        "learning_rate": 0.05, **more,
    }  # fmt: skip


def book_of(make, **options):
    source = type(source_of(network()))(**{**vars(source_of(network())), "seed": SEED})
    given = {"rate": lambda t: 0.05, "weights": SIZES} | options
    return Book(network(), batches=lambda t, m: minibatches(source, t, m), make=make, **given)


@pytest.mark.parametrize(("name", "optimiser"), [("fedavg", "sgd"), ("ditto", "momentum"), ("fedavg", "adam")])
def test_a_run_equals_torch_optim(name, optimiser):
    """Whose weight decay, of SGD and of Adam, is a term of the gradient."""
    both = {"weight_decay": DECAY, "max_gradient_norm": LONGEST}
    method = algorithm(name, num_local_steps=5)
    run = selffl.train(network(), images(), method, loss=CROSS_ENTROPY, optimiser=optimiser, **settings(**both))
    book = book_of(of_torch(optimiser, weight_decay=DECAY), clip=LONGEST)
    assert_run_is(run, book.run(name, COHORTS, num_steps=5), "personal")
    plain = selffl.train(network(), images(), method, loss=CROSS_ENTROPY, optimiser=optimiser, **settings())
    assert max(abs(a - b) for a, b in zip(unload(plain.global_model()), unload(book.shared), strict=True)) > 1e-3


def test_the_length_of_a_gradient_does_not_count_what_is_frozen():
    """FedRep's head and body are clipped each by itself, as by torch with the parameters that an optimiser has."""
    method = algorithm("fedrep", num_local_steps=3, head_steps=2)
    both = {"weight_decay": DECAY, "max_gradient_norm": 0.2}
    run = selffl.train(network(), images(), method, loss=CROSS_ENTROPY, **settings(**both))
    book = book_of(of_torch("sgd", weight_decay=DECAY), clip=0.2, head="5.", weights=[1] * len(SIZES))
    book.run("fedrep", COHORTS, num_steps=3, head_steps=2)
    expected = {m: book.own["personal", m] for m in range(len(SIZES)) if ("personal", m) in book.own}
    body = {name: part for name, part in book.shared.state_dict().items() if not name.startswith("5.")}
    for m, module in expected.items():
        module.load_state_dict(module.state_dict() | body)
        assert unload(run.personal_model(m)) == pytest.approx(unload(module), rel=1e-7, abs=1e-9)


def test_statistics_do_not_decay():
    """BatchNorm's running mean and variance are no parameters."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    source = with_options(source_of(module), TrainingOptions(weight_decay=10.0, max_gradient_norm=0.1))
    task, slots = source.task(torch.arange(2), 1), torch.arange(2)
    params = source.model.params.expand(2, -1).clone()
    params[:, :-8] *= 0.0
    params[:, -8:] = 100.0
    found = task.gradient(params, task.batch(0, slots), slots)
    assert found[:, :-8].norm(dim=-1).max() <= 0.1
    assert (found[:, -8:] == 0).all()


def test_left_out_they_change_no_bit_and_cost_nothing():
    class Counted(LocalTask):
        def __init__(self):
            super().__init__(torch.Size([2]), torch.ones(2, dtype=torch.int64), 0.1)

        batch = None

        def batch_gradient(self, params, batch):
            return batch

    given = torch.randn(2, 3)
    assert Counted().gradient(torch.ones(2, 3), given, torch.arange(2)) is given


# ----------------------------------------------------------------------------------------------------- what is refused


# What a method takes is trained with in the twins above: here with the first and the last of them.
REFUSED = [(name, "weight_decay") for name in NEITHER] + [(name, "max_gradient_norm") for name in WHOLE_GRADIENTS]


@pytest.mark.parametrize(
    ("name", "option"), [*sorted(REFUSED), ("fedavg", "weight_decay"), ("scaffold", "max_gradient_norm")]
)
def test_a_method_takes_them_or_says_why_not(name, option, tmp_path, short):
    fed, method = images(), short(name)
    given = {"rounds": 1, "dtype": "float64", "loss": CROSS_ENTROPY, option: 0.5, "out": tmp_path / "run"}
    if (name, option) not in REFUSED:
        assert selffl.train(network(), fed, method, **given).summary["status"] == "finished"
        return
    usual = "0" if option == "weight_decay" else "none"
    refusal = f"^{option} is 0.5, and {method.name} cannot have it: .*. Expected {usual}, or another method"
    with pytest.raises(ConfigError, match=refusal) as caught:
        selffl.train(network(), fed, method, **given)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", OPTIONS)
def test_another_objective_does_not_drop_them_silently(kind):
    """Also of a method that does not say so."""
    task = with_options(source_of(network()), OPTIONS[kind]).task(torch.arange(2), 1)
    with pytest.raises(ConfigError, match=r"^the method trains on an objective of its own, beside which"):
        task.with_objective(lambda rows: rows.scores.sum())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", ()),
        ("crop", ("crop",)),
        ("flip", ("flip",)),
        ("crop flip", ("crop", "flip")),
        ("flip  crop", ("flip", "crop")),
    ],
)
def test_an_augmentation_is_any_of_two_words(text, expected):
    assert augmentations_of(text) == expected


@pytest.mark.parametrize("text", ["", " ", "crop crop", "crop turn", "none crop", None, 1])
def test_other_augmentations_are_refused(text):
    with pytest.raises(ConfigError, match=r"^augmentation is .*; expected 'none', 'crop', 'flip' or 'crop flip'\.$"):
        augmentations_of(text)
