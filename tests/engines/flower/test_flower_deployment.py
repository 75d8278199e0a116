"""Flower itself, a server and three nodes as processes of their own: the bits of `selffl.train`.

In a network and a process namespace of its own: nothing is reachable from outside, and nothing outlives the test.
"""

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
from selffl.engines.flower.client import personal_model
from selffl.runs import folder as files
from selffl.state.checkpoint import load_tensors

BIN = Path(sys.executable).parent
APART = ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child"]

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "trial"
version = "1.0.0"
description = "A federation of three"
license = "Apache-2.0"
dependencies = ["flwr>=1.41"]
[tool.hatch.build.targets.wheel]
packages = ["."]
[tool.flwr.app]
publisher = "selffl"
[tool.flwr.app.components]
serverapp = "trial.server:app"
clientapp = "trial.client:app"
"""

COMMON = """
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Linear(64, 10)
"""

CLIENT = """
import selffl.data
from selffl.engines.flower.client import client_app
from trial.common import model


def load_data(client_id):
    sites = selffl.data.load("digits", num_clients=3)
    train, test = (slice(*rows.offset[client_id : client_id + 2]) for rows in (sites.train, sites.test))
    return sites.train.features[train], sites.train.labels[train], sites.test.features[test], sites.test.labels[test]


app = client_app(model, load_data, "self-fl-exact", memory_dir={memory!r})
"""

SERVER = """
from selffl.runs.flower import server_app
from trial.common import model

app = server_app(
    model, "self-fl-exact", range(3), out={out!r}, experiment="trial", connect_seconds=120, round_seconds=120,
    **{settings},
)
"""

CONNECTION = """
[superlink]
default = "near"
[superlink.near]
address = "127.0.0.1:9093"
insecure = true
"""

SCRIPT = """
ip link set lo up
flower-superlink --insecure --host 127.0.0.1 --port 9093 --disable-runtime-dependency-installation > link.log 2>&1 &
sleep 8
for client in 0 1 2; do
    flower-supernode --insecure --superlink 127.0.0.1:9093 --port $((9200 + client)) \\
        --node-config "partition-id=$client" > node$client.log 2>&1 &
done
sleep 5
flwr run . near > submit.log 2>&1
for second in $(seq 240); do
    grep -q finished run/summary.json 2> /dev/null && break
    sleep 1
done
"""

SETTINGS = {
    "rounds": 2, "participation": 1.0, "learning_rate": 0.05, "batch_size": 5, "seed": 3, "evaluate_every": 2
}  # fmt: skip


def is_possible():
    needed = all(shutil.which(name) for name in ("unshare", "ip"))
    return needed and subprocess.run([*APART, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not is_possible(), reason="no namespaces of our own here")
def test_processes_over_a_network_have_the_bits_of_train(tmp_path):
    (tmp_path / "trial").mkdir()
    out, memory = tmp_path / "run", tmp_path / "memory"
    written = {
        "pyproject.toml": PROJECT,
        "config.toml": CONNECTION,
        "go.sh": SCRIPT,
        "trial/__init__.py": "",
        "trial/common.py": COMMON,
        "trial/client.py": CLIENT.format(memory=str(memory)),
        "trial/server.py": SERVER.format(out=str(out), settings=SETTINGS),
    }
    for name, text in written.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    surroundings = {
        "PATH": f"{BIN}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(tmp_path),
        "FLWR_HOME": str(tmp_path),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "OMP_NUM_THREADS": "1",
    }
    subprocess.run([*APART, "sh", "go.sh"], cwd=tmp_path, env=surroundings, timeout=400, check=False)
    logs = "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(tmp_path.glob("*.log")))
    assert (out / files.CHECKPOINT).is_file(), logs

    torch.manual_seed(0)
    model = nn.Linear(64, 10)
    run = selffl.train(model, load("digits", num_clients=3), "self-fl-exact", **SETTINGS)
    tensors, about = load_tensors(out / files.CHECKPOINT)
    assert about["round"] == 2, logs
    assert tensors["server.params"].equal(run._state.server.params)
    for client in range(3):
        found = personal_model(model, memory, "trial", client).state_dict()
        for name, expected in run.personal_model(client).state_dict().items():
            assert found[name].equal(expected)
    summary = files.read_records(out).summary
    for name in summary.keys() - {"seconds", "data"}:
        assert summary[name] == run.summary[name], name
