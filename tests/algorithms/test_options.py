"""A wrong option is refused when the method is made, with what was found and what was expected."""

import math
from types import SimpleNamespace

import pytest
import torch

from selffl.algorithms import ALGORITHMS, Layer, LocalTask, Population, algorithm
from selffl.algorithms.norms import check_batch_norm
from selffl.errors import ConfigError


def test_every_name_makes_a_method_with_the_options_given():
    for name in ALGORITHMS:
        assert name.startswith(algorithm(name).name)
    assert algorithm("ditto", penalty=0.5, num_local_steps=3).penalty == 0.5
    assert algorithm("self-fl-exact").form == "exact"
    assert algorithm("self-fl").form == "paper"
    assert algorithm("fedavg-equal").weighting == algorithm("ditto-equal").weighting == "equal"
    assert algorithm("fedavg").weighting == algorithm("ditto").weighting == "examples"
    assert algorithm("self-fl", smoothing="participation") == algorithm("self-fl")


def test_an_unknown_method_is_named_with_its_nearest_neighbour():
    with pytest.raises(ConfigError, match=r"unknown algorithm 'fedavgg'; did you mean 'fedavg'\? .*self-fl-exact"):
        algorithm("fedavgg")
    with pytest.raises(ConfigError, match=r"unknown algorithm 'zzz'; expected one of: .*perfedavg, pfedbayes, pfedme"):
        algorithm("zzz")


@pytest.mark.parametrize(
    ("name", "option", "near"),
    [
        ("fedavg", "num_local_step", "num_local_steps"),
        ("ditto", "penality", "penalty"),
        ("self-fl", "inital_steps", "initial_steps"),
        ("self-fl-exact", "max_steps", "max_local_steps"),
        ("self-fl-augmented", "tolerence", "tolerance"),
        ("pfedme", "mixin", "mixing"),
        ("perfedavg", "orders", "order"),
        ("self-fl", "adaptive_step", "adaptive_steps"),
        ("self-fl-cluster", "num_cluster", "num_clusters"),
        ("fedbabu", "fine_tune_epoch", "fine_tune_epochs"),
        ("fedper", "heads", "head"),
        ("fedrep", "head_step", "head_steps"),
        ("apfl", "mixin", "mixing"),
    ],
)
def test_an_unknown_option_is_named_with_its_nearest_neighbour(name, option, near):
    with pytest.raises(ConfigError, match=f"unknown option of {name} '{option}'; did you mean '{near}'"):
        algorithm(name, **{option: 1})
    with pytest.raises(ConfigError, match=f"unknown option of {name} 'colour'; .*[Ee]xpected one of: .*{near}"):
        algorithm(name, colour="red")


# option: (methods that have it, what is expected, wrong values)
WHOLE_FROM_1 = "a whole number, 1 or more"
WRONG_WHOLE = (0, -3, 2.0, "4", None, True, math.nan)
WRONG_NUMBER = ("1", None, True, math.nan, math.inf, -0.5)
WRONG = {
    "num_local_steps": (
        (
            *("fedavg", "fedavg-equal", "fedprox", "local", "ditto", "ditto-equal", "pfedme", "perfedavg"),
            *("apfl", "fedala", "fedbabu", "feddbe", "feddpa", "fedbn", "fedpac", "fedper", "fedrep"),
            *("fedrod", "pfedbayes", "scaffold"),
        ),
        WHOLE_FROM_1,
        WRONG_WHOLE,
    ),
    "num_local_epochs": (("fedavg", "ditto", "fedrep", "self-fl"), WHOLE_FROM_1, (0, -3, 2.0, "4", True, math.nan)),
    "weighting": (
        ("fedala", "fedavg", "ditto", "fedbabu", "fedbn", "feddbe", "feddpa", "fedper", "fedrep", "fedrod"),
        "'examples' or 'equal'",
        ("Equal", None, 1),
    ),
    "penalty": (("feddbe", "fedprox", "ditto", "pfedme"), "a number 0 or more", WRONG_NUMBER),
    "num_inner_steps": (("pfedbayes", "pfedme"), WHOLE_FROM_1, WRONG_WHOLE),
    "mixing": (("pfedbayes", "pfedme"), "a number above 0", (*WRONG_NUMBER, 0.0)),
    "personal_learning_rate": (("pfedme",), "a number above 0", ("1", True, math.nan, math.inf, -0.5, 0.0)),
    "global_learning_rate": (("scaffold",), "a number above 0", (*WRONG_NUMBER, 0.0)),
    "head_learning_rate": (("fedpac",), "a number above 0", ("1", True, math.nan, math.inf, -0.5, 0.0)),
    "alignment": (("fedpac",), "a number 0 or more", WRONG_NUMBER),
    "tempering": (("pfedbayes",), "a number 0 or more", WRONG_NUMBER),
    "adam_learning_rate": (("pfedbayes",), "a number above 0", ("1", True, math.nan, math.inf, -0.5, 0.0)),
    "initial_deviation": (("pfedbayes",), "a number above 0", (*WRONG_NUMBER, 0.0)),
    "order": (("perfedavg",), "'first' or 'hessian-free'", ("second", None, 1)),
    "inner_learning_rate": (("perfedavg",), "a number above 0", ("1", True, math.nan, math.inf, -0.5, 0)),
    "adaptation_steps": (("perfedavg",), "a whole number, 0 or more", (-1, 1.0, "1", None, False)),
    "difference": (("perfedavg",), "a number above 0", (*WRONG_NUMBER, 0.0)),
    "form": (("self-fl", "self-fl-exact", "self-fl-augmented"), "'paper' or 'exact'", ("Paper", None, 0)),
    "variances": (("self-fl", "self-fl-augmented"), "'estimated' or 'known'", ("unknown", None, True)),
    "variance_scale": (("self-fl", "self-fl-augmented"), "'sum' or 'mean'", ("total", None, 1)),
    "others": (("self-fl", "self-fl-augmented"), "'cohort' or 'all'", ("everyone", None, 1)),
    "smoothing": (
        ("self-fl", "self-fl-augmented"),
        "a number above 0 and at most 1",
        (*WRONG_NUMBER, 0, 1.5, "participations"),
    ),
    "initial_steps": (("self-fl", "self-fl-augmented"), WHOLE_FROM_1, WRONG_WHOLE),
    "max_local_steps": (("self-fl", "self-fl-augmented"), WHOLE_FROM_1, WRONG_WHOLE),
    "tolerance": (("self-fl-augmented",), "a number above 0", ("1", True, math.nan, math.inf, -0.5, 0.0)),
    "max_convergence_steps": (("self-fl-augmented",), WHOLE_FROM_1, WRONG_WHOLE),
    "adaptive_start": (("self-fl", "self-fl-cluster"), "True or False", (1, 0, "yes", None)),
    "adaptive_steps": (("self-fl", "self-fl-augmented"), "True or False", (1, 0, "yes", None)),
    "uncertainty_weights": (("self-fl", "self-fl-cluster"), "True or False", (1, 0, "yes", None)),
    "clusters": (("self-fl-cluster",), "'column' or 'variance'", ("columns", None, 3)),
    "num_clusters": (("self-fl-cluster",), WHOLE_FROM_1, WRONG_WHOLE),
    "head": (("fedbabu", "fedper", "fedrep"), "a string", (None, 1, ("fc",))),
    "mixed_layers": (("fedala",), "a whole number, 0 or more", (-1, 1.0, "1", None, False)),
    "row_share": (("fedala",), "a number above 0 and at most 1", (*WRONG_NUMBER, 0, 1.5)),
    "mixing_rate": (("fedala",), "a number above 0", (*WRONG_NUMBER, 0.0)),
    "first_passes": (("fedala",), WHOLE_FROM_1, WRONG_WHOLE),
    "fine_tune_epochs": (("fedbabu",), WHOLE_FROM_1, WRONG_WHOLE),
    "head_steps": (("fedpac", "fedrep"), WHOLE_FROM_1, WRONG_WHOLE),
    "adaptive": (("apfl",), "True or False", (1, 0, "yes", None)),
}


@pytest.mark.parametrize(
    ("name", "option", "value", "expected"),
    [
        (name, option, value, expected)
        for option, (names, expected, values) in WRONG.items()
        for name in names
        for value in values
    ]
    + [("apfl", "mixing", value, "a number 0 or more and at most 1") for value in (*WRONG_NUMBER, 1.5)],
)
def test_a_wrong_value_is_refused(name, option, value, expected):
    with pytest.raises(ConfigError) as error:
        algorithm(name, **{option: value})
    assert str(error.value).startswith(f"{option} is {value!r}; expected {expected}")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ditto", {"penalty": 0}),
        ("pfedme", {"penalty": 0.0, "num_inner_steps": 1, "num_local_steps": 1, "mixing": 2}),
        ("perfedavg", {"adaptation_steps": 0, "inner_learning_rate": None}),
        ("self-fl", {"smoothing": 1, "initial_steps": 1, "max_local_steps": 1}),
        ("self-fl-augmented", {"max_convergence_steps": 1, "tolerance": 1, "smoothing": 1e-9}),
        ("self-fl-augmented", {"tolerance": None}),
        ("self-fl-cluster", {"num_clusters": 1, "others": "cohort"}),
        ("apfl", {"mixing": 0}),
        ("apfl", {"mixing": 1.0, "adaptive": False}),
        ("fedrep", {"head": "fc", "head_steps": 1, "weighting": "examples"}),
    ],
)
def test_values_at_the_edge_are_taken(name, options):
    made = algorithm(name, **options)
    assert {key: getattr(made, key) for key in options} == options


@pytest.mark.parametrize("name", ["self-fl", "self-fl-exact", "self-fl-augmented", "self-fl-cluster"])
@pytest.mark.parametrize("stated", ["nothing", "intra_variance", "inter_variance"])
def test_known_variances_must_be_stated(name, stated):
    method = algorithm(name, variances="known")
    given = {
        "nothing": {},
        "intra_variance": {"intra_variance": torch.ones(3)},
        "inter_variance": {"inter_variance": torch.tensor(1.0)},
    }
    with pytest.raises(ConfigError, match=r"variances='known'.* states no variances; expected .*variances='estimated'"):
        method.start(torch.zeros(2), Population(3, **given[stated]))
    both = given["intra_variance"] | given["inter_variance"] | {"cluster": torch.tensor([0, 1, 0])}
    assert method.start(torch.zeros(2), Population(3, **both)).intra_variance.tolist() == [1.0, 1.0, 1.0]


def test_clusters_must_be_named():
    with pytest.raises(ConfigError) as error:
        algorithm("self-fl-cluster").start(torch.zeros(2), Population(3))
    assert str(error.value) == (
        "clusters='column', but the federation names no clusters; expected one for each client. Give them, or use "
        "clusters='variance'."
    )
    server = algorithm("self-fl-cluster", clusters="variance").start(torch.zeros(2), Population(3))
    assert server.cluster_params.shape == (5, 2)


LAYERS = (Layer("body.0", 0, 3), Layer("body.2", 3, 4), Layer("neck", 4, 6), Layer("head", 6, 8))


@pytest.mark.parametrize(("mixed", "expected"), [(1, range(6, 8)), (2, range(4, 8)), (4, range(8)), (0, range(8))])
def test_fedala_mixes_the_last_layers(mixed, expected):
    server = algorithm("fedala", mixed_layers=mixed).start(torch.zeros(8), Population(3, layers=LAYERS))
    assert server.is_mixed.nonzero().flatten().tolist() == list(expected)
    assert algorithm("fedala").start(torch.zeros(8), Population(3)).is_mixed.all()
    with pytest.raises(ConfigError, match=r"^mixed_layers is 5, and the model has 4 layers; expected as many or less"):
        algorithm("fedala", mixed_layers=5).start(torch.zeros(8), Population(3, layers=LAYERS))


@pytest.mark.parametrize("name", ["fedbabu", "fedper", "fedrep"])
@pytest.mark.parametrize(
    ("head", "expected"),
    [
        *[("", [6, 7]), ("head", [6, 7]), ("neck", [4, 5]), ("body", [0, 1, 2, 3]), ("body.2", [3])],
        *[("2", [3]), ("0", [0, 1, 2]), ("neck, head", [4, 5, 6, 7])],
    ],
)
def test_a_head_is_a_layer_or_a_module_with_all_its_layers(name, head, expected):
    server = algorithm(name, head=head).start(torch.zeros(2, 8), Population(3, layers=LAYERS))
    assert server.is_head.nonzero().tolist() == [[row, place] for row in range(2) for place in expected]


@pytest.mark.parametrize("name", ["fedbabu", "fedper", "fedrep"])
def test_a_head_that_cannot_be_is_refused(name):
    def start(layers, head=""):
        algorithm(name, head=head).start(torch.zeros(8), Population(3, layers=layers))

    with pytest.raises(ConfigError, match=r"unknown layer 'hed'; did you mean 'head'.*body\.0, body\.2, head, neck"):
        start(LAYERS, "hed")
    with pytest.raises(ConfigError, match="unknown layer 'bod'"):
        start(LAYERS, "bod")
    with pytest.raises(
        ConfigError, match=f"^{name} shares a body and keeps a head, but the model has 1 layer; expected"
    ):
        start((Layer("", 0, 8),))
    with pytest.raises(ConfigError, match="but the model has no layers; expected two or more"):
        start(())
    with pytest.raises(ConfigError, match=r"head is 'net', which is the whole model; expected a part of: net\.0"):
        start((Layer("net.0", 0, 3), Layer("net.2", 3, 8)), "net")


def test_a_method_cannot_be_altered():
    with pytest.raises(AttributeError):
        algorithm("fedavg").num_local_steps = 3


def test_a_whole_number_that_no_float_holds_is_refused():
    with pytest.raises(ConfigError, match=r"penalty is a whole number of 1329 bits; expected a number 0 or more\.$"):
        algorithm("ditto", penalty=10**400)


@pytest.mark.parametrize(
    ("name", "policy", "model", "refusal"),
    [
        ("fedavg", "kept", (2, 2), r"batch_norm is 'kept', and fedavg keeps no layers with its clients"),
        ("fedbn", "averaged", (2, 2), r"batch_norm is 'averaged', and fedbn keeps BatchNorm with each client"),
        ("fedbn", "kept", (0, 0), r"fedbn is to keep BatchNorm with each client, and the model has no BatchNorm"),
        ("self-fl-auto", "averaged", (2, 0), r"the model has BatchNorm with running statistics, and self-fl-auto"),
    ],
)
def test_a_policy_of_batch_norm_that_a_method_cannot_follow_is_refused(name, policy, model, refusal):
    with pytest.raises(ConfigError, match=refusal):
        check_batch_norm(policy, algorithm(name), num_statistics=model[0], num_kept=model[1])


def test_policies_of_batch_norm_that_methods_can_follow_are_taken():
    for name, policy, model in (
        ("fedavg", "averaged", (2, 2)),
        ("fedavg", "batch", (0, 2)),
        ("fedbn", "kept", (2, 2)),
        ("self-fl-auto", "batch", (0, 0)),
    ):
        check_batch_norm(policy, algorithm(name), num_statistics=model[0], num_kept=model[1])


@pytest.mark.parametrize(("taken", "is_refused"), [([3, 3], False), ([3, 4], True), ([0, 4], True)])
def test_one_client_with_more_noisy_gradients_than_were_stated_is_enough(taken, is_refused):
    task = SimpleNamespace(num_noisy=torch.tensor(taken), shape=(2,))
    if is_refused:
        with pytest.raises(ConfigError, match=r"^mine took 4 noisy gradients in a visit, more than it says"):
            LocalTask.check_noisy_gradients(task, "mine", 3)
    else:
        LocalTask.check_noisy_gradients(task, "mine", 3)
