"""Secure sums over Flower: plain sums of masked answers, drop-outs at every stage, and what is refused."""

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'selffl[flower]'")

from flwr.app import Context, RecordDict
from wire import RUN, Small, WireGrid

from selffl.algorithms.auto_closing import NUM_CLOSING_ROUNDS
from selffl.errors import ConfigError, QuorumError
from selffl.flower import client_app, server_app
from selffl.state.checkpoint import load_tensors

SETTINGS = {
    "rounds": 3,
    "participation": 1.0,
    "seed": 3,
    "evaluate_every": 3,
    "connect_seconds": 0,
    "round_seconds": 9.0,
}


@pytest.fixture(scope="module", autouse=True)
def short_closing(few_closing_steps):
    """Clients are in this process, and train for a few steps once training is over, as elsewhere."""
    with few_closing_steps():
        yield


def trained(folder, name="fedavg", fault=None, insists=False, **changed):
    """The grid after a run of four clients, and the model that the server is left with."""
    small = Small(folder, name)
    app = client_app(small.module(), small.rows, name, memory_dir=small.memory, secure_sums=insists)
    grid = WireGrid(app, small.nodes, fault)
    server = server_app(small.module(), name, small.clients, out=small.out, **{**SETTINGS, **changed})
    server(grid, Context(RUN, 1, {}, RecordDict(), {}))
    tensors, _ = load_tensors(small.out / "checkpoint.safetensors")
    return grid, tensors


@pytest.mark.parametrize("name", ["fedavg", "ditto-equal", "scaffold", "self-fl-sums", "self-fl-auto"])
def test_a_run_by_secure_sums_is_the_plain_run_to_the_stated_precision(name, tmp_path):
    _, plain = trained(tmp_path / "plain", name)
    grid, secure = trained(tmp_path / "secure", name, secure_sums=True, insists=True)
    assert secure.keys() == plain.keys()
    for field, tensor in plain.items():
        if field == "num_gradients":
            assert secure[field].sum() == tensor.sum()
        else:
            pair = secure[field], tensor
            close = {"rtol": 1e-4, "atol": 1e-6}
            if ".moments" in field:  # equations of a variance near 0: their solutions count
                continue
            if field.startswith("server.closing."):
                close = {"rtol": 1e-2, "atol": 2e-2}
                pair = tuple(1.0 / each for each in pair) if field.endswith("prior_rows") else pair
            torch.testing.assert_close(*pair, **close, equal_nan=True)
    kinds = [message.metadata.message_type for message, _ in grid.sent]
    held = {"self-fl-auto": NUM_CLOSING_ROUNDS}.get(name, 0)  # closing rounds, which are sums as well
    asked = 4 * (3 + held)
    assert [kinds.count(kind) for kind in ("query.keys", "query.shares", "train", "query.reveal")] == [asked] * 4


def test_what_reaches_the_server_looks_random(tmp_path):
    answers = []

    def watched(message, answer):
        replies = [answer(message)]
        answers.append(replies[0])
        return replies

    trained(tmp_path, fault={"train": watched}, secure_sums=True)
    assert len(answers) == 12
    for reply in answers:
        (record,) = reply.content.array_records.values()
        assert list(record) == ["masked"]
        words = record["masked"].numpy()
        assert words.dtype == np.uint64
        assert reply.content.config_records["about"]["num_gradients"] == 0
        top = np.unpackbits((words >> np.uint64(56)).astype(np.uint8))  # plain numbers have all zeros or all ones there
        assert 0.25 < top.mean() < 0.75


@pytest.mark.parametrize("kind", ["query.keys", "query.shares", "train", "query.reveal"])
def test_who_drops_out_at_any_stage_does_not_end_the_round(kind, tmp_path, caplog):
    """One client of four is silent at that stage, in every round: the rest go on, as without secure sums."""

    def silent(message, answer):
        return [] if message.metadata.dst_node_id == 101 else [answer(message)]

    _, secure = trained(tmp_path / "secure", fault={kind: silent}, secure_sums=True)
    assert "client 1 is left out" in caplog.text
    is_counted = kind == "query.reveal"  # its answer was there; others' shares do for it
    _, plain = trained(tmp_path / "plain", fault=None if is_counted else {"train": silent})
    torch.testing.assert_close(secure["server.params"], plain["server.params"], rtol=1e-5, atol=1e-6)
    assert secure["num_rounds"].tolist() == ([3] * 4 if is_counted else [3, 0, 3, 3])


def test_where_too_few_stay_the_round_is_not_read(tmp_path):
    def silent(message, answer):
        return [] if message.metadata.dst_node_id in (101, 102) else [answer(message)]

    with pytest.raises(QuorumError, match="0 of 4 clients answered in round 1; expected 2 or more"):
        trained(tmp_path / "first", fault={"train": silent}, secure_sums=True)
    _, kept = trained(tmp_path / "second", fault={"query.keys": silent}, secure_sums=True, shortfall="skip")
    assert kept["num_rounds"].tolist() == [0] * 4
    assert kept["server.params"].equal(torch.nn.utils.parameters_to_vector(Small.module().parameters()).detach())


def test_a_client_helps_with_one_list_a_session_alone(tmp_path):
    """A server that asks for both secrets of a client gets one of them."""
    from selffl.engines.flower.secure import ANSWERED

    def twice(message, answer):
        replies = [answer(message)]
        listed = message.content.config_records[ANSWERED]
        listed["numbers"] = [1, 2, 3]
        second = answer(message)
        listed["numbers"] = [0, 1, 2, 3]
        assert second.has_error()
        assert "expected one list for each session" in second.error.reason
        return replies

    trained(tmp_path, fault={"query.reveal": twice}, secure_sums=True, rounds=1)


def test_noise_goes_on_the_sum(tmp_path):
    bounds = {"clip": 0.1, "max_weight": 5.0}
    _, quiet = trained(tmp_path / "quiet", secure_sums=True, **bounds)
    _, plain = trained(tmp_path / "plain", **bounds)
    _, noisy = trained(tmp_path / "noisy", secure_sums=True, **bounds, noise_multiplier=1.0)
    torch.testing.assert_close(quiet["server.params"], plain["server.params"], rtol=1e-5, atol=1e-6)
    assert (noisy["server.params"] - quiet["server.params"]).norm() > 0.01


def test_a_site_that_insists_answers_no_plain_order(tmp_path):
    with pytest.raises(QuorumError, match="expected a secure sum, as its site insists on"):
        trained(tmp_path, insists=True)


@pytest.mark.parametrize(
    ("name", "changed", "reason"),
    [
        ("self-fl", {}, "the server of self-fl needs single clients"),
        ("local", {}, "clients of local send nothing"),
        ("fedavg", {"robust": "median"}, "robust is 'median', which needs single clients"),
    ],
)
def test_what_needs_single_clients_is_refused_in_a_line(name, changed, reason):
    with pytest.raises(ConfigError, match=f"secure_sums is True, and {reason}") as raised:
        server_app(Small.module(), name, range(4), secure_sums=True, **changed)
    assert "\n" not in str(raised.value)
