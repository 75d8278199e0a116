"""The two-level Gaussian model as a federation: section 2.1 of the paper and the synthetic studies of its appendix.

Each client's loss is the negative log-likelihood of its local estimate, Eq. (4): (theta - z_m)^2 / (2 sigma_m^2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor

from selffl.algorithms.population import Population
from selffl.algorithms.rowwise import RowwiseTask, split_in_two
from selffl.errors import ConfigError
from selffl.randomness import integers, normal, random_bits, uniform


class GaussianTask(RowwiseTask):
    """Gradient of Eq. (4) for a cohort: (theta - z_m) / sigma_m^2, Eq. (5).

    The local estimate stands for all of a client's rows, so that every minibatch is the whole data set and B = 1.
    ``key [..., clients]`` is that of noise, for methods that ask for some.  ``halve`` gives
    estimates of two halves of the rows ``[..., clients, 2, P]``, by the number of a split, and their shares of them.
    """

    def __init__(
        self, local_estimate: Tensor, intra_variance: Tensor, num_examples: Tensor, learning_rate: float | Tensor,
        key: Tensor, halve: Callable[[int], tuple[Tensor, Tensor]] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(intra_variance.shape, num_examples, learning_rate)
        self._estimate = local_estimate.reshape(-1, local_estimate.shape[-1])
        self._variance = intra_variance.reshape(-1, 1)
        self._key = key.reshape(-1, 1)
        self._halve = halve
        self._shares: Tensor | None = None  # of the rows that this task has
        self._last: tuple[Tensor, tuple[Tensor, Tensor]] | None = None

    @property
    def num_terms(self) -> Tensor:
        """1: the loss is the log-likelihood of all rows; of a half of them, its share."""
        return torch.ones_like(self.num_examples) if self._shares is None else self._shares

    def batch(self, draw: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The clients' estimates and variances, whatever the draw."""
        # A solver passes the same slots until a client leaves; gathering them anew would be half of the work.
        if self._last is None or self._last[0] is not slots:
            self._last = slots, (self._estimate[slots], self._variance[slots])
        return self._last[1]

    def noise(self, draw: int, slots: Tensor, params: Tensor) -> Tensor:
        """Standard normal numbers, keyed by client."""
        return normal(self._key[slots], "noise", draw, torch.arange(params.shape[-1])).to(params)

    def batch_gradient(self, params: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Eq. (5)."""
        estimate, variance = batch
        return (params - estimate) / variance

    def halves(self, split: int = 0) -> Self:
        """A half's loss is (theta - z)^2 / (2 sigma_m^2) with its own estimate z, and counts by its share."""
        if self._halve is None:
            raise ConfigError("this task was given one estimate a client; expected estimates of two halves beside it.")
        task = self._copy_for_halves()
        estimates, task._shares = self._halve(split)
        task._estimate = estimates.reshape(-1, estimates.shape[-1])
        task._key = torch.stack([2 * self._key, 2 * self._key + 1], dim=1).flatten(0, 1)
        task._variance, task._last = self._variance.repeat_interleave(2, dim=0), None
        return task


@dataclass(frozen=True)
class GaussianFederation:
    """Clients of the two-level model, with the truth they were drawn from; any number of repeats side by side.

    Attributes:
        global_params: θ₀ ``[..., P]``.
        personal_params: θₘ ``[..., M, P]``.
        local_estimate: z_m ``[..., M, P]``.
        intra_variance: σₘ² ``[..., M]``.
        inter_variance: σ₀² ``[...]``.
        num_examples: N_m ``[..., M]``.
        seeds: One per repeat, ``[...]``.
        learning_rate: η, or η_m ``[..., M]``.
        resample: Whether every round sees a parametric bootstrap of the data instead of the data.
        data: The rows themselves ``[..., M, max N_m, P]``, whose means are the estimates, where they were drawn.
    """

    global_params: Tensor
    personal_params: Tensor
    local_estimate: Tensor
    intra_variance: Tensor
    inter_variance: Tensor
    num_examples: Tensor
    seeds: Tensor
    learning_rate: float | Tensor
    resample: bool = False
    data: Tensor | None = None

    @classmethod
    def draw(
        cls,
        *,
        seeds: Tensor,
        num_clients: int,
        num_examples: tuple[int, int],
        global_mean: float,
        inter_variance: float,
        row_variance: float,
        learning_rate: float,
        resample: bool = False,
        with_rows: bool = False,
        dtype: torch.dtype = torch.float64,
    ) -> GaussianFederation:
        """Draw theta_m ~ N(theta_0, sigma_0^2), N_m uniform on the closed range, z_m ~ N(theta_m, row_variance/N_m).

        ``with_rows`` draws N_m rows of each client around its z_m, which stays what it is without.
        """
        client = torch.arange(num_clients)
        seed = seeds.unsqueeze(-1)
        low, high = num_examples
        count = low + integers(high - low + 1, seed, "num_examples", client)
        personal = global_mean + inter_variance**0.5 * normal(seed, "personal_params", client)
        variance = row_variance / count.to(torch.float64)  # a float over whole numbers would be float32
        estimate = personal + variance.sqrt() * normal(seed, "local_estimate", client)
        data = None
        if with_rows:
            index = torch.arange(high)
            noise = normal(seed.unsqueeze(-1), "rows", client.unsqueeze(-1), index)
            is_there = (index < count.unsqueeze(-1)).to(noise)
            noise = (noise - (noise * is_there).sum(-1, keepdim=True) / count.unsqueeze(-1)) * is_there
            data = (estimate.unsqueeze(-1) + row_variance**0.5 * noise).unsqueeze(-1).to(dtype)
        return cls(
            global_params=torch.full_like(personal[..., :1], global_mean, dtype=dtype),
            personal_params=personal.unsqueeze(-1).to(dtype),
            local_estimate=estimate.unsqueeze(-1).to(dtype),
            intra_variance=variance.to(dtype),
            inter_variance=torch.full_like(personal[..., 0], inter_variance, dtype=dtype),
            num_examples=count,
            seeds=seeds,
            learning_rate=learning_rate,
            resample=resample,
            data=data,
        )

    @property
    def shape(self) -> torch.Size:
        """The independent federations."""
        return self.seeds.shape

    @property
    def population(self) -> Population:
        """What is known of the clients: all, variances included."""
        return Population(
            self.intra_variance.shape[-1], self.intra_variance, self.inter_variance, num_examples=self.num_examples
        )

    def task(self, clients: Tensor, round_number: int) -> GaussianTask:
        """The local work of the cohort ``clients [..., C]`` in one round."""

        def of_cohort(values: Tensor) -> Tensor:
            return values.gather(-1, clients)

        index = clients.unsqueeze(-1).expand(*clients.shape, self.local_estimate.shape[-1])
        estimate = self.local_estimate.gather(-2, index)
        variance = of_cohort(self.intra_variance)
        if self.resample:
            coordinate = torch.arange(estimate.shape[-1])
            noise = normal(self.seeds[..., None, None], "bootstrap", round_number, clients.unsqueeze(-1), coordinate)
            estimate = estimate + variance.sqrt().unsqueeze(-1) * noise.to(estimate)
        count, rate = of_cohort(self.num_examples), self.learning_rate
        rate = of_cohort(rate) if isinstance(rate, Tensor) else rate
        key = random_bits(self.seeds.unsqueeze(-1), "noise", round_number, clients)
        return GaussianTask(
            estimate, variance, count, rate, key, partial(self._halve, clients, estimate, variance, count)
        )

    def _halve(
        self, clients: Tensor, estimate: Tensor, variance: Tensor, count: Tensor, split: int
    ) -> tuple[Tensor, Tensor]:
        """Estimates of two halves of each client's rows ``[..., C, 2, P]``, and their shares ``[..., C, 2]``.

        Where no rows were drawn, z_m plus and minus a noise as large as its own: two independent estimates whose mean
        it is, each as uncertain as that of half the rows (Rasines and Young, Biometrika, 2023).
        """
        key = (split,) if split else ()
        if self.data is None:
            coordinate = torch.arange(estimate.shape[-1])
            noise = normal(self.seeds[..., None, None], "halves", *key, clients.unsqueeze(-1), coordinate)
            noise = noise.to(estimate)
            noise = variance.sqrt().unsqueeze(-1) * noise
            shares = torch.full((*clients.shape, 2), 0.5).to(variance)
            return torch.stack([estimate + noise, estimate - noise], dim=-2), shares
        index = clients[..., None, None].expand(*clients.shape, *self.data.shape[-2:])
        parts = split_in_two(count)
        place = torch.arange(self.data.shape[-2]).expand(*clients.shape, -1)
        if split:  # rows come in no order, so that the first half of them is one way to cut them
            lots = uniform(self.seeds[..., None, None], "halves", split, clients.unsqueeze(-1), place)
            place = lots.where(place < count.unsqueeze(-1), torch.inf).argsort(-1).argsort(-1)
        is_first = place < parts[..., :1]
        is_half = torch.stack([is_first, ~is_first & (place < count.unsqueeze(-1))], dim=-2).to(estimate)
        means = is_half @ self.data.gather(-3, index) / parts.clamp(min=1).unsqueeze(-1)
        return means, parts.to(estimate) / count.unsqueeze(-1)
