"""What a module does in training and not when it answers: BatchNorm's statistics, and dropout by masks that have keys.

A training pass has no memory here.  It is given the running statistics and gives them back; its masks follow from a
key.  So a pass is a function, for one client or for a whole cohort under vmap.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TypeGuard

import torch
from torch import Tensor, nn

from selffl.errors import ConfigError, DataError
from selffl.randomness import uniform

STATISTICS = ("running_mean", "running_var")
COUNT = "num_batches_tracked"  # which nothing depends on that has a momentum
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
TOO_FEW = "Expected more than 1 value per channel"  # how torch refuses a batch that has no spread


class TrainingPass:
    """What one pass is given, and what it leaves.

    Attributes:
        statistics: Running statistics by name, which layers replace by those after the pass.
        key: Of the masks ``[1]``; none where nothing is left out.
    """

    def __init__(self) -> None:
        self.begin({}, None)

    def begin(self, statistics: dict[str, Tensor], key: Tensor | None) -> None:
        """A new pass."""
        self.statistics, self.key, self._num_masks = statistics, key, 0

    def mask(self, shape: torch.Size, share: float, device: torch.device) -> Tensor:
        """True where a number is kept: the next mask of the pass, which leaves out that ``share``."""
        if self.key is None:
            raise ConfigError("a training pass leaves out numbers at random and was given no key; expected one.")
        place = torch.arange(shape.numel(), device=device)
        lots = uniform(self.key, "mask", self._num_masks, place).reshape(shape)
        self._num_masks += 1
        return lots >= share


def normalise(layer: nn.BatchNorm1d, own: TrainingPass, name: str, inputs: Tensor) -> Tensor:
    """What BatchNorm makes of a minibatch in training; the running statistics go through the pass, if it has any."""
    layer._check_input_dim(inputs)
    names = [f"{name}.{kind}".removeprefix(".") for kind in STATISTICS]
    before = [own.statistics[each].detach().clone() for each in names if each in own.statistics]
    mean, variance = before or (None, None)
    if inputs.dtype == torch.bfloat16 and torch.is_autocast_enabled(inputs.device.type):
        inputs = inputs.float()  # as statistics, scale and shift are: under vmap there is no kernel for both
    found = nn.functional.batch_norm(
        inputs, mean, variance, layer.weight, layer.bias, True, layer.momentum or 0.0, layer.eps
    )
    own.statistics.update(zip(names, before, strict=False))
    return found


def drop_out(layer: nn.Dropout, own: TrainingPass, inputs: Tensor) -> Tensor:
    """What dropout makes of a minibatch in training: whole channels are left out where that is its kind."""
    shape = inputs.shape
    if not isinstance(layer, nn.Dropout):
        spatial = {nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}[type(layer)]
        shape = torch.Size((*inputs.shape[:-spatial], *[1] * spatial))
    scale = 1.0 / (1.0 - layer.p) if layer.p < 1.0 else 0.0
    return inputs * (own.mask(shape, layer.p, inputs.device).to(inputs.dtype) * scale)


def is_normalising(part: nn.Module) -> TypeGuard[nn.BatchNorm1d]:
    """Whether a part normalises by its minibatch when it trains."""
    return isinstance(part, NORMS) and type(part) in NORMS and (part.training or part.running_mean is None)


def leaves_out(part: nn.Module) -> TypeGuard[nn.Dropout]:
    """Whether a part leaves out numbers at random when it trains."""
    return isinstance(part, DROPOUTS) and type(part) in DROPOUTS and part.training and part.p > 0.0


def statistics_of(module: nn.Module) -> dict[str, Tensor]:
    """Running statistics that training changes, by name; those of parts in eval() mode are constants."""
    return {
        f"{name}.{kind}".removeprefix("."): getattr(part, kind)
        for name, part in module.named_modules()
        if is_normalising(part) and part.running_mean is not None
        for kind in STATISTICS
    }


def check_parts(module: nn.Module) -> None:
    """Refuse parts whose training cannot be told apart by client, or draws random numbers that have no key."""
    kind = type(module).__name__
    for name, part in module.named_modules():
        own = type(part).__name__
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and (part.training or part.running_mean is None):
            if type(part) not in NORMS:
                raise ConfigError(
                    f"{kind} has {own} ({name}), a BatchNorm of its own kind; expected one of torch's, whose "
                    "statistics are known, or one in eval() mode."
                )
            if part.running_mean is not None and part.momentum is None:
                raise ConfigError(
                    f"{kind} has {own} ({name}) with momentum=None, which counts minibatches since the beginning; "
                    "expected a momentum such as 0.1, for clients do not count alike."
                )
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise ConfigError(
                f"{kind} has {own} ({name}) with sparse gradients; expected dense ones, as methods add whole models. "
                "Make it without sparse=True."
            )
        # ``dropout`` is the share that recurrent and attention layers leave out within themselves.
        is_dropout = isinstance(part, nn.modules.dropout._DropoutNd)
        share = part.p if is_dropout else getattr(part, "dropout", 0.0)
        if part.training and isinstance(share, float) and share > 0.0 and type(part) not in DROPOUTS:
            raise ConfigError(
                f"{kind} has {own} ({name}) that leaves out {share:g} at random within itself; expected nn.Dropout, "
                "whose masks have keys. Set it to 0, or call eval() on that part."
            )


def share_copy(module: nn.Module) -> nn.Module:
    """A copy of the modules with the very same parameters and buffers: frozen ones may be large."""
    return copy.deepcopy(module, {id(part): part for part in chain(module.parameters(), module.buffers())})


def make_training_copy(module: nn.Module) -> tuple[nn.Module, TrainingPass]:
    """A module whose BatchNorm and dropout go by a pass, and that pass; the module itself where it has neither."""
    own = TrainingPass()
    if not any(is_normalising(part) or leaves_out(part) for part in module.modules()):
        return module, own
    twin = share_copy(module)
    for name, part in twin.named_modules():
        if is_normalising(part):
            part.forward = partial(normalise, part, own, name)  # type: ignore[method-assign]
        elif leaves_out(part):
            part.forward = partial(drop_out, part, own)  # type: ignore[method-assign]
    return twin, own


def make_answering_copy(module: nn.Module) -> nn.Module:
    """The module in eval() mode; itself, where all of it is."""
    return share_copy(module).eval() if any(part.training for part in module.modules()) else module


def drop_statistics(module: nn.Module) -> tuple[nn.Module, frozenset[str]]:
    """A copy that normalises by batches alone, also when it answers, and the names of entries that it has not."""
    bare = copy.deepcopy(module)
    for part in bare.modules():
        if is_normalising(part):
            part.track_running_stats = False
            part.running_mean = part.running_var = part.num_batches_tracked = None
    return bare, frozenset(module.state_dict()) - frozenset(bare.state_dict())


@contextmanager
def plain_attention() -> Iterator[None]:
    """Attention by its plain operations: the kernels that torch has for eval() mode take one set of parameters."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def say_what_one_row_lacks() -> Iterator[None]:
    """Say what is wrong with one row by itself, which has no spread to be normalised by."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith(TOO_FEW):
            raise
        raise DataError(
            "one row by itself cannot be normalised by its batch; expected two rows or more at a time. Train with a "
            "batch_size of 2 or more, and answer single rows with batch_norm='averaged' or 'kept'."
        ) from None
