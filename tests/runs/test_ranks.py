"""A run over several processes: the bits of one process with as many shards, checkpoints for any number, lost ranks."""

import csv
import json
import os
import re
import signal
import time

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import selffl
from programs import become_selffl
from ranks import SIGNALLED, on_ranks, start_ranks, wait_for
from selffl import cli
from selffl.algorithms.records import tensors_of
from selffl.data import load
from selffl.engines.ranks import TIMEOUT, FirstRankLostError
from selffl.errors import ConfigError, RankError

ROUNDS = 2
TABLES = ("history", "participation", "clients", "answers", "summary")  # of a run


def normalised():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))


def network():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))


def share_of_sevens(outputs, labels):
    return float((outputs.argmax(-1) == 7).double().mean())


def few(name, **options):
    known = {"self-fl": {"initial_steps": 2, "max_local_steps": 3}, "self-fl-cluster": {"max_local_steps": 3}}
    return selffl.algorithm(name, **known.get(name, {"num_local_steps": 3}), **options)


CASES = {  # a model, a method, and settings
    "fedavg": ("softmax", "fedavg", {}),
    "ditto": ("softmax", "ditto", {"client_memory": "disk"}),
    "scaffold": ("softmax", "scaffold", {"batch_size": 3}),
    "self-fl": ("softmax", "self-fl", {"evaluate_clients": 7}),
    "self-fl-auto": ("softmax", "self-fl-auto", {"metrics": {"sevens": share_of_sevens}}),
    "self-fl-cluster": ("softmax", "self-fl-cluster", {}),
    "fedpac": (network, "fedpac", {}),
    "median": ("softmax", "fedavg", {"robust": "median"}),
    "clip": ("softmax", "fedavg", {"clip": 1.0, "max_weight": 40.0}),
    "gain": ("softmax", "ditto", {"gain": True, "fine_tune": (2,), "class_frequencies": True}),
    "momentum": ("softmax", "ditto", {"keep_optimiser": True, "optimiser": "momentum"}),
    "network": (network, "self-fl-auto", {"gradients": "vmap"}),
    "BatchNorm": (normalised, "fedavg", {"batch_norm": "averaged", "evaluate_train": True, "participation": 1.0}),
}
WITH_THREE = ("self-fl", "median", "network")
EXACT = ("fedavg", "ditto", "scaffold", "self-fl", "self-fl-cluster", "median")  # also with other shards


def federation():
    return load("digits", num_clients=11, seed=3, test_fraction=0.3)


def train(name, **more):
    """One of the cases, trained."""
    model, method, settings = CASES[name]
    fed = clustered() if "cluster" in method else federation()
    given = {"rounds": ROUNDS, "participation": 0.6, "evaluate_every": 2} | settings | more
    return selffl.train(model if isinstance(model, str) else model(), fed, few(method), **given)


def clustered():
    rows = federation()
    return selffl.Federation(rows.clients, rows.train, rows.test, cluster=torch.arange(11) % 3)


def found_of(run):
    """All that a run has come to, but for the time that it took."""
    # On disk each process fills slots in its own order: what is in them is in the personal models.
    tensors = {
        name: each for name, each in tensors_of(run._state).items() if name not in ("memory.slots", "memory.sums")
    }
    rows = [{key: cell for key, cell in row.items() if key != "seconds"} for row in (*run.history, run.summary)]
    personal = torch.stack([params_of(run.personal_model(client)) for client in run.federation.clients])
    return {"tensors": tensors, "rows": rows, "clients": run.clients, "personal": personal}


def params_of(module):
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def train_cases(rank, names, folder):
    """Some cases, on each rank."""
    for name in names:
        run = train(name)
        (folder / f"{name}-{rank}.json").write_text(
            json.dumps({table: getattr(run, table) for table in TABLES}), encoding="utf-8"
        )
        if rank == 0:
            torch.save(found_of(run), folder / f"{name}.pt")
        else:
            assert run.summary["status"] == "finished"
            with pytest.raises(ConfigError, match="with rank 0, and this is another rank; expected"):
                run.personal_model(run.federation.clients[0])


@pytest.fixture(scope="module")
def spread(tmp_path_factory):
    """What two ranks have found of every case, and three of some, by number and name."""
    found = {}
    train("network")  # what it takes seconds to import is there, then, when processes are forked
    for size, names in {2: tuple(CASES), 3: WITH_THREE}.items():
        folder = tmp_path_factory.mktemp(f"ranks-{size}")
        assert on_ranks(size, train_cases, names, folder) == [0] * size
        for name in names:
            tables = [json.loads((folder / f"{name}-{rank}.json").read_text(encoding="utf-8")) for rank in range(size)]
            found[size, name] = torch.load(folder / f"{name}.pt") | {"tables": tables}
    return found


def assert_same(found, expected, within=0.0):
    assert found["tensors"].keys() == expected["tensors"].keys()
    for name, tensor in (expected["tensors"] | {"personal": expected["personal"]}).items():
        other = found["personal"] if name == "personal" else found["tensors"][name]
        torch.testing.assert_close(
            other, tensor, rtol=within, atol=within, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.slow
@pytest.mark.parametrize(("size", "name"), [*((2, name) for name in CASES), *((3, name) for name in WITH_THREE)])
def test_ranks_have_the_bits_of_one_process_with_as_many_shards(size, name, spread):
    expected = found_of(train(name, shards=size))
    assert_same(spread[size, name], expected)
    assert spread[size, name]["rows"] == expected["rows"]
    assert spread[size, name]["clients"] == expected["clients"]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "name"), [(2, "fedavg"), (3, "self-fl")])
def test_every_rank_has_the_same_tables(size, name, spread):
    first, *others = spread[size, name]["tables"]
    assert first["answers"]
    assert others == [first] * (size - 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_number_of_ranks_does_not_change_the_result(name, spread):
    expected = found_of(train(name))
    for size in (2, 3) if name in WITH_THREE else (2,):
        assert_same(spread[size, name], expected, 0.0 if name in EXACT else 1e-6)


# ------------------------------------------------------------------------------------------------------------- resuming


def softmax_run(out, **more):
    given = {"rounds": 4, "participation": 0.6, "evaluate_every": 2, "checkpoint_every": 1, "client_memory": "disk"}
    return selffl.train("softmax", federation(), few("ditto"), out=out, **given | more)


def begin_and_go_on(rank, folder):
    """A run of two rounds on two ranks, and one of one process that goes on here."""
    softmax_run(folder / "begun", rounds=2)
    run = selffl.resume(folder / "alone", rounds=4)
    if rank == 0:
        torch.save(found_of(run), folder / "alone.pt")


def go_on(rank, folder):
    run = selffl.resume(folder / "begun", rounds=3)
    assert run.config.shards == 3
    again = selffl.resume(folder / "begun")  # which is finished, and is everybody's at once
    assert again.summary == run.summary


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path):
    softmax_run(tmp_path / "alone", rounds=2)
    assert on_ranks(2, begin_and_go_on, tmp_path) == [0, 0]
    expected = found_of(softmax_run(None))
    assert_same(torch.load(tmp_path / "alone.pt"), expected)
    assert on_ranks(3, go_on, tmp_path) == [0, 0, 0]
    run = selffl.resume(tmp_path / "begun", rounds=4)
    assert run.config.shards == 3
    assert_same(found_of(run), expected)
    assert [row["round"] for row in run.history] == [1, 2, 3, 4]


# ------------------------------------------------------------------------------------------------------ ranks that fail


def say_error(rank, folder, function):
    """Write down what a rank is told, and end."""
    try:
        function(rank, folder)
    except selffl.SelfFLError as error:
        (folder / f"error-{rank}").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")


def told(folder, rank):
    path = folder / f"error-{rank}"
    return path.read_text(encoding="utf-8") if path.is_file() else None


def train_for_long(rank, folder):
    softmax_run(folder / "run", rounds=5000, evaluate_every=5000, client_memory="memory")


def rounds_written(folder):
    try:
        with (folder / "run" / "history.csv").open(newline="") as file:
            return len(list(csv.reader(file))) - 1
    except OSError:
        return 0


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_is_killed_ends_the_run_and_the_checkpoint_is_whole(victim, tmp_path):
    processes = start_ranks(3, say_error, tmp_path, train_for_long)
    until = time.monotonic() + 60
    while rounds_written(tmp_path) < 5 and time.monotonic() < until:
        time.sleep(0.02)
    os.kill(processes[victim], signal.SIGKILL)
    codes = wait_for(processes)
    assert codes == [SIGNALLED + signal.SIGKILL if rank == victim else 0 for rank in range(3)]
    survivor = 1 if victim == 0 else 0
    kind = FirstRankLostError if victim == 0 else RankError
    assert told(tmp_path, survivor).startswith(
        f"{kind.__name__}: rank {victim} of 3 was lost: it ended without a word; expected all ranks to stay until the "
        "last round. Go on from the last checkpoint by --resume (selffl.resume), with any number of ranks."
    )
    reached = selffl.load(tmp_path / "run")._state.round_number
    assert reached >= 4  # rows of a round are written before its checkpoint
    run = selffl.resume(tmp_path / "run", rounds=reached + 1)
    assert_same(found_of(run), found_of(softmax_run(None, rounds=reached + 1, client_memory="memory", shards=3)))


def train_something_else(rank, folder):
    selffl.train("softmax", federation(), few("ditto" if rank else "fedavg"), rounds=1)


def train_on_other_rows(rank, folder):
    selffl.train("softmax", load("digits", num_clients=11, seed=rank), few("fedavg"), rounds=1)


def train_another_model(rank, folder):
    selffl.train(nn.Linear(64, 10 + rank), federation(), few("fedavg"), rounds=1)


def measure_badly(rank, folder):
    def measure(outputs, labels):
        if rank and len(asked) > 1:  # once it has been tried
            raise ValueError("no such thing")
        asked.append(len(labels))
        return 1.0

    asked = []
    selffl.train("softmax", federation(), few("fedavg"), rounds=1, metrics={"own": measure})


def wait_too_long(rank, folder):
    def measure(outputs, labels):
        asked.append(len(labels))
        if rank and len(asked) == 2:
            time.sleep(2.0)
        return 1.0

    asked = []
    selffl.train("softmax", federation(), few("fedavg"), rounds=1, metrics={"own": measure})


def look_for_mistakes(rank, folder):
    selffl.train("softmax", federation(), few("fedavg"), rounds=1, engine="serial")


def diverge_and_try_again(rank, folder):
    fed = federation()
    with pytest.raises(selffl.DivergedError):
        selffl.train("softmax", fed, few("fedavg"), rounds=3, learning_rate=1e38)
    run = selffl.train("softmax", fed, few("fedavg"), rounds=2)
    assert run.summary["status"] == "finished"
    raise selffl.SelfFLError(f"{run.summary['weighted_accuracy']}")


def train_frozen(seed, **more):
    """A model of which half stays as it is, and is no part of what travels."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    module[0].requires_grad_(False)
    return selffl.train(module, federation(), few("ditto"), rounds=1, participation=1.0, **more)


def train_unseeded(rank, folder):
    run = train_frozen(seed=rank)
    if rank == 0:
        torch.save(found_of(run), folder / "unseeded.pt")


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (
            train_something_else,
            "ConfigError: rank 1 has the algorithm 'ditto', and rank 0 'fedavg'; expected the same program",
        ),
        (
            train_on_other_rows,
            "ConfigError: rank 1 has the source {.*'seed': 1.*}, and rank 0 {.*'seed': 0.*}; expected",
        ),
        (train_another_model, "RankError: rank 1 has failed: the model of rank 1 is not that of rank 0 .*; expected"),
        (measure_badly, "no such thing"),
        (look_for_mistakes, "ConfigError: engine is 'serial', and there are 2 ranks; expected one process"),
        (diverge_and_try_again, "SelfFLError: 0[.]"),
    ],
)
def test_rank_0_says_what_is_wrong(function, expected, tmp_path):
    assert on_ranks(2, say_error, tmp_path, function) == [0, 0]
    found = told(tmp_path, 0)
    assert found is not None
    assert re.search(expected, found), found


@pytest.mark.slow
def test_a_rank_that_does_not_answer_in_time_is_named(tmp_path):
    on_ranks(2, say_error, tmp_path, wait_too_long, **{TIMEOUT: 1})
    assert told(tmp_path, 0).startswith(
        "RankError: rank 1 has not answered for 1 s; expected an answer within that time."
    )


def test_a_model_has_the_weights_that_rank_0_has_given_it(tmp_path):
    assert on_ranks(2, say_error, tmp_path, train_unseeded) == [0, 0]
    assert_same(torch.load(tmp_path / "unseeded.pt"), found_of(train_frozen(seed=0, shards=2)))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two' in the environment; expected a number of processes, or none."),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "WORLD_SIZE is 2 .* and MASTER_ADDR is not there; expected all of"),
        (
            {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", TIMEOUT: "-1"},
            f"the rank timeout .{TIMEOUT}. is '-1'; expected seconds above 0",
        ),
    ],
)
def test_an_environment_that_cannot_be_is_refused(environment, expected, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=expected):
        selffl.train("softmax", federation(), "fedavg", rounds=1)


def test_settings_are_tuned_by_one_process(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ConfigError, match=r"there are 2 processes .WORLD_SIZE., and settings are tried by one; expected one"
    ):
        selffl.tune("softmax", federation(), "ditto", rounds=1)


# ----------------------------------------------------------------------------------------------------- the command line


def be_selffl(rank, folder, words):
    with (folder / f"said-{rank}").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    become_selffl(words)


def said(folder, rank):
    return (folder / f"said-{rank}").read_text(encoding="utf-8")


def test_the_command_line_shares_out_the_clients_and_rank_0_speaks(tmp_path):
    words = ["run", "digits", "-a", "fedavg", "--rounds", "2", "--rank-timeout", "60", "--out", str(tmp_path / "run")]
    assert on_ranks(2, be_selffl, tmp_path, words) == [0, 0]
    assert "fedavg on digits, seed 0: 2 rounds, 40 clients" in said(tmp_path, 0)
    assert said(tmp_path, 1) == ""
    assert selffl.load(tmp_path / "run").config.shards == 2
    assert on_ranks(2, be_selffl, tmp_path, [*words[:5], "3", *words[6:], "--resume", "--json"]) == [0, 0]
    assert json.loads(said(tmp_path, 0))["rounds"] == 3
    assert said(tmp_path, 1) == ""


def test_other_commands_are_for_one_process(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = CliRunner().invoke(cli.app, ["compare", "digits"])
    assert isinstance(found.exception, ConfigError)
    assert str(found.exception).startswith("selffl compare is one of 2 processes (WORLD_SIZE); expected one, for only")
