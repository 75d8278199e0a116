"""Steps on a client's loss while it is held at its prior mean, group by group of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from selffl.algorithms.layers import sizes_of
from selffl.algorithms.local_task import StepPart
from selffl.algorithms.rowwise import RowwiseTask
from selffl.algorithms.solver import rate_of, take_linear_steps, take_step

BURN_IN = 0.5  # share of the steps before those whose mean is kept
FACTORS_AT_ONCE = 1 << 18  # of steps, clients and groups


class Hold(NamedTuple):
    """How hard clients are held at their prior means, group by group of parameters."""

    pull: Tensor  # c/N_m [..., C, G]
    sizes: list[int]  # of the groups

    @classmethod
    def of(cls, group_variances: Tensor, group_sizes: Tensor, task: RowwiseTask) -> Hold:
        """A hold by the prior variance of each group and how many parameters it has, both ``[..., C, G]``."""
        return cls(1.0 / (group_variances * task.num_terms.unsqueeze(-1)), sizes_of(group_sizes))

    def of_halves(self) -> Hold:
        """A row of a half is held as hard as one of all: ``[..., C, 1, G]``."""
        return self._replace(pull=self.pull.unsqueeze(-2))

    def draw(self, params: Tensor, centre: Tensor, share: Tensor, group: int | None) -> None:
        """Move ``params [n, P]`` by a ``share [n, G]`` of the way to the ``centre``, in place; or a group of them."""
        if group is not None:
            params.lerp_(centre, share[:, group, None])
            return
        if len(self.sizes) in (1, params.shape[-1]):
            params.lerp_(centre, share)
            return
        # Group by group: shares of every parameter would be as many numbers as the models.
        parts = zip(params.split(self.sizes, -1), centre.split(self.sizes, -1), share.split(1, -1), strict=True)  # type: ignore[no-untyped-call]
        for part, target, own in parts:
            part.lerp_(target, own)


def descend_held(
    task: RowwiseTask,
    start: Tensor,
    anchor: Tensor,
    hold: Hold,
    num_steps: int | Tensor,
    momentum: Tensor,
    rate_share: Tensor | None = None,
) -> Tensor:
    """Models ``[..., P]`` from ``start`` towards the posterior mode, held at the ``anchor``.

    Steps on the loss, each followed by the pull, implicitly, so that no strength is too much for the step size.
    Training arrives at the mean over the second half of its steps.
    """
    begin, centre = (models.reshape(-1, models.shape[-1]) for models in (start, anchor))
    factors = StepFactors(task, hold, num_steps, momentum, rate_share)

    def advance(number: int, slots: Tensor, parts: Sequence[StepPart]) -> None:
        rate, keeps, share, weight = factors.at(number, slots)
        for (params, mean, centre, velocity), gradient, group in parts:
            torch.addcmul(gradient, velocity, keeps, out=velocity)
            take_step(params, velocity, rate)
            hold.draw(params, centre, share, group)
            if number >= factors.first_kept:
                mean.lerp_(params, weight)

    states = begin, begin, centre, None
    found = take_linear_steps(task, num_steps, advance, states, result=1, group_sizes=hold.sizes)
    return found.reshape_as(start)


class Factors(NamedTuple):
    """What some steps of some clients multiply by."""

    rate: float | Tensor  # [n, 1]
    keeps: Tensor  # of the velocity [n, 1]
    shares: Tensor  # of the way to the centre, step by step [S, n, G]
    weights: Tensor  # of a step in the mean of those from half-way on [S, n, 1]


class StepFactors:
    """What steps multiply by, for each client at work: made for many steps at once, for one by one a GPU would wait."""

    def __init__(
        self, task: RowwiseTask, hold: Hold, num_steps: int | Tensor, momentum: Tensor, rate_share: Tensor | None
    ) -> None:
        self._task, self._num_steps = task, num_steps if isinstance(num_steps, int) else int(num_steps.max())
        self._pull = hold.pull.expand(*task.shape, -1).flatten(0, -2)
        self._momenta = momentum.expand(task.shape).reshape(-1, 1)
        self._rate_shares = None if rate_share is None else rate_share.expand(task.shape).reshape(-1, 1)
        skipped = torch.as_tensor(num_steps).to(self._pull).expand(task.shape).reshape(-1, 1) * BURN_IN
        self._skipped = skipped.floor()
        self.first_kept = int(num_steps * BURN_IN) if isinstance(num_steps, int) else int(self._skipped.min())
        self._known: tuple[Tensor, range, Factors] | None = None  # of these slots, for these steps

    def at(self, number: int, slots: Tensor) -> Factors:
        """Factors of one step, without the axis of steps."""
        if self._known is None or slots is not self._known[0] or number not in self._known[1]:
            self._known = self._look_ahead(number, slots)
        _, steps, found = self._known
        place = number - steps.start
        return found._replace(shares=found.shares[place], weights=found.weights[place])

    def _look_ahead(self, number: int, slots: Tensor) -> tuple[Tensor, range, Factors]:
        """Factors of the steps from ``number`` on, as many as there is memory for."""
        pull, keeps, rate = self._pull[slots], self._momenta[slots], rate_of(self._task, slots)
        if self._rate_shares is not None:
            rate = rate * self._rate_shares[slots]
        count = max(min(FACTORS_AT_ONCE // max(pull.numel(), 1), self._num_steps - number), 1)
        step = torch.arange(number, number + count, device=slots.device).reshape(-1, 1, 1)
        # The pull builds up as the momentum does, so that they balance where the posterior is highest.
        built_up = ((1.0 - keeps.double() ** (step + 1)) / (1.0 - keeps.double())).to(pull)
        held = pull * (rate * built_up)
        weights = 1.0 / ((step - self._skipped[slots]).clamp(min=0.0) + 1.0)
        return slots, range(number, number + count), Factors(rate, keeps, held / (1.0 + held), weights)
