"""Local training of a whole cohort at once: the one gradient loop that every method uses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from selffl.algorithms.local_task import Advance, LocalTask, StepPart, Walk
from selffl.algorithms.optimisers import SGD


def per_slot(value: float | Tensor, task: LocalTask) -> float | Tensor:
    """A number per client ``[..., clients]`` as a column ``[slots, 1]``; a plain number as it is."""
    return value.expand(task.shape).reshape(-1, 1) if isinstance(value, Tensor) else value


def rate_of(task: LocalTask, slots: Tensor, learning_rate: float | None = None) -> float | Tensor:
    """Learning rate of the clients in ``slots``: the one given, else the task's, which may differ between clients."""
    rate = per_slot(task.learning_rate if learning_rate is None else learning_rate, task)
    return rate[slots] if isinstance(rate, Tensor) else rate


def take_step(params: Tensor, gradient: Tensor, rate: float | Tensor) -> None:
    """theta <- theta - eta g, in place: on small models a new block costs as much as the gradient in it."""
    if isinstance(rate, Tensor):
        params.addcmul_(gradient, rate, value=-1.0)
    else:
        params.sub_(gradient, alpha=rate)


Step = Callable[[int, Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]  # (number, slots, states) -> states


def iterate(task: LocalTask, num_steps: int | Tensor, step: Step, *states: Tensor) -> tuple[Tensor, ...]:
    """What clients have after their steps: ``step(s, slots, states)`` gives the states of those at work in step s.

    ``states`` are tensors ``[slots, ...]``, a slot for each client; the ones that ``step`` is given are copies in
    another order, which it may write into.  ``num_steps`` may differ between clients (``[..., clients]``): those that
    are done leave the block.
    """
    num_slots = len(states[0])
    if isinstance(num_steps, int):
        order, stops, counts = torch.arange(num_slots, device=states[0].device), [num_steps], [num_slots]
    else:
        # Those with the most steps first: whoever is done is at the end, and leaving is a slice.
        steps, order = num_steps.expand(task.shape).reshape(-1).sort(descending=True, stable=True)
        ends, sizes = steps.unique_consecutive(return_counts=True)  # type: ignore[no-untyped-call]
        stops, counts = ends.tolist()[::-1], sizes.tolist()[::-1]
    current = tuple(state[order] for state in states)
    ended = []
    number, left = 0, num_slots
    for stop, count in zip(stops, counts, strict=True):
        slots = order[:left]
        while number < stop:
            current = step(number, slots, current)
            number += 1
        left -= count
        ended.append([state[left:] for state in current])
        current = tuple(state[:left] for state in current)
    done = tuple(torch.empty_like(state) for state in states)
    for found, parts in zip(done, zip(*ended[::-1], strict=True), strict=True):
        found[order] = torch.cat(parts)
    return done


def take_linear_steps(
    task: LocalTask,
    num_steps: int | Tensor,
    advance: Advance,
    states: tuple[Tensor | None, ...],
    *,
    result: int = 0,
    first_draw: int = 0,
    group_sizes: Sequence[int] | None = None,
) -> Tensor:
    """The state ``[slots, P]`` number ``result`` after steps that are linear in states and gradients (`Walk`).

    Gradients are taken at the first of the ``states [slots, P]``; a state that is none begins with zeros.
    """
    begin = states[0]
    assert begin is not None
    left = torch.as_tensor(num_steps, dtype=torch.int64, device=begin.device).expand(task.shape).reshape(-1)
    walked = task.walk(Walk(left, first_draw, states, result, advance, group_sizes))
    if walked is not None:
        is_done, ended = walked
        if bool(is_done.all()):
            return ended
        num_steps = left.masked_fill(is_done, 0).reshape(task.shape)

    def step(number: int, slots: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        gradient = task.gradient(states[0], task.batch(first_draw + number, slots), slots)
        advance(number, slots, [StepPart(states, gradient)])
        return states

    whole = (torch.zeros_like(begin) if state is None else state for state in states)
    found = iterate(task, num_steps, step, *whole)[result]
    return found if walked is None else torch.where(is_done.unsqueeze(-1), ended, found)


def descend(
    task: LocalTask,
    start: Tensor,
    num_steps: int | Tensor,
    *,
    learning_rate: float | None = None,
    penalty: float = 0.0,
    anchor: Tensor | None = None,
    share: float = 1.0,
    frozen: Tensor | None = None,
    first_draw: int = 0,
) -> Tensor:
    """Stochastic gradient descent from ``start [..., clients, P]``, towards an anchor if there is one.

    theta <- theta - eta (g(theta) + penalty (theta - anchor)), on minibatches ``first_draw``, ``first_draw + 1``, ...
    With a ``share`` s below 1 theta is trained within the mixture m = s theta + (1 - s) anchor: g(theta) is s g(m).
    ``num_steps`` may differ between clients (``[..., clients]``).  Coordinates where ``frozen`` (true or false, as
    ``start`` or expandable to it) stay what they are.  The task's optimiser, where it is not plain SGD, makes a
    direction of what stands in brackets; what it remembers of earlier steps begins anew here, unless clients keep it.
    """
    block = start.reshape(-1, start.shape[-1])
    given = {"anchor": anchor, "frozen": frozen}
    names = [name for name, values in given.items() if values is not None]
    beside = [values.expand_as(start).reshape_as(block) for values in given.values() if values is not None]
    optimiser = task.optimiser
    known = None if task.remembered is None else task.remembered.take()
    remembered = [torch.zeros_like(block) for _ in range(optimiser.num_states)] if known is None else known[2]

    def advance(number: int, slots: Tensor, parts: Sequence[StepPart]) -> None:
        rate = rate_of(task, slots, learning_rate)
        made = number if known is None else known[1][slots] + number
        for states, gradient, _ in parts:
            params, own = states[0], dict(zip(names, states[1:], strict=False))
            if "anchor" in own and penalty:
                pull = task.without_statistics(params - own["anchor"])
                gradient = torch.add(gradient, pull, alpha=penalty, out=pull)
            if "frozen" in own:
                gradient = gradient.masked_fill(own["frozen"], 0.0)
            take_step(params, optimiser.direction(gradient, states[1 + len(names) :], made), rate)

    def step(number: int, slots: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        params, own = states[0], dict(zip(names, states[1:], strict=False))
        place = params if share == 1.0 else own["anchor"].lerp(params, share)
        gradient = task.gradient(place, task.batch(first_draw + number, slots), slots, own.get("frozen"))
        advance(number, slots, [StepPart(states, gradient if share == 1.0 else share * gradient)])
        return states

    if type(optimiser) is SGD and known is None and frozen is None and share == 1.0:
        return take_linear_steps(task, num_steps, advance, (block, *beside), first_draw=first_draw).reshape_as(start)
    done = iterate(task, num_steps, step, block, *beside, *remembered)
    if task.remembered is not None and known is not None:
        made = num_steps.expand(task.shape).reshape(-1) if isinstance(num_steps, Tensor) else num_steps
        task.remembered.put(known[0], made, done[1 + len(names) :])
    return done[0].reshape_as(start)


CHECK_EVERY_STEPS = 10  # between two checks whether a client has converged, which cost more than steps


def windows(task: LocalTask) -> tuple[Tensor, Tensor]:
    """Over how many steps each client's progress is measured, and every how many steps: ``[slots]`` each.

    With full batches the last of every ten steps.  A minibatch step never vanishes, but over whole epochs its noise
    cancels: with minibatches the whole epochs that make up at least ten steps, one after the other.
    """
    count = task.num_examples.expand(task.shape).reshape(-1)
    if task.is_full_batch:
        return torch.ones_like(count), torch.full_like(count, CHECK_EVERY_STEPS)
    epoch = task.steps_per_epoch.reshape(-1)
    whole = epoch * ((CHECK_EVERY_STEPS + epoch - 1) // epoch)
    return whole, whole


def descend_to_convergence(
    task: LocalTask, start: Tensor, *, tolerance: float, max_steps: int, first_draw: int = 0
) -> Tensor:
    """Gradient descent until a client gets nowhere, by ``tolerance`` times its model a step, or ``max_steps``.

    The criterion is |theta_{s+w} - theta_s| <= tolerance * w * (1 + |theta_s|), client by client, over its window of w
    steps (`windows`); converged clients leave the block.
    """
    params = start.reshape(-1, start.shape[-1])
    params = params.clone() if task.num_statistics else params  # which a pass writes into
    done = torch.empty_like(params)
    slots = torch.arange(len(params), device=start.device)
    window, period = windows(task)
    schedule = set(zip(window.tolist(), period.tolist(), strict=True))
    opens: dict[int, list[int]] = defaultdict(list)  # step: the periods whose window begins before it
    closes: dict[int, list[int]] = defaultdict(list)  # and those whose window ends after it
    for length, every in schedule:
        for last in range(every, max_steps + 1, every):
            opens[last - length + 1].append(every)
            closes[last].append(every)
    before, rate = params, rate_of(task, slots)
    for step in range(1, max_steps + 1):
        if step in opens:
            is_due = _among(opens[step], period, schedule)
            before = params if is_due is None else torch.where(is_due.unsqueeze(-1), params, before)
        params = params - rate * task.gradient(params, task.batch(first_draw + step - 1, slots), slots)
        if step in closes:
            way, size = (task.parameters(each).norm(dim=-1) for each in (params - before, before))
            stays = way > tolerance * window * (1.0 + size)
            is_due = _among(closes[step], period, schedule)
            stays = stays if is_due is None else stays | ~is_due
            if bool(stays.all()):
                continue
            done[slots[~stays]] = params[~stays]
            slots, params, before, window, period = (kept[stays] for kept in (slots, params, before, window, period))
            rate = rate_of(task, slots)
            if len(slots) == 0:
                break
    done[slots] = params
    return done.reshape_as(start)


def _among(some: list[int], period: Tensor, schedule: set[tuple[int, int]]) -> Tensor | None:
    """Which clients have one of these periods, ``[slots]``; none if there is only one to have."""
    return torch.isin(period, torch.tensor(some, device=period.device)) if len(schedule) > 1 else None
