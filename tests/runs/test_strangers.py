"""Run folders from somebody else: no code in them runs unasked, no name is a formula, and damage is one line."""

import csv
import json
import pathlib
import random
import re
import shutil

import numpy as np
import pytest
import torch
from torch import nn

import selffl
from selffl.errors import CheckpointError, ConfigError, SelfFLError
from selffl.models.layers import build_layers, describe_layers
from selffl.reports.collect import collect
from selffl.reports.page import render
from selffl.runs import folder as files
from selffl.state.files import append_csv, read_csv, write_csv

NAMES = ('=HYPERLINK("http://x")', "@SUM(1)", "+1", "-1+2", "'=kept", "''@x", "\tx", "-7", "plain", "'quoted'")


def rows(seed=0, clients=("a", "b", "c")):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(24 * len(clients), 4)).astype(np.float32)
    return selffl.Federation.from_arrays(x, (x[:, 0] > 0).astype(int), list(clients) * 24)


class Own(nn.Linear):
    """A module that is not torch's own."""


class Payload:
    """An object whose pickle makes a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (pathlib.Path(self.path),)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two rounds of a module of the user's own, in a folder."""
    place = tmp_path_factory.mktemp("trained") / "run"
    selffl.train(
        Own(4, 2), rows(), selffl.algorithm("fedavg", num_local_steps=1), rounds=2, participation=1.0, out=place
    )
    return place


@pytest.fixture
def hostile(trained, tmp_path):
    """A copy whose module.pt makes the file ``ran`` when it is unpickled."""
    shutil.copytree(trained, tmp_path / "run")
    torch.save({"module": Payload(tmp_path / "ran")}, tmp_path / "run" / files.MODULE)
    return tmp_path / "run"


@pytest.mark.parametrize("call", [selffl.load, selffl.resume, lambda path: selffl.resume(path, rounds=3)])
def test_python_unpickles_nothing_unasked(hostile, tmp_path, call):
    with pytest.raises(
        ConfigError,
        match=r"has its own model as a pickle, which can run code when it is read; expected a folder that you trust\. "
        r"Pass trusted=True if you have made it, or know who has, or pass model\.$",
    ):
        call(hostile)
    assert not (tmp_path / "ran").exists()


def test_a_model_that_is_passed_and_trust_open_a_run(trained, hostile, tmp_path):
    expected = selffl.load(trained, trusted=True).global_model().weight
    assert torch.equal(selffl.load(hostile, model=Own(4, 2)).global_model().weight, expected)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(SelfFLError):
        selffl.load(hostile, trusted=True)  # the payload is no module, and ran
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "words", [("export", "RUN", "--all"), ("export", "RUN", "--client", "a"), ("predict", "RUN", "rows.csv"),
              ("welcome", "RUN", "rows.csv")]
)  # fmt: skip
def test_commands_unpickle_nothing_unasked(hostile, tmp_path, command_line, words):
    (tmp_path / "rows.csv").write_text("a,label\n1,0\n")
    before = sorted(tmp_path.iterdir())
    code, output, messages = command_line(*(hostile if word == "RUN" else word for word in words))
    assert (code, output) == (2, "")
    assert re.fullmatch(
        r"selffl: \S+ has its own model as a pickle, which can run code when it is read; expected a folder that you "
        r"trust\. Add --trusted if you have made it, or know who has\.\n",
        messages,
    )
    assert sorted(tmp_path.iterdir()) == before


def test_other_commands_need_no_trust(hostile, tmp_path, command_line):
    assert command_line("export", hostile, "--list")[0] == 0
    assert command_line("report", hostile, "-o", "r.html")[0] == 0
    assert command_line("run", "digits", "--out", hostile, "--resume")[0] == 2
    assert not (tmp_path / "ran").exists()


def test_trust_exports_what_was_trained(trained, tmp_path, command_line):
    assert command_line("export", trained, "--client", "a", "-o", "a.safetensors", "--trusted")[0] == 0
    assert (tmp_path / "a.safetensors").stat().st_size > 0


# ------------------------------------------------------------------------------------------- modules that are no code


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(4, 2, bias=False),
        nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 2)),
        nn.Sequential(
            nn.Identity(), nn.Linear(4, 8), nn.GroupNorm(2, 8), nn.GELU(),
            nn.BatchNorm1d(8, eps=1e-3), nn.Linear(8, 2),
        ),
    ],
    ids=["linear", "norm", "several"],
)  # fmt: skip
def test_a_module_of_torchs_layers_is_no_pickle(tmp_path, module):
    module.double()
    next(module.parameters()).requires_grad_(False)
    assert files.save_layers(tmp_path, module)
    back = files.load_layers(tmp_path)
    assert str(back) == str(module)
    assert [(n, p.requires_grad, p.dtype) for n, p in back.named_parameters()] == [
        (n, p.requires_grad, p.dtype) for n, p in module.named_parameters()
    ]
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in back.state_dict().items())


def test_images_have_their_layers():
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, stride=(2, 1), bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 4, (3, 1), padding="same"), nn.AvgPool2d(2, ceil_mode=True), nn.Flatten(), nn.Linear(8, 2),
    )  # fmt: skip
    back = build_layers(json.loads(json.dumps(describe_layers(module))))
    back.load_state_dict(module.state_dict(), assign=True)
    x = torch.randn(3, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(back.eval()(x), module.eval()(x))


def test_a_description_makes_no_room_for_what_it_asks_for():
    """Forty gigabytes of a file of somebody else's: they have to be in it."""
    found = build_layers({"kind": "Linear", "in_features": 10**5, "out_features": 10**5, "bias": True})
    assert all(parameter.is_meta for parameter in found.parameters())


def tied():
    shared = nn.Linear(3, 3)
    return nn.Sequential(shared, nn.Tanh(), shared)


def with_another_forward():
    module = nn.Linear(4, 2)
    module.forward = lambda x: x
    return module


@pytest.mark.parametrize("make", [tied, with_another_forward, lambda: Own(4, 2)])
def test_whatever_its_layers_do_not_say_is_not_described(make):
    assert describe_layers(make()) is None


def test_a_run_of_torchs_layers_opens_without_trust(tmp_path, short):
    run = selffl.train(
        nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), rows(), short("ditto"), rounds=2, participation=1.0,
        out=tmp_path / "run",
    )  # fmt: skip
    assert not (tmp_path / "run" / files.MODULE).exists()
    again = selffl.load(tmp_path / "run")
    for name, value in run.personal_model("b").state_dict().items():
        assert torch.equal(again.personal_model("b").state_dict()[name], value)
    longer = selffl.resume(tmp_path / "run", rounds=3)
    assert longer.summary["rounds"] == 3


# ----------------------------------------------------------------------------------------------------------- formulas


def test_names_that_are_formulas_are_text_in_a_spreadsheet_and_come_back(tmp_path):
    path = tmp_path / "t.csv"
    written = [{"client": name, "=column": value} for value, name in enumerate(NAMES)]
    write_csv(path, written[:4], ["client", "=column"])
    append_csv(path, written[4:], ["client", "=column"])
    with path.open(newline="", encoding="utf-8") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert not [cell for cell in cells if cell[:1] in "=+@\t\r" or (cell[:1] == "-" and cell != "-7")]
    assert read_csv(path, as_text=("client",)) == written
    assert {"plain", "'quoted'", "-7"} < set(cells)


def test_a_run_of_such_clients_goes_on_by_their_names(tmp_path, short):
    run = selffl.train(
        "softmax", rows(clients=NAMES), short("self-fl"), rounds=2, participation=1.0, out=tmp_path / "run"
    )  # fmt: skip
    found = files.read_records(tmp_path / "run")
    assert [row["client"] for row in found.clients] == list(run.federation.clients)
    assert {row["client"] for row in found.participation} == set(NAMES)
    assert {row["client"] for row in selffl.resume(tmp_path / "run", rounds=3).clients} == set(NAMES)
    page = render(collect([tmp_path / "run"]))
    assert "\"'=HYPER" not in page


# ------------------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (files.CONFIG, b"{", "is not the configuration of a run"),
        (files.CONFIG, b"\xff\xfe", "is not the configuration of a run"),
        (files.CONFIG, b"[]", "is not the configuration of a run"),
        (files.CONFIG, b'{"version": 1, "config": {}, "environment": []}', "is not the configuration of a run"),
        (files.CONFIG, b'{"version": 9}', r"has version 9; expected 1\. Use the selffl that wrote it"),
        (
            files.PARTITION,
            b"client,class,num_train\na,0,x\n",
            r"partition\.csv is damaged \(there is no column num_test",
        ),
        (files.PARTITION, b"client,class,num_train,num_test\na,0,x,1\n", r"row 1 has 'x' for num_train"),
        (files.PARTITION, b"\xff\n", r"partition\.csv is damaged"),
        (files.CLIENTS, b"client,accuracy\na,many\n", r"clients\.csv is damaged \(row 1 has 'many' for accuracy"),
        (files.CLIENTS, b"accuracy\n1\n", r"clients\.csv is damaged \(there is no column client\)"),
        (files.PARTICIPATION, b"round,client\n1.5,a\n", r"participation\.csv is damaged \(row 1 has 1\.5 for round"),
        (files.HISTORY, b"round,clients\n1,nan\n", r"history\.csv is damaged \(row 1 has nan for clients"),
        (files.HISTORY, b"round,clients,seconds\n1,2," + b"9" * 400 + b"\n", r"history\.csv is damaged"),
        (files.SUMMARY, b'{"status": []}', r"summary\.json is damaged"),
        (files.SUMMARY, b"[1]", r"summary\.json is damaged"),
    ],
)
def test_a_damaged_file_is_one_line_in_a_report(trained, tmp_path, command_line, file, content, message):
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / file).write_bytes(content)
    code, output, messages = command_line("report", tmp_path / "run")
    assert (code, output) == (2, "")
    assert re.search(message, messages)
    assert messages.count("\n") == 1


def test_facts_of_a_configuration_are_what_they_should_be(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    path = tmp_path / "run" / files.CONFIG
    whole = json.loads(path.read_text(encoding="utf-8"))
    for name, value in {"algorithm": 3, "metrics": [], "options": [], "source": {}, "data": None}.items():
        path.write_text(json.dumps(whole | {"config": whole["config"] | {name: value}}), encoding="utf-8")
        with pytest.raises(CheckpointError, match=r"config\.json is not the configuration of a run"):
            collect([tmp_path / "run"])


def test_records_that_do_not_fit_each_other_are_one_line(trained, tmp_path, command_line):
    shutil.copytree(trained, tmp_path / "run")
    path = tmp_path / "run" / files.SUMMARY
    path.write_text(path.read_text(encoding="utf-8").replace("weighted_accuracy", "weighted_speed"), encoding="utf-8")
    path = tmp_path / "run" / files.CONFIG
    path.write_text(path.read_text(encoding="utf-8").replace('"accuracy"', '"speed"'), encoding="utf-8")
    code, output, messages = command_line("report", tmp_path / "run")
    assert (code, output) == (2, "")
    assert re.fullmatch(
        r"selffl: the records in \S+/run do not fit each other \(.*\); expected those of .*\n", messages
    )


def test_random_damage_is_one_line_or_nothing(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    names = (files.CONFIG, files.HISTORY, files.CLIENTS, files.PARTITION, files.SUMMARY)
    chance, whole = random.Random(0), {name: (trained / name).read_bytes() for name in names}
    for _ in range(60):
        name = chance.choice(names)
        damaged = bytearray(whole[name])
        place = chance.randrange(len(damaged))
        damaged[place : place + chance.randrange(9)] = chance.choice([b"", b"nan", b'"', b"\xff", b"\n", b"-1", b"x"])
        (tmp_path / "run" / name).write_bytes(damaged)
        said = ""
        try:
            collect([tmp_path / "run"])
        except SelfFLError as error:
            said = str(error)
        assert "\n" not in said
        (tmp_path / "run" / name).write_bytes(whole[name])
