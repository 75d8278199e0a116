"""The two-level Gaussian model as a federation: section 2.1 of the paper and the synthetic studies of its appendix.

Each client's loss is the negative log-likelihood of its local estimate, Eq. (4): (theta - z_m)^2 / (2 sigma_m^2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selffl.algorithms.population import Population
from selffl.algorithms.rowwise import RowGradients, RowwiseTask
from selffl.randomness import integers, normal


class GaussianTask(RowwiseTask):
    """Gradient of Eq. (4) for a cohort: (theta - z_m) / sigma_m^2, Eq. (5).

    The local estimate stands for all of a client's rows, so that every minibatch is the whole data set and B = 1.
    """

    def __init__(
        self, local_estimate: Tensor, intra_variance: Tensor, num_examples: Tensor, learning_rate: float | Tensor,
        data: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(intra_variance.shape, num_examples, learning_rate)
        self._estimate = local_estimate.reshape(-1, local_estimate.shape[-1])
        self._variance = intra_variance.reshape(-1, 1)
        self._data = None if data is None else data.reshape(-1, *data.shape[-2:])
        self._last: tuple[Tensor, tuple[Tensor, Tensor]] | None = None

    @property
    def num_terms(self) -> Tensor:
        """1: the loss is the log-likelihood of all rows."""
        return torch.ones_like(self.num_examples)

    def batch(self, draw: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The clients' estimates and variances, whatever the draw."""
        # A solver passes the same slots until a client leaves; gathering them anew would be half of the work.
        if self._last is None or self._last[0] is not slots:
            self._last = slots, (self._estimate[slots], self._variance[slots])
        return self._last[1]

    def batch_gradient(self, params: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Eq. (5)."""
        estimate, variance = batch
        return (params - estimate) / variance

    def batch_row_gradients(
        self, params: Tensor, batch: tuple[Tensor, Tensor], slots: Tensor, most: int
    ) -> RowGradients:
        """Gradients of all rows where rows were drawn, else of one row a coordinate, each as certain as z_m is of one.

        A row x has the loss (theta - x)^2 / (2 N_m sigma_m^2): their sum is Eq. (4), up to a constant.
        """
        _, variance = batch
        count = self.num_examples.reshape(-1)[slots]
        if self._data is None:
            single = torch.eye(params.shape[-1]).to(params) / variance.sqrt().unsqueeze(-1)
            count = torch.full_like(count, params.shape[-1])
        else:
            is_there = torch.arange(self._data.shape[-2], device=count.device) < count.unsqueeze(-1)
            single = (params.unsqueeze(-2) - self._data[slots]) / (variance * count.unsqueeze(-1)).unsqueeze(-1)
            single = single * is_there.unsqueeze(-1)
        ones = torch.ones_like(single[..., 0])
        mean, temperature = self.batch_gradient(params, batch), torch.ones_like(variance[:, 0])
        return RowGradients(mean, single, ones, count, count, temperature)


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
        """All of it, variances included."""
        return Population(self.intra_variance.shape[-1], self.intra_variance, self.inter_variance)

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
        rate = self.learning_rate
        return GaussianTask(
            estimate,
            variance,
            of_cohort(self.num_examples),
            of_cohort(rate) if isinstance(rate, Tensor) else rate,
            None
            if self.data is None
            else self.data.gather(-3, index.unsqueeze(-2).expand(*index.shape[:-1], self.data.shape[-2], -1)),
        )
