"""Over Flower the methods give the numbers of the cohort engine, and what is wrong with an answer stays out of them."""

import csv
import inspect
import logging
import math
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'selffl[flower]'")

from flwr.app import Array, Context, Error, Message, RecordDict
from wire import RUN, WireGrid, over_the_wire, set_numbers

from needs import NEEDS_BATCH_NORM, NEEDS_HEAD, NEEDS_LAYERS
from selffl.algorithms import ALGORITHMS, DEFAULT_ALGORITHM, algorithm
from selffl.algorithms.population import Population
from selffl.algorithms.records import tensors_of
from selffl.data import load
from selffl.data.federation import Federation, Rows
from selffl.engines.cohort import CohortEngine, sample_cohort
from selffl.engines.flower.client import client_app, client_of, personal_model
from selffl.engines.flower.server import MODEL, Server, number_ids
from selffl.engines.flower.settings import Network
from selffl.errors import ConfigError, QuorumError, RefusedError
from selffl.runs.flower import RemoteRecorder
from selffl.runs.recipe import SETTINGS as RECIPE_SETTINGS
from selffl.runs.recipe import Recipe
from selffl.state.checkpoint import load_tensors
from selffl.training.flat import FlatModel
from selffl.training.model import ModelSource

NUM_CLIENTS, ROUNDS, SEED = 8, 4, 3
SETTINGS = {"participation": 0.5, "learning_rate": 0.05, "batch_size": 5, "seed": SEED}
OPTIONS = {
    "self-fl-cluster": {"clusters": "variance"},
    "feddbe": {"penalty": 10.0},  # at 50 steps of 0.05 do not settle, and the last digits grow a hundredfold a round
}
NODES = {1000 + 37 * (client * 5 % 8): client for client in range(NUM_CLIENTS)}  # not in the order of the clients


@pytest.fixture(scope="module", autouse=True)
def short_closing(few_closing_steps):
    """Clients are in this process, and train for a few steps once training is over, as elsewhere."""
    with few_closing_steps():
        yield


@pytest.fixture(scope="module")
def federation():
    return load("digits", num_clients=NUM_CLIENTS, seed=2)


def of_client(federation, client):
    """(x_train, y_train, x_test, y_test) of one client."""
    parts = []
    for rows in (federation.train, federation.test):
        own = slice(int(rows.offset[client]), int(rows.offset[client + 1]))
        parts += [rows.features[own], rows.labels[own]]
    return tuple(parts)


def linear():
    torch.manual_seed(0)
    return nn.Linear(64, 10)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))


class Setting:
    """A federation, a model and a method, with everything that is needed to run them over the wire."""

    def __init__(self, federation, folder, method, module=None):
        self.federation, self.folder, self.method = federation, folder, method
        self.module = module or linear()

    def client(self, **changed):
        given = {"algorithm": self.method, "memory_dir": self.folder / "clients", **changed}
        return client_app(self.module, lambda client: of_client(self.federation, client), **given)

    def run(self, grid, rounds=ROUNDS, recording=None, **changed):
        of_run = {name: changed.pop(name) for name in ("out", "population") if name in changed}
        of_run["experiment"] = changed.pop("experiment", "first")
        usual = {"round_seconds": 20.0, "connect_seconds": 0} | changed
        network = Network(**{name: value for name, value in usual.items() if name in Network.__annotations__})
        settings = SETTINGS | {"evaluate_every": 1} | {name: usual[name] for name in usual if name in RECIPE_SETTINGS}
        recipe = Recipe(algorithm=self.method.name, options={}, rounds=rounds, **settings)
        server = Server(FlatModel(self.module), self.method, number_ids(range(NUM_CLIENTS)), recipe, network, **of_run)
        record = recording and (lambda state: RemoteRecorder(recording, recipe, self.method, server.clients, {}, state))
        self.ended = server.run(grid, record)
        return self.ended.state

    def personal(self):
        models = [personal_model(self.module, self.folder / "clients", "first", m) for m in range(NUM_CLIENTS)]
        return torch.stack([FlatModel(model).params for model in models])

    def engine(self):
        source = ModelSource(
            self.federation, FlatModel(self.module), nn.functional.cross_entropy, SETTINGS["learning_rate"],
            SETTINGS["batch_size"], SEED,
        )  # fmt: skip
        return CohortEngine(self.method, source, SETTINGS["participation"], SEED)

    def cohort(self, rounds=ROUNDS):
        engine = self.engine()
        state = engine.conclude(engine.advance(engine.start(FlatModel(self.module).params), rounds))
        return state, engine.personal(state, is_over=True)


def assert_same(found, expected, *, bits):
    (state, personal), (wanted, wanted_personal) = found, expected
    tolerance = {"rtol": 0, "atol": 0 if bits else 1e-6, "equal_nan": True}
    ours, theirs = tensors_of(state.server), tensors_of(wanted.server)
    assert ours.keys() == theirs.keys()
    if not bits:  # variances are sums of squares of as many numbers as there are parameters
        tolerance = {"rtol": 1e-4, "atol": 1e-6, "equal_nan": True}
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], **tolerance, msg=lambda m, n=name: f"{n}: {m}")
    tolerance |= {"rtol": 0}
    torch.testing.assert_close(state.server.params, wanted.server.params, **tolerance)
    torch.testing.assert_close(personal, wanted_personal, **tolerance)
    assert state.num_gradients.equal(wanted.num_gradients)
    assert state.num_rounds.equal(wanted.num_rounds)


# --------------------------------------------------------------------------------------------------- the same numbers


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - NEEDS_LAYERS - NEEDS_BATCH_NORM))
def test_softmax_regression_has_the_bits_of_the_cohort_engine(name, federation, tmp_path, short):
    setting = Setting(federation, tmp_path, replace(short(name), **OPTIONS.get(name, {})))
    state = setting.run(WireGrid(setting.client(), NODES), evaluate_every=2)
    assert state.round_number == ROUNDS
    assert_same((state, setting.personal()), setting.cohort(), bits=True)


@pytest.mark.parametrize(("name", "robust"), [("fedavg", "trimmed"), ("ditto", "clip"), ("self-fl-auto", "hierarchy")])
def test_a_defence_has_the_bits_of_the_cohort_engine(name, robust, federation, tmp_path):
    setting = Setting(federation, tmp_path, algorithm(name, **OPTIONS.get(name, {})))
    state = setting.run(WireGrid(setting.client(), NODES), robust=robust)
    plain = setting.engine()
    engine = replace(plain, robust=robust)
    expected = engine.conclude(engine.advance(engine.start(FlatModel(setting.module).params), ROUNDS))
    assert torch.equal(state.server.params, expected.server.params)
    without = plain.advance(plain.start(FlatModel(setting.module).params), ROUNDS)
    assert not torch.equal(state.server.params, without.server.params)


@pytest.mark.parametrize(
    "name", ["self-fl", "self-fl-exact", "self-fl-auto", "ditto", "fedavg", *sorted(NEEDS_LAYERS | NEEDS_HEAD)]
)
def test_a_network_has_the_numbers_of_the_cohort_engine(name, federation, tmp_path, short):
    """Alone it goes by autograd, in a cohort by vmap: equal to rounding."""
    setting = Setting(federation, tmp_path, replace(short(name), **OPTIONS.get(name, {})), network())
    state = setting.run(WireGrid(setting.client(), NODES), evaluate_every=2)
    assert_same((state, setting.personal()), setting.cohort(), bits=False)


FEDERATED = {name for name, make in ALGORITHMS.items() if make().is_federated}


@pytest.mark.parametrize("name", sorted(FEDERATED - NEEDS_BATCH_NORM))
def test_the_bytes_in_the_history_are_those_of_the_arrays_in_messages(name, federation, tmp_path, short):
    setting = Setting(federation, tmp_path, replace(short(name), **OPTIONS.get(name, {})), network())
    found = []

    def weigh(message, answer):
        reply = answer(message)
        if int(message.metadata.group_id) <= 2:  # closing rounds come later, and are none of the history's
            arrays = [array for each in (message, reply) for array in each.content.array_records["arrays"].values()]
            found.append(sum(array.numpy().nbytes for array in arrays))
        return [reply]

    setting.run(WireGrid(setting.client(), NODES, weigh), rounds=2, recording=tmp_path / "run")
    with (tmp_path / "run" / "history.csv").open(newline="") as file:
        counted = [int(row["bytes_sent"]) for row in csv.DictReader(file)]
    assert counted == [sum(found[:4]), sum(found)]


def test_what_clients_keep_is_in_no_answer(federation, tmp_path, short):
    setting, sizes = Setting(federation, tmp_path, short("fedper"), network()), set()

    def measure(message, answer):
        reply = answer(message)
        sizes.add(reply.content["arrays"]["change"].shape)
        return [reply]

    setting.run(WireGrid(setting.client(), NODES, measure), rounds=1)
    assert sizes == {(1, 65 * 12)}  # of the first layer alone


def test_a_federation_of_one_client_is_data_too(federation, tmp_path):
    setting = Setting(federation, tmp_path, algorithm("self-fl"))

    def own(client):
        x_train, y_train, x_test, y_test = of_client(federation, client)
        return Federation([client], Rows.single_client(x_train, y_train), Rows.single_client(x_test, y_test))

    app = client_app(setting.module, own, "self-fl", memory_dir=tmp_path / "clients")
    assert_same((setting.run(WireGrid(app, NODES)), setting.personal()), setting.cohort(), bits=True)


def test_clusters_of_a_column_come_with_the_population(federation, tmp_path):
    setting = Setting(federation.with_clusters([0, 1, 0, 1, 2, 2, 0, 1]), tmp_path, algorithm("self-fl-cluster"))
    known = Population(NUM_CLIENTS, cluster=setting.federation.cluster)
    state = setting.run(WireGrid(setting.client(), NODES), population=known)
    assert_same((state, setting.personal()), setting.cohort(), bits=True)


# ----------------------------------------------------------------------------------------------------- closing visit


def test_the_closing_visit_comes_with_the_last_evaluation_and_leave_memories_as_they_are(federation, tmp_path):
    """By what a client is sent to train; before that it is sent the global model alone."""
    setting = Setting(federation, tmp_path, algorithm("self-fl-auto"))

    def looks(message, answer):
        folder = next(path for path in (tmp_path / "clients").iterdir())
        before = {path: path.read_bytes() for path in folder.glob("*.safetensors") if "-model" not in path.name}
        reply = answer(message)
        assert all(path.read_bytes() == content for path, content in before.items())
        return [reply]

    grid = WireGrid(setting.client(), NODES, {"evaluate": looks})
    state = setting.run(grid, rounds=2)
    evaluated = [message for message in grid.received if message.metadata.message_type == "evaluate"]
    asked = {(m.metadata.group_id, m.content.config_records["about"]["is_over"]) for m in evaluated}
    assert asked == {("1", False), ("2", True)}
    for message in evaluated:
        names = set(message.content.array_records["arrays"])
        if message.metadata.group_id == "2":
            assert {"params", "broadcast.params", "broadcast.latest"} < names
        else:
            assert names == {"params"}
    expected, closed = setting.cohort(rounds=2)
    assert_same((state, setting.personal()), (expected, closed), bits=True)
    has_trained = expected.num_rounds > 0
    assert not has_trained.all()  # else the last line says nothing
    assert (closed != setting.engine().personal(expected)).any(-1).equal(has_trained)
    centre = algorithm("self-fl-auto").global_model(state.server)
    assert not torch.equal(centre, state.server.params)
    assert torch.equal(setting.personal()[~has_trained], centre.expand(int((~has_trained).sum()), -1))


def test_a_small_model_of_numbers_closes_as_a_mixed_model_does(tmp_path):
    """Here as in one process: who never took part, and the file that the server leaves, have the centre."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(10 * NUM_CLIENTS, 2, generator=draw)
    owner = torch.arange(NUM_CLIENTS).repeat_interleave(10)
    y = (x.sum(1) + torch.randn(NUM_CLIENTS, generator=draw)[owner]).unsqueeze(1)
    numbers = Federation.from_arrays(x.numpy(), y.numpy(), owner.numpy(), test_fraction=0.2)
    module, method = nn.Linear(2, 1), algorithm("self-fl-auto", num_local_steps=5)
    setting = Setting(numbers, tmp_path, method, module)
    grid = WireGrid(setting.client(loss=nn.functional.mse_loss), NODES)
    state = setting.run(grid, rounds=2, out=tmp_path / "run")
    engine = replace(setting.engine(), source=replace(setting.engine().source, loss=nn.functional.mse_loss))
    expected = engine.conclude(engine.advance(engine.start(FlatModel(module).params), 2))
    torch.testing.assert_close(
        state.server.closing.mixed.covariance, expected.server.closing.mixed.covariance, rtol=1e-3, atol=1e-5
    )
    centre = method.global_model(state.server)
    assert (centre - state.server.params).norm() > 1e-3
    torch.testing.assert_close(centre, method.global_model(expected.server), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(setting.personal(), engine.personal(expected, is_over=True), rtol=1e-4, atol=1e-4)
    away = expected.num_rounds == 0
    assert away.any()
    torch.testing.assert_close(setting.personal()[away], centre.expand(int(away.sum()), -1), rtol=0, atol=1e-6)
    left = load_tensors(tmp_path / "run" / MODEL)[0]
    torch.testing.assert_close(torch.cat([left[name].flatten() for name in ("weight", "bias")]), centre)


@pytest.mark.parametrize("name", ["self-fl", "perfedavg", "ditto"])
def test_a_method_without_a_closing_visit_is_sent_the_global_model_alone_to_the_end(name, federation, tmp_path):
    setting = Setting(federation, tmp_path, algorithm(name))
    grid = WireGrid(setting.client(), NODES)
    setting.run(grid, rounds=2)
    evaluated = [message for message in grid.received if message.metadata.message_type == "evaluate"]
    assert {message.content.config_records["about"]["is_over"] for message in evaluated} == {False, True}
    assert all(set(message.content.array_records["arrays"]) == {"params"} for message in evaluated)


# ------------------------------------------------------------------------------------------------ stops and restarts


@pytest.mark.parametrize("name", ["self-fl", "self-fl-auto", "ditto"])
def test_clients_and_server_that_start_anew_in_the_middle_change_nothing(name, federation, tmp_path):
    setting = Setting(federation, tmp_path, algorithm(name))
    setting.run(WireGrid(setting.client(), NODES), rounds=2, out=tmp_path / "server", experiment=None)
    # Other processes, on other nodes; the experiment's name comes from the checkpoint.
    elsewhere = {node + 1: client for node, client in NODES.items()}
    state = setting.run(WireGrid(setting.client(), elsewhere), out=tmp_path / "server", experiment=None)
    assert setting.ended.names.experiment not in ("", "first")
    setting_personal = [
        personal_model(setting.module, tmp_path / "clients", setting.ended.names.experiment, m)
        for m in range(NUM_CLIENTS)
    ]
    personal = torch.stack([FlatModel(model).params for model in setting_personal])
    assert_same((state, personal), setting.cohort(), bits=True)


def test_a_run_that_is_over_is_not_run_again(federation, tmp_path):
    setting = Setting(federation, tmp_path, algorithm("fedavg"))
    first = setting.run(WireGrid(setting.client(), NODES), rounds=2, out=tmp_path / "server")
    grid = WireGrid(setting.client(), NODES)
    again = setting.run(grid, rounds=2, out=tmp_path / "server")
    assert again.server.params.equal(first.server.params)
    assert {message.metadata.message_type for message in grid.received} == {"query"}


@pytest.mark.parametrize("changed", [{"seed": 4}, {"learning_rate": 0.1}, {"batch_size": 4}, {"participation": 1.0}])
def test_a_checkpoint_of_another_run_is_refused(changed, federation, tmp_path):
    setting = Setting(federation, tmp_path, algorithm("fedavg"))
    setting.run(WireGrid(setting.client(), NODES), rounds=1, out=tmp_path / "server")
    with pytest.raises(ConfigError, match=f"{next(iter(changed))} is"):
        setting.run(WireGrid(setting.client(), NODES), rounds=2, out=tmp_path / "server", **changed)


def test_a_round_that_was_lost_is_asked_for_again_and_answered_the_same(federation, tmp_path):
    """The server dies after the clients of round 3 have trained, and before it has heard of it."""
    setting = Setting(federation, tmp_path, algorithm("self-fl"))

    def dies(message, answer):
        reply = answer(message)
        if message.metadata.group_id == "2":
            raise KeyboardInterrupt
        return [reply]

    with pytest.raises(KeyboardInterrupt):
        setting.run(WireGrid(setting.client(), NODES, dies), out=tmp_path / "server")
    state = setting.run(WireGrid(setting.client(), NODES), out=tmp_path / "server")
    assert_same((state, setting.personal()), setting.cohort(), bits=True)


def test_a_message_that_arrives_twice_advances_the_clock_once(federation, tmp_path):
    setting = Setting(federation, tmp_path, algorithm("self-fl"))

    def twice(message, answer):
        first, second = answer(message), answer(message)
        ours, theirs = first.content.array_records["arrays"], second.content.array_records["arrays"]
        assert {name: array.data for name, array in ours.items()} == {name: a.data for name, a in theirs.items()}
        return [second]

    state = setting.run(WireGrid(setting.client(), NODES, twice))
    assert_same((state, setting.personal()), setting.cohort(), bits=True)


# -------------------------------------------------------------------------------------------------------------- faults


def edited(change):
    """A fault that changes the tensors of an answer: ``change`` alters the dictionary of arrays."""

    def fault(reply):
        arrays = reply.content.array_records["arrays"]
        change(arrays)
        return [reply]

    return fault


def note(**values):
    """A fault that changes what an answer says of itself."""

    def fault(reply):
        reply.content.config_records["about"].update(values)
        return [reply]

    return fault


def entry(name, value):
    """A fault that sets the first number of a tensor."""

    return edited(lambda arrays: set_numbers(arrays, name, value, only_first=True))


def torn(arrays):
    whole = arrays["params"]
    arrays["params"] = Array(whole.dtype, whole.shape, whole.stype, whole.data[:200])


def lying(arrays):
    """The header is right, the bytes are of another array."""
    whole = arrays["params"]
    other = Array(whole.numpy().astype("float64"))
    arrays["params"] = Array(whole.dtype, whole.shape, whole.stype, other.data)


def misdirected(reply):
    reply.metadata.__dict__["_reply_to_message_id"] = "0" * 64
    return [reply]


def in_its_place(reply):
    reply.metadata.__dict__["_src_node_id"] = 4242
    return [reply]


def without(record):
    def fault(reply):
        del reply.content[record]
        return [reply]

    return fault


def unavailable(reply):
    """What Flower's server says when a node has gone: it is the sender itself."""
    error = Message(Error(5, "node unavailable"), reply_to=reply)
    error.metadata.__dict__["_reply_to_message_id"] = reply.metadata.reply_to_message_id
    error.metadata.__dict__["_src_node_id"] = 1
    return [error]


FAULTS = {
    "dropped": (lambda reply: [], "no answer within"),
    "of another round": (note(round_number=1), "round_number of the answer is 1"),
    "of another experiment": (note(experiment="second"), "experiment of the answer is 'second'"),
    "of another client": (note(client="77"), "client of the answer is '77'"),
    "without a round": (note(round_number="2"), "round_number is '2'"),
    "of negative cost": (note(num_gradients=-3), "num_gradients is -3"),
    "to no message of ours": (misdirected, "which is none of this round's"),
    "from another node": (in_its_place, "node 4242 answers in its place"),
    "an error of the server's": (unavailable, "error 5: 'node unavailable'"),
    "without tensors": (without("arrays"), "no record 'arrays'"),
    "without a note": (without("about"), "no record 'about'"),
    "lacks a tensor": (edited(lambda arrays: arrays.pop("params")), r"lacks \['params'\]"),
    "has one too many": (edited(lambda arrays: arrays.update(extra=arrays["params"])), r"also has \['extra'\]"),
    "other shape": (
        edited(lambda arrays: arrays.update(params=Array(arrays["params"].numpy()[:, :7].copy()))),
        r"'params' is float32 \(1, 7\); expected float32 \(1, 650\)",
    ),
    "other type": (
        edited(lambda arrays: arrays.update(params=Array(arrays["params"].numpy().astype("float64")))),
        "'params' is float64",
    ),
    "torn": (edited(torn), "'params' cannot be read"),
    "lying header": (edited(lying), "'params' is torch.float64"),
    "NaN in the model": (entry("params", math.nan), "params holds NaN"),
    "infinity in the model": (entry("params", math.inf), "params holds NaN or infinity"),
    "negative variance": (entry("intra_variance", -0.5), r"intra_variance is -0\.5"),
    "infinite variance": (entry("intra_variance", math.inf), "intra_variance is inf; expected 0 to"),
    "no examples": (entry("num_examples", 0.0), "num_examples is 0"),
    "more examples than may be": (entry("num_examples", 2e9), "num_examples is 2e.09; expected 1 to 123"),
    "a model too long to square": (entry("params", 1e20), "params measures 1e.20; expected at most"),
    "absurd cost": (note(num_gradients=2**62), "num_gradients is 4611686018427387904; expected 0 to"),
    "NaN examples": (entry("num_examples", math.nan), "num_examples holds NaN"),
    "negative steps": (entry("num_local_steps", -1), "num_local_steps is -1"),
}


@pytest.fixture
def heard(caplog):
    caplog.set_level(logging.WARNING, logger="selffl")
    return caplog


def reference(setting, left_out):
    """What the method makes of round 2 of the cohort engine without the answer of ``left_out``."""
    source = ModelSource(
        setting.federation, FlatModel(setting.module), nn.functional.cross_entropy, SETTINGS["learning_rate"],
        SETTINGS["batch_size"], SEED,
    )  # fmt: skip
    engine = CohortEngine(setting.method, source, SETTINGS["participation"], SEED)
    reports = []
    state = engine.advance(engine.start(source.model.params), 1)
    engine.advance(state, 1, reports.append)
    kept = [place for place, client in enumerate(reports[0].clients.tolist()) if client != left_out]
    parts = {name: tensor[kept] for name, tensor in tensors_of(reports[0].upload).items()}
    upload = type(reports[0].upload)(**parts)
    return setting.method.server_round(state.server, reports[0].clients[kept], upload)


@pytest.mark.parametrize("kind", FAULTS)
def test_a_wrong_answer_is_left_out_and_the_round_goes_on_with_the_rest(kind, federation, tmp_path, heard, short):
    fault, reason = FAULTS[kind]
    setting = Setting(federation, tmp_path, short("self-fl"))
    victim = int(sample_cohort(SEED, 2, NUM_CLIENTS, 0.5)[1])

    def stands_between(message, answer):
        reply = answer(message)
        if message.metadata.group_id != "2" or NODES[message.metadata.dst_node_id] != victim:
            return [reply]
        return [over_the_wire(reply) for reply in fault(reply)]

    state = setting.run(WireGrid(setting.client(), NODES, stands_between), rounds=2, evaluate_every=0)
    heard_of = [record.getMessage() for record in heard.records]
    heard.clear()
    assert any(re.search(reason, line) for line in heard_of), heard_of
    if "none of this round's" not in reason:
        assert any(f"client {victim} is left out" in line for line in heard_of)
    for name, tensor in tensors_of(reference(setting, victim)).items():
        torch.testing.assert_close(tensors_of(state.server)[name], tensor, rtol=0, atol=0, equal_nan=True)


def test_an_answer_that_comes_twice_counts_once(federation, tmp_path, heard):
    setting = Setting(federation, tmp_path, algorithm("self-fl"))

    def twice(message, answer):
        reply = answer(message)
        return [reply, over_the_wire(reply)]

    state = setting.run(WireGrid(setting.client(), NODES, twice))
    assert_same((state, setting.personal()), setting.cohort(), bits=True)
    assert "it has answered before; the first answer counts" in heard.text


def test_an_answer_that_comes_a_round_late_counts_in_none(federation, tmp_path, heard):
    setting, kept = Setting(federation, tmp_path, algorithm("fedavg")), []
    victim = int(sample_cohort(SEED, 1, NUM_CLIENTS, 0.5)[0])

    def late(message, answer):
        reply = answer(message)
        if message.metadata.group_id == "1" and NODES[message.metadata.dst_node_id] == victim:
            kept.append(reply)
            return []
        if message.metadata.group_id == "2" and kept:
            return [kept.pop(), reply]
        return [reply]

    state = setting.run(WireGrid(setting.client(), NODES, late), rounds=2)
    assert "which is none of this round's" in heard.text
    assert not kept
    assert state.num_rounds.sum() == 7


def test_a_client_that_fails_is_left_out_with_its_reason(federation, tmp_path, heard):
    setting = Setting(federation, tmp_path, algorithm("fedavg"))
    victim = int(sample_cohort(SEED, 2, NUM_CLIENTS, 0.5)[0])

    def rows(client):
        if client == victim and grid.received[-1].metadata.group_id == "2":
            raise OSError("the disk is gone")
        return of_client(federation, client)

    app = client_app(setting.module, rows, "fedavg", memory_dir=tmp_path)
    grid = WireGrid(app, NODES)
    state = setting.run(grid, rounds=2)
    assert f"client {victim} is left out: error 2" in heard.text
    assert "the disk is gone" in heard.text
    assert state.num_rounds.sum() == 7


def test_a_client_that_is_not_connected_is_left_out(federation, tmp_path, heard):
    setting = Setting(federation, tmp_path, algorithm("self-fl"))
    victim = int(sample_cohort(SEED, 1, NUM_CLIENTS, 0.5)[0])
    some = {node: client for node, client in NODES.items() if client != victim}
    state = setting.run(WireGrid(setting.client(), some), rounds=1)
    assert f"client {victim} is left out: it is not connected" in heard.text
    assert "7 of 8 clients are connected" in heard.text
    assert state.num_rounds.tolist()[victim] == 0


# -------------------------------------------------------------------------------------------------------------- quorum


def only_half(message, answer):
    """In round 2 two of four clients answer."""
    left_out = sample_cohort(SEED, 2, NUM_CLIENTS, 0.5)[:2].tolist()
    is_lost = message.metadata.group_id == "2" and NODES[message.metadata.dst_node_id] in left_out
    reply = answer(message)
    return [] if is_lost else [reply]


def test_half_of_the_cohort_is_enough_for_half_a_quorum(federation, tmp_path):
    setting = Setting(federation, tmp_path, algorithm("self-fl"))
    assert setting.run(WireGrid(setting.client(), NODES, only_half), quorum=0.5).num_rounds.sum() == 14


def test_too_few_answers_end_the_run_and_nothing_is_lost(federation, tmp_path):
    setting = Setting(federation, tmp_path, algorithm("self-fl"))
    with pytest.raises(QuorumError, match="2 of 4 clients answered in round 2; expected 3 or more"):
        setting.run(WireGrid(setting.client(), NODES, only_half), quorum=0.75, out=tmp_path / "server")
    state = setting.run(WireGrid(setting.client(), NODES), quorum=0.75, out=tmp_path / "server")
    assert_same((state, setting.personal()), setting.cohort(), bits=True)


def test_too_few_answers_can_be_skipped(federation, tmp_path, heard):
    setting = Setting(federation, tmp_path, algorithm("fedavg"))
    grid = WireGrid(setting.client(), NODES, only_half)
    state = setting.run(grid, rounds=2, quorum=0.75, shortfall="skip")
    assert state.round_number == 2
    assert state.server.params.equal(setting.cohort(rounds=1)[0].server.params)
    assert "the round is skipped" in heard.text


def test_nobody_there_is_no_round(federation, tmp_path):
    setting = Setting(federation, tmp_path, algorithm("fedavg"))
    with pytest.raises(QuorumError, match="0 of 4 clients answered in round 1"):
        setting.run(WireGrid(setting.client(), {}), rounds=1, round_seconds=0.3)


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"algorithm": algorithm("ditto")}, "algorithm is 'self-fl'; expected 'ditto'"),
        ({"algorithm": algorithm("self-fl", max_local_steps=7)}, '"max_local_steps": 7'),
    ],
)
def test_a_client_with_another_method_does_not_train(changed, reason, federation, tmp_path, heard):
    setting = Setting(federation, tmp_path, algorithm("self-fl"))
    with pytest.raises(QuorumError):
        setting.run(WireGrid(setting.client(**changed), NODES), rounds=1)
    assert reason in heard.text


def test_a_client_with_another_model_is_none_of_ours(federation, tmp_path, heard):
    setting = Setting(federation, tmp_path, algorithm("self-fl"))
    other = client_app(network(), lambda client: of_client(federation, client), "self-fl", memory_dir=tmp_path)
    with pytest.raises(QuorumError):
        setting.run(WireGrid(other, NODES), rounds=1, round_seconds=2.5)
    assert "is left out: the fingerprint of client" in heard.text


def test_strangers_and_pretenders_are_left_out(federation, tmp_path, heard):
    setting = Setting(federation, tmp_path, algorithm("fedavg"))

    def rows(client):
        return of_client(federation, client if client < NUM_CLIENTS else 0)

    app = client_app(setting.module, rows, "fedavg", memory_dir=tmp_path / "clients")
    state = setting.run(WireGrid(app, {**NODES, 77: 99, 78: 3}))
    assert "client '99' is not in the list of 8 clients" in heard.text
    assert "node 78 says that it is client 3, as node" in heard.text
    assert_same((state, setting.personal()), setting.cohort(), bits=True)


@pytest.mark.parametrize("clients", [[], ["a", "a"], [1, "1"], ["a", 1]])
def test_ids_that_cannot_number_clients_are_refused(clients):
    with pytest.raises(ConfigError):
        number_ids(clients)


def test_numbers_follow_the_sorted_ids_as_numbers_or_as_text():
    assert number_ids([10, 9, 1]) == [1, 9, 10]
    assert number_ids(["10", "9", "1"]) == ["1", "10", "9"]


def test_a_node_says_which_client_it_is_by_name_or_by_number():
    def context(**config):
        return Context(RUN, 5, {name.replace("_", "-"): value for name, value in config.items()}, RecordDict(), {})

    assert client_of(context(client_id="anna", partition_id=3)) == "anna"
    assert client_of(context(partition_id=3)) == 3
    with pytest.raises(RefusedError, match="neither client-id nor partition-id"):
        client_of(context(other=3))


def test_a_client_trains_by_the_default_method_where_none_is_named():
    assert inspect.signature(client_app).parameters["algorithm"].default == DEFAULT_ALGORITHM
