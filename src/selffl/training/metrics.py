"""What is measured of a model's answers follows from what they are: classes, two classes, values, or none of these.

Whatever the task, a row is reduced to one or two numbers at the model, which are all that is kept of it.  The first is
its *answer*: whether it is right (classes), the log-odds of class 1 (two classes), its squared error (values), else its
loss.  The second, where answers are classes, is its *log loss*: minus the logarithm of the probability that the softmax
of the outputs gives to its class.  Metrics of the user's own (`Metric`) see all outputs of a client at once, and leave
one number for each client.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from selffl.data.federation import Rows
from selffl.errors import ConfigError, one_line
from selffl.training.blocks import Loss
from selffl.training.losses import is_logistic, is_loss, is_of_log_rates
from selffl.training.losses import name_of as name_of_loss

# Where a larger number is a better one.
HIGHER_IS_BETTER = {
    "accuracy": True,
    "auc": True,
    "error": False,
    "loss": False,
    "balanced_accuracy": True,
    "log_loss": False,
}
PERCENT = ("accuracy", "balanced_accuracy")  # shown in percent


def name_of(metric: str) -> str:
    """A metric as a reader sees it."""
    return "AUC" if metric == "auc" else metric.replace("_", " ")


# Above this share of the training rows in one class, accuracy says little: always answering it scores as much.
IMBALANCED_SHARE = 0.8
LARGEST_LOG_LOSS = 100.0  # of a row whose probability is 0, as in torch's binary cross-entropy: infinity has no mean


def plain_number(value: float, digits: int = 4, *, signed: bool = False) -> str:
    """A number to so many significant digits, as people write it: 15,980 and −0.02; powers of ten only far from these.

    Examples:
        >>> plain_number(15984.2), plain_number(-0.0213, 2), plain_number(3.2e12)
        ('15,980', '−0.021', '3.2e+12')
    """
    sign = "+" if signed else ""
    short = float(f"{value:.{digits}g}")
    is_long = 10**digits <= abs(short) < 1e9
    return (f"{short:{sign},.0f}" if is_long else f"{short:{sign}.{digits}g}").replace("-", "−", 1 if short < 0 else 0)


def read_number(text: str) -> float:
    """The value of what `plain_number` has written.

    Examples:
        >>> read_number("15,980"), read_number("−0.021"), read_number("3.2e+12")
        (15980.0, -0.021, 3200000000000.0)
    """
    return float(text.replace(",", "").replace("−", "-"))


@dataclass(frozen=True)
class Measure:
    """How a task is measured.

    Attributes:
        metrics: What is reported of every client, the first of them first.
        of_rows: ``(outputs [rows, ...], labels [rows, ...])`` to the numbers of each row, ``[rows]`` each: its answer
            and, where ``log_loss`` is a metric, its log loss.
    """

    metrics: tuple[str, ...]
    of_rows: Callable[[Tensor, Tensor], tuple[Tensor, ...]]

    def averaged(self, metric: str, numbers: Sequence[Tensor], labels: Tensor) -> Tensor:
        """What a metric is the mean of (an error the root of it), row by row, from the ``numbers``, ``[rows]`` each."""
        if metric == "log_loss":
            return numbers[1]
        if metric in PERCENT and "auc" in self.metrics:  # log-odds
            return (numbers[0] > 0) == (labels.reshape(-1) > 0.5)
        return numbers[0]

    @property
    def has_classes(self) -> bool:
        """Whether it is known which class an answer is."""
        return "accuracy" in self.metrics

    def classes_of(self, labels: Tensor) -> Tensor:
        """Labels as numbers of classes, ``[rows]``."""
        flat = labels.reshape(-1)
        return (flat > 0.5).long() if labels.is_floating_point() else flat.long()


def balanced_accuracy(is_right: Tensor, classes: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """Mean over classes of the share of a class's rows that is right, of each group of rows: ``[num_groups]``.

    ``is_right``, ``classes`` and ``group`` are ``[rows]``.  NaN for a group with fewer than two classes: there it would
    be an accuracy that the constant answer has in full.
    """
    num_classes = int(classes.max()) + 1 if len(classes) else 1
    cells, cell = (group * num_classes + classes).unique(return_inverse=True)  # type: ignore[no-untyped-call]
    of_cell = torch.zeros(len(cells), dtype=torch.float64)
    recall = of_cell.index_add(0, cell, is_right.double()) / of_cell.index_add(0, cell, torch.ones_like(cell).double())
    owner = cells // num_classes
    of_group = torch.zeros(num_groups, dtype=torch.float64)
    held = of_group.index_add(0, owner, torch.ones_like(recall))
    return (of_group.index_add(0, owner, recall) / held).where(held > 1, torch.nan)


@dataclass(frozen=True)
class Majority:
    """What the constant answer scores, on the rows that models are tested on.

    Attributes:
        own: Rows of each client right by its own most frequent training class, ``[M]``; of a client without training
            rows, by the federation's.
        federation: Rows of each client right by the most frequent training class of all, ``[M]``.
        largest_share: Share of that class in the training rows of all.
    """

    own: Tensor
    federation: Tensor
    largest_share: float

    @classmethod
    def of(cls, measure: Measure, train: Rows, tested: Rows) -> Majority | None:
        """Rows right by the most frequent training class, of ties the first; none where answers are no classes."""
        if not measure.has_classes or not len(train.labels):
            return None
        labels, answers = (measure.classes_of(rows.labels.cpu()) for rows in (train, tested))
        owner, of_tested = train.owner.cpu(), tested.owner.cpu()
        num_clients = len(train.num_examples)
        counts = labels.bincount()
        largest = int(counts.argmax())
        # A cell is a class of a client: by client, then by falling count, then by class; each client's first is taken.
        cells, rows = (owner * len(counts) + labels).unique(return_counts=True)  # type: ignore[no-untyped-call]
        cells = cells[rows.sort(descending=True, stable=True).indices]
        holders, order = (cells // len(counts)).sort(stable=True)
        is_first = holders.diff(prepend=holders.new_tensor([-1])) > 0
        own = torch.full((num_clients,), largest)
        own[holders[is_first]] = cells[order][is_first] % len(counts)

        def right(of_rows: Tensor) -> Tensor:
            counts = torch.zeros(num_clients, dtype=torch.float64)
            return counts.index_add(0, of_tested, (answers == of_rows).double())

        return cls(right(own[of_tested]), right(torch.tensor(largest)), int(counts[largest]) / len(labels))


def auc(scores: Tensor, labels: Tensor) -> float:
    """Probability that a row of class 1 scores above one of class 0, ties counting half.

    By ranks: the Mann-Whitney statistic.  NaN with one class only, or where a score is NaN and has no rank.
    """
    is_one = labels.reshape(-1) > 0.5
    ones, zeros = int(is_one.sum()), int((~is_one).sum())
    if ones == 0 or zeros == 0 or bool(scores.isnan().any()):
        return float("nan")
    _, index, count = scores.unique(return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call]
    rank = count.cumsum(0).double() - (count - 1) / 2  # equal scores share the mean of their ranks
    return float((rank[index[is_one]].sum() - ones * (ones + 1) / 2) / (ones * zeros))


@dataclass(frozen=True)
class Metric:
    """A metric of the user's own, taken over all of a client's rows at once.

    Attributes:
        function: ``(outputs [rows, ...], labels [rows, ...])`` to one number, NaN where there is none; or an object
            with ``reset``, ``update`` and ``compute``, such as those of torchmetrics; or one with ``for_client``, which
            gives the function of a client, by its id.  Tensors are on the run's device.
        higher_is_better: Whether a larger number is a better one, which decides who is among the worst tenth; none:
            as the object itself says (torchmetrics does), else true.
    """

    function: Any
    higher_is_better: bool | None = None

    def __post_init__(self) -> None:
        if isinstance(self.function, type):
            name = self.function.__name__
            raise ConfigError(f"a metric is the class {name}; expected a function or an instance, {name}(…).")
        if not (callable(self.function) or self._is_stateful or hasattr(self.function, "for_client")):
            raise ConfigError(f"a metric is {self.function!r}; expected a function (outputs, labels) -> number.")
        if self.higher_is_better not in (None, True, False):
            raise ConfigError(f"higher_is_better is {self.higher_is_better!r}; expected true, false or none.")
        if self.higher_is_better is None:
            said = getattr(self.function, "higher_is_better", None)
            object.__setattr__(self, "higher_is_better", True if said is None else bool(said))

    @property
    def _is_stateful(self) -> bool:
        return all(callable(getattr(self.function, name, None)) for name in ("reset", "update", "compute"))

    def own(self) -> Metric:
        """A copy of the metric with a state of its own, whatever the user does with theirs later."""
        return Metric(copy.deepcopy(self.function), self.higher_is_better) if self._is_stateful else self

    def of_client(self, name: str, client: Hashable, outputs: Tensor, labels: Tensor) -> float:
        """The number of one client; ``name`` and ``client`` are for the message if there is none."""
        shapes = f"outputs of shape {tuple(outputs.shape)} and labels of shape {tuple(labels.shape)}, {labels.dtype}"
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                value = self._compute(client, outputs, labels)
            except Exception as error:  # a metric is the user's code
                raise ConfigError(
                    f"metric {name!r} fails for client {client!r} ({type(error).__name__}: {one_line(error)}); "
                    f"expected one number of {shapes}."
                ) from None
        # torchmetrics warns that an AUROC of one class only is meaningless, and returns 0.
        is_undefined = any("meaningless" in str(warning.message) for warning in said)
        for warning in said if not is_undefined else ():
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        try:
            return float("nan") if is_undefined else float(value)
        except (TypeError, ValueError, RuntimeError):
            what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r}"[:80]
            raise ConfigError(
                f"metric {name!r} of client {client!r} is {what}; expected one number of {shapes}. Average it."
            ) from None

    def _compute(self, client: Hashable, outputs: Tensor, labels: Tensor) -> Any:
        if hasattr(self.function, "for_client"):
            return self.function.for_client(client)(outputs, labels)
        if not self._is_stateful:
            return self.function(outputs, labels)
        device = getattr(self.function, "device", None)
        if isinstance(device, torch.device) and device != outputs.device:
            self.function.to(outputs.device)
        self.function.reset()
        self.function.update(outputs, labels)
        value = self.function.compute()
        self.function.reset()  # it keeps nothing of a client
        return value


# Columns that a run's records have anyway, and how the names of scores begin.
RESERVED_NAMES = (
    "client", "cluster", "predicted_gain", "realised_gain", "rounds", "round", "clients", "seconds",
    "gradient_evaluations", "bytes_sent", "majority_accuracy", "federation_majority_accuracy", "largest_class_share",
    "inter_variance_low", "inter_variance_high", "closing_multiple", "best_round",
)  # fmt: skip
PREFIXES = (
    "weighted_", "top10_", "worst10_", "pooled_", "global_", "personal_", "alone_", "train_", "num_", "after_",
    "with_classes_", "with_neighbours_", "validation_", "in_best_round_",
)  # fmt: skip


def own_metrics(given: Mapping[str, Any] | None) -> dict[str, Metric]:
    """The metrics that a user gives by name, once their names can be columns."""
    if not isinstance(given or {}, Mapping):
        raise ConfigError(f"metrics is a {type(given).__name__}; expected a dictionary, such as {{'f1': function}}.")
    metrics = {}
    for name, metric in (given or {}).items():
        if not (isinstance(name, str) and name.isidentifier()):
            raise ConfigError(f"a metric is called {name!r}; expected letters, digits and underscores, such as 'f1'.")
        if name in HIGHER_IS_BETTER or name in RESERVED_NAMES or name.startswith(PREFIXES) or name.endswith("variance"):
            raise ConfigError(f"a metric is called {name!r}, as something else in a run's records is; rename it.")
        metrics[name] = (metric if isinstance(metric, Metric) else Metric(metric)).own()
    return metrics


def _of_classes(outputs: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    return outputs.argmax(-1) == labels, nn.functional.cross_entropy(outputs, labels.long(), reduction="none")


def _of_two_classes(outputs: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    # The gap of two logits is their log-odds; equal ones say class 0, as argmax does.
    return _with_log_loss(outputs[..., 1] - outputs[..., 0], labels)


def _with_log_loss(log_odds: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """The log-odds of class 1 and the log loss; a label between 0 and 1 is in part of each class."""
    share = labels.reshape(-1).to(log_odds)
    of_one, of_zero = (nn.functional.softplus(z).clamp(max=LARGEST_LOG_LOSS) for z in (-log_odds, log_odds))
    return log_odds, share * of_one + (1.0 - share) * of_zero


def _of_values(outputs: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    error = (outputs.reshape(labels.shape) - labels).square()
    return (error.flatten(1).mean(1) if error.ndim > 1 else error,)


RANKED = ("accuracy", "auc", "balanced_accuracy", "log_loss")  # of two classes, where each row has a log-odds
CLASSES = Measure(("accuracy", "balanced_accuracy", "log_loss"), _of_classes)
TWO_CLASSES = Measure(RANKED, _of_two_classes)
ONE_LOGIT = Measure(RANKED, lambda logits, labels: _with_log_loss(logits.reshape(len(labels)), labels))
ONE_PROBABILITY = Measure(RANKED, lambda shares, labels: _with_log_loss(shares.reshape(len(labels)).logit(), labels))
# Under a loss that does not say from where on a score means class 1.
ONE_SCORE = Measure(("auc",), lambda scores, labels: (scores.reshape(len(labels)),))
VALUES = Measure(("error",), _of_values)
COUNTS = Measure(("error",), lambda logs, labels: _of_values(logs.exp(), labels))  # outputs are logarithms of the rates


def by_loss(loss: Loss) -> Measure:
    """The measure where no metric fits: the loss of every row, as a minibatch of one."""

    def of_rows(outputs: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        return (torch.stack([loss(outputs[row : row + 1], labels[row : row + 1]) for row in range(len(labels))]),)

    return Measure(("loss",), of_rows)


def measure_of(loss: Loss, outputs: Tensor, labels: Tensor) -> Measure:
    """The measure that fits the outputs for a few rows, the labels of all, and the loss.

    Whole numbers are classes; a single output ranks two of them.  Floating-point labels are values, unless the loss is
    binary cross-entropy, or one of the user's own and all labels are 0 or 1.  Under the loss of counts outputs are the
    logarithms of their rates.
    """
    is_single = outputs.numel() == len(outputs) and labels.numel() == len(labels)
    is_binary = is_single and bool(((labels == 0) | (labels == 1)).all())
    if is_single and is_logistic(loss):
        return ONE_LOGIT
    if is_of_log_rates(loss):
        return COUNTS if is_single or outputs.shape[1:] == labels.shape[1:] else by_loss(loss)
    if not labels.is_floating_point():
        if labels.ndim == 1 and outputs.ndim == 2 and outputs.shape[1] > 1:
            return TWO_CLASSES if outputs.shape[1] == 2 else CLASSES
        return ONE_SCORE if is_binary else by_loss(loss)
    if is_single and is_loss(loss, nn.functional.binary_cross_entropy, nn.BCELoss):
        return ONE_PROBABILITY
    if is_binary and not (_is_torchs(loss) or name_of_loss(loss)):
        return ONE_SCORE
    return VALUES if is_single or outputs.shape[1:] == labels.shape[1:] else by_loss(loss)


def _is_torchs(loss: Loss) -> bool:
    return (getattr(loss, "__module__", None) or "").startswith("torch.")
