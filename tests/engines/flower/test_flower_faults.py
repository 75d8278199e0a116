"""What clients claim, report and let out, and how long they are waited for: nothing of it stops or spoils a run."""

import logging
import math
import re

import pytest
from torch import nn

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'selffl[flower]'")

from flwr.app import Array, ConfigRecord, Error, Message, MetricRecord, RecordDict
from wire import Small, WireGrid, over_the_wire, set_numbers

from selffl.algorithms import algorithm
from selffl.algorithms.self_fl import SelfFL
from selffl.engines.flower.messages import MAX_SHOWN_CHARACTERS, Answer, fingerprint, read, shown
from selffl.engines.flower.roster import Roster, wait_for_clients
from selffl.engines.flower.strategy import QUERY_SECONDS
from selffl.errors import DataError, DivergedError, QuorumError, RefusedError
from selffl.flower import personal_model
from selffl.runs import folder as files
from selffl.state.checkpoint import load_tensors
from selffl.training.flat import FlatModel

VICTIM = 2
REST = [client for client in Small.clients if client != VICTIM]
SERVER = ("selffl.engines.flower.strategy", "selffl.engines.flower.roster")


@pytest.fixture(scope="module", autouse=True)
def short_closing(few_closing_steps):
    """Servers and clients are one process here, so that clients can be told to train for a few steps in the end."""
    with few_closing_steps():
        yield


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    """No power cut is looked at here."""
    monkeypatch.setattr("selffl.state.files.os.fsync", lambda handle: None)


@pytest.fixture
def small(tmp_path):
    return Small(tmp_path)


@pytest.fixture
def heard(caplog):
    """A function that gives the lines of the server's log."""
    caplog.set_level(logging.WARNING, logger="selffl")
    return lambda: [record.getMessage() for record in caplog.records if record.name in SERVER]


def of_client(change, client=VICTIM, rounds=None):
    """A fault that changes the answers of one client: ``change(reply)`` alters it, or gives the replies that arrive."""

    def fault(message, answer):
        reply = answer(message)
        is_meant = Small.nodes[message.metadata.dst_node_id] == client
        if not is_meant or (rounds and int(message.metadata.group_id) not in rounds):
            return [reply]
        found = change(reply)
        return [over_the_wire(arrived) for arrived in ([reply] if found is None else found)]

    return fault


def note(**values):
    return lambda reply: reply.content.config_records["about"].update(values)


def tensor(name, value):
    """All numbers of a tensor in an answer are that one."""

    def change(reply):
        set_numbers(reply.content.array_records["arrays"], name, value)

    return change


def metrics(**values):
    """What a client reports; names have two underscores for a dot, and those that are None are taken out."""

    def change(reply):
        found = dict(reply.content.metric_records["metrics"])
        found |= {name.replace("__", "."): value for name, value in values.items()}
        reply.content["metrics"] = MetricRecord({name: value for name, value in found.items() if value is not None})

    return change


def took_part(records, round_number):
    return [int(row["client"]) for row in records.participation if row["round"] == round_number]


def reported(records):
    """The clients that the last evaluation has heard of."""
    return [int(row["client"]) for row in records.clients if row["num_test"] > 0]


def spent(small):
    tensors, _ = load_tensors(small.out / "checkpoint.safetensors")
    return tensors["num_gradients"].tolist()


# -------------------------------------------------------------------------------------------------------------- claims


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (tensor("num_examples", 101.0), "num_examples is 101; expected 1 to 8."),
        (tensor("num_examples", 3e38), "num_examples measures 3e+38; expected at most"),
        (tensor("num_examples", math.inf), "num_examples holds NaN or infinity"),
        (tensor("params", 1e17), "params measures 3.87298e+17; expected at most"),
        (tensor("params", -3e38), "params measures"),
        (note(num_gradients=10**12 + 1), "num_gradients is 1000000000001; expected 0 to 1000000000000."),
        (note(num_gradients=2**63 - 1), "num_gradients is 9223372036854775807"),
    ],
)
def test_what_a_client_cannot_have_is_left_out(change, reason, small, heard):
    found = small.serve(small.grid(of_client(change)), rounds=1, max_examples=100)
    assert took_part(found, 1) == REST
    assert any(line.startswith(f"round 1: client {VICTIM} is left out: {reason}") for line in heard()), heard()
    assert spent(small)[VICTIM] == 0
    assert found.summary["status"] == "finished"


@pytest.mark.parametrize("change", [tensor("num_examples", 8.0), tensor("params", 1e15), note(num_gradients=10**12)])
def test_what_a_client_can_just_have_counts(change, small, heard):
    found = small.serve(small.grid(of_client(change)), rounds=1, max_examples=100)
    assert took_part(found, 1) == list(Small.clients)
    assert not heard()


@pytest.mark.parametrize(("each", "is_left_out"), [(2.6, False), (2.9, True)])  # the victim has eight rows
def test_classes_of_a_client_weigh_no_more_than_the_client(each, is_left_out, tmp_path, heard):
    small = Small(tmp_path, "self-fl-auto")
    found = small.serve(small.grid(of_client(tensor("class_weights", each), rounds=[1])), rounds=1)
    assert took_part(found, 1) == (REST if is_left_out else list(Small.clients))
    reason = f"round 1: client {VICTIM} is left out: the sum of class_weights is 8.7; expected 0 to 8."
    assert heard() == [reason] * is_left_out


@pytest.mark.parametrize(("each", "is_left_out"), [(0.0, False), (1e6, True), (-1.0, True)])
def test_no_client_makes_the_interval_of_the_variance_what_it_likes(each, is_left_out, tmp_path, heard):
    """Squares of what its halves agree and disagree on are no larger than what it says of both allows, nor below 0."""
    small = Small(tmp_path, "self-fl-auto")
    found = small.serve(small.grid(of_client(tensor("spread_products", each), rounds=[1])), rounds=1)
    assert took_part(found, 1) == (REST if is_left_out else list(Small.clients))
    said = heard()
    assert len(said) == is_left_out
    assert all(f"client {VICTIM} is left out: spread_products is {each:g}; expected" in line for line in said)


FEWER_STEPS = {"self-fl-augmented": {"max_convergence_steps": 50}}  # in place of 2,000


@pytest.mark.parametrize(
    ("method", "changes", "reason"),
    [
        ("self-fl", {"intra_variance": 1e20}, "intra_variance is 1e+20; expected 0 to"),
        ("self-fl-exact", {"intra_variance": 1e30}, "intra_variance is 1e+30; expected 0 to"),
        ("self-fl-augmented", {"intra_variance": 1e8}, "intra_variance is 1e+08; expected 0 to"),
        ("self-fl-auto", {"deviation_squares": 3e38}, "deviation_squares measures"),
        ("self-fl-auto", {"difference_squares": 3e38}, "difference_squares measures"),
        ("self-fl-auto", {"disagreements": -1e30}, None),
        ("self-fl-auto", {"factor_curvature": 1e30}, None),
    ],
)
def test_finite_lies_of_one_client_do_not_end_a_run(method, changes, reason, tmp_path, heard):
    """Four rounds: a lie of the first two would have had honest clients diverge in the third."""
    small = Small(tmp_path, algorithm(method, **FEWER_STEPS.get(method, {})))

    def lie(reply):
        for name, value in changes.items():
            tensor(name, value)(reply)

    found = small.serve(small.grid(of_client(lie, rounds=range(1, 5))), rounds=4, evaluate_every=4)
    assert found.summary["status"] == "finished"
    assert took_part(found, 4) == (list(Small.clients) if reason is None else REST)
    left_out = [line for line in heard() if "is left out" in line]
    assert all(f"client {VICTIM} is left out: {reason}" in line for line in left_out)
    assert len(left_out) == (0 if reason is None else 4)


@pytest.mark.usefixtures("no_small_models")
@pytest.mark.parametrize("name", ["deviation_squares", "spread_products", "agreements", "num_examples"])
def test_nobody_settles_how_closing_visits_are_held(name, tmp_path, heard):
    """In both closing rounds after the last an answer that cannot be is left out by name."""
    small = Small(tmp_path, "self-fl-auto")
    found = small.serve(small.grid(of_client(tensor(name, 1e6), rounds=[3, 4])), rounds=2)
    assert found.summary["status"] == "finished"
    assert took_part(found, 2) == list(Small.clients)
    said = heard()
    assert len(said) == 2
    wrong = "spread_products" if name == "agreements" else name  # these are of the agreements
    for number, line in zip((3, 4), said, strict=True):
        assert line.startswith(f"round {number}: client {VICTIM} is left out: {wrong} is ")
    assert 0.0 < found.summary["inter_variance"] < 10.0


@pytest.mark.usefixtures("no_small_models")
def test_closing_rounds_of_too_few_change_nothing(tmp_path, caplog):
    """Nobody answers them: the run ends all the same, and closing visits are held as was learned."""

    def fault(message, answer):
        return [] if message.metadata.group_id in ("3", "4") else [answer(message)]

    found = (small := Small(tmp_path, "self-fl-auto")).serve(small.grid(fault), rounds=2)
    assert found.summary["status"] == "finished"
    assert found.summary["closing_multiple"] == 1.0
    assert found.summary["inter_variance"] == found.history[-1]["inter_variance"]
    assert "0 of 4 clients have answered in closing round 1: too few, and it changes nothing." in caplog.text


def test_nobody_has_more_rows_than_it_said_when_it_came(tmp_path, heard):
    """A site whose rows grow from 8 to 1,000 after it was asked who it is does not weigh more by them."""
    small, grown = Small(tmp_path, "fedavg"), []

    def load(client):
        rows = small.rows(client)
        if client != VICTIM or not grown:
            return rows
        return (rows[0].repeat(125, 1), rows[1].repeat(125), *rows[2:])

    grid = small.grid(lambda message, answer: [grown.append(message), answer(message)][1:], load_data=load)
    found = small.serve(grid, rounds=2)
    assert [row["clients"] for row in found.history] == [3, 3]
    assert f"round 1: client {VICTIM} is left out: weight is 1000; expected 1 to 8." in heard()


def test_models_that_are_just_short_enough_leave_finite_variances(tmp_path):
    """All clients at the limit, of alternating signs: what the method squares and sums stays finite."""
    small = Small(tmp_path)

    def far(reply):
        client = int(reply.content.config_records["about"]["client"])
        tensor("params", 2.3e16 * (-1) ** client)(reply)
        tensor("intra_variance", 1.0)(reply)

    def fault(message, answer):
        reply = answer(message)
        far(reply)
        return [over_the_wire(reply)]

    found = small.serve(small.grid(fault), rounds=1)
    assert took_part(found, 1) == list(Small.clients)


def test_a_second_answer_never_counts_even_if_the_first_was_wrong(small, heard):
    def twice(reply):
        bad = over_the_wire(reply)
        tensor("params", math.nan)(bad)
        return [reply, bad]  # the grid turns their order round: the wrong one is first

    found = small.serve(small.grid(of_client(twice, rounds=[1])))
    assert took_part(found, 1) == REST
    assert took_part(found, 2) == list(Small.clients)
    reasons = [line for line in heard() if f"client {VICTIM} is left out" in line]
    assert ["it has answered before" in reasons[0], "holds NaN" in reasons[1], len(reasons)] == [True, True, 2]


def test_a_second_answer_never_counts_even_if_the_first_was_an_error(small):
    def twice(reply):
        failed = Message(Error(2, "out of memory"), reply_to=reply)
        failed.metadata.__dict__["_reply_to_message_id"] = reply.metadata.reply_to_message_id
        failed.metadata.__dict__["_src_node_id"] = reply.metadata.src_node_id
        return [reply, failed]

    assert took_part(small.serve(small.grid(of_client(twice)), rounds=1), 1) == REST


# -------------------------------------------------------------------------------------------------------------- roster


class Nodes(WireGrid):
    """Nodes that change before a round's messages are sent: ``changes[round](grid)``."""

    def __init__(self, app, clients, changes):
        super().__init__(app, clients)
        self.changes = changes

    def send_and_receive(self, messages, *, timeout=None):
        kinds = {(message.metadata.message_type, message.metadata.group_id) for message in messages}
        for kind, number in kinds:
            if kind == "train" and int(number) in self.changes:
                self.changes.pop(int(number))(self)
        return super().send_and_receive(messages, timeout=timeout)

    def asked(self, node):
        return sum(m.metadata.message_type == "query" and m.metadata.dst_node_id == node for m, _ in self.sent)


def test_nodes_that_change_their_clients_are_asked_again(small, heard):
    def swap(grid):
        grid.clients[100], grid.clients[101] = 1, 0

    grid = Nodes(small.client(), Small.nodes, {2: swap})
    found = small.serve(grid, rounds=3, evaluate_every=0)
    assert [took_part(found, number) for number in (1, 2, 3)] == [[0, 1, 2, 3], [2, 3], [0, 1, 2, 3]]
    assert [grid.asked(node) for node in (100, 101, 102)] == [2, 2, 1]
    assert any("the server's client is '0'; expected '1'" in line for line in heard())


def test_an_error_of_a_node_has_it_asked_again(small):
    def fails(message, answer):
        reply = answer(message)
        if message.metadata.dst_node_id != 102 or message.metadata.group_id != "1":
            return [reply]
        error = Message(Error(2, "killed"), reply_to=message)
        error.metadata.__dict__["_src_node_id"] = 102
        return [over_the_wire(error)]

    grid = small.grid(fails)
    small.serve(grid, rounds=3, evaluate_every=0)
    asked = [m.metadata.dst_node_id for m, _ in grid.sent if m.metadata.message_type == "query"]
    assert sorted(asked) == [100, 101, 102, 102, 103]


def test_a_node_whose_model_is_mended_is_taken_in(small, heard):
    wrong, right = small.client(module=nn.Linear(4, 3, bias=False)), small.client()
    mended = []

    def app(message, context):
        return (wrong if context.node_id == 102 and not mended else right)(message, context)

    grid = Nodes(app, Small.nodes, {2: lambda grid: mended.append(True)})
    found = small.serve(grid, rounds=4, evaluate_every=0)
    assert [VICTIM in took_part(found, number) for number in (1, 2, 3, 4)] == [False, False, True, True]
    assert any("node 102 is left out: the fingerprint of client '2' is" in line for line in heard())


def test_a_stranger_that_becomes_one_of_ours_is_taken_in(small, heard):
    def named(grid):
        grid.clients[102] = VICTIM

    app = small.client(lambda client: Small.rows(0))
    found = small.serve(Nodes(app, {**Small.nodes, 102: 77}, {2: named}), rounds=4, evaluate_every=0)
    assert [VICTIM in took_part(found, number) for number in (1, 2, 3, 4)] == [False, False, True, True]
    assert any("client '77' is not in the list of 4 clients" in line for line in heard())


def roster_of(small, seconds=5.0):
    return Roster([str(client) for client in Small.clients], fingerprint(FlatModel(small.module())), seconds)


def test_a_silent_node_is_asked_with_growing_pauses(small, heard):
    grid = WireGrid(
        small.client(), Small.nodes, {"query": lambda m, answer: [] if m.metadata.dst_node_id == 102 else [answer(m)]}
    )
    roster, looks = roster_of(small), []
    for look in range(1, 40):
        before = len(grid.sent)
        assert roster.locate(grid).keys() == set(REST)
        looks += [look] * (len(grid.sent) > before)
    assert looks == [1, 2, 4, 8, 16, 32]
    assert {timeout for _, timeout in grid.sent} == {m.metadata.ttl for m, _ in grid.sent} == {5.0}
    assert heard()[0] == "node 102 is left out: it has not said who it is within 5 seconds"
    grid.faults.clear()
    while VICTIM not in roster.locate(grid):
        look += 1
    assert look < 64
    # A node that has come back is new, however long it was silent before.
    grid.faults["query"] = lambda message, answer: []
    grid.clients = {}
    assert roster.locate(grid) == {}
    grid.clients, grid.faults = dict(Small.nodes), {}
    assert roster.locate(grid).keys() == set(Small.clients)


def test_a_node_that_comes_back_after_silence_is_asked_at_once(small):
    grid = small.grid({"query": lambda message, answer: []})
    roster = roster_of(small)
    for _ in range(9):
        assert roster.locate(grid) == {}
    grid.clients = {}
    roster.locate(grid)
    grid.clients, grid.faults = dict(Small.nodes), {}
    assert roster.locate(grid).keys() == set(Small.clients)


# --------------------------------------------------------------------------------------------------------- evaluations

WRONG = {
    "an unknown metric": metrics(personal__charm=1.0, global__charm=1.0),
    "only an unknown one": metrics(
        personal__accuracy=None, global__accuracy=None, personal__charm=1.0, global__charm=1.0
    ),
    "no metric": metrics(personal__accuracy=None, global__accuracy=None),
    "a missing view": metrics(global__accuracy=None),
    "another view": metrics(local__accuracy=1.0),
    "no view": metrics(accuracy=1.0),
    "negative rows": metrics(num_test=-1, personal__accuracy=0.0, global__accuracy=0.0),
    "negative training rows": metrics(num_train=-8),
    "rows and a half": metrics(num_test=6.5),
    "a list of rows": metrics(num_test=[6]),
    "no count": metrics(num_train=None),
    "too many rows": metrics(num_test=2**62),
    "too many training rows": metrics(num_train=101),
    "more right than rows": metrics(personal__accuracy=6.5),
    "less than none right": metrics(global__accuracy=-1.0),
    "NaN right": metrics(personal__accuracy=math.nan),
    "infinitely many right": metrics(global__accuracy=math.inf),
    "a whole number": metrics(personal__accuracy=3),
    "a list": metrics(personal__accuracy=[3.0]),
    "a sum over no rows": metrics(num_test=0, personal__accuracy=1.0, global__accuracy=0.0),
    "another round": note(round_number=7),
    "another client": note(client="0"),
    "no answer": lambda reply: [],
}


@pytest.fixture(scope="module")
def without_victim(tmp_path_factory):
    """The records of a run whose evaluation one client does not answer."""
    small = Small(tmp_path_factory.mktemp("without"))
    return small.serve(small.grid({"evaluate": of_client(lambda reply: [])}), rounds=1)


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_evaluation_is_left_out_and_the_rest_counted(kind, small, heard, without_victim):
    found = small.serve(small.grid({"evaluate": of_client(WRONG[kind])}), rounds=1, max_examples=100)
    assert any(line.startswith(f"round 1: client {VICTIM} is left out: ") for line in heard()), heard()
    assert found.summary["status"] == "finished"
    assert reported(found) == REST
    assert found.clients == without_victim.clients
    assert found.summary | {"seconds": 0} == without_victim.summary | {"seconds": 0}


def test_metrics_that_nobody_knows_do_not_stop_a_run_though_all_name_them(small):
    charm = of_metric("charm", 1.0)
    found = small.serve(small.grid({"evaluate": all_but(charm, charm)}), rounds=1)
    assert (found.summary["status"], found.summary["weighted_accuracy"], found.clients) == ("finished", None, [])


def test_a_run_goes_on_after_a_wrong_evaluation(small):
    found = small.serve(small.grid({"evaluate": of_client(WRONG["an unknown metric"], rounds=[1])}))
    assert reported(found) == list(Small.clients)
    assert [row["weighted_accuracy"] is not None for row in found.history] == [True, True]


def of_metric(metric, value, client=VICTIM, **counts):
    """That client measures by that alone, and finds that value."""
    gone = dict.fromkeys(("personal__accuracy", "global__accuracy"))
    return metrics(**gone, **counts, **{f"personal__{metric}": value, f"global__{metric}": value})


def all_but(change, others, client=VICTIM):
    """A fault of everybody's evaluations: ``change`` of one client's, ``others`` of the others'."""

    def fault(message, answer):
        reply = answer(message)
        (change if Small.nodes[message.metadata.dst_node_id] == client else others)(reply)
        return [over_the_wire(reply)]

    return fault


@pytest.mark.parametrize(
    ("metric", "value", "rows", "is_taken"),
    [
        ("loss", math.inf, 6, False),
        ("loss", -math.inf, 6, False),
        ("loss", math.nan, 6, False),
        ("loss", 1e16, 6, False),
        ("loss", -3.0, 6, True),
        ("loss", 5.0, 0, False),
        ("loss", 0.0, 0, True),
        ("error", -1.0, 6, False),
        ("error", 1e300, 6, False),
        ("error", 2.5, 0, False),
        ("error", 2.5, 6, True),
        ("auc", 1.01, 6, False),
        ("auc", -0.01, 6, False),
        ("auc", math.inf, 6, False),
        ("auc", math.nan, 6, True),
        ("auc", math.nan, 0, True),
        ("auc", 1.0, 6, True),
        ("accuracy", 6.0, 6, True),
    ],
)
def test_what_a_metric_can_be(metric, value, rows, is_taken, small, heard):
    def own(given, rows):
        if metric == "accuracy":
            return metrics(num_test=rows, personal__accuracy=given, global__accuracy=given)
        return of_metric(metric, given, num_test=rows)

    found = small.serve(small.grid({"evaluate": all_but(own(value, rows), own(0.5, 10))}), rounds=1)
    is_left_out = any(f"client {VICTIM} is left out: personal.{metric} is {value!r}; expected" in x for x in heard())
    assert is_left_out == (not is_taken), heard()
    assert files.read_config(small.out).metrics == (metric,)
    assert found.summary["status"] == "finished"
    assert [row["num_test"] for row in found.clients] == [10, 10, rows if is_taken else 0, 10]
    others = {"accuracy": 0.05, "loss": 0.05, "auc": 0.5, "error": math.sqrt(0.05)}[metric]
    name = metric if metric != "accuracy" else "accuracy"
    assert [found.clients[client][name] for client in REST] == pytest.approx([others] * 3)
    assert math.isfinite(found.summary[f"weighted_{metric}"])


def test_the_metrics_are_those_that_most_measure_and_stay_so(small, heard):
    """At first three of four measure by the loss; when the run goes on, three of four do not."""
    loss = of_metric("loss", 3.0)
    first = small.serve(small.grid({"evaluate": all_but(lambda reply: None, loss)}), rounds=1)
    assert files.read_config(small.out).metrics == ("loss",)
    assert reported(first) == REST
    assert f"round 1: client {VICTIM} is left out: it measures accuracy; expected loss" in heard()
    again = small.serve(small.grid({"evaluate": all_but(loss, lambda reply: None)}), rounds=2)
    assert files.read_config(small.out).metrics == ("loss",)
    assert reported(again) == [VICTIM]
    assert [row["weighted_loss"] is not None for row in again.history] == [True, True]
    assert "weighted_accuracy" not in again.history[0]


def test_the_metrics_do_not_hang_on_who_answers_first(small):
    """Replies arrive from the last client to the first."""
    small.serve(small.grid({"evaluate": all_but(of_metric("loss", 3.0), lambda reply: None, client=3)}), rounds=1)
    assert files.read_config(small.out).metrics == ("accuracy",)


def test_nobody_who_answers_the_last_evaluation_leaves_a_finished_run(small, heard):
    found = small.serve(small.grid({"evaluate": lambda message, answer: [answer(message)][:0]}), evaluate_every=0)
    assert found.summary["status"] == "finished"
    assert (found.summary["rounds"], found.summary["weighted_accuracy"]) == (2, None)
    assert "round 2: nobody has said how it does." in heard()
    assert (small.out / "model.safetensors").is_file()
    # Whoever runs it again has the evaluation after all.
    assert small.serve(evaluate_every=0).summary["weighted_accuracy"] > 0


def test_nobody_who_is_there_at_the_last_evaluation_leaves_a_finished_run(small):
    def leaves(message, answer):
        reply = answer(message)
        del grid.clients[message.metadata.dst_node_id]
        return [reply]

    grid = small.grid(leaves)
    found = small.serve(grid, rounds=1)
    assert (found.summary.get("status"), found.summary.get("rounds")) == ("finished", 1)


def test_nobody_who_answers_leaves_the_scores_of_the_evaluation_before(small):
    def fault(message, answer):
        return [answer(message)] if message.metadata.group_id == "1" else []

    found = small.serve(small.grid({"evaluate": fault}))
    assert (found.summary["status"], found.summary["rounds"], found.summary["evaluated_in_round"]) == ("finished", 2, 1)
    assert reported(found) == list(Small.clients)


def test_a_personal_model_that_is_not_finite_is_neither_kept_nor_counted(small, heard, monkeypatch):
    plain, own = SelfFL.personal, len(Small.rows(VICTIM)[0])

    def lost(self, shared, memory, task):
        return plain(self, shared, memory, task) * (math.inf if task.num_examples.tolist() == [own] else 1.0)

    monkeypatch.setattr(SelfFL, "personal", lost)
    found = small.serve(rounds=1)
    assert reported(found) == REST
    assert any(f"the personal model of client {VICTIM} is not finite after round 1" in line for line in heard())
    assert len(list(small.memory.rglob("*-model.safetensors"))) == 3


# ------------------------------------------------------------------------------------------------------------- waiting


class Clock:
    """Time that passes when somebody sleeps; ``then`` is called at the end of each sleep."""

    def __init__(self, monkeypatch, then=lambda now: None):
        self.now, self.then = 0.0, then
        for module in ("roster", "strategy"):
            monkeypatch.setattr(f"selffl.engines.flower.{module}.time", self)

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.now += seconds
        self.then(self.now)


def arriving(grid, seconds):
    """Nodes that connect at these seconds."""
    return lambda now: grid.clients.update({node: Small.nodes[node] for node, when in seconds.items() if when <= now})


def test_all_clients_are_waited_for(small, monkeypatch, heard):
    grid = WireGrid(small.client(), {100: 0, 101: 1})
    clock = Clock(monkeypatch, arriving(grid, {102: 7.0, 103: 30.0}))
    wait_for_clients(roster_of(small), grid, 4, 60.0)
    assert (clock.now, heard()) == (30.0, [])


def test_waiting_for_clients_ends(small, monkeypatch, heard):
    grid = WireGrid(small.client(), {100: 0, 101: 1})
    clock = Clock(monkeypatch, arriving(grid, {102: 7.0, 103: 30.0}))
    wait_for_clients(roster_of(small), grid, 4, 20.0)
    assert (clock.now, heard()) == (20.0, ["3 of 4 clients are connected after 20 seconds."])


def test_a_run_waits_for_its_clients_before_the_first_round(small, monkeypatch):
    grid = WireGrid(small.client(), {})
    clock = Clock(monkeypatch, arriving(grid, dict.fromkeys(Small.nodes, 50.0)))
    found = small.serve(grid, connect_seconds=60, rounds=1)
    assert (took_part(found, 1), clock.now) == (list(Small.clients), 50.0)


def test_a_round_waits_until_its_quorum_is_connected(small, monkeypatch):
    grid = WireGrid(small.client(), {100: 0})
    clock = Clock(monkeypatch, arriving(grid, {101: 12.0, 102: 300.0}))
    found = small.serve(grid, rounds=2, quorum=0.5, round_seconds=600.0)
    assert (took_part(found, 1), took_part(found, 2), clock.now) == ([0, 1], [0, 1], 12.0)
    with pytest.raises(QuorumError, match="2 of 4 clients answered in round 3; expected 3"):
        small.serve(WireGrid(small.client(), {100: 0, 101: 1}), rounds=3, quorum=0.75, round_seconds=600.0)
    assert clock.now == 612.0


def test_rounds_are_not_skipped_at_once_because_nobody_is_there(small, monkeypatch):
    """Everybody is back after six minutes: no more than six rounds of a minute are lost."""
    grid = WireGrid(small.client(), {})
    clock = Clock(monkeypatch, arriving(grid, dict.fromkeys(Small.nodes, 350.0)))
    found = small.serve(grid, rounds=8, shortfall="skip", round_seconds=60.0, evaluate_every=0)
    assert [row["clients"] for row in found.history] == [0, 0, 0, 0, 0, 4, 4, 4]
    assert clock.now == 350.0


def test_the_time_of_a_round_is_what_flower_is_told(small):
    grid = small.grid()
    small.serve(grid, rounds=1, round_seconds=17.0)
    kinds = {(m.metadata.message_type, timeout, m.metadata.ttl) for m, timeout in grid.sent}
    queried = ("query", QUERY_SECONDS, QUERY_SECONDS)
    assert kinds == {queried, ("train", 17.0, 17.0), ("evaluate", 17.0, 17.0)}


def test_an_evaluation_that_is_made_up_for_has_the_time_of_a_round(small):
    def stops(message, answer):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        small.serve(small.grid({"evaluate": stops}), rounds=1)
    grid = small.grid()
    found = small.serve(grid, rounds=1, round_seconds=23.0)
    assert found.summary["status"] == "finished"
    kinds = {(m.metadata.message_type, timeout, m.metadata.ttl) for m, timeout in grid.sent}
    assert kinds == {("query", QUERY_SECONDS, QUERY_SECONDS), ("evaluate", 23.0, 23.0)}


@pytest.mark.parametrize(("connect", "query"), [(5.0, QUERY_SECONDS), (300.0, 300.0)])
def test_a_node_has_less_time_to_say_who_it_is_than_to_train(connect, query, small):
    grid = small.grid()
    small.serve(grid, rounds=1, round_seconds=3600.0, connect_seconds=connect)
    kinds = {(m.metadata.message_type, timeout) for m, timeout in grid.sent}
    assert kinds == {("query", query), ("train", 3600.0), ("evaluate", 3600.0)}


# ---------------------------------------------------------------------------------------------------------- discretion

SECRET = "Jane Doe, HIV positive"


class Listening(WireGrid):
    """A grid that notes the errors that nodes answer."""

    def __init__(self, *args):
        super().__init__(*args)
        self.errors = []

    def answer(self, message):
        reply = super().answer(message)
        self.errors += [reply.error.reason] if reply.has_error() else []
        return reply


def failing(error, kind):
    """Rows of a client that raises an error at messages of a kind."""

    def rows(client):
        if client == VICTIM and rows.grid.received[-1].metadata.message_type == kind:
            raise error
        return Small.rows(client)

    return rows


@pytest.mark.parametrize("kind", ["query", "train", "evaluate"])
@pytest.mark.parametrize("error", [ValueError(SECRET), KeyError(SECRET), OSError(2, SECRET, SECRET)])
def test_an_error_with_a_name_in_it_leaves_the_client_as_its_kind_alone(kind, error, small, heard, caplog):
    rows = failing(error, kind)
    rows.grid = grid = Listening(small.client(rows), Small.nodes)
    small.serve(grid, rounds=1)
    told = "\n".join([*heard(), *grid.errors])
    assert "Jane" not in told
    assert f"{type(error).__name__}; the client's own log has the reason" in told
    own = [record for record in caplog.records if record.name == "selffl.engines.flower.client"]
    assert own
    assert all("Jane" in logging.Formatter().format(record) for record in own)


def test_rows_that_do_not_fit_are_not_described_to_the_server(small, heard):
    def rows(client):
        x_train, y_train, x_test, y_test = Small.rows(client)
        return x_train, y_train + 77 * (client == VICTIM), x_test, y_test

    grid = Listening(small.client(rows), Small.nodes)
    small.serve(grid, rounds=1)
    told = "\n".join([*heard(), *grid.errors])
    assert "DataError; the client's own log has the reason" in told
    assert not re.search("label|outputs|7[789]", told)


@pytest.mark.parametrize("error", [RefusedError("this site rests on Sundays"), DivergedError("this site is lost")])
def test_errors_of_our_own_words_reach_the_server(error, small, heard):
    rows = failing(error, "train")
    rows.grid = grid = Listening(small.client(rows), Small.nodes)
    small.serve(grid, rounds=1)
    assert any(f"client {VICTIM} is left out: error 2" in line and str(error) in line for line in heard())


FORGED = "\nround 1: client 0 is left out: forged\r\x1b[2J\u2028"
LONG = "x" * 200_000


def named(name, dtype=None):
    """An answer with another tensor, or one of a strange type."""

    def change(reply):
        arrays = reply.content.array_records["arrays"]
        one = arrays["params"]
        arrays[name] = one if dtype is None else Array(dtype, one.shape, one.stype, one.data)

    return change


def failed(reason):
    def change(reply):
        error = Message(Error(2, reason), reply_to=reply)
        error.metadata.__dict__["_reply_to_message_id"] = reply.metadata.reply_to_message_id
        error.metadata.__dict__["_src_node_id"] = reply.metadata.src_node_id
        return [error]

    return change


def who(**values):
    """Another introduction of one node; it has no rounds."""

    def fault(message, answer):
        reply = answer(message)
        if message.metadata.dst_node_id == 102:
            reply.content.config_records["about"].update(values)
        return [over_the_wire(reply)]

    return fault


def charming(text):
    return metrics(**{f"personal.{text}": 1.0, f"global.{text}": 1.0})


TEXTS = {
    "a round": lambda text: of_client(note(round_number=text)),
    "a client": lambda text: of_client(note(client=text)),
    "an experiment": lambda text: of_client(note(experiment=text)),
    "a tensor's name": lambda text: of_client(named(text)),
    "a tensor's type": lambda text: of_client(named("params", text)),
    "an error": lambda text: of_client(failed(text)),
    "a metric": lambda text: {"evaluate": of_client(charming(text))},
    "a stranger": lambda text: {"query": who(client=text)},
    "a model": lambda text: {"query": who(fingerprint=text)},
    "a protocol": lambda text: {"query": who(protocol=text)},
}


@pytest.mark.parametrize("text", [FORGED, LONG + FORGED], ids=["forged", "long"])
@pytest.mark.parametrize("place", TEXTS)
def test_what_clients_say_is_cut_and_stays_on_its_line(place, text, small, heard):
    small.serve(small.grid(TEXTS[place](text)), rounds=1)
    assert heard()
    for line in heard():
        assert len(line) < MAX_SHOWN_CHARACTERS + 300
        assert line.isprintable(), line


def test_a_run_that_ends_for_want_of_answers_says_no_more_than_its_log(small):
    fault = {"train": lambda message, answer: of_client(failed(LONG + FORGED), 0)(message, answer)}
    with pytest.raises(QuorumError) as found:
        small.serve(WireGrid(small.client(), {100: 0}, fault), rounds=1, quorum=0.25)
    assert str(found.value).isprintable()
    assert len(str(found.value)) < MAX_SHOWN_CHARACTERS + 300


def test_what_is_shown_is_on_one_line_of_bounded_length():
    assert shown("a\nb\x1b") == r"'a\nb\x1b'"
    assert len(shown("é" * 5000)) == MAX_SHOWN_CHARACTERS + 1
    assert shown((1, 650)) == "(1, 650)"


def test_a_note_of_20_megabytes_is_a_short_error():
    record = ConfigRecord({"experiment": "first", "round_number": "x" * 20_000_000 + FORGED})
    with pytest.raises(DataError) as found:
        read(Answer, RecordDict({"about": record}))
    assert str(found.value).startswith("round_number is 'xxx")
    assert len(str(found.value)) < MAX_SHOWN_CHARACTERS + 100


def test_the_name_of_an_experiment_outlives_a_first_round_that_does_not_end(small):
    def stops(message, answer):
        if message.metadata.dst_node_id == 103:
            raise KeyboardInterrupt
        return [answer(message)]

    with pytest.raises(KeyboardInterrupt):
        small.serve(small.grid(stops), experiment=None)
    small.serve(experiment=None)
    _, about = load_tensors(small.out / "checkpoint.safetensors")
    assert len(list(small.memory.iterdir())) == 1
    assert personal_model(small.module(), small.memory, about["experiment"], 0)
