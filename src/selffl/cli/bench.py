"""`selffl bench`: how fast rounds are on this machine, as ratios that hold while it does other things."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from selffl.cli import console, names
from selffl.errors import ConfigError, check_known

if TYPE_CHECKING:
    from selffl.studies.speed import Spread

app = typer.Typer()

LOOP, OURS = "plain PyTorch loop", "selffl"
STEPS, BATCH = 20, 10
MOST_CLIENTS = 290  # that the digits can be split over
TITLES = {"loop": LOOP, "products": "bare products", "fedjax": "FedJAX", "pfl": "pfl-research", "flower": "Flower"}


@app.command("bench")
def bench_command(
    peers: Annotated[
        bool, typer.Option("--peers", help="Other libraries too, each installed by pip into the user's cache.")
    ] = False,
    only: Annotated[list[str] | None, typer.Option("--peer", help="One of them; may be given several times.")] = None,
    clients: Annotated[
        int | None, typer.Option(min=2, help="100, over whom the digits are split; of peers 1000, a tenth a round.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=2, help="Turns, after one to warm up.")] = 11,
    cores: Annotated[int, typer.Option(min=1, help="That each process of peers may use.")] = os.cpu_count() or 1,
    device: Annotated[str, typer.Option(help="cpu or cuda.", autocompletion=names.device)] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print every measurement as JSON.")] = False,
) -> None:
    """Time rounds of FedAvg on embedded digits: this library and a plain PyTorch loop in turns.

    Ratios are taken turn by turn, so that what else the machine does meets both; the table has their median and range.
    With --peers on rows of MNIST's shape, beside other libraries and the bare products of matrices of a round.

    Example: selffl bench --clients 100 --repeats 11
    """
    if peers or only:
        _bench_peers(only, clients or 1000, repeats, cores, as_json)
        return
    import torch

    from selffl.data import load
    from selffl.runs.environment import check_device
    from selffl.studies.speed import Spread, cohort_rounds, plain_loop, ratios, time_interleaved

    clients = clients or 100
    if clients > MOST_CLIENTS:
        raise ConfigError(f"--clients is {clients}; expected at most {MOST_CLIENTS}: so many can share the digits.")
    check_device(device)
    fed = load("digits", num_clients=clients)
    rows, num_classes = fed.train.to(device), fed.num_classes or 0
    cases = {
        LOOP: plain_loop(rows, num_classes, cohort=clients, steps=STEPS, batch=BATCH),
        OURS: cohort_rounds(rows, num_classes, cohort=clients, steps=STEPS, batch=BATCH, chunk_size=50),
    }
    seconds = time_interleaved(cases, repeats, device)
    faster = {OURS: Spread.of(ratios(seconds, LOOP, OURS))}
    where = torch.cuda.get_device_name() if device != "cpu" else f"{platform.machine()}, {os.cpu_count()} cores"
    machine = f"{where}, torch {torch.__version__}, {torch.get_num_threads()} threads"
    title = f"One round of FedAvg, softmax regression on digits: {clients} clients, {STEPS} steps of batch {BATCH}"
    if as_json:
        ratios_of = {name: {"median": r.median, "low": r.low, "high": r.high} for name, r in faster.items()}
        content: dict[str, Any] = {"title": title, "machine": machine, "seconds": seconds, "times_as_fast": ratios_of}
        print(json.dumps(content, ensure_ascii=False))
        return
    _print(title, machine, seconds, faster)


def _bench_peers(only: list[str] | None, clients: int, turns: int, cores: int, as_json: bool) -> None:
    from tempfile import TemporaryDirectory

    from selffl.cli.bench_peers import PEERS, PRODUCTS, measure
    from selffl.studies.speed import Spread, ratios

    for name in only or ():
        check_known("--peer", name, PEERS)
    with TemporaryDirectory() as folder:
        record = measure(only or list(PEERS), clients=clients, turns=turns, cores=cores, folder=Path(folder))
    if as_json:
        print(json.dumps(record, ensure_ascii=False))
        return
    found = record["libraries"]
    seconds = {TITLES.get(name, name): each["seconds"] for name, each in found.items()}
    faster = {name: Spread.of(ratios(seconds, LOOP, name)) for name in seconds if name != LOOP}
    sizes = record["sizes"]
    title = f"One round of FedAvg, softmax regression: {clients} clients, {sizes['cohort']} a round, {STEPS} steps"
    _print(f"{title} of batch {BATCH}", record["machine"], seconds, faster)
    for name, each in found.items():
        used = ", ".join(f"{package} {number}" for package, number in each["versions"].items())
        right = "" if name == PRODUCTS else f", accuracy {each['accuracy']:.3f} after {each['num_steps']:,} steps"
        console.tell(console.out, f"{TITLES.get(name, name)}: {used}; {each['peak_megabytes']:.0f} MB{right}.")
    for name, why in record["left_out"].items():
        console.tell(console.out, f"Left out: {TITLES.get(name, name)}: {why.rstrip('.')}.")


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
