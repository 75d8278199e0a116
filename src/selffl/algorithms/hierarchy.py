"""What a method of a two-level model has learned of it: variances between and within clients, weights, gains.

Methods without such a model leave everything as it stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Generic, TypeVar

from torch import Tensor

Server = TypeVar("Server")
Upload = TypeVar("Upload")


class Hierarchy(Generic[Server, Upload]):
    """What is known of the two levels, where a method learns it; None where it does not."""

    has_inter_variance: ClassVar[bool] = False  # whether the server learns σ₀², the variance between clients
    has_group_variances: ClassVar[bool] = False  # whether it learns one of each group of parameters
    hierarchy_inputs: ClassVar[tuple[str, ...]] = ()  # fields of an upload for `intra_variance`, and for no table
    information_balance: ClassVar[float | None] = None  # of a row, in the personal posterior; None: there is none

    def inter_variance(self, server: Server) -> Tensor | None:
        """σ₀² ``[...]``, as the server has learned it; None: the method has none."""
        return None

    def inter_variance_interval(self, server: Server) -> tuple[Tensor, Tensor] | None:
        """Between what σ₀² lies with 95 % confidence ``[...]``, NaN where unknown; None: the method does not say."""
        return None

    def group_variances(self, server: Server) -> Tensor | None:
        """σ₀² of each group of the population's parameters ``[..., G]``; None: the method has one for all, or none."""
        return None

    def closing_prior(self, server: Server) -> tuple[Tensor, Tensor] | None:
        """The variance of the prior of closing visits ``[...]``, and the ratios of the groups' own to it ``[..., G]``.

        None: the method has no such prior.
        """
        return None

    def closing_multiple(self, server: Server) -> Tensor | None:
        """How many times as hard as 1/σ₀² says closing visits are held ``[...]``; None: the method has none."""
        return None

    def intra_variance(self, server: Server, clients: Tensor, recorded: Mapping[str, Tensor]) -> Tensor | None:
        """σₘ² of ``clients [..., C]``, NaN where unknown; None: the method has none.

        ``recorded`` has the fields of their uploads that the method names, ``recorded`` and ``hierarchy_inputs``.
        """
        return None

    def intra_variance_by_rows(self, server: Server, num_examples: Tensor) -> Tensor | None:
        """σₘ² of clients with so many rows ``[..., M]``; None: the server does not know it of those who are away."""
        return None

    def weights(self, server: Server, clients: Tensor, upload: Upload) -> Tensor | None:
        """What each client of the cohort weighs ``[..., C]``, where the server weighs them, relative to each other."""
        return None

    def gains(self, server: Server, num_examples: Tensor) -> Tensor | None:
        """Factor by which the others shrink each client's variance, ``[..., M]``; NaN where unknown."""
        return None
