"""What clients gain by joining: against a second run of `local` by hand, and tests by counting every outcome."""

import csv
import itertools
import json
import re
import statistics

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import binomtest
from torch import nn

import selffl
from selffl.algorithms import FedAvg
from selffl.data import load
from selffl.errors import CheckpointError, ConfigError, DataError
from selffl.runs import session
from selffl.runs.gain import gain_rows, is_within_chance, losers

SETTINGS = {"rounds": 4, "participation": 0.5, "learning_rate": 0.05, "batch_size": 8, "seed": 3, "evaluate_every": 2}


@pytest.fixture(scope="module")
def fed():
    return load("digits", num_clients=12, seed=0, test_fraction=0.3)


def by_hand(fed, alone, **settings):
    """The other run: `local`, trained by itself."""
    return selffl.train("softmax", fed, alone, **SETTINGS | settings)


CASES = {
    "self-fl": ({"initial_steps": 7, "max_local_steps": 30}, {"num_local_steps": 7}),
    "self-fl-auto": ({"num_local_steps": 11}, {"num_local_steps": 11}),
    "ditto": ({"num_local_steps": 5, "num_local_epochs": 2}, {"num_local_epochs": 2}),
    "self-fl-sums": ({}, {"num_local_steps": 20}),
    "fedavg": ({}, {"num_local_steps": 20}),
}


@pytest.mark.parametrize("name", CASES)
def test_alone_is_what_a_run_of_local_training_has(fed, name):
    options, steps = CASES[name]
    joined = selffl.train("softmax", fed, selffl.algorithm(name, **options), gain=True, **SETTINGS)
    alone = by_hand(fed, selffl.algorithm("local", **steps))
    plain = selffl.train("softmax", fed, selffl.algorithm(name, **options), **SETTINGS)
    ours, theirs = plain.evaluate().numbers["personal"], alone.evaluate().numbers["personal"]
    gains, sizes = [], fed.test.num_examples.tolist()
    for row, other, ownly, mine, his in zip(
        joined.clients, alone.clients, plain.clients, ours.split(sizes), theirs.split(sizes), strict=True
    ):
        assert row["alone_accuracy"] == other["accuracy"]
        assert row | ownly == row  # nothing else of the run is touched
        if other["accuracy"] is None:
            assert row["realised_gain"] is None
            continue
        gains.append(row["accuracy"] - other["accuracy"])
        assert row["realised_gain"] == gains[-1]
        assert row["num_won"] == sum(a and not b for a, b in zip(mine.tolist(), his.tolist(), strict=True))
        assert row["num_lost"] == sum(b and not a for a, b in zip(mine.tolist(), his.tolist(), strict=True))
    assert any(gains)
    assert joined.summary["share_losing"] == sum(gain < 0 for gain in gains) / len(gains)
    assert joined.summary["mean_realised_gain"] == pytest.approx(statistics.mean(gains))
    assert joined.summary["gradient_evaluations"] == plain.summary["gradient_evaluations"]
    assert "share_losing" not in plain.summary
    assert "realised_gain" not in plain.clients[0]


def test_alone_begins_where_the_run_began(fed):
    first = by_hand(fed, "fedavg")
    joined = selffl.train("softmax", fed, "ditto", gain=True, start=first, **SETTINGS)
    warm, cold = by_hand(fed, "local", start=first), by_hand(fed, "local")
    assert [row["alone_accuracy"] for row in joined.clients] == [row["accuracy"] for row in warm.clients]
    assert [row["accuracy"] for row in warm.clients] != [row["accuracy"] for row in cold.clients]


def test_of_an_error_less_is_a_gain_and_nothing_is_right_or_wrong():
    torch.manual_seed(0)
    x, client = torch.randn(160, 4), torch.arange(160) % 8
    fed = selffl.Federation.from_arrays(x, x @ torch.randn(4) + torch.randn(160), client, test_fraction=0.3)
    settings = {"rounds": 5, "participation": 1.0, "loss": nn.functional.mse_loss, "metrics": {"bias": bias}}
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    joined = selffl.train(model, fed, "fedavg", gain=True, **settings)
    alone = selffl.train(model, fed, "local", **settings)
    for row, other in zip(joined.clients, alone.clients, strict=True):
        assert row["realised_gain"] == pytest.approx(other["error"] - row["error"])
        assert row["alone_bias"] == other["bias"]
        assert "num_won" not in row
    assert any(row["realised_gain"] > 0 for row in joined.clients)
    assert {row["is_within_chance"] for row in joined.gains()} == {None}


def bias(outputs, labels):
    return float((outputs - labels).mean())


def test_two_classes_are_right_or_wrong_by_their_odds():
    torch.manual_seed(1)
    x = torch.randn(240, 3)
    y = (x[:, 0] + 0.8 * torch.randn(240) > 0).long()
    fed = selffl.Federation.from_arrays(x, y, torch.arange(240) % 6, test_fraction=0.4)
    settings = {"rounds": 6, "participation": 1.0, "learning_rate": 0.5}
    model = nn.Linear(3, 2)
    joined = selffl.train(model, fed, "fedavg", gain=True, **settings)
    alone = selffl.train(model, fed, "local", **settings)
    for place, row in enumerate(joined.clients):
        low, high = fed.test.offset[place : place + 2].tolist()
        rows, labels = fed.test.features[low:high], fed.test.labels[low:high]
        right = [run.personal_model(row["client"])(rows).argmax(1) == labels for run in (joined, alone)]
        assert row["num_won"] == int((right[0] & ~right[1]).sum())
        assert row["num_lost"] == int((right[1] & ~right[0]).sum())
        assert row["alone_auc"] == alone.clients[place]["auc"]


# ------------------------------------------------------------------------------------------------ kept and taken up


def test_it_is_kept_in_the_folder_and_read_again(fed, tmp_path, short):
    run = selffl.train("softmax", fed, short("self-fl-auto"), gain=True, out=tmp_path / "run", **SETTINGS)
    again = selffl.load(tmp_path / "run")
    assert again.clients == run.clients
    assert again.gains() == run.gains()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["share_losing"] == run.summary["share_losing"]
    with (tmp_path / "run" / "clients.csv").open(newline="") as file:
        assert [row["realised_gain"] for row in csv.DictReader(file)] == [
            "" if row["realised_gain"] is None else str(row["realised_gain"]) for row in run.clients
        ]
    plain, typed = (getattr(pd, f"read_{kind}")(tmp_path / "run" / f"clients.{kind}") for kind in ("csv", "parquet"))
    pd.testing.assert_frame_equal(plain, typed, check_dtype=False)
    again.save(tmp_path / "copy")
    assert selffl.resume(tmp_path / "copy").gains() == run.gains()


@pytest.fixture(scope="module")
def begun(fed):
    """A run to begin with, and one that begins there and is left alone."""
    start = by_hand(fed, "fedavg")
    return start, selffl.train("softmax", fed, "self-fl", gain=True, start=start, **SETTINGS)


@pytest.mark.parametrize("last", [1, 2, 4])
def test_an_interrupted_run_ends_as_one_that_was_left_alone(fed, begun, tmp_path, last):
    def stop(row):
        if row["round"] == last:
            raise KeyboardInterrupt

    start, whole = begun
    with pytest.raises(KeyboardInterrupt):
        selffl.train("softmax", fed, "self-fl", gain=True, start=start, out=tmp_path / "run", on_round=stop, **SETTINGS)
    found = selffl.resume(tmp_path / "run")
    assert found.clients == whole.clients
    assert found.summary["share_losing"] == whole.summary["share_losing"]


def test_interrupted_while_clients_train_alone(fed, tmp_path, monkeypatch):
    """Nothing that was trained is lost: the rounds are checkpointed before, and are not trained again."""
    with monkeypatch.context() as patch:
        patch.setattr(session.Session, "train_alone", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            selffl.train("softmax", fed, "ditto", gain=True, out=tmp_path / "run", **SETTINGS)
    halfway = selffl.load(tmp_path / "run")
    assert (halfway.summary["status"], halfway.summary["rounds"]) == ("running", 4)
    with pytest.raises(ConfigError, match="has not ended"):
        halfway.gains()
    seen = []
    found = selffl.resume(tmp_path / "run", on_round=seen.append)
    assert seen == []
    assert found.clients == selffl.train("softmax", fed, "ditto", gain=True, **SETTINGS).clients
    assert selffl.load(tmp_path / "run").summary["status"] == "finished"


def test_a_longer_run_is_held_against_longer_training_alone(fed, tmp_path):
    selffl.train("softmax", fed, "ditto", gain=True, out=tmp_path / "run", **SETTINGS | {"rounds": 2})
    longer = selffl.resume(tmp_path / "run", rounds=4)
    assert longer.clients == selffl.train("softmax", fed, "ditto", gain=True, **SETTINGS).clients


def test_a_folder_without_the_first_model_says_so(fed, tmp_path):
    selffl.train("softmax", fed, "ditto", gain=True, out=tmp_path / "run", **SETTINGS)
    (tmp_path / "run" / "start.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"start\.safetensors does not exist"):
        selffl.resume(tmp_path / "run", rounds=5)


# ---------------------------------------------------------------------------------------------------------- refused


class WithoutSteps(FedAvg):
    def local_work(self):
        return None


def test_what_makes_no_sense_is_refused_in_a_line(fed):
    for method, options, kind, part in (
        ("local", {}, ConfigError, "local trains every client alone, so that there is no gain to measure"),
        ("ditto", {"gain": 1}, ConfigError, "gain is 1; expected True or False"),
        (WithoutSteps(), {}, ConfigError, "does not say how long its clients train"),
    ):
        with pytest.raises(kind, match=part) as found:
            selffl.train("softmax", fed, method, **SETTINGS | {"gain": True} | options)
        assert "\n" not in str(found.value)
    x = np.ones((6, 3), dtype=np.float32)
    untested = selffl.Federation.from_arrays(x, [0, 1] * 3, list("aabbcc"), test_fraction=0.0)
    with pytest.raises(DataError, match="no client has test rows"):
        selffl.train(nn.Linear(3, 2), untested, "ditto", gain=True)
    with pytest.raises(ConfigError, match="without gain=True"):
        selffl.train("softmax", fed, "ditto", **SETTINGS).gains()


class Idle(FedAvg):
    """Clients that send back what they were sent: nobody's model can grow without end."""

    name = "idle"

    def client_round(self, broadcast, memory, task):
        return self.upload(broadcast.params, broadcast.params, task), memory


def test_whose_training_alone_leaves_the_finite_numbers_has_no_number_and_the_others_have():
    x = np.random.default_rng(0).normal(size=(200, 1)).astype(np.float32)
    client = np.arange(200) % 10
    x[client == 4] *= 1e4
    fed = selffl.Federation.from_arrays(x, (2 * x[:, 0]).astype(np.float32), client, test_fraction=0.3)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 1), nn.Flatten(0))
    run = selffl.train(model, fed, Idle(), rounds=9, participation=1.0, loss=nn.functional.mse_loss, gain=True)
    alone = {row["client"]: row["alone_error"] for row in run.clients}
    assert alone.pop(4) is None
    assert all(error < 0.1 for error in alone.values())
    assert run.summary["mean_realised_gain"] < 0
    assert run.gains()[-1]["why"] == "alone, its training diverged"


# -------------------------------------------------------------------------------------------------- chance, reasons


@pytest.mark.parametrize(("won", "lost"), list(itertools.product(range(9), repeat=2)))
def test_chance_is_counted_over_all_ways_to_toss(won, lost):
    number, gap = won + lost, abs(won - lost)
    as_uneven = sum(abs(2 * sum(toss) - number) >= gap for toss in itertools.product((0, 1), repeat=min(number, 12)))
    if number <= 12:
        assert is_within_chance(won, lost) == (as_uneven / 2**number >= 0.05)
    assert is_within_chance(won, lost) == (number == 0 or binomtest(won, number).pvalue >= 0.05)


def client(name, **more):
    row = {"client": name, "num_train": 40, "num_test": 50, "rounds": 3, "accuracy": 0.8, "alone_accuracy": 0.8}
    row |= {"global_accuracy": 0.6, "num_won": 0, "num_lost": 0, **more}
    if "realised_gain" not in row:
        row["realised_gain"] = row["accuracy"] - row["alone_accuracy"]
    return row


def losing(name, num_won=0, num_lost=10, **more):
    gain = (num_won - num_lost) / 50
    return client(name, accuracy=0.5, alone_accuracy=0.5 - gain, num_won=num_won, num_lost=num_lost, **more)


def why(*rows, others=8, **options):
    usual = [client(f"usual {number}", num_train=30 + number) for number in range(others)]
    return {row["client"]: row["why"] for row in gain_rows([*rows, *usual], "accuracy", **options)}


def test_reasons_are_read_off_the_numbers():
    assert why(losing("a", 1, 4))["a"] == "within chance: 1 won and 4 lost of 50 test rows"
    assert why(losing("a", rounds=0))["a"] == "never took part in a round"
    assert why(losing("a", num_train=812, predicted_gain=1.05))["a"] == (
        "large client: 812 rows, the others are predicted to be worth 41"
    )
    assert why(losing("a", num_train=812))["a"] == "large client: 812 rows, 34 at the middle client"
    assert why(losing("a"))["a"] == "significant: 0 won and 10 lost of 50 test rows"  # 40 rows are not many
    several = [losing(name, global_accuracy=score, num_train=33) for name, score in (("a", 0.31), ("b", 0.35))]
    assert why(*several)["a"] == "unlike the others: the shared model has 31 % here, 60 % at the middle client"
    assert why(*several, has_global=False)["a"] == "significant: 0 won and 10 lost of 50 test rows"
    assert why(losing("a", num_train=33, predicted_gain=3.25))["a"] == (
        "a gain was predicted (variance ÷ 3.25) and did not come: 0 won and 10 lost of 50 test rows"
    )
    assert why(client("a"))["a"] == "no difference: 0 won and 0 lost of 50 test rows"
    gaining = client("a", accuracy=0.9, alone_accuracy=0.6, num_won=15, num_train=4, predicted_gain=6.0)
    assert why(gaining)["a"] == "small client: 4 rows, the others are predicted to be worth 20"
    lost = client("a", alone_accuracy=None, realised_gain=None, num_won=None, num_lost=None)
    assert why(lost)["a"] == "alone, its training diverged"


def test_a_tenth_are_large_and_a_quarter_unlike():
    """Thresholds by rank: only the largest of eleven is large, only the two worst of eleven unlike."""
    rows = [losing(f"{n}", num_train=10 * 2**n, global_accuracy=0.2 + 0.05 * n) for n in range(11)]
    found = {row["client"]: row["why"].split(":")[0] for row in gain_rows(rows, "accuracy")}
    assert [name for name, reason in found.items() if reason == "large client"] == ["10"]
    assert sorted(name for name, reason in found.items() if reason == "unlike the others") == ["0", "1"]


def test_the_worst_come_first_and_those_without_a_number_last():
    rows = [
        client("none", alone_accuracy=None, realised_gain=None, num_won=None, num_lost=None),
        client("same"),
        losing("worst", 0, 20),
        losing("worse", 0, 10),
        client("untested", num_test=0, accuracy=None, alone_accuracy=None, realised_gain=None),
    ]
    assert [row["client"] for row in gain_rows(rows, "accuracy")] == ["worst", "worse", "same", "none"]


def test_whoever_loses_beyond_chance_is_named_before_the_rest():
    rows = [losing("chance", 0, 5), losing("clear", 0, 10), losing("clearer", 0, 12), client("same")]
    found = gain_rows(rows, "accuracy")
    found[2]["realised_gain"] = -0.9  # of two rows, say
    assert [row["client"] for row in losers(found)] == ["clearer", "clear", "chance"]


def test_without_pairs_only_what_is_within_chance_in_any_case_is_said_to_be():
    """Five rows fewer can be five lost and none won, of which 1 in 16 is as uneven; six cannot be told."""
    rows = [losing("five", 0, 5), losing("six", 0, 6)]
    for row in rows:
        del row["num_won"], row["num_lost"]
    found = {row["client"]: row for row in gain_rows(rows, "accuracy")}
    assert (found["five"]["is_within_chance"], found["six"]["is_within_chance"]) == (True, None)
    assert found["five"]["why"] == "within chance: 5 fewer right of 50 test rows"
    assert found["six"]["why"] == "nothing measured stands out: 6 fewer right of 50 test rows"


def test_gains_of_a_run_have_the_numbers_of_its_table(fed, short):
    run = selffl.train("softmax", fed, short("self-fl-auto"), gain=True, **SETTINGS)
    table = {row["client"]: row for row in run.clients}
    rows = run.gains()
    assert [row["client"] for row in rows if row["num_test"]] == [row["client"] for row in rows]
    assert {row["client"] for row in rows} == {name for name, row in table.items() if row["num_test"]}
    assert list(rows[0]) == [
        "client", "num_train", "num_test", "predicted_gain", "alone", "personal", "realised_gain", "is_within_chance",
        "why",
    ]  # fmt: skip
    assert [row["realised_gain"] for row in rows] == sorted(row["realised_gain"] for row in rows)
    for row in rows:
        own = table[row["client"]]
        assert (row["alone"], row["personal"]) == (own["alone_accuracy"], own["accuracy"])
        assert row["predicted_gain"] == own["predicted_gain"]
        assert row["why"]


# ------------------------------------------------------------------------------------------- what methods report


def test_self_fl_auto_leaves_weights_and_variances(fed):
    run = selffl.train("softmax", fed, "self-fl-auto", **SETTINGS)
    server = run._state.server
    size = dict(zip(fed.clients, fed.train.num_examples.tolist(), strict=True))
    rows = [row for row in run.participation if row["round"] == 4]
    before = selffl.train(
        "softmax", fed, "self-fl-auto", **SETTINGS | {"rounds": 3}
    )._state.server  # n_0 as it was sent
    own = [size[row["client"]] / (size[row["client"]] + float(before.prior_rows)) for row in rows]
    assert [row["weight"] for row in rows] == pytest.approx([each / sum(own) for each in own], rel=1e-5)
    decided = [row["effective_params"] for row in run.participation]
    assert all(0 <= number <= 650 for number in decided)
    assert statistics.mean(decided) > 1
    assert {row["num_local_steps"] for row in run.participation} == {None}
    closing = server.closing
    for row in run.clients:
        gain = 1 + float(closing.prior_rows) / size[row["client"]]
        variance = float(closing.inter_variance * closing.prior_rows) / size[row["client"]]
        for name, expected in (("predicted_gain", gain), ("intra_variance", variance)):
            assert row[name] == (pytest.approx(expected, rel=1e-5) if row["rounds"] else None)
    assert {row["rounds"] > 0 for row in run.clients} == {True, False}
    for row in rows:
        variance = float(server.inter_variance * server.prior_rows) / size[row["client"]]
        assert row["intra_variance"] == pytest.approx(variance, rel=1e-5)
    last = [row["intra_variance"] for row in rows]
    assert run.history[-1]["intra_variance"] == pytest.approx(statistics.mean(last))


def test_a_server_that_knows_sums_alone_foretells_nothing(fed):
    run = selffl.train("softmax", fed, "self-fl-sums", **SETTINGS)
    assert run.participation == []
    assert "predicted_gain" not in run.clients[0]


# ------------------------------------------------------------------------------------------------- the command line


def test_the_command_line_says_who_loses(command_line, tmp_path):
    words = ("run", "digits", "--rounds", "3", "--algorithm", "fedavg")
    code, out, err = command_line(*words, "--gain", "--out", "here")
    assert (code, err) == (0, "")
    run = selffl.load(tmp_path / "here")
    losing = [row for row in run.gains() if row["realised_gain"] < 0]
    assert len(losing) > 5
    losing = [row for chance in (False, True) for row in losing if row["is_within_chance"] == chance]
    clear = sum(not row["is_within_chance"] for row in losing)
    share = (
        f"{len(losing)} of 40 clients lose by joining ({100 * len(losing) / 40:.1f} %), "
        f"{clear or 'none'} of them significantly; the mean gain"
    )
    assert share in out
    named = re.findall(r"^  (\d+): −([\d.]+) points \(.* alone, .* joined\): (.*)$", out, re.M)
    assert named == [(str(row["client"]), f"{-100 * row['realised_gain']:.1f}", row["why"]) for row in losing[:5]]
    code, out, _ = command_line("run", "digits", "--rounds", "4", "--out", "here", "--resume")
    assert code == 0
    assert "clients lose by joining" in out


def test_the_command_line_refuses_gain_where_it_makes_no_sense(command_line, tmp_path):
    code, out, err = command_line("run", "digits", "--rounds", "3", "--algorithm", "local", "--gain")
    assert (code, out) == (2, "")
    assert err.startswith("selffl: local trains every client alone, so that there is no gain to measure; expected ")
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())
    command_line("run", "digits", "--rounds", "3", "--out", "here")
    code, _, err = command_line("run", "digits", "--rounds", "4", "--out", "here", "--resume", "--gain")
    assert code == 2
    assert err.startswith("selffl: gain is True, and the run in here was begun with False; ")
