"""The records of a run over Flower are those that `selffl.train` writes."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'selffl[flower]'")
sys.path.append(str(Path(__file__).parent.parent / "engines" / "flower"))

from flwr.app import Context, MetricRecord, RecordDict
from wire import RUN, WireGrid

import selffl
from mistakes import SETTINGS as MISTAKES
from selffl.data import load
from selffl.data.federation import Federation, Rows
from selffl.engines.cohort import sample_cohort
from selffl.errors import ConfigError, DivergedError, QuorumError
from selffl.flower import client_app, personal_model, server_app
from selffl.runs import folder as files
from selffl.runs.recipe import FLOWER_SETTINGS
from selffl.state.checkpoint import load_tensors
from selffl.state.files import locked

SETTINGS = {"rounds": 4, "participation": 0.5, "learning_rate": 0.05, "batch_size": 5, "seed": 3, "evaluate_every": 2}

DITTO, AUTO = (selffl.algorithm(name, num_local_steps=5) for name in ("ditto", "self-fl-auto"))


@pytest.fixture(scope="module", autouse=True)
def short_closing(few_closing_steps):
    """Clients are in this process, and train for a few steps once training is over, as elsewhere."""
    with few_closing_steps():
        yield


def linear():
    torch.manual_seed(0)
    return nn.Linear(64, 10)


def own(federation):
    def rows(client):
        parts = []
        for part in (federation.train, federation.test):
            low, high = int(part.offset[client]), int(part.offset[client + 1])
            parts.append(Rows(part.features[low:high], part.labels[low:high], torch.tensor([0, high - low])))
        return Federation([client], *parts)

    return rows


def run(federation, folder, name, module=None, loss=None, grid=None, config=None, **changed):
    module = module or linear()
    metrics = changed.get("metrics")
    app = client_app(module, own(federation), name, memory_dir=folder / "clients", loss=loss, metrics=metrics)
    grid = grid or (lambda app: WireGrid(app, {100 + m: m for m in range(federation.num_clients)}))
    given = {**SETTINGS, "connect_seconds": 0, "round_seconds": 20.0, **changed}
    server = server_app(module, name, range(federation.num_clients), out=folder / "run", data="digits", **given)
    server(grid(app), Context(RUN, 1, {}, RecordDict(), config or {}))
    return files.read_records(folder / "run")


# What takes rows, or counts by class, which a client does not send: empty here, or not there at all.
UNSENT = ("balanced_accuracy", "log_loss", "majority_accuracy", "largest_class_share", "pooled_auc")


def assert_same_row(found, expected, within=1e-12, but=("seconds",)):
    assert [name for name in found if not name.endswith(UNSENT)] == [
        name for name in expected if not name.endswith(UNSENT)
    ]
    assert all(value is None for name, value in found.items() if name.endswith(UNSENT))
    for name in {name for name in expected if not name.endswith(UNSENT)} - set(but):
        is_number = isinstance(expected[name], int | float) and found[name] is not None
        wanted = pytest.approx(expected[name], rel=within) if is_number else expected[name]
        assert found[name] == wanted, name


def assert_same_records(found, expected):
    for part in ("history", "participation", "clients"):
        ours, theirs = getattr(found, part), getattr(expected, part)
        assert len(ours) == len(theirs)
        for row, wanted in zip(ours, theirs, strict=True):
            assert_same_row(row, wanted)
    assert_same_row(found.summary, expected.summary)


@pytest.fixture(scope="module")
def federation():
    return load("digits", num_clients=8, seed=2)


@pytest.mark.parametrize("name", ["self-fl-exact", "self-fl-auto", "fedavg"])
def test_records_are_those_of_train(name, federation, tmp_path, short):
    found = run(federation, tmp_path, short(name))
    selffl.train(linear(), federation, short(name), out=tmp_path / "train", **SETTINGS)
    assert_same_records(found, files.read_records(tmp_path / "train"))
    assert found.summary["status"] == "finished"
    assert files.read_config(tmp_path / "run").algorithm == name


@pytest.mark.parametrize("name", ["self-fl", "self-fl-auto"])
def test_a_run_that_was_stopped_ends_with_the_same_records(name, federation, tmp_path, short):
    """Stopped in round 3; and, once more, after round 4 and before its evaluation."""

    class Stops(WireGrid):
        def __init__(self, app, nodes, kind, round_number):
            super().__init__(app, nodes)
            self.kind, self.round_number = kind, str(round_number)

        def answer(self, message):
            if (message.metadata.message_type, message.metadata.group_id) == (self.kind, self.round_number):
                raise KeyboardInterrupt
            return super().answer(message)

    nodes = {100 + m: m for m in range(8)}
    for kind, number in (("train", 3), ("evaluate", 4)):
        with pytest.raises(KeyboardInterrupt):
            run(federation, tmp_path, short(name), grid=lambda app, k=kind, n=number: Stops(app, nodes, k, n))
        assert files.read_records(tmp_path / "run").summary["status"] == "running"
    found = run(federation, tmp_path, short(name))
    selffl.train(linear(), federation, short(name), out=tmp_path / "train", **SETTINGS)
    assert_same_records(found, files.read_records(tmp_path / "train"))


@pytest.mark.parametrize("first", [2, 3])
def test_a_run_that_goes_on_for_longer_has_the_records_of_one_that_was_as_long(first, federation, tmp_path):
    """It had ended with a closing visit: what that had brought is no longer in the history of its rounds."""
    ended = run(federation, tmp_path, AUTO, rounds=first).history[-1]
    found = run(federation, tmp_path, AUTO)
    selffl.train(linear(), federation, AUTO, out=tmp_path / "train", **SETTINGS)
    assert_same_records(found, files.read_records(tmp_path / "train"))
    assert ended["weighted_accuracy"] != found.history[first - 1]["weighted_accuracy"]


def test_values_and_two_classes_have_their_own_metrics(tmp_path):
    torch.manual_seed(1)
    x, client = torch.randn(160, 5), torch.arange(160) % 8
    y = x @ torch.randn(5) + 0.1 * torch.randn(160)
    kinds = {
        "values": (y, nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)), nn.functional.mse_loss),
        "classes": ((y > 0).long(), nn.Linear(5, 2), nn.functional.cross_entropy),
        "values, whose loss follows": (y, nn.Linear(5, 1), None),
        "classes, whose loss follows": ((y > 0).long(), nn.Linear(5, 1), None),
    }
    for kind, (labels, module, loss) in kinds.items():
        federation = Federation.from_arrays(x, labels, client, test_fraction=0.3)
        found = run(federation, tmp_path / kind, DITTO, module, loss)
        selffl.train(module, federation, DITTO, loss=loss, out=tmp_path / kind / "train", **SETTINGS)
        expected = files.read_records(tmp_path / kind / "train")
        # A module of one layer in a Sequential goes by vmap in a cohort and by autograd alone.
        assert_same_row(found.summary, expected.summary, within=1e-4, but=("seconds", "data"))


def test_a_client_that_does_not_answer_leaves_empty_cells(federation, tmp_path):
    nodes = {100 + m: m for m in range(7)}
    found = run(federation, tmp_path, "fedavg", grid=lambda app: WireGrid(app, nodes))
    assert found.clients[7]["accuracy"] is None
    assert found.clients[7]["num_test"] == 0
    assert found.summary["weighted_accuracy"] > 0.3


def test_a_round_that_was_skipped_has_a_row(federation, tmp_path):
    def nobody(message, answer):
        return [] if message.metadata.group_id == "2" else [answer(message)]

    def grid(app):
        return WireGrid(app, {100 + m: m for m in range(8)}, nobody)

    found = run(federation, tmp_path, "fedavg", grid=grid, shortfall="skip")
    assert [row["clients"] for row in found.history] == [4, 0, 4, 4]


def test_clients_that_diverge_keep_nothing_and_say_so(federation, tmp_path):
    with pytest.raises(QuorumError, match=r"0 of 4 .* in round 1; .* \(client \d: error 2: .*DivergedError"):
        run(federation, tmp_path, "self-fl", learning_rate=1e38)
    assert not list((tmp_path / "clients").rglob("*.safetensors"))


def test_a_server_that_diverges_says_so(federation, tmp_path, monkeypatch):
    def lost(self, server, clients, upload):
        return replace(server, params=server.params * torch.inf)

    monkeypatch.setattr("selffl.algorithms.fedavg.FedAvg.server_round", lost)
    with pytest.raises(DivergedError, match="not finite after round 1"):
        run(federation, tmp_path, "fedavg")
    assert files.read_records(tmp_path / "run").summary["status"] == "diverged"


def test_two_servers_do_not_write_one_folder(federation, tmp_path):
    with locked(tmp_path / "run"), pytest.raises(ConfigError, match="another process is writing"):
        run(federation, tmp_path, "fedavg")


# --------------------------------------------------------------------------------- optimisers, own metrics, gain


@pytest.mark.parametrize("optimiser", ["momentum", selffl.algorithms.Adam(beta2=0.9)])
def test_optimisers_are_those_of_train(optimiser, federation, tmp_path):
    found = run(federation, tmp_path, DITTO, optimiser=optimiser)
    selffl.train(linear(), federation, DITTO, optimiser=optimiser, out=tmp_path / "train", **SETTINGS)
    expected = files.read_records(tmp_path / "train")
    for ours, theirs in zip(found.clients, expected.clients, strict=True):
        assert_same_row(ours, theirs, within=1e-5)
    plain = run(federation, tmp_path / "plain", DITTO)
    assert plain.summary["weighted_accuracy"] != found.summary["weighted_accuracy"]
    assert files.read_config(tmp_path / "run").optimiser == files.read_config(tmp_path / "train").optimiser


def test_an_optimiser_by_the_run_configuration_and_one_that_the_method_cannot_take(federation, tmp_path):
    run(federation, tmp_path, "fedavg", config={"optimiser": "adam"})
    assert files.read_config(tmp_path / "run").optimiser == selffl.algorithms.Adam()
    with pytest.raises(ConfigError, match=r"whose optimiser is .*adam.*; expected .*sgd"):
        run(federation, tmp_path, "fedavg")
    with pytest.raises(ConfigError, match="optimiser is 'adam', and self-fl cannot use it"):
        server_app(linear(), "self-fl", range(8), optimiser="adam")


TRAINING = {
    "weight_decay": {"weight_decay": 0.1},
    "max_gradient_norm": {"max_gradient_norm": 0.5},
    "learning_rate_schedule": {"learning_rate_schedule": "exponential 0.5"},
    "keep_optimiser": {"keep_optimiser": True, "optimiser": "momentum"},
}


@pytest.mark.parametrize("name", TRAINING)
def test_training_options_are_those_of_train(name, federation, tmp_path):
    given = TRAINING[name] | {"gain": True}
    found = run(federation, tmp_path, DITTO, **given)
    selffl.train(linear(), federation, DITTO, out=tmp_path / "train", **given, **SETTINGS)
    assert_same_records(found, files.read_records(tmp_path / "train"))
    usual = {key: value for key, value in given.items() if key != name}
    assert run(federation, tmp_path / "plain", DITTO, **usual).clients != found.clients
    with pytest.raises(ConfigError, match=f"is of a run whose {name} is .*; expected .* Give another folder"):
        run(federation, tmp_path, DITTO, rounds=5, **usual)


def test_images_change_as_in_train(tmp_path):
    digits = load("digits", num_clients=4, seed=2)
    parts = (Rows(part.features.view(-1, 1, 8, 8), part.labels, part.offset) for part in (digits.train, digits.test))
    images, module = Federation(range(4), *parts), nn.Sequential(nn.Flatten(), linear())
    found = run(images, tmp_path, "fedavg", module, augmentation="crop flip")
    selffl.train(module, images, "fedavg", augmentation="crop flip", gradients="loop", out=tmp_path / "a", **SETTINGS)
    for ours, theirs in zip(found.clients, files.read_records(tmp_path / "a").clients, strict=True):
        assert_same_row(ours, theirs, within=1e-6)
    selffl.train(module, images, "fedavg", gradients="loop", out=tmp_path / "b", **SETTINGS)
    assert found.clients != files.read_records(tmp_path / "b").clients


@pytest.mark.parametrize("name", ["perfedavg", "self-fl-auto"])
def test_what_comes_after_a_round_has_the_rate_that_it_has_in_train(name, federation, tmp_path):
    """Steps before an evaluation, and a closing visit."""
    given = {"learning_rate_schedule": "step 0.01 0.5"}
    found = run(federation, tmp_path, name, **given)
    selffl.train(linear(), federation, name, out=tmp_path / "train", **given, **SETTINGS)
    assert_same_records(found, files.read_records(tmp_path / "train"))
    with pytest.raises(ConfigError, match="is of a run whose rounds is 4; expected 5"):
        run(federation, tmp_path, name, rounds=5, **given)


def spread(outputs, labels):
    return float(outputs.std())


def test_metrics_of_the_users_own_are_those_of_train(federation, tmp_path):
    metrics = {"spread": selffl.Metric(spread, higher_is_better=False)}
    found = run(federation, tmp_path, DITTO, metrics=metrics)
    selffl.train(linear(), federation, DITTO, metrics=metrics, out=tmp_path / "train", **SETTINGS)
    expected = files.read_records(tmp_path / "train")
    for name in ("weighted_spread", "worst10_spread", "global_spread"):
        assert found.summary[name] == pytest.approx(expected.summary[name], rel=1e-5)
    for ours, theirs in zip(found.clients, expected.clients, strict=True):
        assert ours["spread"] == pytest.approx(theirs["spread"], rel=1e-5)
        assert ours["global_spread"] == pytest.approx(theirs["global_spread"], rel=1e-5)


def test_clients_that_do_not_measure_what_the_server_wants_are_left_out(federation, tmp_path, caplog):
    app = client_app(linear(), own(federation), "fedavg", memory_dir=tmp_path / "clients")
    server = server_app(
        linear(), "fedavg", range(8), out=tmp_path / "run", metrics={"spread": spread}, connect_seconds=0, **SETTINGS
    )
    server(WireGrid(app, {100 + m: m for m in range(8)}), Context(RUN, 1, {}, RecordDict(), {}))
    assert "expected some of" in caplog.text
    assert "with spread" in caplog.text
    assert files.read_records(tmp_path / "run").summary["weighted_accuracy"] is None


@pytest.mark.parametrize("name", ["self-fl-auto", "ditto"])
def test_gains_are_those_of_train(name, federation, tmp_path, short):
    found = run(federation, tmp_path, short(name), gain=True)
    selffl.train(linear(), federation, short(name), gain=True, out=tmp_path / "train", **SETTINGS)
    expected = files.read_records(tmp_path / "train")
    for ours, theirs in zip(found.clients, expected.clients, strict=True):
        assert_same_row(ours, theirs, within=1e-6)
    assert found.summary["status"] == "finished"
    assert found.summary["mean_realised_gain"] == pytest.approx(expected.summary["mean_realised_gain"], rel=1e-6)
    assert len({row["realised_gain"] for row in found.clients}) > 2


def test_gains_of_a_run_that_was_stopped_before_clients_trained_alone(federation, tmp_path):
    class Stops(WireGrid):
        def answer(self, message):
            if json.loads(dict(message.content.config_records["about"]).get("alone") or "[]"):
                raise KeyboardInterrupt
            return super().answer(message)

    nodes = {100 + m: m for m in range(8)}
    with pytest.raises(KeyboardInterrupt):
        run(federation, tmp_path, DITTO, gain=True, grid=lambda app: Stops(app, nodes))
    assert files.read_records(tmp_path / "run").summary["status"] == "running"
    other = nn.Linear(64, 10)  # the values of the module are no longer those that the run began with
    found = run(federation, tmp_path, DITTO, other, gain=True)
    expected = run(federation, tmp_path / "whole", DITTO, gain=True)
    assert found.clients == expected.clients
    assert found.summary["status"] == "finished"
    again = run(federation, tmp_path, DITTO, gain=True)
    assert again.clients == expected.clients


def test_a_client_that_does_not_train_alone_has_empty_cells(federation, tmp_path):
    def silent(message, answer):
        about = dict(message.content.config_records["about"])
        return [] if about["alone"] and about["client"] == "3" else [answer(message)]

    found = run(
        federation,
        tmp_path,
        DITTO,
        gain=True,
        grid=lambda app: WireGrid(app, {100 + m: m for m in range(8)}, {"evaluate": silent}),
    )
    assert [row["client"] for row in found.clients if row["realised_gain"] is None] == ["3"]
    assert found.clients[3]["num_won"] is None
    assert found.clients[3]["accuracy"] is not None


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"num_test": 0, "num_won": 0, "num_lost": 0, "alone.accuracy": 0.0}, ""),  # not those of its evaluation
        ({"num_test": 9, "num_won": 0, "num_lost": 0, "alone.error": 0.5}, "it measures error; expected accuracy"),
        ({"num_test": 9, "num_won": 5, "num_lost": 5, "alone.accuracy": 1.0}, "5 rows are won and 5 lost"),
        ({"num_test": 9, "num_won": -1, "num_lost": 0, "alone.accuracy": 1.0}, "num_won is -1"),
        ({"num_test": 9, "num_won": 0, "num_lost": 0, "alone.accuracy": 10.0}, "alone.accuracy is 10.0"),
        ({"num_test": 9, "num_won": 0, "num_lost": 0}, "the metrics are"),
    ],
)
def test_an_answer_about_training_alone_that_cannot_be_is_left_out(changed, reason, federation, tmp_path, caplog):
    def wrong(message, answer):
        about, reply = dict(message.content.config_records["about"]), answer(message)
        if about["alone"] and about["client"] == "3":
            reply.content["metrics"] = MetricRecord(changed)
        return [reply]

    nodes = {100 + m: m for m in range(8)}
    found = run(
        federation, tmp_path, DITTO, gain=True, grid=lambda app: WireGrid(app, nodes, {"evaluate": wrong})
    )  # fmt: skip
    assert reason in caplog.text
    assert [row["client"] for row in found.clients if row["realised_gain"] is None] == ["3"]
    assert found.summary["status"] == "finished"


def test_gain_is_refused_where_it_cannot_be_measured(federation, tmp_path):
    with pytest.raises(ConfigError, match="gain is True without out"):
        server_app(linear(), "ditto", range(8), gain=True)
    with pytest.raises(ConfigError, match="local trains every client alone"):
        server_app(linear(), "local", range(8), gain=True, out=tmp_path / "run")
    run(federation, tmp_path, "ditto", rounds=2)
    with pytest.raises(ConfigError, match="was begun without it"):
        run(federation, tmp_path, "ditto", gain=True)


# ----------------------------------------------------------------------------------------------- the run configuration


def test_the_run_configuration_counts(federation, tmp_path):
    config = {
        "algorithm": "ditto", "rounds": 2, "participation": 1, "learning-rate": 0.1, "batch-size": 7, "seed": 5,
        "evaluate-every": 1, "out": str(tmp_path / "elsewhere"), "experiment": "named", "mine": "whatever",
    }  # fmt: skip
    app = client_app(linear(), own(federation), "fedavg", memory_dir=tmp_path / "clients")
    grid = WireGrid(app, {100 + m: m for m in range(8)}, run_config=config)
    server = server_app(linear(), "fedavg", range(8), connect_seconds=0, data="digits")
    server(grid, Context(RUN, 1, {}, RecordDict(), config))
    expected = selffl.train(
        linear(), federation, "ditto", rounds=2, participation=1.0, learning_rate=0.1, batch_size=7, seed=5,
        evaluate_every=1, out=tmp_path / "train",
    )  # fmt: skip
    assert_same_records(files.read_records(tmp_path / "elsewhere"), files.read_records(tmp_path / "train"))
    found = personal_model(linear(), tmp_path / "clients", "named", 3)
    assert all(map(torch.equal, found.parameters(), expected.personal_model(3).parameters()))


@pytest.mark.parametrize(("name", "value", "says"), [row for row in MISTAKES if row[0] in FLOWER_SETTINGS])
def test_a_setting_that_cannot_work_is_refused_as_in_train(name, value, says):
    with pytest.raises(ConfigError) as caught:
        server_app(linear(), "fedavg", range(8), **{name: value})
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("rounds", "ten", "rounds is 'ten' in the run configuration; expected int"),
        ("rounds", 1.5, "expected int"),
        ("rounds", True, "expected int"),
        ("rounds", 0, "rounds is 0"),
        ("participation", "half", "expected float"),
        ("quorum", 2.0, "quorum is 2"),
        ("shortfall", "wait", "shortfall is 'wait'"),
        ("algorithm", "dito", "ditto"),
        ("algorithm", 3, "expected the name of a method"),
    ],
)
def test_a_wrong_run_configuration_is_refused(name, value, reason, federation, tmp_path):
    with pytest.raises(ConfigError, match=reason):
        run(federation, tmp_path, "fedavg", config={name: value})
    assert not (tmp_path / "run").exists()


def test_memories_lie_where_the_node_says(federation, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    def trained(nodes):
        app = client_app(linear(), own(federation), "ditto")
        server = server_app(
            linear(), "ditto", range(8), connect_seconds=0, experiment="e", **SETTINGS | {"rounds": 1}
        )  # fmt: skip
        server(WireGrid(app, nodes), Context(RUN, 1, {}, RecordDict(), {}))

    trained({100 + m: {"client-id": m, "memory-dir": str(tmp_path / "node")} for m in range(8)})
    assert len(list((tmp_path / "node").rglob("*-model.safetensors"))) == 8
    trained({100 + m: m for m in range(8)})
    assert len(list((tmp_path / "home" / ".selffl" / "memory").rglob("*-model.safetensors"))) == 8
    monkeypatch.setenv("SELFFL_MEMORY", str(tmp_path / "environment"))
    trained({100 + m: m for m in range(8)})
    assert len(list((tmp_path / "environment").rglob("*-model.safetensors"))) == 8


def test_the_global_model_lies_by_name_when_the_run_has_ended(federation, tmp_path):
    run(federation, tmp_path, "fedavg")
    tensors, about = load_tensors(tmp_path / "run" / "model.safetensors")
    expected = selffl.train(linear(), federation, "fedavg", **SETTINGS).global_model().state_dict()
    assert about["round"] == 4
    assert tensors.keys() == expected.keys()
    assert all(tensors[name].equal(expected[name]) for name in expected)


# ------------------------------------------------------------------------------------------------------------- noise


NOISE = {"clip": 1.0, "max_weight": 2.0, "noise_multiplier": 0.01}


def test_noise_and_cohorts_cannot_be_repeated_by_who_knows_the_seed(federation, tmp_path):
    """Clients are told the seed: from it they must learn neither the noise nor who else takes part."""
    run(federation, tmp_path / "first", "self-fl-sums", **NOISE)
    run(federation, tmp_path / "second", "self-fl-sums", **NOISE)
    (first, one), (second, two) = (
        load_tensors(tmp_path / name / "run" / files.CHECKPOINT) for name in ("first", "second")
    )
    assert not first["server.params"].equal(second["server.params"])
    assert one["cohort_seed"] not in (two["cohort_seed"], SETTINGS["seed"])
    expected = selffl.train(linear(), federation, "self-fl-sums", **SETTINGS, **NOISE)
    assert not first["server.params"].equal(expected._state.server.params)


def test_rows_are_clipped_as_in_train(federation, tmp_path):
    """With minibatches of all rows, which leave nothing to draw, and no noise."""
    given = {"row_clip": 0.1, "batch_size": 1000, "gain": True}
    found = run(federation, tmp_path, DITTO, **given)
    selffl.train(linear(), federation, DITTO, out=tmp_path / "train", **SETTINGS | given)
    assert_same_records(found, files.read_records(tmp_path / "train"))


def test_noise_that_hides_rows_is_the_clients_secret(federation, tmp_path):
    given = {"row_clip": 0.1, "row_noise_multiplier": 1.0}
    models = []
    for name in ("first", "second"):
        found = run(federation, tmp_path / name, "fedavg", **given)
        models.append(load_tensors(tmp_path / name / "run" / files.CHECKPOINT)[0]["server.params"])
        assert found.summary["row_delta"] == 1e-5
        assert all("row_epsilon" in row for row in found.clients)
    assert not models[0].equal(models[1])
    with pytest.raises(ConfigError, match=r"row_clip is 0\.1, and fedpac cannot have it"):
        server_app(linear(), "fedpac", range(8), **given)


def test_a_run_with_noise_goes_on_with_the_cohorts_it_began_with(federation, tmp_path):
    run(federation, tmp_path, "self-fl-sums", rounds=2, **NOISE)
    _, before = load_tensors(tmp_path / "run" / files.CHECKPOINT)
    run(federation, tmp_path, "self-fl-sums", rounds=4, **NOISE)
    tensors, after = load_tensors(tmp_path / "run" / files.CHECKPOINT)
    assert after["cohort_seed"] == before["cohort_seed"]
    drawn = torch.cat([sample_cohort(after["cohort_seed"], number, 8, 0.5) for number in (1, 2, 3, 4)])
    assert tensors["num_rounds"].equal(torch.bincount(drawn, minlength=8))
