"""The keys that the page's scripts read are those that `selffl.reports.schema` declares, and the other way round."""

import re
from pathlib import Path

import pytest

import selffl
from selffl.reports import schema

REPORTS = Path(selffl.__file__).parent / "reports"
SCRIPT = "\n".join((REPORTS / name).read_text(encoding="utf-8") for name in ("charts.js", "report.js"))
LOSER = re.search(r"const line = \(one\) => \{.*?\n    \};", SCRIPT, re.S)[0]
CHARTS = (REPORTS / "charts.js").read_text(encoding="utf-8")

OF_JAVASCRIPT = {"length", "map", "filter", "forEach", "flatMap", "slice", "has", "reduce", "find", "findLastIndex"}
OF_JAVASCRIPT |= {"indexOf", "some", "join", "find", "at", "toFixed"}
BY_PYTHON = {
    ("SeedTable", "total"),
    ("Inside", "totalRounds"),
    ("Inside", "interval"),
    ("Inside", "closing"),
}  # sentences are made of these
KINDS = ("Payload", "Entry", "Tables", "SeedTable", "Classes", "ClientColumns", "Losing", "Loser", "Bins", "Curve")
KINDS += ("Inside", "Bands", "Trajectory", "AnswerCells")
VARIABLES = {  # what the scripts call a value, and what it may be
    "payload": ("Payload",),
    "news": ("Payload",),
    "entry": ("Entry",),
    "data": ("Tables",),
    "seed": ("SeedTable",),
    "classes": ("Classes",),
    "answers": ("AnswerCells",),
    "own": ("ClientColumns", "Trajectory"),
    "losing": ("Losing",),
    "bins": ("Bins",),
    "curve": ("Curve",),
    "band": ("Bands",),
    "path": ("Trajectory",),
}


def keys(kind):
    return set(getattr(schema, kind).__annotations__)


def reads():
    """(kinds, key) for every key that is read."""
    for name, kinds in VARIABLES.items():
        for key in re.findall(rf"(?<![\w\"-]){name}\??\.(\w+)", SCRIPT):
            yield kinds, key
        for inner in re.findall(rf"\{{ ([\w, ]+) \}} = (?:\w+\.)*{name}\b(?![.(])", SCRIPT):
            for key in inner.split(", "):
                yield kinds, key
    for key in re.findall(r"\bone\.(\w+)", LOSER):
        yield ("Loser",), key
    for key in re.findall(r"\bone\.(\w+)", CHARTS):
        yield ("Inside", "Trajectory"), key
    for key in re.findall(r"\bone\.(?:weight|steps)\.(\w+)", CHARTS):
        yield ("Bands",), key
    for key in re.findall(r"\bof\(\w+\)\?\.(\w+)", SCRIPT) + re.findall(r"\bvalue\([^\"]+?, \"(\w+)\"", SCRIPT):
        yield ("ClientColumns",), key
    for inner in re.findall(r"\{ ([\w, ]+) \} = state\.of\(focus\)\?\.losing", SCRIPT):
        for key in inner.split(", "):
            yield ("Losing",), key
    for key in re.findall(r"\bpick\(\"(\w+)\"\)", SCRIPT) + re.findall(r"\bp\.(\w+) ===", SCRIPT):
        yield ("Trajectory",), key


READ = sorted({(kinds, key) for kinds, key in reads() if key not in OF_JAVASCRIPT})


def test_there_are_keys_to_compare():
    assert len(READ) > 60


@pytest.mark.parametrize(("kinds", "key"), READ)
def test_what_a_script_reads_is_declared(kinds, key):
    assert any(key in keys(kind) for kind in kinds), f"{key} is read from {' or '.join(kinds)} and not declared there"


def test_what_is_declared_is_read():
    declared = {(kind, key) for kind in KINDS for key in keys(kind)}
    read = {(kind, key) for kinds, key in READ for kind in kinds}
    assert declared - read - BY_PYTHON == set()
    assert not BY_PYTHON & read
    assert {kind for kind in vars(schema) if hasattr(getattr(schema, kind), "__total__")} == set(KINDS)
