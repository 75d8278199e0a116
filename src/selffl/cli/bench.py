"""`selffl bench`: how fast rounds are on this machine, as ratios that hold while it does other things."""

from __future__ import annotations

import json
import os
import platform
import statistics
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from selffl.cli import console, names

if TYPE_CHECKING:
    from selffl.studies.speed import Spread

app = typer.Typer()

LOOP, OURS, FLOWER = "plain PyTorch loop", "selffl", "Flower, simulation"
STEPS, BATCH = 20, 10
NEEDS = {FLOWER: ("flwr", "ray")}  # packages of a peer
INSTALL = {FLOWER: "pip install 'selffl[simulation]', in an environment of its own"}
UNTIMED = {"fluke": "fluke", "pfl-research": "pfl", "FedJAX": "fedjax", "PFLlib": None, "FL-bench": None}  # as imported


@app.command("bench")
def bench_command(
    peers: Annotated[bool, typer.Option("--peers", help="Other libraries too, where they are installed.")] = False,
    clients: Annotated[int, typer.Option(min=2, max=290, help="Over whom the digits are split; all take part.")] = 100,
    repeats: Annotated[int, typer.Option(min=2, help="Turns, after one to warm up.")] = 11,
    device: Annotated[str, typer.Option(help="cpu or cuda.", autocompletion=names.device)] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print every measurement as JSON.")] = False,
) -> None:
    """Time rounds of FedAvg on embedded digits: a plain PyTorch loop and this library, taking turns.

    Ratios are taken turn by turn, so that what else the machine does meets both; the table has their median and range.

    Example: selffl bench --clients 100 --repeats 11
    """
    import torch

    from selffl.data import load
    from selffl.runs.environment import check_device
    from selffl.studies.speed import LEARNING_RATE, Spread, cohort_rounds, plain_loop, ratios, time_interleaved

    check_device(device)
    fed = load("digits", num_clients=clients)
    rows, num_classes = fed.train.to(device), fed.num_classes or 0
    cases = {
        LOOP: plain_loop(rows, num_classes, cohort=clients, steps=STEPS, batch=BATCH),
        OURS: cohort_rounds(rows, num_classes, cohort=clients, steps=STEPS, batch=BATCH, chunk_size=50),
    }
    seconds = time_interleaved(cases, repeats, device)
    faster = {OURS: Spread.of(ratios(seconds, LOOP, OURS))}
    missing = []
    for peer, needed in NEEDS.items() if peers else ():
        absent = [package for package in needed if find_spec(package) is None]
        if absent:
            missing.append(f"{peer}: {' and '.join(absent)} not installed ({INSTALL[peer]})")
            continue
        from selffl.engines.flower.peer import simulated_rounds

        seconds[peer] = simulated_rounds(
            fed.train, num_classes, steps=STEPS, batch=BATCH, rounds=repeats, learning_rate=LEARNING_RATE
        )
        # It takes no turns with the others: held against the loop's median.
        faster[peer] = Spread.of([statistics.median(seconds[LOOP]) / value for value in seconds[peer]])
    if peers:
        for peer, package in UNTIMED.items():
            state = "installed" if package and find_spec(package) else "not installed" if package else "no package"
            missing.append(f"{peer}: no adapter for it here ({state})")
    where = torch.cuda.get_device_name() if device != "cpu" else f"{platform.machine()}, {os.cpu_count()} cores"
    machine = f"{where}, torch {torch.__version__}, {torch.get_num_threads()} threads"
    title = f"One round of FedAvg, softmax regression on digits: {clients} clients, {STEPS} steps of batch {BATCH}"
    if as_json:
        ratios_of = {name: {"median": r.median, "low": r.low, "high": r.high} for name, r in faster.items()}
        content: dict[str, Any] = {"title": title, "machine": machine, "seconds": seconds, "times_as_fast": ratios_of}
        print(json.dumps(content | {"missing": missing}, ensure_ascii=False))
        return
    _print(title, machine, seconds, faster)
    for line in missing:
        console.tell(console.out, f"Left out: {line}.")


def _print(title: str, machine: str, seconds: dict[str, list[float]], faster: dict[str, Spread]) -> None:
    from selffl.studies.speed import Spread

    console.out.print(title, style="bold", highlight=False, soft_wrap=True)
    console.tell(console.out, machine)
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("")
    for name in ("ms a round", "range", "times as fast as the loop", "range"):
        table.add_column(name, justify="right")
    for name, values in seconds.items():
        spread = Spread.of([1000 * value for value in values])
        cells = [f"{spread.median:.1f}", f"{spread.low:.1f}–{spread.high:.1f}"]
        times = faster.get(name)
        cells += ["1", ""] if times is None else [f"{times.median:.2g}", f"{times.low:.2g}–{times.high:.2g}"]
        table.add_row(name, *cells)
    console.out.print(table, highlight=False)
