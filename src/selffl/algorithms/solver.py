"""Local training of a whole cohort at once: the one gradient loop that every method uses."""

from __future__ import annotations

import torch
from torch import Tensor

from selffl.algorithms.contract import LocalTask


def per_row(value: float | Tensor, task: LocalTask) -> float | Tensor:
    """A number per client ``[..., clients]`` as a column ``[rows, 1]``; a plain number as it is."""
    return value.expand(task.shape).reshape(-1, 1) if isinstance(value, Tensor) else value


def rate_of(task: LocalTask, rows: Tensor, learning_rate: float | None = None) -> float | Tensor:
    """Learning rate of the clients in ``rows``: the one given, else the task's, which may differ between clients."""
    rate = per_row(task.learning_rate if learning_rate is None else learning_rate, task)
    return rate[rows] if isinstance(rate, Tensor) else rate


def descend(
    task: LocalTask,
    start: Tensor,
    num_steps: int | Tensor,
    *,
    learning_rate: float | None = None,
    penalty: float = 0.0,
    anchor: Tensor | None = None,
    first_draw: int = 0,
) -> Tensor:
    """Stochastic gradient descent from ``start [..., clients, P]``, towards an anchor if there is one.

    theta <- theta - eta (g(theta) + penalty (theta - anchor)), on minibatches ``first_draw``, ``first_draw + 1``, ...
    ``num_steps`` may differ between clients (``[..., clients]``): those that are done leave the block.
    """
    block = start.reshape(-1, start.shape[-1])
    if isinstance(num_steps, int):
        order, stops, counts = torch.arange(len(block), device=start.device), [num_steps], [len(block)]
    else:
        # Those with the most steps first: whoever is done is at the end, and leaving is a slice.
        steps, order = num_steps.expand(task.shape).reshape(-1).sort(descending=True, stable=True)
        ends, sizes = steps.unique_consecutive(return_counts=True)  # type: ignore[no-untyped-call]
        stops, counts = ends.tolist()[::-1], sizes.tolist()[::-1]
    params, anchors = block[order], None if anchor is None else anchor.expand_as(start).reshape_as(block)[order]
    ended = []
    draw = 0
    for stop, count in zip(stops, counts, strict=True):
        rows = order[: len(params)]
        rate = rate_of(task, rows, learning_rate)
        while draw < stop:
            gradient = task.gradient(params, task.batch(first_draw + draw, rows), rows)
            if anchors is not None:
                gradient = gradient + penalty * (params - anchors[: len(params)])
            params = params - rate * gradient
            draw += 1
        stay = len(params) - count
        ended.append(params[stay:])
        params = params[:stay]
    done = torch.empty_like(block)
    done[order] = torch.cat(ended[::-1])
    return done.reshape_as(start)


def descend_to_convergence(
    task: LocalTask, start: Tensor, *, tolerance: float, max_steps: int, first_draw: int = 0
) -> Tensor:
    """Gradient descent until a client's step is shorter than ``tolerance`` times its model, or ``max_steps``.

    The criterion is |theta_{s+1} - theta_s| <= tolerance * (1 + |theta_s|), client by client, looked at after every
    tenth step (looking costs more than stepping); converged clients leave the block.
    """
    params = start.reshape(-1, start.shape[-1])
    done = torch.empty_like(params)
    rows = torch.arange(len(params), device=start.device)
    for step in range(1, max_steps + 1):
        gradient = task.gradient(params, task.batch(first_draw + step - 1, rows), rows)
        moved = params - rate_of(task, rows) * gradient
        before, params = params, moved
        if step % 10 == 0 or step == max_steps:
            stays = (params - before).norm(dim=-1) > tolerance * (1.0 + before.norm(dim=-1))
            done[rows[~stays]] = params[~stays]
            rows, params = rows[stays], params[stays]
            if len(rows) == 0:
                break
    done[rows] = params
    return done.reshape_as(start)
