"""Rounds of Flower's own FedAvg in its own simulation, to be timed beside this library's; nothing of ours is in it."""

from __future__ import annotations

import logging
import math
import time
from itertools import pairwise
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn

from selffl.data.federation import Rows
from selffl.models import build


def simulated_rounds(
    rows: Rows, num_classes: int, *, steps: int, batch: int, rounds: int, learning_rate: float
) -> list[float]:
    """Seconds of rounds of Flower's own FedAvg in its simulation, clients as its users write them; all take part."""
    num_clients, num_features = len(rows.offset) - 1, math.prod(rows.array.shape[1:])
    began: list[float] = []
    client, server = ClientApp(), ServerApp()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        number = int(context.node_config["partition-id"])
        low, high = int(rows.offset[number]), int(rows.offset[number + 1])
        x, y = rows.array[low:high], rows.labels[low:high]
        module, criterion = build("softmax", num_features, num_classes), nn.CrossEntropyLoss()
        module.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimiser = torch.optim.SGD(module.parameters(), lr=learning_rate)
        left = steps
        while left:
            for chosen in torch.split(torch.randperm(len(y)), batch)[:left]:
                optimiser.zero_grad()
                criterion(module(x[chosen]), y[chosen]).backward()
                optimiser.step()
                left -= 1
        metrics = MetricRecord({"num-examples": len(y)})
        content = RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    class Timed(FedAvg):
        """Flower's own, with a look at the clock when a round begins."""

        def configure_train(self, *args: Any, **options: Any) -> Any:
            """Note the time."""
            began.append(time.perf_counter())
            return super().configure_train(*args, **options)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        del context
        first = ArrayRecord(build("softmax", num_features, num_classes).state_dict())
        strategy = Timed(fraction_evaluate=0.0, min_available_nodes=num_clients, min_train_nodes=num_clients)
        strategy.start(grid, first, rounds + 2)

    logging.getLogger("flwr").setLevel(logging.ERROR)  # it writes a page for every run
    run_simulation(server, client, num_clients)
    # The first round starts processes; the last has none behind it that says when it ended.
    return [after - before for before, after in pairwise(began[1:])]
