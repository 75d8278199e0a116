"""Flower's own simulation, its Ray engine and all: the bits of `selffl.train`.

Ray listens on every interface, so it runs in a network and a process namespace of its own.  It takes long to start: one
run of one app has all the methods in it, one after the other.
"""

import shutil
import subprocess
import sys
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'selffl[flower]'")
if find_spec("ray") is None:  # not imported here: Ray sets up the process it is imported in
    pytest.skip("ray is not installed: pip install 'flwr[simulation]'", allow_module_level=True)

import selffl
from selffl.data import load
from selffl.flower import personal_model
from selffl.runs import folder as files
from selffl.runs.evaluation import MAJORITY
from selffl.state.checkpoint import load_tensors
from selffl.training.flat import FlatModel

BIN = Path(sys.executable).parent
APART = ["unshare", "--map-root-user", "--net", "--pid", "--mount-proc", "--fork", "--kill-child"]

NAMES = ("self-fl", "self-fl-exact", "ditto", "fedavg")
NUM_CLIENTS = 6
SETTINGS = {  # rounds enough for Self-FL to have variances, without which its two forms are one
    "rounds": 6, "participation": 0.5, "learning_rate": 0.05, "batch_size": 5, "seed": 3, "evaluate_every": 3
}  # fmt: skip

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "trial"
version = "1.0.0"
description = "Four methods in one simulation"
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

# Each method has the app that it would have alone: the experiment of an order bears its name; a question is anybody's.
CLIENT = """
import selffl.data
from flwr.clientapp import ClientApp
from selffl.flower import client_app
from trial.common import model


def load_data(client_id):
    sites = selffl.data.load("digits", num_clients={num_clients}, seed=2)
    train, test = (slice(*rows.offset[client_id : client_id + 2]) for rows in (sites.train, sites.test))
    return sites.train.features[train], sites.train.labels[train], sites.test.features[test], sites.test.labels[test]


apps = {{name: client_app(model, load_data, name, memory_dir={memory!r}) for name in {names}}}
app = ClientApp()


@app.query()
def query(message, context):
    return apps["fedavg"](message, context)


@app.train()
@app.evaluate()
def ordered(message, context):
    return apps[message.content["about"]["experiment"]](message, context)
"""

SERVER = """
from flwr.serverapp import ServerApp
from selffl.flower import server_app
from trial.common import model

apps = [
    server_app(
        model, name, range({num_clients}), out={out!r} + "/" + name, experiment=name, connect_seconds=60,
        round_seconds=60, **{settings},
    )
    for name in {names}
]
app = ServerApp()


@app.main()
def main(grid, context):
    for each in apps:
        each(grid, context)
"""

CONNECTION = """
[superlink]
default = "here"
[superlink.here]
address = "127.0.0.1:9093"
insecure = true
"""

# Not the server that `flwr run` starts by itself for ":local:": that one would install the app's dependencies.
SCRIPT = """
ip link set lo up
flower-superlink --insecure --simulation --host 127.0.0.1 --port 9093 --disable-runtime-dependency-installation \\
    > link.log 2>&1 &
for second in $(seq 60); do
    flwr list here > /dev/null 2>&1 && break
    sleep 1
done
flwr run . here --stream --federation-config \\
    "num-supernodes={num_clients} client-resources-num-cpus=1 init-args-num-cpus=2" > run.log 2>&1
"""


def is_possible():
    needed = all(shutil.which(name) for name in ("unshare", "ip"))
    return needed and subprocess.run([*APART, "true"], capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """Where one simulation of all the methods has left its files, and what it said."""
    if not is_possible():
        pytest.skip("no namespaces of our own here")
    folder = tmp_path_factory.mktemp("simulation")
    (folder / "trial").mkdir()
    given = {
        "num_clients": NUM_CLIENTS,
        "names": NAMES,
        "settings": SETTINGS,
        "memory": str(folder / "memory"),
        "out": str(folder / "runs"),
    }
    written = {
        "pyproject.toml": PROJECT,
        "config.toml": CONNECTION,
        "go.sh": SCRIPT.format(**given),
        "trial/__init__.py": "",
        "trial/common.py": COMMON,
        "trial/client.py": CLIENT.format(**given),
        "trial/server.py": SERVER.format(**given),
    }
    for name, text in written.items():
        (folder / name).write_text(text, encoding="utf-8")
    # Elsewhere the paths of Ray's sockets may have too many characters.
    with TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as short:
        surroundings = {
            "PATH": f"{BIN}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(folder),
            "FLWR_HOME": str(folder),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": short,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(selffl.__file__).parent.parent),
        }
        subprocess.run([*APART, "sh", "go.sh"], cwd=folder, env=surroundings, timeout=300, check=False)
    logs = "\n".join(path.read_text(errors="replace")[-5000:] for path in sorted(folder.glob("*.log")))
    return folder, logs


def models(folder, name):
    """The global model, and those of the clients, that the simulation has left of a method."""
    tensors, about = load_tensors(folder / "runs" / name / files.CHECKPOINT)
    assert about["round"] == SETTINGS["rounds"]
    personal = [personal_model(linear(), folder / "memory", name, client) for client in range(NUM_CLIENTS)]
    return tensors["server.params"], torch.stack([FlatModel(model).params for model in personal])


def linear():
    torch.manual_seed(0)
    return nn.Linear(64, 10)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_simulation_has_the_bits_of_train(name, simulated):
    folder, logs = simulated
    assert (folder / "runs" / name / files.CHECKPOINT).is_file(), logs
    shared, personal = models(folder, name)
    run = selffl.train(linear(), load("digits", num_clients=NUM_CLIENTS, seed=2), name, **SETTINGS)
    assert shared.equal(run._state.server.params)
    expected = [FlatModel(run.personal_model(client)).params for client in range(NUM_CLIENTS)]
    assert personal.equal(torch.stack(expected))
    summary = files.read_records(folder / "runs" / name).summary
    # The majority class is known only to who sees every client's class counts, which no client sends for a score.
    assert [summary[field] for field in MAJORITY] == [None] * len(MAJORITY)
    for field in summary.keys() - {"seconds", "data", *MAJORITY}:
        assert summary[field] == run.summary[field], field


@pytest.mark.slow
def test_the_methods_of_the_simulation_differ(simulated):
    """Else it would not be seen if one were run in the place of another."""
    folder, logs = simulated
    assert all((folder / "runs" / name / files.CHECKPOINT).is_file() for name in NAMES), logs
    for one, other in combinations(NAMES, 2):
        assert not models(folder, one)[1].equal(models(folder, other)[1]), (one, other)
