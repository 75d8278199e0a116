"""A server and three nodes over TLS, each a process of its own: the bits of `selffl.train`, though the server dies.

`scenario.py` runs once, in a network and a process namespace of its own: nothing is reachable from outside, and nothing
outlives it.  The tests look at what it found.
"""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'selffl[flower]'")

import selffl
from selffl.data import load
from selffl.flower import personal_model
from selffl.runs import folder as files
from selffl.runs.evaluation import MAJORITY
from selffl.state.checkpoint import load_tensors

HERE = Path(__file__).resolve().parent
APART = ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
SETTINGS = {"participation": 1.0, "learning_rate": 0.05, "batch_size": 5, "seed": 3, "evaluate_every": 0}  # as there
METHOD, WHOLE = "self-fl-exact", 4


def is_possible():
    needed = all(shutil.which(name) for name in ("unshare", "ip", "openssl", "ssh-keygen"))
    return needed and subprocess.run([*APART, "true"], capture_output=True, check=False).returncode == 0


pytestmark = [pytest.mark.slow, pytest.mark.skipif(not is_possible(), reason="no namespaces of our own here")]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Where it all happened."""
    path = tmp_path_factory.mktemp("federation")
    source = Path(selffl.__file__).parents[1]
    done = subprocess.run(
        [*APART, "sh", "-c", 'ip link set lo up; exec "$@"', "sh", sys.executable, HERE / "scenario.py", path],
        env=os.environ | {"PYTHONPATH": str(source)}, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return path


@pytest.fixture(scope="module")
def found(place):
    return json.loads((place / "found.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def undisturbed():
    """The same rounds in one process, by `selffl.train`."""
    return trained(METHOD, WHOLE)


def trained(method, rounds):
    torch.manual_seed(0)
    model = nn.Linear(64, 10)
    return model, selffl.train(model, load("digits", num_clients=3), method, rounds=rounds, **SETTINGS)


def assert_same_bits(out, memory, model, run):
    """The global model in a server's folder and the personal models on the sites' disks are those of ``run``."""
    tensors, about = load_tensors(out / files.CHECKPOINT)
    assert about["round"] == run.summary["rounds"]
    assert tensors["server.params"].equal(run._state.server.params)
    for client in range(3):
        kept = personal_model(model, memory / f"site-{client}", about["experiment"], client)
        for name, expected in run.personal_model(client).state_dict().items():
            assert kept.state_dict()[name].equal(expected), (client, name)


# ----------------------------------------------------------------------------------------------------------- refusals


def test_a_key_that_is_not_registered_is_refused(found):
    status, said = found["unregistered"]
    assert status != 0
    assert "Failed to activate SuperNode" in said
    assert "SuperNode ID:" not in said
    assert "No SuperNode found with the given public key" in found["refusals"]["superlink"]


def test_a_server_of_another_authority_is_refused(found):
    status, said = found["wrong-ca"]
    assert status != 0
    assert "CERTIFICATE_VERIFY_FAILED" in said
    assert "SuperNode ID:" not in said


def test_plain_text_is_refused(found):
    status, said = found["plain"]
    assert status is None  # it tries for ever
    # How a connection ends that the other side has closed depends on what was still on its way.
    assert "Server disconnected without sending a response" in said or "reset by peer" in said
    assert "SuperNode ID:" not in said


def test_operators_cannot_come_through_the_gate(found):
    for words, path in (("supernode", "/v1/control/register-node"), ("run", "/v1/control/start-run")):
        status, said = found[f"gate: {words}"]
        assert status != 0
        assert "404 Not Found" in said
        assert f"refused POST '{path}'" in found["refusals"]["gate"]


def test_only_registered_nodes_are_there_and_the_server_goes_on(found):
    lines = found["nodes after refusals"].splitlines()[1:]
    assert [line.split()[0::2] for line in lines] == [[f"site-{number}", "online"] for number in range(3)]


# ---------------------------------------------------------------------------------------------------- the server dies


def test_the_server_died_in_a_round(found):
    rounds = found["rounds when the server dies"]
    assert rounds == list(range(1, len(rounds) + 1))
    assert 1 <= len(rounds) < WHOLE  # which one it is, a busy machine may decide
    assert max(found["remembered when the server dies"].values()) <= len(rounds) + 1


def test_models_have_the_bits_of_an_undisturbed_run(place, undisturbed):
    assert_same_bits(place / "whole", place / "whole-memory", *undisturbed)
    assert undisturbed[1].history[-1]["intra_variance"] is not None  # or the exact form would do what the paper's does


def test_no_round_counts_twice(place, undisturbed):
    _, run = undisturbed
    records = files.read_records(place / "whole")
    assert [row["round"] for row in records.history] == list(range(1, WHOLE + 1))
    assert all(row["clients"] == 3 for row in records.history)
    pairs = [(row["round"], row["client"]) for row in records.participation]
    assert len(pairs) == len(set(pairs)) == 3 * WHOLE
    for name in records.summary.keys() - {"seconds", "data", *MAJORITY}:  # no client sends its class counts for a score
        assert records.summary[name] == run.summary[name], name


# ------------------------------------------------------------------------------------------------------- a node dies


def test_the_round_closes_with_those_who_answered(found, place):
    assert found["round without"]["clients"] == "2"
    with (Path(found["out"]) / "participation.csv").open(newline="") as file:
        rows = [row["client"] for row in csv.DictReader(file) if row["round"] == str(WHOLE + 1)]
    assert sorted(rows) == ["0", "1"]


def test_the_log_names_the_client_and_the_reason(found):
    line = re.search(rf"round {WHOLE + 1}: client 2 is left out: (.*)", found["log"])
    assert line is not None
    assert re.match(r"error \d+: .*(Unavailable|heartbeat)|no answer within", line[1])


def test_the_node_is_started_until_it_is_let_in(found):
    assert "has ended by signal SIGKILL" in found["restarts"][0]
    assert len(found["restarts"]) >= 2  # refused while the server took the old one for alive
    assert all("has ended with status 1" in line for line in found["restarts"][1:])


def test_its_memory_is_intact_and_it_takes_part_again(found):
    assert found["is intact"]
    assert found["remembered without"] == {"0": WHOLE + 1, "1": WHOLE + 1, "2": WHOLE}
    assert found["round with"]["clients"] == "3"
    assert found["remembered with"] == dict.fromkeys("012", WHOLE + 2)


def test_the_others_kept_their_rounds_in_order(found):
    with (Path(found["out"]) / "history.csv").open(newline="") as file:
        assert [row["round"] for row in csv.DictReader(file)] == [str(n) for n in range(1, WHOLE + 3)]


# -------------------------------------------------------------------------------------------------------- other methods


@pytest.mark.parametrize("method", ["self-fl", "ditto", "fedavg"])
def test_other_methods_have_their_bits_too(method, found, place):
    assert_same_bits(Path(found["others"][method]), place / "memory", *trained(method, 2))
