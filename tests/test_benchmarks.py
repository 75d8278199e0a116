"""The benchmarks run, at sizes too small to mean anything, and say what they are there to say."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from programs import Script

FOLDER = Path(__file__).parent.parent / "benchmarks"

TINY = {
    "mnist_rounds": [
        "--clients", "6", "--rows", "5", "--cohort", "3", "--steps", "3", "--batch", "2", "--repeats", "2",
        "--threads", "1",
    ],
    "auto_rounds": ["--models", "softmax", "--repeats", "1"],
    "cifar_cnn": ["--clients", "2", "--rows", "3", "--steps", "2", "--batch", "2", "--repeats", "1", "--threads", "1"],
    "lstm_cohort": [
        "--clients", "2", "--rows", "3", "--steps", "2", "--batch", "2", "--words", "7", "--length", "3",
        "--hidden", "4", "--ways", "auto", "vmap", "loop", "--turns", "1", "--threads", "1",
    ],
    "adapter_cohort": [
        "--clients", "2", "--rows", "3", "--steps", "2", "--batch", "2", "--width", "16", "--layers", "1",
        "--length", "3", "--rank", "2", "--ways", "auto", "vmap", "loop", "--repeats", "1", "--threads", "1",
    ],
    "adapter_newcomers": [
        "--width", "8", "--clients", "3", "--rounds", "1", "--rows", "2", "--rank", "2", "--repeats", "1",
    ],
    "flower_rounds": ["--repeats", "1", "--rounds", "1", "--clients", "2", "--steps", "2", "--models", "softmax"],
    "large_tables": ["--tables", "5x60"],
    "scale": [
        "--clients", "20", "60", "--cohort", "5", "--rows", "4", "--features", "6", "--steps", "2", "--turns", "1",
    ],
    "memory": ["--clients", "10", "--rows", "4", "--rounds", "2", "--every", "1", "--repeats", "1"],
    "ranks": [
        "--clients", "4", "--cohort", "4", "--rows", "3", "--steps", "1", "--batch", "2", "--turns", "1",
        "--cases", "1 process, 1 thread", "2 ranks, 1 thread",
    ],
    "privacy_attacks": ["--part", "audit", "--repeats", "4"],
    "interval_coverage": ["--clients", "4", "--inter-variances", "0.5", "--repeats", "3"],
    "grouped_variances": [
        "--groups", "6", "--medians", "8", "--variances", "0.3", "--seeds", "0", "1", "--rounds", "2",
    ],
    "calibration": [
        "--problems", "digits", "--methods", "self-fl-auto", "fedavg", "--seeds", "0", "1", "--rounds", "2",
    ],
}  # fmt: skip
ROWS = {
    "auto_rounds": ["softmax  times as long as FedAvg:"],
    "mnist_rounds": ["loop, 1 thr.", "selffl, 1 thr.", "products alone, 1 thr."],
    "cifar_cnn": [
        f"{name}, 2 clients, 1 thr." for name in ("loop", "selffl auto", "selffl vmap", "selffl loop", "selffl unfold")
    ],
    "lstm_cohort": [f"{name}, 2 clients, 1 thr." for name in ("loop", "selffl auto", "selffl vmap", "selffl loop")],
    "adapter_cohort": [f"{name}, 2 clients, 1 thr." for name in ("loop", "selffl auto", "selffl vmap", "selffl loop")],
    "adapter_newcomers": ["   2 rows"],
    "flower_rounds": ["Flower FedAvg, softmax"],
    "large_tables": ["5x60"],
    "memory": ["import torch", "whole run, above it"],
    "scale": ["20 clients", "60 clients"],
    "ranks": ["1 process, 1 thread", "2 ranks, 1 thread"],
    "privacy_attacks": ["{'z': 1.0,", "{'z': 2.0,", "{'z': 4.0,"],
    "grouped_variances": ["| linear | 8 | 0.3 |", "| logistic | 8 | 0.3 |"],
    "interval_coverage": ["| personal, integrated over σ₀² |", "| mean, Hartung–Knapp |", "| σ₀², Q-profile |"],
    "calibration": [
        f"| digits | {line}"
        for line in (
            "self-fl-auto | plain |",
            "self-fl-auto | posterior as it stands |",
            "self-fl-auto | moderated |",
            "self-fl-auto | global |",
            "fedavg | plain |",
        )
    ],
}
RATIO = r"\d\.\d\d x"
CELLS = {
    "auto_rounds": r"\d\.\d\d \(",
    "adapter_newcomers": r"\d+ visits",
    "interval_coverage": r"\d\.\d ± \d",
    "grouped_variances": r"\d\.\d+ ± \d",
    "privacy_attacks": r"'proven epsilon': \d",
}
KEYS = {
    "large_tables": "tables",
    "memory": "megabytes",
    "scale": "measured",
    "privacy_attacks": "audit",
    "calibration": "calibration",
    "interval_coverage": "coverage",
    "grouped_variances": "variances",
}


def test_every_benchmark_has_a_case_here_and_a_place_in_the_readme():
    scripts = {path.stem for path in FOLDER.glob("*.py")} - {"timing", "rounds", "stages"}
    assert scripts == set(TINY)
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [name for name in scripts if f"`{name}.py`" not in page] == []


# Those that measure a process as a whole; the others run in the test's, which need not import everything again.
OWN_PROCESS = ("memory", "large_tables", "flower_rounds")
FORKING = ("ranks", "scale")  # they start processes of their own, which are forked


@pytest.fixture
def benchmark(monkeypatch, capsys):
    """A function that runs a benchmark with its options: what it printed."""
    monkeypatch.syspath_prepend(FOLDER)
    threads = torch.get_num_threads()

    def call(name, *words):
        command = [str(FOLDER / f"{name}.py"), *words]
        if name in OWN_PROCESS:
            done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300, check=False)
            assert done.returncode == 0, done.stderr
            return done.stdout
        monkeypatch.setattr(sys, "argv", command)
        if name in FORKING:
            monkeypatch.setattr(subprocess, "Popen", Script)
        runpy.run_path(command[0], run_name="__main__")
        return capsys.readouterr().out

    yield call
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_a_benchmark_prints_its_ratios_and_writes_its_file(name, benchmark, tmp_path):
    if name == "flower_rounds":
        pytest.importorskip("flwr", reason="flwr is not installed: pip install 'selffl[flower]'")
    printed = benchmark(name, *TINY[name], "--json", str(tmp_path / "out.json"))
    for row in ROWS[name]:
        assert re.search(rf"^{re.escape(row)} .*{CELLS.get(name, RATIO)}", printed, re.M), printed
    record = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert record[KEYS.get(name, "seconds")]


@pytest.mark.slow
def test_cases_one_by_one(benchmark, tmp_path):
    sizes = [word for word in TINY["adapter_cohort"] if word not in ("--ways", "auto", "vmap", "loop")]
    printed = benchmark(
        "adapter_cohort", *sizes, "--layers", "2", "--each", "vmap", "stacked:1", "recomputed:2",
        "--json", str(tmp_path / "out.json"),
    )  # fmt: skip
    for name in ("loop", "vmap", "stacked:1", "recomputed:2"):
        assert re.search(rf"^{name} .* \d+\.\d\d x the loop", printed, re.M), printed
    assert list(json.loads((tmp_path / "out.json").read_text())["cases"]) == [
        "loop",
        "vmap",
        "stacked:1",
        "recomputed:2",
    ]
