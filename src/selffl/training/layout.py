"""Where the parameters that a module trains, and its statistics, lie in one flat vector, and back."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, reduce
from itertools import product

import torch
from torch import Tensor, nn

from selffl.algorithms.layers import ClassBias, Head, Layer
from selffl.algorithms.norms import BatchNorm
from selffl.algorithms.population import Population
from selffl.errors import ConfigError
from selffl.training.passes import (
    COUNT,
    NORMS,
    check_parts,
    drop_statistics,
    statistics_of,
)

MAX_OWN_GROUPS = 32  # parameters of a model, up to which each may vary by a variance of its own


class Layout:
    """A module, and where its numbers lie in a vector: the parameters that it trains, and behind them its statistics.

    Statistics are the running means and variances of BatchNorm in training mode.  A training pass changes them, and no
    gradient does; they travel with the parameters.  Parts in eval() mode stay as they are, and so do other buffers:
    constants.
    """

    def __init__(self, module: nn.Module, batch_norm: BatchNorm = "averaged") -> None:
        check_parameters(module)
        check_parts(module)
        self.batch_norm = batch_norm
        self._dropped: frozenset[str] = frozenset()  # entries of the module as it was given
        if batch_norm == "batch":
            module, self._dropped = drop_statistics(module)
        self.module = module
        # Frozen parameters stay what they are in the module: they are no part of what clients train and send.
        self._trained = {name: part for name, part in module.named_parameters() if part.requires_grad}
        if not self._trained:
            kind = type(module).__name__
            raise ConfigError(f"{kind} has no parameters to train; expected some that require a gradient.")
        self._statistics = statistics_of(module)
        self._shapes = {name: part.shape for name, part in (self._trained | self._statistics).items()}
        self._sizes = [shape.numel() for shape in self._shapes.values()]
        self.num_statistics = sum(part.numel() for part in self._statistics.values())
        self.num_parameters = sum(self._sizes) - self.num_statistics

    @property
    def trained_names(self) -> tuple[str, ...]:
        """Names of the parameters that are trained, in their order."""
        return tuple(self._trained)

    @property
    def params(self) -> Tensor:
        """The module's own trained parameters, and its statistics behind them: ``[P]``."""
        return torch.cat([part.detach().reshape(-1) for part in (self._trained | self._statistics).values()])

    def own_parts(self, device: torch.device) -> dict[str, Tensor]:
        """The module's own trained parameters and statistics by name, on a device: as `parts` of `params`, uncopied."""
        return {name: part.detach().to(device) for name, part in (self._trained | self._statistics).items()}

    @property
    def device(self) -> torch.device:
        """Where its parameters are."""
        return next(iter(self._trained.values())).device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the vector of its parameters."""
        return reduce(torch.promote_types, (part.dtype for part in (self._trained | self._statistics).values()))

    @property
    def num_numbers(self) -> int:
        """P, parameters and statistics."""
        return self.num_parameters + self.num_statistics

    @property
    def constants(self) -> dict[str, Tensor]:
        """Buffers that training does not change, by name; counts of minibatches are of no use to anybody."""
        buffers = self.module.named_buffers()
        return {
            name: buffer
            for name, buffer in buffers
            if name not in self._statistics and name.rpartition(".")[2] != COUNT
        }

    @property
    def layers(self) -> tuple[Layer, ...]:
        """What lies behind each other of one module (weight and bias; statistics), in the order of the modules."""
        layers: list[Layer] = []
        start = 0
        for name, size in zip(self._shapes, self._sizes, strict=True):
            owner = name.rpartition(".")[0]
            if layers and layers[-1].name == owner and start != self.num_parameters:
                layers[-1] = layers[-1]._replace(stop=start + size)
            else:
                layers.append(Layer(owner, start, start + size))
            start += size
        place = {name: number for number, (name, _) in enumerate(self.module.named_modules())}
        return tuple(sorted(layers, key=lambda layer: place[layer.name]))

    def describe(self, population: Population) -> Population:
        """What is known of a federation, with what this model is made of."""
        return replace(
            population, layers=self.layers, class_bias=self.class_bias, group_sizes=self.group_sizes,
            kept=self.kept_layers, head=self.head,
        )  # fmt: skip

    @property
    def kept_layers(self) -> tuple[Layer, ...]:
        """Layers of BatchNorm, where clients keep them."""
        if self.batch_norm != "kept":
            return ()
        norms = {name for name, part in self.module.named_modules() if type(part) in NORMS}
        return tuple(layer for layer in self.layers if layer.name in norms)

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Sizes of groups of parameters that may vary alike: those of one tensor; in small models, each by itself."""
        sizes = tuple(self._sizes[: len(self._trained)])
        return (1,) * self.num_parameters if self.num_parameters <= MAX_OWN_GROUPS else sizes

    @property
    def group_names(self) -> tuple[str, ...]:
        """What these groups are called: by their tensor, and a single parameter also by its place in it."""
        if len(self.group_sizes) == len(self._trained):
            return tuple(self._trained)
        return tuple(
            name + str(list(place)) if part.ndim else name
            for name, part in self._trained.items()
            for place in product(*map(range, part.shape))
        )

    @cached_property
    def class_bias(self) -> ClassBias | None:
        """Where the last layer's bias is, if it is linear and trains both; `has_scores` says if it makes the scores."""
        head = self.head
        return ClassBias(head.bias_start, head.stop, head.start) if head is not None and head.has_bias else None

    @cached_property
    def last_layer(self) -> tuple[str, nn.Module]:
        """The last module that trains parameters of its own, in the order of the modules, and its name."""
        owners = {name.rpartition(".")[0] for name in self._trained}
        return [(name, part) for name, part in self.module.named_modules() if name in owners][-1]

    @cached_property
    def head(self) -> Head | None:
        """The last layer, if that is linear; `selffl.training.features` says whether it comes last in a pass, too."""
        name, last = self.last_layer
        weight, bias = (f"{name}.{kind}".removeprefix(".") for kind in ("weight", "bias"))
        if not isinstance(last, nn.Linear) or weight not in self._trained:
            return None
        if last.bias is not None and bias not in self._trained:  # which is then no part of the vector
            return None
        start = sum(self._sizes[: list(self._shapes).index(weight)])
        return Head(start, last.out_features, last.in_features, bias in self._trained)

    def parts(self, params: Tensor) -> dict[str, Tensor]:
        """Views of ``params [P]`` by name, each in its shape."""
        pieces = params.split(self._sizes)  # type: ignore[no-untyped-call]
        return {name: piece.view(shape) for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)}

    def parts_by_client(self, params: Tensor) -> dict[str, Tensor]:
        """Views of ``params [n, P]`` by name, each in its shape behind the clients."""
        pieces = params.split(self._sizes, dim=1)  # type: ignore[no-untyped-call]
        named = zip(self._shapes.items(), pieces, strict=True)
        return {name: piece.view(-1, *shape) for (name, shape), piece in named}

    @contextmanager
    def borrowed(self) -> Iterator[tuple[nn.Parameter, ...]]:
        """The module's own trained parameters, to be pointed elsewhere for a while: cheaper than a functional call."""
        trained = tuple(self._trained.values())
        before = [part.data for part in trained]
        try:
            yield trained
        finally:
            for part, data in zip(trained, before, strict=True):
                part.data = data

    def load(self, params: Tensor) -> nn.Module:
        """A copy of the module with ``params [P]``, on their device and in their type, in eval() mode."""
        if params.shape != (sum(self._sizes),):
            raise ConfigError(
                f"params have shape {tuple(params.shape)}; expected one vector of {sum(self._sizes)} parameters."
            )
        loaded = copy.deepcopy(self.module).to(params)
        own = dict(loaded.named_parameters()) | dict(loaded.named_buffers())
        with torch.no_grad():
            for name, part in self.parts(params).items():
                own[name].copy_(part)
        return loaded.eval()

    def flatten(self, state: Mapping[str, Tensor]) -> Tensor:
        """A ``state_dict`` of such a module as ``[P]``, whatever the order of its entries.

        Entries of frozen parameters and constant buffers may be left out; given, they have to be those of the module,
        for they are not trained and never sent.  How many minibatches a BatchNorm has met does not matter.
        """
        own = self.module.state_dict()
        state = {name: entry for name, entry in state.items() if name not in self._dropped}
        check_entries(self.module, state, self._shapes)
        for name, entry in state.items():
            if name in self._shapes or name.rpartition(".")[2] == COUNT:
                continue
            if not torch.equal(entry.to(own[name]), self._expected_entry(name, state, own)):
                raise ConfigError(
                    f"{name!r} is not trained, and that state_dict has other values for it than the module; expected "
                    "the same. Load the state_dict into the module first."
                )
        return torch.cat([state[name].detach().to(own[name]).reshape(-1) for name in self._shapes])

    def _expected_entry(self, name: str, state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> Tensor:
        """What an entry that is no trained parameter has to be: its twin if it is tied to one, else the module's."""
        twin = next((other for other in self._trained if own[other].data_ptr() == own[name].data_ptr()), None)
        return own[name] if twin is None else state[twin].to(own[name])


def check_parameters(module: nn.Module) -> None:
    """Refuse a module whose parameters are not there yet, or are complex: a cast would drop their imaginary parts."""
    kind = type(module).__name__
    for name, part in module.named_parameters():
        if isinstance(part, nn.parameter.UninitializedParameter):
            raise ConfigError(
                f"{kind} has a parameter without a shape ({name}), as lazy modules have before their first call; "
                "expected all of them. Call the module once on a row."
            )
        if part.is_meta:
            raise ConfigError(
                f"{kind} has a parameter without values ({name}), on the meta device; expected values to start from. "
                "Make the module on the CPU."
            )
        if part.is_complex():
            raise ConfigError(
                f"{kind} has a complex parameter ({name}, {part.dtype}); expected real ones. Keep real and imaginary "
                "parts as two parameters."
            )


def check_entries(module: nn.Module, state: Mapping[str, Tensor], needed: Iterable[str]) -> None:
    """Refuse a ``state_dict`` with entries that the module has not, without those ``needed``, or of other shapes."""
    kind, own = type(module).__name__, module.state_dict()
    unexpected = [name for name in state if name not in own]
    missing = [name for name in needed if name not in state]
    for what, names in (("does not know", unexpected), ("misses", missing)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ConfigError(
                f"{kind} {what} {names[0]!r}{more} of that state_dict; expected the entries {', '.join(own)}."
            )
    for name, entry in state.items():
        if entry.shape != own[name].shape:
            raise ConfigError(
                f"{name!r} has shape {tuple(entry.shape)} in that state_dict; expected {tuple(own[name].shape)}."
            )
