"""Any torch module as a function of one flat vector of parameters, and back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial, reduce
from itertools import chain, product
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from selffl.algorithms.layers import ClassBias, Head, Layer
from selffl.algorithms.norms import BatchNorm
from selffl.algorithms.population import Population
from selffl.data.named import Features, entries_of, map_entries, row_kind
from selffl.errors import ConfigError
from selffl.training.calls import call
from selffl.training.embedding import guard_embeddings, is_trained
from selffl.training.passes import (
    COUNT,
    NORMS,
    TrainingPass,
    check_parts,
    drop_statistics,
    is_normalising,
    leaves_out,
    make_answering_copy,
    make_training_copy,
    plain_attention,
    say_what_one_row_lacks,
    share_copy,
    statistics_of,
)
from selffl.training.recurrent import convert_lstms, is_convertible
from selffl.training.unfold import unfold_convolutions

SCORE_TOLERANCE = 1e-3  # of a number that is added to outputs, and of the largest of these
Precision = Literal["full", "bfloat16"]
MAX_OWN_GROUPS = 32  # parameters of a model, up to which each may vary by a variance of its own


class FlatModel:
    """A module seen as a function of one flat vector: the parameters that it trains, and behind them its statistics.

    Statistics are the running means and variances of BatchNorm in training mode.  A training pass changes them, and no
    gradient does; they travel with the parameters.  Parts in eval() mode stay as they are, and so do other buffers:
    constants.
    """

    def __init__(
        self, module: nn.Module, batch_norm: BatchNorm = "averaged", precision: Precision = "full"
    ) -> None:  # fmt: skip
        check_parameters(module)
        check_parts(module)
        kind = type(module).__name__
        self.batch_norm, self.precision = batch_norm, precision
        self._dropped: frozenset[str] = frozenset()  # entries of the module as it was given
        if batch_norm == "batch":
            module, self._dropped = drop_statistics(module)
        self.module = module
        # Frozen parameters stay what they are in the module: they are no part of what clients train and send.
        self._trained = {name: part for name, part in module.named_parameters() if part.requires_grad}
        if not self._trained:
            raise ConfigError(f"{kind} has no parameters to train; expected some that require a gradient.")
        self._statistics = statistics_of(module)
        self._shapes = {name: part.shape for name, part in (self._trained | self._statistics).items()}
        self._sizes = [shape.numel() for shape in self._shapes.values()]
        self.num_statistics = sum(part.numel() for part in self._statistics.values())
        self.num_parameters = sum(self._sizes) - self.num_statistics
        # What is known of rows, by their kind.
        self._work: dict[Hashable, int] = {}
        self._has_scores: dict[Hashable, bool] = {}
        self._ends_in_head: dict[Hashable, bool] = {}
        self._is_vectorisable: dict[Hashable, bool] = {}
        self._alters_rows: dict[Hashable, bool] = {}  # as far as `probe_rows` has looked
        self._of_threads: list[FlatModel] = []
        self.gradients: dict[Hashable, Callable[..., Tensor]] = {}  # that were made for it, by loss and way
        self.twins: dict[Hashable, Any] = {}  # of the module, for passes over the rows of many clients

    def __getstate__(self) -> dict[str, Any]:
        """Without the gradients and what they use, which are made anew for a copy."""
        return vars(self) | {"gradients": {}, "twins": {}, "_of_threads": []}

    @property
    def trained_names(self) -> tuple[str, ...]:
        """Of the parameters that are trained, in their order."""
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
        """Those of BatchNorm, where clients keep them."""
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
        name, last = self.last_layer
        weights, bias = (f"{name}.{part}".removeprefix(".") for part in ("weight", "bias"))
        names = list(self._shapes)
        if not isinstance(last, nn.Linear) or bias not in self._trained or names[names.index(bias) - 1] != weights:
            return None
        start = sum(self._sizes[: names.index(bias)])
        return ClassBias(start, start + last.out_features, start - last.weight.numel())

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

    @contextmanager
    def catch_inputs(self) -> Iterator[list[Tensor]]:
        """A list that takes what the last layer is given, call by call, as long as the context lasts."""
        caught: list[Tensor] = []

        def take(part: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
            caught.append(inputs[0] if inputs else named["input"])

        name = self.last_layer[0]
        modules = {id(module): module for module in (self.answering, self._training[0])}.values()
        hooks = [module.get_submodule(name).register_forward_pre_hook(take, with_kwargs=True) for module in modules]
        try:
            yield caught
        finally:
            for hook in hooks:
                hook.remove()

    def has_scores(self, features: Features) -> bool:
        """Whether outputs ``[rows, K]`` are that layer's, but for a number added to all.

        What is added to its bias is added to them, and twice its weights and bias make twice of them.
        """
        bias = self.class_bias
        if bias is None:
            return False
        kind = row_kind(features)
        if kind not in self._has_scores:
            features = _twice(features)
            params = self.params.to(features.device)
            more = torch.zeros_like(params)
            width = bias.stop - bias.start
            more[bias.start : bias.stop] = torch.linspace(1.0, 2.0, width, device=params.device)
            with torch.no_grad():
                before = self(params, features)
                shifted, doubled = (
                    self(params + more, features),
                    self(bias.scale_scores(params, params.new_tensor(2.0)), features),
                )
            added = more[bias.start : bias.stop].expand(len(features), -1)
            is_same = before.shape == added.shape
            errors = torch.stack([shifted - before - added, doubled - 2.0 * before]) if is_same else added
            # Softmax leaves a number open that is added to all.
            errors = errors if width == 1 else errors - errors[..., :1]
            self._has_scores[kind] = bool((errors.abs() < SCORE_TOLERANCE * (1.0 + before.abs().max())).all())
        return self._has_scores[kind]

    def ends_in_head(self, features: Features, tolerance: float) -> bool:
        """Whether outputs are W z + c ``[rows, K]``, where z is the last layer's one input and not changed by W and c.

        Found by passes over a row of ``features`` with the module's own head, and with one that is moved by 1 to 2.
        """
        head = self.head
        if head is None:
            return False
        kind = row_kind(features)
        if kind not in self._ends_in_head:
            rows = _twice(features)
            params = self.params.to(features.device)
            moved = params.clone()
            moved[head.start : head.stop] += torch.linspace(1.0, 2.0, head.stop - head.start, device=params.device)
            outputs, inputs = [], []
            with torch.no_grad():
                for each in (params, moved):
                    with self.catch_inputs() as caught:
                        outputs.append(self(each, rows))
                    inputs.append(caught)
            z = inputs[0][0]
            is_once = [len(caught) for caught in inputs] == [1, 1] and z.shape == (len(rows), head.num_features)
            expected = [head.scores(each, z) for each in (params, moved)] if is_once else []
            pairs = list(zip(outputs, expected, strict=False))
            self._ends_in_head[kind] = is_once and all(
                found.shape == right.shape and torch.allclose(found, right, rtol=tolerance, atol=tolerance)
                for found, right in pairs
            )
        return self._ends_in_head[kind]

    def parts(self, params: Tensor) -> dict[str, Tensor]:
        """Views of ``params [P]`` by name, each in its shape."""
        pieces = params.split(self._sizes)  # type: ignore[no-untyped-call]
        return {name: piece.view(shape) for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)}

    def parts_by_client(self, params: Tensor) -> dict[str, Tensor]:
        """Views of ``params [n, P]`` by name, each in its shape behind the clients."""
        pieces = params.split(self._sizes, dim=1)  # type: ignore[no-untyped-call]
        named = zip(self._shapes.items(), pieces, strict=True)
        return {name: piece.view(-1, *shape) for (name, shape), piece in named}

    def __call__(self, params: Tensor, features: Features) -> Tensor:
        """Outputs for ``features`` at ``params [P]``, as the module answers: in eval() mode."""
        return self.at(self.parts(params), features)

    def at(self, parts: Mapping[str, Tensor], features: Features) -> Tensor:
        """Outputs for ``features`` with trained parameters and statistics by name."""
        with self.plain_attention(), say_what_one_row_lacks():
            return call(self.answering, self.protect_rows(features), parts)

    def train_at(self, params: Tensor, features: Features, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Outputs of a training pass at ``params [P]``, and the statistics that it leaves; none where there are none.

        ``key [1]`` is that of the masks of dropout, where the module has any.
        """
        return self.train_with(self.parts(params), features, key)

    def train_with(
        self, parts: Mapping[str, Tensor], features: Features, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """A training pass with trained parameters and statistics by name."""

        def forward(rows: Features) -> Tensor:
            return call(self._training[0], rows, {name: parts[name] for name in self._trained})

        return self._pass(forward, parts, features, key)

    def train_borrowed(
        self, own: Mapping[str, Tensor], features: Features, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """A training pass with the module's own parameters, wherever they point, and the statistics of ``own``."""
        return self._pass(partial(call, self._training[0]), own, features, key)

    def _pass(
        self, forward: Callable[[Features], Tensor], parts: Mapping[str, Tensor], features: Features, key: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        module, through = self._training
        if module is self.module:  # nothing in it is other than when it answers
            with self.plain_attention(), self.half_products(features):
                return self.precise(forward(self.protect_rows(features))), None
        through.begin({name: parts[name] for name in self._statistics}, key)
        try:
            with self.plain_attention(), self.half_products(features), say_what_one_row_lacks():
                outputs = self.precise(forward(self.protect_rows(features)))
            left = [through.statistics[name].reshape(-1) for name in self._statistics]
        finally:
            through.begin({}, None)
        return outputs, torch.cat(left) if left else None

    def half_products(self, features: Features) -> AbstractContextManager[Any]:
        """Where torch takes products in half precision, if asked to; nothing of them is kept for another client."""
        if self.precision == "full":
            return nullcontext()
        return torch.autocast(features.device.type, torch.bfloat16, cache_enabled=False)

    def precise(self, outputs: Tensor) -> Tensor:
        """Outputs in full precision, as losses take them."""
        return outputs if self.precision == "full" else outputs.float()

    def plain_attention(self) -> AbstractContextManager[None]:
        """Where attention calls its layers, instead of the kernels that torch has for eval() mode."""
        return plain_attention() if self.may_attend else nullcontext()

    def attention_at_once(self) -> AbstractContextManager[None]:
        """Where attention takes the kernel that many clients can compute at once; others go client by client."""
        return sdpa_kernel(SDPBackend.MATH) if self.may_attend else nullcontext()

    @cached_property
    def answering(self) -> nn.Module:
        """The module in eval() mode."""
        return make_answering_copy(self.module)

    @cached_property
    def _training(self) -> tuple[nn.Module, TrainingPass]:
        return make_training_copy(self.module)

    @property
    def training_modules(self) -> tuple[nn.Module, ...]:
        """The copies of the module that training passes have called so far."""
        twins = [vars(self).get(name) for name in ("_vectorised", "unfolded")]
        found = (self._training[0], *(twin._training[0] for twin in twins if twin is not None))
        return (*found, *(twin for twin in self.twins.values() if isinstance(twin, nn.Module)))

    @cached_property
    def still(self) -> FlatModel:
        """The module in eval() mode, whose statistics are constants; for gradients of what it answers."""
        if self.num_statistics or self.mixes_rows:
            raise ConfigError(
                f"{type(self.module).__name__} normalises by batches, so that what it answers has no gradient by row; "
                "expected a model without BatchNorm. Use GroupNorm in its place."
            )
        return FlatModel(self.answering)

    @cached_property
    def leaves_out(self) -> bool:
        """Whether a training pass leaves out numbers at random, and needs a key for that."""
        return any(map(leaves_out, self.module.modules()))

    @cached_property
    def may_attend(self) -> bool:
        """Whether there may be attention: in a layer of torch's, or in a part that is not torch's own."""
        layers = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)
        return any(
            isinstance(part, layers) or not type(part).__module__.startswith("torch.nn.")
            for part in self.module.modules()
        )

    @cached_property
    def is_mostly_frozen(self) -> bool:
        """Whether more parameters are frozen than trained, as where clients train adapters."""
        return sum(part.numel() for part in self.module.parameters()) > 2 * self.num_parameters

    @cached_property
    def mixes_rows(self) -> bool:
        """Whether what is answered of a row depends on those beside it: BatchNorm without running statistics."""
        return any(is_normalising(part) and part.running_mean is None for part in self.module.modules())

    def probe_rows(self, features: Features) -> None:
        """Note whether the module works in place on rows such as ``features [B, ...]``, by a pass over a copy."""
        rows = map_entries(Tensor.clone, features)
        pairs = list(zip(entries_of(rows).values(), entries_of(features).values(), strict=True))
        before = [None if row.is_inference() else row._version for row, _ in pairs]
        with torch.no_grad(), self.plain_attention(), say_what_one_row_lacks():
            call(self.answering, rows)
        # The count of changes sees a ReLU in place on positive numbers; the numbers see what goes past the count.
        is_same = all(
            count is not None and row._version == count and torch.equal(row, given)
            for count, (row, given) in zip(before, pairs, strict=True)
        )
        self._alters_rows[row_kind(features)] = not is_same

    def probe_training(self, features: Features) -> None:
        """Refuse a module that changes its buffers when it trains on such rows, other than BatchNorm's statistics."""
        trained = self._training[0]
        before = {name: (buffer, buffer.clone(), _writes(buffer)) for name, buffer in trained.named_buffers()}
        key = torch.zeros(1, dtype=torch.int64, device=features.device) if self.leaves_out else None
        with torch.no_grad():
            self.train_with(self.own_parts(features.device), features, key)
        for name, buffer in trained.named_buffers():
            was, values, writes = before[name]
            # What has converged is written with the same values, and other ones once parameters move.
            if buffer is not was or _writes(buffer) != writes or not torch.equal(buffer, values):
                raise ConfigError(
                    f"{type(self.module).__name__} changes its buffer {name} when it trains, which averaging over "
                    "clients does not define; expected constants, and torch's BatchNorm for running statistics."
                )

    def protect_rows(self, features: Features) -> Features:
        """The rows to hand to the module: a copy, unless `probe_rows` has found that the module leaves them alone."""
        return map_entries(Tensor.clone, features) if self._alters_rows.get(row_kind(features), True) else features

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
        """Whether convolutions over images are trained; frozen ones take the rows of all clients at once."""
        return any(isinstance(part, nn.Conv2d) and part.weight.requires_grad for part in self.module.modules())

    @property
    def vectorised(self) -> FlatModel:
        """The model for vmap: LSTMs by kernels that take many clients, embeddings that give NaN out of range."""
        return self._vectorised or self

    @cached_property
    def _vectorised(self) -> FlatModel | None:  # None for itself: a model that holds itself is freed late
        is_other = self.lstm_width or any(map(is_trained, self.module.modules()))
        return self._twin(convert_lstms, guard_embeddings) if is_other else None

    @cached_property
    def unfolded(self) -> FlatModel:
        """The model for vmap, with its convolutions as products of matrices."""
        return self._twin(convert_lstms, guard_embeddings, unfold_convolutions)

    def _twin(self, *changes: Callable[[nn.Module], None]) -> FlatModel:
        """A copy of the module after ``changes``, which has the very same parameters and buffers."""
        module = share_copy(self.module)
        for change in changes:
            change(module)
        twin = FlatModel(module, precision=self.precision)
        twin._alters_rows = self._alters_rows
        return twin

    @property
    def has_only_known_parts(self) -> bool:
        """Whether all of it is torch's own layers, other than attention, and this library's, without hooks."""
        parts = list(self.module.modules())
        is_known = all(type(part).__module__.startswith(("torch.nn.modules.", "selffl.")) for part in parts)
        is_changed = any(part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part) for part in parts)
        attends = any(isinstance(part, nn.MultiheadAttention) for part in parts)
        return is_known and not attends and not is_changed

    def twins_of_threads(self, number: int) -> list[FlatModel]:
        """As many models that can train at a time: their trained parameters can be pointed elsewhere by themselves."""
        while len(self._of_threads) < number:
            kept = (part for part in self.module.parameters() if not part.requires_grad)
            memo = {id(part): part for part in chain(kept, self.module.buffers())}
            twin = FlatModel(copy.deepcopy(self.module, memo), precision=self.precision)
            twin._alters_rows = self._alters_rows
            self._of_threads.append(twin)
        return self._of_threads[:number]

    def is_vectorisable(self, params: Tensor, features: Features) -> bool:
        """Whether the module goes by vmap over such rows as ``features [B, ...]``: found by a pass over the first."""
        kind = row_kind(features)
        if kind not in self._is_vectorisable:
            try:
                with torch.no_grad(), self.attention_at_once():
                    torch.func.vmap(self.vectorised, randomness="error")(params[None], _twice(features)[None])
                self._is_vectorisable[kind] = True
            except Exception:  # a module is the user's code; if rows are at fault, the loop will say so
                self._is_vectorisable[kind] = False
        return self._is_vectorisable[kind]

    def convolution_work(self, params: Tensor, features: Features) -> int:
        """Multiplications that trained convolutions take in one pass over ``features`` at ``params [P]``."""
        parts = self.answering.modules()
        convolutions = [
            part for part in parts if isinstance(part, nn.modules.conv._ConvNd) and part.weight.requires_grad
        ]
        kind = row_kind(features), len(features)
        if convolutions and kind not in self._work:
            products = []

            def count(layer: nn.modules.conv._ConvNd, _: tuple[Tensor, ...], outputs: Tensor) -> None:
                products.append(outputs.numel() * layer.weight[0].numel())

            hooks = [layer.register_forward_hook(count) for layer in convolutions]
            try:
                with torch.no_grad():
                    self(params, _twice(features))
            finally:
                for hook in hooks:
                    hook.remove()
            self._work[kind] = sum(products) * len(features) // 2
        return self._work.get(kind, 0)


def _writes(buffer: Tensor) -> int:
    """How often a tensor was written into; of one that does not count, always the same."""
    return 0 if buffer.is_inference() else buffer._version


def _twice(features: Features) -> Features:
    """The first row, twice: what normalises by a batch needs two."""
    return features[[0, 0]]


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
