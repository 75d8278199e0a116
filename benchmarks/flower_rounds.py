"""Rounds over Flower: its own FedAvg with a client as its users write it, against this library's FedAvg and Self-FL.

The same rows, model, number of local steps, batch size and learning rate for all; every client takes part in every
round; digits, softmax regression and a network of a million parameters.

**process**: server and clients in one process, every message taken apart into Flower's objects and put together again.
What the libraries do is all there is, and the bytes are those of the objects.  **deployment**: a server and three nodes
as processes, over loopback in a network of their own; Flower starts a process for every message and asks for answers
every few seconds, so that seconds go by steps.  Seconds of a client's process, imports and all, say more.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from stages import Stages
from torch import Tensor, nn

# Client processes import this file, and those of Flower's own FedAvg are not to pay for selffl: it is imported below.

HERE = Path(__file__).resolve().parent
CASES = ("Flower FedAvg", "selffl FedAvg", "selffl Self-FL")
MODELS = ("softmax", "network")
WIDTH = 960  # of the network's two layers: 994,570 parameters
LEARNING_RATE = 0.05
# Of a round in the process: where its seconds go.  What is not named here is the rest.
STAGES = {
    "wire:sealed": "messages",
    "flower_rounds:across": "messages",
    "flower_rounds:train_plainly": "training",
    "selffl.algorithms.fedavg:FedAvg.client_round": "training",
    "selffl.algorithms.self_fl:SelfFL.client_round": "training",
    "selffl.engines.flower.site:ClientSite._rows": "rows and their checks",
    "selffl.engines.flower.site:ClientSite._check": "orders and their checks",
    "selffl.engines.flower.strategy:SelfFLStrategy._message": "orders and their checks",
    "selffl.engines.flower.site:templates": "templates",
    "selffl.engines.flower.site:pack": "packing",
    "selffl.engines.flower.site:unpack": "packing",
    "selffl.engines.flower.strategy:pack": "packing",
    "selffl.engines.flower.strategy:pack_each": "packing",
    "selffl.engines.flower.answers:unpack": "packing",
    "selffl.engines.flower.site:is_finite": "checks of answers",
    "selffl.engines.claims:Claims.are_possible": "checks of answers",
    "selffl.engines.rounds:GatheredUploads.add": "sums",
    "selffl.engines.flower.strategy:finish_round": "server's step",
    "flwr.serverapp.strategy:FedAvg.aggregate_train": "server's step",
    "selffl.engines.flower.memory:load_tensors": "reading files",
    "selffl.engines.flower.memory:save_tensors": "writing files",
    "selffl.engines.flower.server:save_tensors": "writing files",
    "selffl.state.checkpoint:_crc32": "checksums",
    "os:fsync": "waiting for the disk",
    "selffl.runs.flower:RemoteRecorder.take": "records",
}
APART = ["unshare", "--map-root-user", "--net", "--pid", "--mount-proc", "--fork", "--kill-child"]


def build(model: str) -> nn.Module:
    """The module, with the same first values each time."""
    torch.manual_seed(0)
    if model == "softmax":
        return nn.Linear(64, 10)
    return nn.Sequential(
        nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
    )  # fmt: skip


def write_rows(folder: Path, clients: int) -> None:
    """One file for each client: neither library has to import anything to read it."""
    from selffl.data import load

    sites = load("digits", num_clients=clients)
    for client in range(clients):
        parts = []
        for rows in (sites.train, sites.test):
            own = slice(int(rows.offset[client]), int(rows.offset[client + 1]))
            parts += [rows.features[own].numpy(), rows.labels[own].numpy()]
        np.savez(folder / f"rows-{client}.npz", *parts)


def read_rows(folder: Path, client: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x_train, y_train, x_test, y_test) of a client."""
    with np.load(folder / f"rows-{client}.npz") as file:
        x_train, y_train, x_test, y_test = (torch.from_numpy(file[name]) for name in file.files)
    return x_train, y_train, x_test, y_test


# ------------------------------------------------------------------------------------------- as a user of Flower has it


def train_plainly(module: nn.Module, criterion: nn.Module, x: Tensor, y: Tensor, config: ConfigRecord) -> float:
    """A plain loop: the mean loss of its minibatches."""
    steps, batch, rate = (config[name] for name in ("steps", "batch", "lr"))
    optimiser = torch.optim.SGD(module.parameters(), lr=rate)
    left, total = steps, 0.0
    while left:
        for rows in torch.randperm(len(y)).split(batch)[:left]:
            optimiser.zero_grad()
            loss = criterion(module(x[rows]), y[rows])
            loss.backward()
            optimiser.step()
            total += loss.item()
            left -= 1
    return total / steps


def plain_client(model: str, folder: Path) -> ClientApp:
    """A client that takes the server's model and its configuration, and sends its own."""
    module, criterion = build(model), nn.CrossEntropyLoss()
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        module.load_state_dict(message.content["arrays"].to_torch_state_dict())
        x, y, _, _ = read_rows(folder, context.node_config["partition-id"])
        mean_loss = train_plainly(module, criterion, x, y, message.content["config"])
        metrics = MetricRecord({"train-loss": mean_loss, "num-examples": len(y)})
        content = RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        module.load_state_dict(message.content["arrays"].to_torch_state_dict())
        _, _, x, y = read_rows(folder, context.node_config["partition-id"])
        with torch.no_grad():
            outputs = module(x)
            found = {"loss": criterion(outputs, y).item(), "accuracy": (outputs.argmax(1) == y).float().mean().item()}
        metrics = MetricRecord({**found, "num-examples": len(y)})
        return Message(content=RecordDict({"metrics": metrics}), reply_to=message)

    return app


def plain_server(model: str, folder: Path, args: argparse.Namespace, clients: int) -> ServerApp:
    """Flower's own strategy."""
    from flwr.serverapp.strategy import FedAvg

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_evaluate=float(args.evaluate), min_available_nodes=clients, min_train_nodes=clients)
        config = ConfigRecord({"lr": LEARNING_RATE, "steps": args.steps, "batch": args.batch})
        result = strategy.start(grid, ArrayRecord(build(model).state_dict()), args.rounds + 1, train_config=config)
        torch.save(result.arrays.to_torch_state_dict(), folder / "plain.pt")

    return app


# --------------------------------------------------------------------------------------------- as a user of ours has it


def method_of(case: str, steps: int) -> Any:
    """Ours, with that many steps for everybody."""
    from selffl.algorithms import algorithm

    if case == "selffl FedAvg":
        return algorithm("fedavg", num_local_steps=steps)
    return algorithm("self-fl", initial_steps=steps, max_local_steps=steps, adaptive_steps=False)


def client_of(case: str, model: str, folder: Path, args: argparse.Namespace) -> ClientApp:
    """The client's app of a case."""
    if case == CASES[0]:
        return plain_client(model, folder)
    from selffl.flower import client_app

    method = method_of(case, args.steps)
    return client_app(build(model), lambda client: read_rows(folder, client), method, memory_dir=folder / "memory")


def server_of(case: str, model: str, folder: Path, args: argparse.Namespace, clients: int) -> ServerApp:
    """The server's app of a case; ours keeps its records and a checkpoint of every round."""
    if case == CASES[0]:
        return plain_server(model, folder, args, clients)
    import uuid

    from selffl.flower import server_app

    return server_app(
        build(model),
        method_of(case, args.steps),
        range(clients),
        out=folder / "runs" / uuid.uuid4().hex,
        rounds=args.rounds + 1,
        participation=1.0,
        learning_rate=LEARNING_RATE,
        batch_size=args.batch,
        evaluate_every=int(args.evaluate),
    )


# ------------------------------------------------------------------------------------------------------------ measuring


class Watch:
    """When each round began, and what had gone over the loopback by then: of all rounds but the last."""

    def __init__(
        self, grid: Grid, clock: Callable[[], float] = time.perf_counter, stages: Stages | None = None
    ) -> None:
        self.began: list[float] = []
        self.looped: list[int] = []
        self.stages: dict[str, float] = {}  # seconds of a round
        send = grid.send_and_receive

        def send_and_receive(messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
            messages = list(messages)
            if messages and messages[0].metadata.message_type == "train":
                self.began.append(clock())
                self.looped.append(loopback())
                if stages is not None and len(self.began) == 1:
                    stages.clear()
                elif stages is not None:
                    num_rounds = len(self.began) - 1
                    self.stages = {stage: seconds / num_rounds for stage, seconds in stages.read().items()}
            return send(messages, timeout=timeout)

        grid.send_and_receive = send_and_receive  # type: ignore[method-assign]

    @property
    def seconds(self) -> list[float]:
        """Of each round, from its beginning to that of the next."""
        return [after - before for before, after in zip(self.began, self.began[1:], strict=False)]

    @property
    def num_looped(self) -> float:
        """Bytes over the loopback, of a round."""
        return (self.looped[-1] - self.looped[0]) / max(len(self.looped) - 1, 1)


def loopback() -> int:
    """Bytes that this network's loopback has carried."""
    lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()
    return next(int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith("lo:"))


def across(message: Message) -> tuple[Message, int]:
    """The message taken apart as Flower stores it and put together again, and its bytes."""
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    contents = {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
    num_bytes = sum(map(len, contents.values()))  # which are gone once they are put together
    arrived: Message = inflate_object_from_contents(message.object_id, contents)
    arrived.metadata.__dict__["_message_id"] = message.metadata.message_id
    return arrived, num_bytes


def counting_grid(app: ClientApp, clients: int) -> Any:
    """A grid in this process that takes every message apart as Flower stores it, and counts the bytes."""
    from wire import RUN, WireGrid, sealed

    class CountingGrid(WireGrid):  # type: ignore[misc]
        """Nodes that answer one after the other."""

        def __init__(self) -> None:
            super().__init__(app, {1000 + client: client for client in range(clients)})
            self.counted: dict[str, list[int]] = defaultdict(list)

        def _across(self, message: Message, direction: str) -> Message:
            arrived, num_bytes = across(message)
            self.counted[f"{message.metadata.message_type} {direction}"].append(num_bytes)
            return arrived

        def answer(self, message: Message) -> Message:
            node = message.metadata.dst_node_id
            context = Context(RUN, node, {"partition-id": self.clients[node]}, RecordDict(), {})
            reply = self.app(self._across(message, "down"), context)
            return self._across(sealed(reply, is_reply=True), "up")

    return CountingGrid()


def in_process(case: str, model: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One run in this process: seconds of its rounds, in all and by stage, and bytes of a message by kind and way."""
    clock = {"wall": time.perf_counter, "cpu": time.process_time}[args.clock]
    sys.path.insert(0, str(HERE.parent / "tests" / "engines" / "flower"))
    sys.modules.setdefault("flower_rounds", sys.modules[__name__])  # as which its functions are named
    stages = Stages(clock)
    with stages.watching(STAGES):
        grid = counting_grid(client_of(case, model, folder, args), args.clients)
        watch = Watch(grid, clock, stages)
        server_of(case, model, folder, args, args.clients)(grid, Context(7, 1, {}, RecordDict(), {}))
    sizes = {name: sum(counts) / len(counts) for name, counts in grid.counted.items()}
    return {"seconds": watch.seconds, "stages": watch.stages, "bytes": sizes}


# ----------------------------------------------------------------------------------------------------------- deployment

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "trial"
version = "1.0.0"
description = "One case of a benchmark"
license = "Apache-2.0"
dependencies = ["flwr>=1.41"]
[tool.hatch.build.targets.wheel]
packages = ["."]
[tool.flwr.app]
publisher = "selffl"
[tool.flwr.app.components]
serverapp = "{package}.server:app"
clientapp = "{package}.client:app"
[tool.flwr.app.config]
times = ""
"""

APP = """
from argparse import Namespace
from pathlib import Path
from flower_rounds import deployed_{side}
app = deployed_{side}({case!r}, {model!r}, Path({folder!r}), Namespace(**{settings!r}))
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
for second in $(seq 60); do flwr list near > /dev/null 2>&1 && break; sleep 1; done
for client in $(seq 0 {last}); do
    flower-supernode --insecure --superlink 127.0.0.1:9093 --port $((9200 + client)) \\
        --node-config "partition-id=$client" > node$client.log 2>&1 &
done
while read package times; do
    echo "$times" >> submit.log
    flwr run $package near --run-config "times='$PWD/$times'" >> submit.log 2>&1
    for second in $(seq 600); do test -e $times && break; sleep 1; done
    sleep 2
done < turns.txt
"""


def deployed_server(case: str, model: str, folder: Path, args: argparse.Namespace) -> ServerApp:
    """The server's app of a case, which writes down its seconds where the run's configuration says."""
    torch.set_num_threads(1)
    inner, app = server_of(case, model, folder, args, args.nodes), ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        watch = Watch(grid)
        inner(grid, context)
        place = Path(str(context.run_config["times"]))
        place.with_suffix(".part").write_text(
            json.dumps({"seconds": watch.seconds, "looped": watch.num_looped / args.nodes}), encoding="utf-8"
        )
        place.with_suffix(".part").replace(place)

    return app


def deployed_client(case: str, model: str, folder: Path, args: argparse.Namespace) -> ClientApp:
    """The client's app of a case; its process writes down what it has used when it ends."""
    torch.set_num_threads(1)
    inner, app = client_of(case, model, folder, args), ClientApp()

    def counted(message: Message, context: Context) -> Message:
        place = Path(str(context.run_config["times"])).with_suffix(".clients")
        answered = inner(message, context)

        def used() -> None:
            line = json.dumps({"kind": message.metadata.message_type, "cpu": time.process_time(), "wall": age()})
            with place.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

        atexit.register(used)
        return answered

    app.query()(counted)
    app.train()(counted)
    app.evaluate()(counted)
    return app


def age() -> float:
    """Seconds since this process was started."""
    ticks = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    up = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
    return up - int(ticks) / os.sysconf("SC_CLK_TCK")


def deployments(folder: Path, args: argparse.Namespace) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """All turns of all cases with one server and its nodes: for each case what its runs have written."""
    settings = {name: getattr(args, name) for name in ("steps", "batch", "rounds", "evaluate", "nodes")}
    cases = [(model, case) for model in args.models for case in CASES]
    for number, (model, case) in enumerate(cases):
        inside = folder / f"app{number}" / f"trial{number}"
        inside.mkdir(parents=True)
        written = {
            inside.parent / "pyproject.toml": PROJECT.format(package=inside.name),
            inside / "__init__.py": "",
            **{
                inside / f"{side}.py": APP.format(
                    side=side, case=case, model=model, folder=str(folder), settings=settings
                )
                for side in ("client", "server")
            },
        }
        for path, text in written.items():
            path.write_text(text, encoding="utf-8")
    # The first model has one turn more, which does not count: in it Python compiles what it keeps compiled.
    turns = [
        (turn, number)
        for model in args.models
        for turn in range(int(model != args.models[0]), args.turns + 1)
        for number, one in enumerate(cases)
        if one[0] == model
    ]
    lines = [f"app{number} times-{turn}-{number}.json" for turn, number in turns]
    (folder / "turns.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "config.toml").write_text(CONNECTION, encoding="utf-8")
    (folder / "go.sh").write_text(SCRIPT.format(last=args.nodes - 1), encoding="utf-8")
    import selffl

    surroundings = {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(folder),
        "FLWR_HOME": str(folder),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{HERE}:{Path(selffl.__file__).parent.parent}",
        "PYTHONPYCACHEPREFIX": str(folder / "compiled"),
    }
    done = subprocess.run([*APART, "sh", "go.sh"], cwd=folder, env=surroundings, check=False)
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for turn, number in turns:
        place = folder / f"times-{turn}-{number}.json"
        if not place.is_file():
            logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted(folder.glob("*.log")))
            raise SystemExit(f"{place.name} was not written (status {done.returncode})\n{logs}")
        if turn == 0:
            continue
        of_clients = [
            json.loads(line) for line in place.with_suffix(".clients").read_text(encoding="utf-8").splitlines()
        ]
        trained = [one for one in of_clients if one["kind"] == "train"]
        clocks = {clock: [one[clock] for one in trained] for clock in ("cpu", "wall")}
        found[cases[number]].append({**json.loads(place.read_text(encoding="utf-8")), **clocks})
    return found


# --------------------------------------------------------------------------------------------------------------- report


def middle(values: Iterable[float]) -> float:
    """The median."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def plain(value: float) -> str:
    """A number without powers of ten."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def table(title: str, unit: str, turns: dict[tuple[str, str], list[float]]) -> None:
    """A number for each turn of each case, and how many times that of Flower's own in the same turn."""
    print(f"{title}\n{'':26}  {'median':>12}  {'range':>23}  {'times Flower (range)':>24}")
    for (model, case), values in turns.items():
        found = sorted(one / other for one, other in zip(values, turns[model, CASES[0]], strict=True))
        span = f"{plain(min(values))}-{plain(max(values))}"
        times = f"{middle(found):.2f} x ({found[0]:.2f}-{found[-1]:.2f})"
        print(f"{case + ', ' + model:26}  {plain(middle(values)):>9} {unit:2}  {span:>23}  {times:>24}")
    print()


def stage_table(runs: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    """Where the seconds of a round go: the median of the turns, for each stage and case."""
    for model in dict.fromkeys(model for model, _ in runs):
        cases = [case for of_model, case in runs if of_model == model]
        print(f"Milliseconds of a round by stage, {model}\n{'':26}" + "".join(f"  {case:>14}" for case in cases))
        names = dict.fromkeys([*STAGES.values(), "rest"])
        for stage in names:
            found = [middle(run["stages"].get(stage, 0.0) for run in runs[model, case]) for case in cases]
            print(f"{stage:26}" + "".join(f"  {1000 * seconds:14,.1f}" for seconds in found))
        print()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where", nargs="+", choices=("process", "deployment"), default=["process"])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--clients", type=int, default=10, help="in the process")
    parser.add_argument("--nodes", type=int, default=3, help="of the deployment")
    parser.add_argument("--rounds", type=int, default=5, help="of a turn; there is one more, which is not counted")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--evaluate", action="store_true", help="every round; otherwise none of those that count")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="of rounds in the process; cpu: on a machine that is busy",
    )
    parser.add_argument("--repeats", type=int, default=11, help="turns in the process")
    parser.add_argument("--turns", type=int, default=3, help="of the deployment")
    parser.add_argument("--json", type=Path, help="also write every measurement to this file")
    args = parser.parse_args()

    import logging
    from tempfile import TemporaryDirectory

    from timing import write

    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    sizes = f"{args.steps} steps of batch {args.batch}, {'' if args.evaluate else 'no '}evaluation, one thread"
    record: dict[str, Any] = {"seconds": {}, "stages": {}, "bytes": {}, "of_clients": {}}
    with TemporaryDirectory(prefix="rounds") as name:
        folder = Path(name)
        if "process" in args.where:
            write_rows(folder, args.clients)
            runs: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
            for model in args.models:
                for turn in range(args.repeats + 1):
                    for case in CASES:
                        found = in_process(case, model, folder, args)
                        if turn:
                            runs[model, case].append(found)
            head = f"{args.clients} clients in one process, {sizes}, {args.repeats} turns of {args.rounds} rounds"
            head += f", {args.clock} time"
            report(head, "process", runs, record)
        if "deployment" in args.where:
            write_rows(folder, args.nodes)
            runs = deployments(folder, args)
            report(
                f"{args.nodes} nodes, {sizes}, {args.turns} turns of {args.rounds} rounds", "deployment", runs, record
            )
    write(args.json, record)


def report(head: str, where: str, runs: dict[tuple[str, str], list[dict[str, Any]]], record: dict[str, Any]) -> None:
    """Print the tables of one setting and add its numbers to the record."""
    print(f"{head}\n")

    def each(number: Callable[[dict[str, Any]], float]) -> dict[tuple[str, str], list[float]]:
        return {case: [number(run) for run in found] for case, found in runs.items()}

    table("Seconds of a round, median of a turn", "s", each(lambda run: middle(run["seconds"])))
    if where == "process":
        stage_table(runs)
        table("Bytes to train, to a client in a round", "B", each(lambda run: run["bytes"]["train down"]))
        table("Bytes to train, from a client in a round", "B", each(lambda run: run["bytes"]["train up"]))
        table("Bytes to train, both ways", "B", each(lambda run: run["bytes"]["train down"] + run["bytes"]["train up"]))
    else:
        table("Processor seconds of a client's process that trains", "s", each(lambda run: middle(run["cpu"])))
        table("Seconds of a client's process that trains", "s", each(lambda run: middle(run["wall"])))
        table("Bytes over the loopback, of a client and a round", "B", each(lambda run: run["looped"]))
    for (model, case), found in runs.items():
        key = f"{case}, {model}, {where}"
        record["seconds"][key] = [run["seconds"] for run in found]
        if where == "process":
            record["stages"][key] = [run["stages"] for run in found]
            record["bytes"][key] = found[-1]["bytes"]
        else:
            record["bytes"][key] = [run["looped"] for run in found]
            record["of_clients"][key] = [{clock: run[clock] for clock in ("cpu", "wall")} for run in found]


if __name__ == "__main__":
    main()
