"""Any torch module as a function of one flat vector of parameters, and back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor, nn

from selffl.algorithms.layers import ClassBias, Layer
from selffl.errors import ConfigError
from selffl.training.embedding import guard_embeddings, is_trained
from selffl.training.recurrent import convert_lstms, is_convertible
from selffl.training.unfold import unfold_convolutions

BIAS_TOLERANCE = 1e-3  # that a bias is added to an output is seen on numbers between 1 and 2
MAX_OWN_GROUPS = 32  # parameters of a model, up to which each may vary by a variance of its own


class FlatModel:
    """A module seen as a function of one flat vector of the parameters that it trains.

    What a module says of a row may depend on its parameters and on that row alone: statistics over a batch (BatchNorm)
    and random numbers (Dropout in training mode) are refused.
    """

    def __init__(self, module: nn.Module) -> None:
        check_parameters(module)
        kind = type(module).__name__
        for name, part in module.named_modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                raise ConfigError(
                    f"{kind} has {type(part).__name__} ({name}), whose statistics averaging over clients does not "
                    "define; expected a module of parameters alone. Use GroupNorm in its place."
                )
            if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
                raise ConfigError(
                    f"{kind} has {type(part).__name__} ({name}) with sparse gradients; expected dense ones, as methods "
                    "add whole models. Make it without sparse=True."
                )
            # ``dropout`` is the share that recurrent and attention layers leave out within themselves.
            share = part.p if isinstance(part, nn.modules.dropout._DropoutNd) else getattr(part, "dropout", 0.0)
            if part.training and isinstance(share, float) and share > 0.0:
                raise ConfigError(
                    f"{kind} has {type(part).__name__} ({name}) that leaves out {share:g} at random; expected a module "
                    "that draws no random numbers. Set it to 0, or call eval() on the module."
                )
        buffer = next((name for name, _ in module.named_buffers()), None)
        if buffer is not None:
            raise ConfigError(
                f"{kind} has buffers ({buffer}), which averaging over clients does not define; expected a module of "
                "parameters alone."
            )
        self.module = module
        # Frozen parameters stay what they are in the module: they are no part of what clients train and send.
        self._trained = {name: part for name, part in module.named_parameters() if part.requires_grad}
        self._shapes = {name: part.shape for name, part in self._trained.items()}
        if not self._shapes:
            raise ConfigError(f"{kind} has no parameters to train; expected some that require a gradient.")
        self._sizes = [shape.numel() for shape in self._shapes.values()]
        self._convolutions = [part for part in module.modules() if isinstance(part, nn.modules.conv._ConvNd)]
        self._work: dict[torch.Size, int] = {}
        self._adds_bias: dict[tuple[torch.Size, torch.dtype], bool] = {}
        self._is_vectorisable: dict[tuple[torch.Size, torch.dtype], bool] = {}
        self._alters_rows: dict[tuple[torch.Size, torch.dtype], bool] = {}  # as far as `probe_rows` has looked

    @property
    def params(self) -> Tensor:
        """The module's own trained parameters, ``[P]``."""
        return torch.cat([part.detach().reshape(-1) for part in self._trained.values()])

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Trained parameters by the module that owns them (weight and bias together), in the order they lie."""
        layers: list[Layer] = []
        start = 0
        for name, size in zip(self._shapes, self._sizes, strict=True):
            owner = name.rpartition(".")[0]
            if layers and layers[-1].name == owner:
                layers[-1] = layers[-1]._replace(stop=start + size)
            else:
                layers.append(Layer(owner, start, start + size))
            start += size
        return tuple(layers)

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Sizes of groups of parameters that may vary alike: those of one tensor; in small models, each by itself."""
        total = sum(self._sizes)
        return (1,) * total if total <= MAX_OWN_GROUPS else tuple(self._sizes)

    @cached_property
    def class_bias(self) -> ClassBias | None:
        """The bias of the last layer, if that is linear and trains one; `adds_bias` says whether it acts as a bias."""
        owners = {name.rpartition(".")[0] for name in self._trained}
        last = [(name, part) for name, part in self.module.named_modules() if name in owners][-1]
        bias = f"{last[0]}.bias".removeprefix(".")
        if not isinstance(last[1], nn.Linear) or bias not in self._trained:
            return None
        start = sum(self._sizes[: list(self._shapes).index(bias)])
        return ClassBias(start, start + last[1].out_features)

    def adds_bias(self, features: Tensor) -> bool:
        """Whether what is added to that bias is added to the outputs ``[rows, K]``, but for a number added to all."""
        bias = self.class_bias
        if bias is None:
            return False
        kind = features.shape[1:], features.dtype
        if kind not in self._adds_bias:
            params = self.params.to(features.device)
            more = torch.zeros_like(params)
            width = bias.stop - bias.start
            more[bias.start : bias.stop] = torch.linspace(1.0, 2.0, width, device=params.device)
            with torch.no_grad():
                change = self(params + more, features) - self(params, features)
            expected = more[bias.start : bias.stop].expand(len(features), -1)
            is_same = change.shape == expected.shape
            # Softmax leaves a number open that is added to all.
            error = (change - expected) if is_same else expected
            is_added = error if width == 1 else error - error[:, :1]
            self._adds_bias[kind] = bool((is_added.abs() < BIAS_TOLERANCE).all())
        return self._adds_bias[kind]

    def parts(self, params: Tensor) -> dict[str, Tensor]:
        """Views of ``params [P]`` by name, each in its shape."""
        pieces = params.split(self._sizes)  # type: ignore[no-untyped-call]
        return {name: piece.view(shape) for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)}

    def __call__(self, params: Tensor, features: Tensor) -> Tensor:
        """Outputs for ``features`` at ``params [P]``."""
        return self.at(self.parts(params), features)

    def at(self, parts: Mapping[str, Tensor], features: Tensor) -> Tensor:
        """Outputs for ``features`` with trained parameters by name."""
        outputs: Tensor = torch.func.functional_call(self.module, dict(parts), (self.protect_rows(features),))
        return outputs

    def probe_rows(self, features: Tensor) -> None:
        """Note whether the module works in place on rows such as ``features [B, ...]``, by a pass over a copy."""
        rows = features.clone()
        before = None if rows.is_inference() else rows._version
        with torch.no_grad():
            self.module(rows)
        # The count of changes sees a ReLU in place on positive numbers; the numbers see what goes past the count.
        is_same = before is not None and rows._version == before and torch.equal(rows, features)
        self._alters_rows[features.shape[1:], features.dtype] = not is_same

    def protect_rows(self, features: Tensor) -> Tensor:
        """The rows to hand to the module: a copy, unless `probe_rows` has found that the module leaves them alone."""
        return features.clone() if self._alters_rows.get((features.shape[1:], features.dtype), True) else features

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
        """A copy of the module with the parameters ``params [P]``, on their device and in their type."""
        if params.shape != (sum(self._sizes),):
            raise ConfigError(
                f"params have shape {tuple(params.shape)}; expected one vector of {sum(self._sizes)} parameters."
            )
        loaded = copy.deepcopy(self.module).to(params)
        own = dict(loaded.named_parameters())
        with torch.no_grad():
            for name, part in self.parts(params).items():
                own[name].copy_(part)
        return loaded

    def flatten(self, state: Mapping[str, Tensor]) -> Tensor:
        """A ``state_dict`` of such a module as ``[P]``, whatever the order of its entries.

        Entries of frozen parameters may be left out; given, they have to be those of the module, for they are not
        trained and never sent.
        """
        own = self.module.state_dict()
        check_entries(self.module, state, self._trained)
        for name, entry in state.items():
            if name not in self._trained and not torch.equal(entry.to(own[name]), self._expected(name, state, own)):
                raise ConfigError(
                    f"{name!r} is not trained, and that state_dict has other values for it than the module; expected "
                    "the same. Load the state_dict into the module first."
                )
        return torch.cat([state[name].detach().to(own[name]).reshape(-1) for name in self._trained])

    def _expected(self, name: str, state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> Tensor:
        """What an entry that is no trained parameter has to be: its twin if it is tied to one, else the module's."""
        twin = next((other for other in self._trained if own[other].data_ptr() == own[name].data_ptr()), None)
        return own[name] if twin is None else state[twin].to(own[name])

    @cached_property
    def lstm_width(self) -> int:
        """Hidden units of the widest LSTM that many clients can compute at once; 0 if there is none."""
        return max((part.hidden_size for part in self.module.modules() if is_convertible(part)), default=0)

    @cached_property
    def needs_loop(self) -> bool:
        """Whether there are recurrent layers of other kinds, whose kernels take one set of parameters at a time."""
        return any(isinstance(part, nn.RNNBase) and not is_convertible(part) for part in self.module.modules())

    @cached_property
    def is_convolutional(self) -> bool:
        """Whether there are convolutions over images."""
        return any(isinstance(part, nn.Conv2d) for part in self.module.modules())

    @cached_property
    def vectorised(self) -> FlatModel:
        """The model for vmap: LSTMs by kernels that take many clients, embeddings that give NaN out of range."""
        is_other = self.lstm_width or any(map(is_trained, self.module.modules()))
        return self._twin(convert_lstms, guard_embeddings) if is_other else self

    @cached_property
    def unfolded(self) -> FlatModel:
        """The model for vmap, with its convolutions as products of matrices."""
        return self._twin(convert_lstms, guard_embeddings, unfold_convolutions)

    def _twin(self, *changes: Callable[[nn.Module], None]) -> FlatModel:
        """A copy of the module after ``changes``, which has the very same parameters: frozen ones may be large."""
        module = copy.deepcopy(self.module, {id(part): part for part in self.module.parameters()})
        for change in changes:
            change(module)
        twin = FlatModel(module)
        twin._alters_rows = self._alters_rows
        return twin

    def is_vectorisable(self, params: Tensor, features: Tensor) -> bool:
        """Whether the module goes by vmap over such rows as ``features [B, ...]``: found by a pass over the first."""
        kind = features.shape[1:], features.dtype
        if kind not in self._is_vectorisable:
            try:
                with torch.no_grad():
                    torch.func.vmap(self.vectorised, randomness="error")(params[None], features[None, :1])
                self._is_vectorisable[kind] = True
            except Exception:  # a module is the user's code; if rows are at fault, the loop will say so
                self._is_vectorisable[kind] = False
        return self._is_vectorisable[kind]

    def convolution_work(self, params: Tensor, features: Tensor) -> int:
        """Multiplications that convolutions take in one pass over ``features`` at ``params [P]``."""
        if self._convolutions and features.shape not in self._work:
            products = []

            def count(layer: nn.modules.conv._ConvNd, _: tuple[Tensor, ...], outputs: Tensor) -> None:
                products.append(outputs.numel() * layer.weight[0].numel())

            hooks = [layer.register_forward_hook(count) for layer in self._convolutions]
            try:
                with torch.no_grad():
                    self(params, features)
            finally:
                for hook in hooks:
                    hook.remove()
            self._work[features.shape] = sum(products)
        return self._work.get(features.shape, 0)


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
