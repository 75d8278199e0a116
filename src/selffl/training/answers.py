"""Labels as the loss sees them, and outputs as the user reads them: in the units of the user's own table."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from selffl.data.federation import Federation, Rows
from selffl.data.preparation import Preparation
from selffl.training.blocks import Loss
from selffl.training.losses import is_of_log_rates, is_scale_equivariant
from selffl.training.metrics import Measure


@dataclass(frozen=True)
class LabelScale:
    """How a label's values are scaled for training.

    A squared or absolute error has the same minimiser whatever the unit of the label, so that values are brought to
    mean 0 and standard deviation 1 for it.  Counts are brought to mean 1: Poisson's loss keeps its minimiser, and a
    model that starts near 0 starts near the mean count.  Any other loss sees labels as they are.

    Attributes:
        mean: What is taken from a label: the mean in the training rows for values, 0 for counts.
        scale: What it is then divided by: the standard deviation for values, the mean for counts.
        is_log: Whether outputs are logarithms of expected counts, in units of the scale.
    """

    mean: float = 0.0
    scale: float = 1.0
    is_log: bool = False

    @classmethod
    def of(cls, preparation: Preparation | None, loss: Loss) -> LabelScale:
        """The scale of a run with that preparation and loss."""
        if preparation is None or preparation.label.task == "classes":
            return cls()
        if is_of_log_rates(loss):
            return cls(scale=preparation.label.mean or 1.0, is_log=True)
        return cls(preparation.label.mean, preparation.label.scale) if is_scale_equivariant(loss) else cls()

    @property
    def is_identity(self) -> bool:
        """Whether labels are taken as they are."""
        return (self.mean, self.scale) == (0.0, 1.0)

    def scale_labels(self, labels: Tensor) -> Tensor:
        """Labels in the user's units as the loss sees them, float64."""
        return labels if self.is_identity else (labels.double() - self.mean) / self.scale

    def unscale(self, values: Tensor) -> Tensor:
        """What the loss sees, in the user's units, float64."""
        return values if self.is_identity else values.double() * self.scale + self.mean

    def answers(self, outputs: Tensor) -> Tensor:
        """Outputs of a model in the user's units: values, or expected counts; scores of classes as they are."""
        return self.unscale(outputs.double().exp() if self.is_log else outputs)

    def scale_rows(self, federation: Federation) -> Federation:
        """The federation with labels as the loss sees them."""
        if self.is_identity:
            return federation

        def scaled(rows: Rows) -> Rows:
            return replace(rows, labels=self.scale_labels(rows.labels))

        parts: dict[str, Any] = {name: scaled(rows) for name, rows in federation.parts.items()}
        return replace(federation, **parts)

    def in_user_units(self, measure: Measure) -> Measure:
        """The measure of answers in the user's units, from outputs and labels as the loss sees them."""
        if self.is_identity:
            return measure
        of_rows = measure.of_rows

        def outputs_of(outputs: Tensor) -> Tensor:
            return outputs.double() + math.log(self.scale) if self.is_log else self.unscale(outputs)

        return replace(measure, of_rows=lambda outputs, labels: of_rows(outputs_of(outputs), self.unscale(labels)))

    def for_user(self, on_client: Callable[[int, Tensor, Tensor], None]) -> Callable[[int, Tensor, Tensor], None]:
        """A function of a client's outputs and labels that is handed both in the user's units."""
        return lambda client, outputs, labels: on_client(client, self.answers(outputs), self.unscale(labels))


class PreparedModel(nn.Module):
    """A trained model that takes rows, and answers, in the user's own units.

    Its input is a row of numbers as `Preparation.inputs` names them: numbers as they stand in the table, dates in
    seconds since 1970, 0 or 1 for words.  Its output is a value in the label's unit, an expected count, or a score for
    each class.

    Attributes:
        module: The model that was trained, which takes scaled inputs.
        preparation: What scales them, and what the columns and classes are called.
    """

    mean: Tensor
    spread: Tensor

    def __init__(self, module: nn.Module, preparation: Preparation, label_scale: LabelScale) -> None:
        super().__init__()
        self.module, self.preparation, self.label_scale = module, preparation, label_scale
        device = next((part.device for part in module.parameters()), torch.device("cpu"))
        self.register_buffer("mean", torch.tensor(preparation.means, device=device))
        self.register_buffer("spread", torch.tensor(preparation.scales, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Answers to rows in the user's units."""
        dtype = next((part.dtype for part in self.module.parameters()), torch.float32)
        scaled = ((x.to(self.mean) - self.mean) / self.spread).to(dtype)
        return self.label_scale.answers(self.module(scaled))


def present_model(module: nn.Module, preparation: Preparation | None, label_scale: LabelScale) -> nn.Module:
    """A model as the user gets it: in the units of the table, where rows were prepared."""
    return module if preparation is None else PreparedModel(module, preparation, label_scale)


def trained_module(model: nn.Module) -> nn.Module:
    """The module as it was trained, on scaled inputs, of a model as the user gets it."""
    return model.module if isinstance(model, PreparedModel) else model
