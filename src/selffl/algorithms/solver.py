"""Local training of a whole cohort at once: the one gradient loop that every method uses."""

from __future__ import annotations

from collections import defaultdict

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


def _step(params: Tensor, gradient: Tensor, rate: float | Tensor) -> None:
    """theta <- theta - eta g, in place: on small models a new block costs as much as the gradient in it."""
    if isinstance(rate, Tensor):
        params.addcmul_(gradient, rate, value=-1.0)
    else:
        params.sub_(gradient, alpha=rate)


def descend(
    task: LocalTask,
    start: Tensor,
    num_steps: int | Tensor,
    *,
    learning_rate: float | None = None,
    penalty: float = 0.0,
    anchor: Tensor | None = None,
    frozen: Tensor | None = None,
    first_draw: int = 0,
) -> Tensor:
    """Stochastic gradient descent from ``start [..., clients, P]``, towards an anchor if there is one.

    theta <- theta - eta (g(theta) + penalty (theta - anchor)), on minibatches ``first_draw``, ``first_draw + 1``, ...
    ``num_steps`` may differ between clients (``[..., clients]``): those that are done leave the block.  Coordinates
    where ``frozen`` (true or false, as ``start`` or expandable to it) stay what they are.
    """
    block = start.reshape(-1, start.shape[-1])
    if isinstance(num_steps, int):
        order, stops, counts = torch.arange(len(block), device=start.device), [num_steps], [len(block)]
    else:
        # Those with the most steps first: whoever is done is at the end, and leaving is a slice.
        steps, order = num_steps.expand(task.shape).reshape(-1).sort(descending=True, stable=True)
        ends, sizes = steps.unique_consecutive(return_counts=True)  # type: ignore[no-untyped-call]
        stops, counts = ends.tolist()[::-1], sizes.tolist()[::-1]

    def in_order(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.expand_as(start).reshape_as(block)[order]

    params, anchors, still = block[order], in_order(anchor), in_order(frozen)
    ended = []
    draw = 0
    for stop, count in zip(stops, counts, strict=True):
        rows = order[: len(params)]
        rate = rate_of(task, rows, learning_rate)
        while draw < stop:
            gradient = task.gradient(params, task.batch(first_draw + draw, rows), rows)
            if anchors is not None:
                pull = params - anchors[: len(params)]
                gradient = torch.add(gradient, pull, alpha=penalty, out=pull)
            if still is not None:
                gradient = gradient.masked_fill(still[: len(params)], 0.0)
            _step(params, gradient, rate)
            draw += 1
        stay = len(params) - count
        ended.append(params[stay:])
        params = params[:stay]
    done = torch.empty_like(block)
    done[order] = torch.cat(ended[::-1])
    return done.reshape_as(start)


LOOK = 10  # steps between two looks at whether a client has converged, which cost more than steps


def windows(task: LocalTask) -> tuple[Tensor, Tensor]:
    """Over how many steps each client's progress is measured, and every how many steps: ``[rows]`` each.

    With full batches the last of every ten steps.  A minibatch step never vanishes, but over whole epochs its noise
    cancels: with minibatches the whole epochs that make up at least ten steps, one after the other.
    """
    count = task.num_examples.expand(task.shape).reshape(-1)
    if task.is_full_batch:
        return torch.ones_like(count), torch.full_like(count, LOOK)
    epoch = (count + task.batch_size - 1) // task.batch_size
    whole = epoch * ((LOOK + epoch - 1) // epoch)
    return whole, whole


def descend_to_convergence(
    task: LocalTask, start: Tensor, *, tolerance: float, max_steps: int, first_draw: int = 0
) -> Tensor:
    """Gradient descent until a client gets nowhere, by ``tolerance`` times its model a step, or ``max_steps``.

    The criterion is |theta_{s+w} - theta_s| <= tolerance * w * (1 + |theta_s|), client by client, over its window of w
    steps (`windows`); converged clients leave the block.
    """
    params = start.reshape(-1, start.shape[-1])
    done = torch.empty_like(params)
    rows = torch.arange(len(params), device=start.device)
    window, period = windows(task)
    schedule = set(zip(window.tolist(), period.tolist(), strict=True))
    opens: dict[int, list[int]] = defaultdict(list)  # step: the periods whose window begins before it
    closes: dict[int, list[int]] = defaultdict(list)  # and those whose window ends after it
    for length, every in schedule:
        for last in range(every, max_steps + 1, every):
            opens[last - length + 1].append(every)
            closes[last].append(every)
    before, rate = params, rate_of(task, rows)
    for step in range(1, max_steps + 1):
        if step in opens:
            is_due = _among(opens[step], period, schedule)
            before = params if is_due is None else torch.where(is_due.unsqueeze(-1), params, before)
        params = params - rate * task.gradient(params, task.batch(first_draw + step - 1, rows), rows)
        if step in closes:
            stays = (params - before).norm(dim=-1) > tolerance * window * (1.0 + before.norm(dim=-1))
            is_due = _among(closes[step], period, schedule)
            stays = stays if is_due is None else stays | ~is_due
            if bool(stays.all()):
                continue
            done[rows[~stays]] = params[~stays]
            rows, params, before, window, period = (kept[stays] for kept in (rows, params, before, window, period))
            rate = rate_of(task, rows)
            if len(rows) == 0:
                break
    done[rows] = params
    return done.reshape_as(start)


def _among(some: list[int], period: Tensor, schedule: set[tuple[int, int]]) -> Tensor | None:
    """Which clients have one of these periods, ``[rows]``; none if there is only one to have."""
    return torch.isin(period, torch.tensor(some, device=period.device)) if len(schedule) > 1 else None
