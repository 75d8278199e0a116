"""Rounds of FedAvg by one library, in a process of its own: what `selffl bench --peers` starts and takes turns with.

It runs by itself in environments that have no selffl in them, so that it imports nothing of it but where selffl is what
is measured.  Every library trains the same rows, which are made here from a seed, as its users would write it.  After
a first line that says that it is ready, each line on standard input, ``round`` or ``end``, is answered by one of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

NUM_FEATURES, NUM_CLASSES, LEARNING_RATE = 784, 10, 0.03
DISTANCE = 0.12  # of the classes' centres from 0 in each feature, as standard deviations: some rows are never right


@dataclass(frozen=True)
class Problem:
    """Clients' rows, and how much of them a round trains on."""

    features: Any  # [M, N, F]
    labels: Any  # [M, N]
    cohort: int
    steps: int
    batch: int

    @classmethod
    def make(cls, args: argparse.Namespace) -> Problem:
        """Normal rows around a centre for each class, from a seed."""
        draw = np.random.default_rng(0)
        centres = DISTANCE * draw.standard_normal((NUM_CLASSES, NUM_FEATURES), dtype=np.float32)
        labels = draw.integers(NUM_CLASSES, size=(args.clients, args.rows))
        features = draw.standard_normal((args.clients, args.rows, NUM_FEATURES), dtype=np.float32)
        for own, classes in zip(features, labels, strict=True):
            own += centres[classes]
        return cls(features, labels, args.cohort, args.steps, args.batch)

    @property
    def epochs(self) -> int:
        """Passes over a client's rows that make up the steps."""
        return self.steps // (int(self.labels.shape[1]) // self.batch)

    def cohorts(self) -> Iterator[list[int]]:
        """Who takes part, round after round."""
        draw = np.random.default_rng(1)
        while True:
            yield draw.choice(len(self.labels), self.cohort, replace=False).tolist()

    def accuracy(self, weight: Any, bias: Any) -> float:
        """Accuracy of a model ``weight [K, F]``, ``bias [K]`` on everybody's rows, client by client to spare memory."""
        weight, bias = np.asarray(weight), np.asarray(bias)
        rows = zip(self.features, self.labels, strict=True)
        return float(np.mean([((x @ weight.T + bias).argmax(-1) == y).mean() for x, y in rows]))


@dataclass(frozen=True)
class Rounds:
    """A library at work: one round more, the model after it, and the gradient steps that all clients have taken."""

    advance: Callable[[], object]
    model: Callable[[], tuple[Any, Any]]  # weight [K, F] and bias [K]; none where there is no model
    num_steps: Callable[[], int]
    packages: tuple[str, ...]


def count_steps(servers: Any = None) -> Callable[[], int]:
    """A counter of all steps of torch's optimisers in this process from now on, but for the server's."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    taken = [0]

    def count(optimiser: Any, *_: Any) -> None:
        taken[0] += optimiser is not servers

    register_optimizer_step_post_hook(count)
    return lambda: taken[0]


def of_ours(what: str, problem: Problem) -> Rounds:
    """Rounds of ``selffl`` itself, of a plain ``loop`` in PyTorch, or of the ``products`` that steps consist of.

    The products alone have no model.
    """
    import torch

    from selffl.data.federation import Rows
    from selffl.studies import speed

    num_clients, num_rows = problem.labels.shape
    rows = Rows(
        torch.from_numpy(problem.features).view(-1, NUM_FEATURES),
        torch.from_numpy(problem.labels).view(-1),
        torch.arange(num_clients + 1) * num_rows,
    )
    sizes: dict[str, Any] = {"cohort": problem.cohort, "steps": problem.steps, "batch": problem.batch}
    packages = ("torch",)
    if what == "products":
        products = speed.bare_products(NUM_FEATURES, NUM_CLASSES, **sizes)
        return Rounds(products, lambda: (None, None), int, packages)
    taken = count_steps()
    found: list[Any] = []
    make = speed.plain_loop if what == "loop" else speed.cohort_rounds
    case = make(rows, NUM_CLASSES, **sizes)

    def advance() -> None:
        found[:] = [case()]

    def model() -> tuple[Any, Any]:
        if what == "loop":
            return tuple(found[0])
        params = found[0].server.params
        return params[:-NUM_CLASSES].view(NUM_CLASSES, -1), params[-NUM_CLASSES:]

    num_steps = taken if what == "loop" else lambda: int(found[0].num_gradients.sum())
    return Rounds(advance, model, num_steps, packages if what == "loop" else ("selffl", *packages))


def of_fedjax(problem: Problem) -> Rounds:
    """FedJAX's federated averaging, clients one by one by jax.jit, as is its default."""
    import fedjax
    import jax
    import jax.numpy as jnp

    def loss(params: Any, batch: Any, rng: Any) -> Any:
        scores = batch["x"] @ params["w"] + params["b"]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(scores), batch["y"][:, None], axis=1)
        return -jnp.mean(chosen)

    taken = [0]

    class Counted(fedjax.ClientDataset):  # type: ignore[misc]
        """Its own, counting minibatches."""

        def shuffle_repeat_batch(self, *args: Any, **options: Any) -> Any:
            """As they are."""
            for batch in super().shuffle_repeat_batch(*args, **options):
                taken[0] += 1
                yield batch

    own = [Counted({"x": x, "y": y}) for x, y in zip(problem.features, problem.labels, strict=True)]
    hparams = fedjax.ShuffleRepeatBatchHParams(batch_size=problem.batch, num_steps=problem.steps, num_epochs=None)
    method = fedjax.algorithms.fed_avg.federated_averaging(
        jax.grad(loss), fedjax.optimizers.sgd(LEARNING_RATE), fedjax.optimizers.sgd(1.0), hparams
    )
    first = {"w": jnp.zeros((NUM_FEATURES, NUM_CLASSES)), "b": jnp.zeros(NUM_CLASSES)}
    state, cohorts, key = [method.init(first)], problem.cohorts(), [jax.random.PRNGKey(0)]

    def advance() -> None:
        key[0], *keys = jax.random.split(key[0], problem.cohort + 1)
        clients = [(client, own[client], each) for client, each in zip(next(cohorts), keys, strict=True)]
        state[0], _ = method.apply(state[0], clients)
        jax.block_until_ready(state[0].params)

    def model() -> tuple[Any, Any]:
        return np.asarray(state[0].params["w"]).T, state[0].params["b"]

    return Rounds(advance, model, lambda: taken[0], ("fedjax", "jax"))


def softmax_module() -> Any:
    """Softmax regression that begins at 0."""
    from torch import nn

    module = nn.Linear(NUM_FEATURES, NUM_CLASSES)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    return module


def numpy_model(module: Any) -> tuple[Any, Any]:
    """Weight and bias of a layer of torch."""
    return module.weight.detach().numpy(), module.bias.detach().numpy()


def of_pfl(problem: Problem) -> Rounds:
    """pfl-research's federated averaging in its simulation, one process."""
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    cohorts = problem.cohorts()
    own = list(zip(torch.from_numpy(problem.features), torch.from_numpy(problem.labels), strict=True))
    module = softmax_module()
    # What it asks of a module.
    module.loss = lambda x, y, is_eval=False: torch.nn.functional.cross_entropy(module(x), y)
    module.metrics = lambda x, y: {}
    of_server = torch.optim.SGD(module.parameters(), lr=1.0)
    model, taken = PyTorchModel(module, torch.optim.SGD, of_server), count_steps(of_server)
    users = iter(client for cohort in cohorts for client in cohort)
    rows = FederatedDataset(lambda user: Dataset(own[user]), lambda: next(users))
    backend = SimulatedBackend(rows, rows)
    params = NNAlgorithmParams(
        central_num_iterations=2, evaluation_frequency=1_000, train_cohort_size=problem.cohort, val_cohort_size=0
    )
    of_clients = NNTrainHyperParams(
        local_batch_size=problem.batch, local_num_epochs=problem.epochs, local_learning_rate=LEARNING_RATE
    )

    def advance() -> None:
        method = FederatedAveraging()
        method._current_central_iteration = 1  # the second of two: in the first it evaluates
        method.run(params, backend, model, of_clients, None, [])

    return Rounds(advance, lambda: numpy_model(module), taken, ("pfl", "torch"))


def of_fluke(problem: Problem) -> Rounds:
    """fluke's server and clients, without evaluation."""
    import torch
    from fluke import FlukeENV
    from fluke.client import Client
    from fluke.config import OptimizerConfigurator
    from fluke.data import FastDataLoader
    from fluke.server import Server

    taken = count_steps()
    FlukeENV().open_cache("bench")
    optimiser = OptimizerConfigurator(
        {"name": torch.optim.SGD, "lr": LEARNING_RATE}, {"name": "StepLR", "step_size": 1, "gamma": 1.0}
    )
    clients = [
        Client(
            number,
            FastDataLoader(x, y, num_labels=NUM_CLASSES, batch_size=problem.batch, shuffle=True),
            None,
            optimiser,
            torch.nn.CrossEntropyLoss(),
            local_epochs=problem.epochs,
            persistency=False,
        )
        for number, (x, y) in enumerate(
            zip(torch.from_numpy(problem.features), torch.from_numpy(problem.labels), strict=True)
        )
    ]
    server = Server(softmax_module(), None, clients)
    for client in clients:
        client.set_channel(server.channel)

    def advance() -> None:
        server.fit(1, problem.cohort / len(clients), finalize=False)

    return Rounds(advance, lambda: numpy_model(server.model), taken, ("fluke-fl", "torch"))


def of_flower(problem: Problem) -> Rounds:
    """Flower's own FedAvg in its simulation, by Ray; clients are written as in its tutorial."""
    import logging
    from queue import SimpleQueue
    from threading import Thread

    import torch
    from flwr.app import ArrayRecord, MetricRecord, RecordDict
    from flwr.app import Message as FlowerMessage
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client, server, module = ClientApp(), ServerApp(), softmax_module()
    asked: SimpleQueue[None] = SimpleQueue()
    done: SimpleQueue[None] = SimpleQueue()
    taken = [0]
    rows = torch.from_numpy(problem.features), torch.from_numpy(problem.labels)

    @client.train()
    def train(message: Any, context: Any) -> Any:
        number = int(context.node_config["partition-id"])
        (x, y), own, steps = (each[number] for each in rows), softmax_module(), 0
        own.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimiser, criterion = torch.optim.SGD(own.parameters(), lr=LEARNING_RATE), torch.nn.CrossEntropyLoss()
        for _ in range(problem.epochs):
            for chosen in torch.split(torch.randperm(len(y)), problem.batch):
                optimiser.zero_grad()
                criterion(own(x[chosen]), y[chosen]).backward()
                optimiser.step()
                steps += 1
        metrics = MetricRecord({"num-examples": len(y), "steps": steps})
        content = RecordDict({"arrays": ArrayRecord(own.state_dict()), "metrics": metrics})
        return FlowerMessage(content=content, reply_to=message)

    class InTurns(FedAvg):  # type: ignore[misc]
        """Flower's own, which begins a round when it is asked to."""

        def configure_train(self, *args: Any, **options: Any) -> Any:
            """Wait for the question."""
            asked.get()
            return super().configure_train(*args, **options)

        def aggregate_train(self, number: int, replies: Any) -> Any:
            """Say that the round is over."""
            answers = list(replies)
            taken[0] += sum(int(each.content["metrics"]["steps"]) for each in answers)
            found = super().aggregate_train(number, answers)
            module.load_state_dict(found[0].to_torch_state_dict())
            done.put(None)
            return found

    @server.main()
    def main(grid: Any, context: Any) -> None:
        InTurns(
            fraction_train=problem.cohort / len(problem.labels), fraction_evaluate=0.0,
            min_available_nodes=len(problem.labels), min_train_nodes=problem.cohort,
        ).start(grid, ArrayRecord(module.state_dict()), 1_000_000)  # fmt: skip

    logging.getLogger("flwr").setLevel(logging.ERROR)
    Thread(target=run_simulation, args=(server, client, len(problem.labels)), daemon=True).start()

    def advance() -> None:
        asked.put(None)
        done.get()

    return Rounds(advance, lambda: numpy_model(module), lambda: taken[0], ("flwr", "ray", "torch"))


LIBRARIES: dict[str, Callable[[Problem], Rounds]] = {
    **{what: partial(of_ours, what) for what in ("products", "loop", "selffl")},
    "fedjax": of_fedjax,
    "pfl": of_pfl,
    "fluke": of_fluke,
    "flower": of_flower,
}


def peak_megabytes() -> float:
    """The most that this process has had in memory."""
    status = Path("/proc/self/status")
    if status.is_file():  # the other counter begins with that of the process that started this one
        found = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(encoding="utf-8"), re.M)
        if found:
            return int(found[1]) / 1e3
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used / 1e6 if sys.platform == "darwin" else used / 1e3


def choose_threads(rounds: Rounds, cores: int) -> int:
    """Number of torch's threads that makes a round quicker: all cores, or one, as loops over small products like it."""
    torch = sys.modules.get("torch")
    seconds: dict[int, float] = {}
    for threads in (cores, 1):
        if torch is not None:
            torch.set_num_threads(threads)
        begin = time.perf_counter()
        rounds.advance()
        seconds[threads] = min(time.perf_counter() - begin, seconds.get(threads, math.inf))
    chosen = min(seconds, key=lambda threads: seconds[threads])
    if torch is None:  # which has threads of its own
        return cores
    torch.set_num_threads(chosen)
    return chosen


def main() -> None:
    """Answer until told to end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", choices=LIBRARIES)
    for name in ("clients", "rows", "cohort", "steps", "batch", "cores"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    problem = Problem.make(args)

    def answer(**content: Any) -> None:
        print(json.dumps(content), flush=True, file=out)

    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # libraries print, too
        rounds = LIBRARIES[args.library](problem)
        rounds.advance()  # compiles, starts, fills caches
        threads = choose_threads(rounds, args.cores)
        answer(ready=args.library)
        for line in sys.stdin:
            if line.strip() != "round":
                break
            begin, used = time.perf_counter(), time.process_time()
            rounds.advance()
            answer(seconds=time.perf_counter() - begin, cpu_seconds=time.process_time() - used)
        peak, (weight, bias) = peak_megabytes(), rounds.model()
        answer(
            num_steps=rounds.num_steps(),
            accuracy=None if weight is None else problem.accuracy(weight, bias),
            peak_megabytes=peak,
            threads=threads,
            versions={name: version(name) for name in rounds.packages},
        )


if __name__ == "__main__":
    main()
