"""BatchNorm in a federation, compared with plain loops of torch: averaged, kept by clients, by batches alone."""

import copy
import re
from functools import partial

import pytest
import torch
from torch import nn

import selffl
from needs import NEEDS_BATCH_NORM, ONE_OF_A_KIND
from selffl.algorithms import ALGORITHMS
from selffl.errors import ConfigError, DataError
from selffl.runs.recipe import Recipe

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
STEPS, RATE, SIZE = 4, 0.1, 5
STATISTICS = ("running_mean", "running_var")


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, bias=False),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(48, 6),
        nn.BatchNorm1d(6, momentum=0.3, affine=False),
        nn.ReLU(),
        nn.Linear(6, 3),
    )


def federation(**options):
    """Five clients with 8 to 40 rows, each in units of its own."""
    drawn = torch.Generator().manual_seed(1)
    client = torch.arange(5).repeat_interleave(torch.tensor([8, 16, 24, 32, 40]))
    x = torch.randn(120, 1, 6, 6, generator=drawn) * (1 + client.view(-1, 1, 1, 1)) + client.view(-1, 1, 1, 1)
    y = torch.randint(3, (120,), generator=drawn)
    return selffl.Federation.from_arrays(x, y, client.numpy(), **{"test_fraction": 0.25, "seed": 0} | options)


def trained(method="fedavg", module=None, fed=None, **options):
    chosen = selffl.algorithm(method, num_local_steps=STEPS)
    options = {"rounds": 3, "participation": 1.0, "learning_rate": RATE, "batch_size": SIZE} | options
    return selffl.train(module or network(), fed or federation(), chosen, **options)


# ------------------------------------------------------------------------------------------------------ the plain loop


def step_through(module, run, client, round_number, penalty=0.0, anchor=None):
    """As anybody would train a module in torch, on the run's minibatches."""
    module = copy.deepcopy(module).train()
    task = run._session.source.task(torch.tensor([client]), round_number)
    optimiser = torch.optim.SGD(module.parameters(), lr=RATE)
    for draw in range(STEPS):
        x, y = (part[0] for part in task.batch(draw, torch.tensor([0])))
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        for own, other in zip(module.parameters(), anchor.parameters() if anchor else (), strict=False):
            own.grad += penalty * (own.data - other.data)
        optimiser.step()
    return module


def averaged(modules, weights):
    """Every entry of the state_dicts but the counts of minibatches, in double precision."""
    found = copy.deepcopy(modules[0])
    state = found.state_dict()
    total = sum(weights)
    for name, entry in state.items():
        if entry.is_floating_point():
            parts = [
                weight * module.state_dict()[name].double() for weight, module in zip(weights, modules, strict=True)
            ]
            entry.copy_(sum(parts) / total)
    return found


def is_norm(name):
    return name.split(".")[0] in ("1", "5")


def assert_same(found, expected):
    ours, theirs = found.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    for name, entry in theirs.items():
        if entry.is_floating_point():
            torch.testing.assert_close(ours[name], entry, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


def sizes(fed):
    return fed.train.num_examples.tolist()


# ------------------------------------------------------------------------------------------------------------ averaged


@pytest.mark.parametrize("gradients", ["auto", "vmap", "loop", "unfold"])
def test_averaged_is_the_plain_loop_of_modules_in_training_mode(gradients):
    fed, module = federation(), network()
    run = trained(fed=fed, gradients=gradients)
    for number in (1, 2, 3):
        module = averaged([step_through(module, run, client, number) for client in range(5)], sizes(fed))
    assert_same(run.global_model(), module)
    first = network().state_dict()
    for name in ("1.running_mean", "5.running_var"):  # which have moved
        assert (module.state_dict()[name] - first[name]).abs().min() > 0.01


OWN_PENALTY = {"ditto": 1.0, "local": 0.0}  # of the models that clients keep


def sent_model(method, shared, run, client, number):
    """What a client trains from the shared model and sends."""
    if method in OWN_PENALTY and not OWN_PENALTY[method]:
        return shared
    penalty = {"fedprox": 1.0}.get(method, 0.0)
    step = {"perfedavg": meta_steps}.get(method, partial(step_through, penalty=penalty, anchor=shared))
    return step(shared, run, client, number)


@pytest.mark.parametrize("method", ["ditto", "fedprox", "local", "perfedavg"])
def test_a_model_has_the_statistics_of_its_own_passes(method):
    """Penalties pull parameters alone; two models of a client have statistics of their own."""
    fed = federation()
    run = trained(method, fed=fed, rounds=2)
    weights = {"perfedavg": [1] * 5}.get(method, sizes(fed))
    shared, own = network(), [None] * 5
    for number in (1, 2):
        after = [sent_model(method, shared, run, client, number) for client in range(5)]
        if method in OWN_PENALTY:
            pull = {"penalty": OWN_PENALTY[method], "anchor": shared}
            own = [step_through(own[client] or shared, run, client, number, **pull) for client in range(5)]
        shared = averaged(after, weights)
    assert_same(run.global_model(), shared)
    for client in range(5) if method in OWN_PENALTY else ():
        assert_same(run.personal_model(client), own[client])


def meta_steps(module, run, client, number):
    """First-order PerFedAvg: a step on one minibatch, and the gradient there on the next, taken where it began."""
    module = copy.deepcopy(module).train()
    task = run._session.source.task(torch.tensor([client]), number)

    def slopes_of(module, draw):
        x, y = (part[0] for part in task.batch(draw, torch.tensor([0])))
        return torch.autograd.grad(nn.functional.cross_entropy(module(x), y), [*module.parameters()])

    @torch.no_grad()
    def move(module, slopes):
        for part, slope in zip(module.parameters(), slopes, strict=True):
            part -= RATE * slope

    for step in range(STEPS):
        slopes = slopes_of(module, 2 * step)
        ahead = copy.deepcopy(module)
        move(ahead, slopes)
        move(module, slopes_of(ahead, 2 * step + 1))
    return module


def test_a_head_that_stays_has_its_statistics_with_it():
    fed = federation()
    method = selffl.algorithm("fedper", num_local_steps=STEPS, head="1")
    module = nn.Sequential(network()[:5], network()[5:])
    run = selffl.train(module, fed, method, rounds=1, participation=1.0, learning_rate=RATE, batch_size=SIZE)
    for client in range(5):
        alone = step_through(module, run, client, 1).state_dict()
        for name, entry in run.personal_model(client).state_dict().items():
            if name.startswith("1.") and entry.is_floating_point():
                torch.testing.assert_close(entry, alone[name], **CLOSE)
    assert torch.equal(run.global_model().state_dict()["1.5.running_var"], torch.ones(6))


def test_evaluation_takes_running_statistics_and_models_are_handed_out_in_eval_mode():
    fed, given = federation(), network()
    before = copy.deepcopy(given.state_dict())
    run = trained("ditto", given, fed)
    assert given.training
    for name, entry in given.state_dict().items():  # statistics and counts, too
        assert torch.equal(entry, before[name])
    right = 0
    for client in range(5):
        low, high = fed.test.offset[client : client + 2].tolist()
        model = run.personal_model(client)
        assert not any(part.training for part in model.modules())
        with torch.no_grad():  # row by row: nothing depends on the others
            answers = torch.cat([model(row[None]).argmax(1) for row in fed.test.features[low:high]])
        right += int((answers == fed.test.labels[low:high]).sum())
    assert run.summary["weighted_accuracy"] == right / len(fed.test.labels)
    assert run.predict(fed.test.features.numpy(), [0] * len(fed.test.labels)).num_rows == len(fed.test.labels)


@pytest.mark.parametrize("method", ["fedavg", "fedbn"])
def test_chunks_change_nothing_and_the_loop_no_bit(method):
    whole = trained(method, participation=0.8)
    for gradients, chunk in (("auto", 2), ("loop", 3), ("loop", 1)):
        run = trained(method, participation=0.8, gradients=gradients, chunk_size=chunk)
        for client in range(5):
            assert_same(run.personal_model(client), whole.personal_model(client))
    first, second = (trained(method, gradients="loop", chunk_size=size) for size in (1, 5))
    assert torch.equal(first._state.server.params, second._state.server.params)


@pytest.mark.parametrize(
    ("method", "options"), [("fedavg", {}), ("ditto", {}), ("fedbn", {}), ("fedavg", {"batch_norm": "batch"})]
)
def test_a_run_goes_on_to_the_same_bits(method, options, tmp_path):
    whole = trained(method, rounds=5, participation=0.6, **options)
    trained(method, rounds=2, participation=0.6, out=tmp_path / "run", **options)
    again = selffl.resume(tmp_path / "run", rounds=5)
    assert torch.equal(again._state.server.params, whole._state.server.params)
    for client in range(5):
        ours, theirs = (run.personal_model(client).state_dict() for run in (again, whole))
        assert all(torch.equal(entry, theirs[name]) for name, entry in ours.items())
    assert again.summary["weighted_accuracy"] == whole.summary["weighted_accuracy"]


@pytest.mark.parametrize(("method", "policy"), [("ditto", None), ("fedbn", None), ("local", "batch")])
def test_exported_models_answer_as_the_run_does(method, policy, tmp_path):
    fed = federation()
    run = trained(method, fed=fed, batch_norm=policy)
    run.export(tmp_path / "all.safetensors")
    models = selffl.PersonalModels(tmp_path / "all.safetensors")
    plain = network() if policy is None else without_statistics(network())
    for client in range(5):
        found = models.model(client, plain)
        assert plain.training
        assert not found.training
        assert torch.equal(found(fed.test.features), run.personal_model(client)(fed.test.features))
    run.export(tmp_path / "one.pt", [2], full=True)
    plain.load_state_dict(torch.load(tmp_path / "one.pt"))
    assert torch.equal(plain.eval()(fed.test.features), run.personal_model(2)(fed.test.features))


def test_a_run_can_begin_with_a_trained_module_and_its_statistics():
    begun = step_through(network(), trained(rounds=1), 0, 1)
    run = trained("local", start=begun, rounds=1, learning_rate=1e-9)
    state = run._session.first
    assert torch.equal(state, run._session.model.flatten(begun.state_dict()))
    assert torch.equal(run.global_model().state_dict()["1.running_var"], begun.state_dict()["1.running_var"])
    batch = trained("local", start=begun, rounds=1, batch_norm="batch")  # which has no use for them
    assert batch._session.model.num_statistics == 0


def test_parts_in_eval_mode_keep_their_statistics():
    module = network()
    module[1].eval()
    with torch.no_grad():
        module[1].running_mean.fill_(0.5)
    fed = federation()
    run = trained(module=module, fed=fed, rounds=1)
    found = run.global_model().state_dict()
    assert torch.equal(found["1.running_mean"], torch.full((3,), 0.5))
    assert not torch.equal(found["5.running_mean"], torch.zeros(6))

    def half_still(module):
        module = copy.deepcopy(module)
        module.train = lambda mode=True: module  # as it was given
        return module

    after = [step_through(half_still(module), run, client, 1) for client in range(5)]
    assert_same(run.global_model(), averaged(after, sizes(fed)))


# -------------------------------------------------------------------------------------------------- by batches alone


def without_statistics(module):
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.track_running_stats = False
            part.running_mean = part.running_var = part.num_batches_tracked = None
    return module


@pytest.mark.parametrize("gradients", ["vmap", "loop"])
def test_by_batches_alone_is_the_plain_loop_and_answers_a_clients_rows_together(gradients):
    fed, module = federation(), without_statistics(network())
    run = trained("ditto", fed=fed, batch_norm="batch", gradients=gradients, rounds=2)
    own = [None] * 5
    for number in (1, 2):
        own = [step_through(own[client] or module, run, client, number, 1.0, module) for client in range(5)]
        module = averaged([step_through(module, run, client, number) for client in range(5)], sizes(fed))
    assert_same(run.global_model(), module)
    right, shared = 0, 0
    for client in range(5):
        rows = slice(*fed.test.offset[client : client + 2].tolist())
        x, y = fed.test.features[rows], fed.test.labels[rows]
        assert_same(run.personal_model(client), own[client])
        right += int((own[client].eval()(x).argmax(1) == y).sum())
        shared += int((module.eval()(x).argmax(1) == y).sum())
    assert run.summary["weighted_accuracy"] == right / len(fed.test.labels)
    assert run.summary["global_accuracy"] == shared / len(fed.test.labels)


@pytest.mark.parametrize("name", [name for name in ONE_OF_A_KIND if name not in NEEDS_BATCH_NORM])
def test_every_kind_of_method_can_go_by_batches_alone(name, short):
    fed = federation().with_clusters([0, 0, 1, 1, 1])
    run = selffl.train(network(), fed, short(name), rounds=2, participation=1.0, batch_norm="batch")
    assert run.summary["status"] == "finished"
    assert run._session.model.num_statistics == 0


def test_a_client_with_one_row_is_refused_where_rows_go_by_batches():
    fed = federation(test_fraction=0.12)
    assert 1 in fed.test.num_examples
    with pytest.raises(DataError, match=r"^client 0 has one row, and one row by itself cannot .* or 'kept'\.$"):
        trained(fed=fed, batch_norm="batch")
    trained(fed=fed)
    images = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 3))
    trained(module=images, fed=fed, batch_norm="batch")  # a picture has a spread of its own


def test_minibatches_of_one_row_are_refused_in_one_line():
    with pytest.raises(DataError, match=r"^one row by itself cannot .*batch_size of 2 or more"):
        trained(batch_size=1)


# ------------------------------------------------------------------------------------------------------ kept by clients


@pytest.mark.parametrize("gradients", ["vmap", "loop"])
def test_kept_is_the_plain_loop_of_fedbn(gradients):
    """Li et al., Algorithm 1: all but BatchNorm is averaged."""
    fed = federation()
    run = trained("fedbn", fed=fed, gradients=gradients)
    models = [network() for _ in range(5)]
    for number in (1, 2, 3):
        models = [step_through(module, run, client, number) for client, module in enumerate(models)]
        mean = averaged(models, sizes(fed)).state_dict()
        for module in models:
            module.load_state_dict(mean | {name: part for name, part in module.state_dict().items() if is_norm(name)})
    for client, module in enumerate(models):
        assert_same(run.personal_model(client), module)
    for name, entry in run.global_model().state_dict().items():
        if is_norm(name):  # nothing of it has left a client
            assert torch.equal(entry, network().state_dict()[name])
    spread = torch.stack([module.state_dict()["1.weight"] for module in models]).std(0)
    assert spread.min() > 1e-3


def test_a_head_and_batch_norm_can_both_be_kept():
    run = trained("fedper", batch_norm="kept")
    ours = [run.personal_model(client).state_dict() for client in range(2)]
    for name, entry in ours[0].items():
        is_own = is_norm(name) or name.startswith("7.")
        if entry.is_floating_point():
            assert torch.equal(entry, ours[1][name]) is not is_own


# ----------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_methods_carry_statistics_or_say_why_not(name, short):
    fed = federation().with_clusters([0, 0, 1, 1, 1])
    method = short(name)
    if method.no_statistics is None:
        run = selffl.train(network(), fed, method, rounds=1, participation=1.0)
        assert run._session.model.num_statistics == 18
        return
    words = r"^the model has BatchNorm with running statistics, and .* cannot carry them: .*batch_norm='batch'"
    with pytest.raises(ConfigError, match=words) as caught:
        selffl.train(network(), fed, method, rounds=1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("method", "policy", "message"),
    [
        ("fedavg", "kept", "batch_norm is 'kept', and fedavg keeps no layers with its clients; expected a method"),
        ("fedbn", "averaged", "batch_norm is 'averaged', and fedbn keeps BatchNorm with each client; expected 'kept'"),
        ("fedbn", "batch", "batch_norm is 'batch', and fedbn keeps BatchNorm"),
        ("fedavg", "frozen", "batch_norm is 'frozen'; expected 'averaged' or 'kept' or 'batch'."),
    ],
)
def test_a_policy_that_a_method_cannot_follow_is_refused(method, policy, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        trained(method, batch_norm=policy)


@pytest.mark.parametrize(("method", "policy"), [("fedbn", None), ("fedbn", "kept"), ("fedper", "kept")])
@pytest.mark.parametrize(
    "layer", [nn.Linear(36, 36), nn.LayerNorm(36), nn.BatchNorm1d(36, affine=False, track_running_stats=False)]
)
def test_a_model_without_batch_norm_to_keep_is_refused(method, policy, layer):
    module = nn.Sequential(nn.Flatten(), layer, nn.Linear(36, 3))
    message = (
        f"{method} is to keep BatchNorm with each client, and the model has no BatchNorm with anything to keep; "
        "expected some. Give another model, or train without batch_norm='kept', by a method such as fedavg or ditto."
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        trained(method, module, batch_norm=policy)


def test_statistics_alone_are_enough_to_keep():
    module = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(36, affine=False), nn.Linear(36, 3))
    run = trained("fedbn", module)
    means = [run.personal_model(client).state_dict()["1.running_mean"] for client in range(2)]
    assert not torch.equal(*means)


def test_the_policy_is_recorded_and_older_runs_have_none(tmp_path):
    trained(batch_norm="batch", out=tmp_path / "run", rounds=1)
    run = selffl.load(tmp_path / "run")
    assert run.config.batch_norm == "batch"
    assert run._session.model.mixes_rows
    content = run.config.to_json()
    del content["batch_norm"]
    assert Recipe.from_json(content).batch_norm is None
