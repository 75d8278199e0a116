"""What a benchmark of adapters is made of: rows by client, and a network that was trained before on other rows."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from selffl.data.locate import cache
from selffl.state.checkpoint import load_tensors, save_tensors
from selffl.state.files import exclusive_lock

HEAD = "head"  # what the last layer of every network here is called


class Rows(NamedTuple):
    """Rows as they lie, one behind the other, and whose they are."""

    features: npt.NDArray[Any]
    labels: npt.NDArray[Any]
    client: npt.NDArray[Any]


@dataclass(frozen=True)
class Benchmark:
    """Rows of clients, and the network that they adapt; both smaller for a quick look."""

    rows: Callable[[int, bool], Rows]  # by seed, and whether small
    network: Callable[[bool], nn.Module]  # trained before; its last layer is called `HEAD`
    test_fraction: float = 0.25


def of_some_clients(rows: Rows, number: int) -> Rows:
    """Rows of the first so many clients."""
    is_chosen = np.isin(rows.client, np.unique(rows.client)[:number])
    return Rows(*(each[is_chosen] for each in rows))


Network = TypeVar("Network", bound=nn.Module)


def pretrain(
    network: Network, features: Tensor, labels: Tensor, num_steps: int, batch_size: int, rate: float, seed: int = 0
) -> Network:
    """The network, trained on rows that are no client's, and kept for the next process that asks for the same."""
    options = num_steps, batch_size, rate, seed
    place = cache() / "networks" / f"{_digest(network, features, labels, *options)}.safetensors"
    with ExitStack() as stack:
        with suppress(OSError):  # a place that cannot be written to costs time alone
            place.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(exclusive_lock(place))
        if place.is_file():
            network.load_state_dict(load_tensors(place)[0])
        else:
            _train(network, features, labels, *options)
            with suppress(OSError):
                save_tensors(place, network.state_dict(), {})
    return network.eval().requires_grad_(False)


def _digest(network: nn.Module, features: Tensor, labels: Tensor, *options: float) -> str:
    """Digest of all that a trained network depends on."""
    digest = hashlib.sha256(repr(options).encode())
    for part in (*network.state_dict().values(), features, labels):
        digest.update(part.contiguous().numpy().data)
    return digest.hexdigest()[:16]


def _train(
    network: nn.Module, features: Tensor, labels: Tensor, num_steps: int, batch_size: int, rate: float, seed: int
) -> None:
    """Train by plain AdamW, the rate up and down again in a cosine."""
    optimiser = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=0.01)
    generator = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.int64)
    network.train()
    for step in range(num_steps):
        if len(order) < batch_size:
            order = torch.randperm(len(labels), generator=generator)
        chosen, order = order[:batch_size], order[batch_size:]
        for group in optimiser.param_groups:
            group["lr"] = rate * math.sin(math.pi * (step + 1) / (num_steps + 1)) ** 2
        optimiser.zero_grad()
        nn.functional.cross_entropy(network(features[chosen]), labels[chosen]).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
