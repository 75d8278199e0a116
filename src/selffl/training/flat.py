"""Any torch module as a function of one flat vector of parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial, wraps
from itertools import chain
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from selffl.algorithms.norms import BatchNorm
from selffl.data.named import Features, entries_of, map_entries, row_kind
from selffl.errors import ConfigError
from selffl.training.calls import call
from selffl.training.embedding import guard_embeddings, is_trained
from selffl.training.layout import Layout
from selffl.training.passes import (
    TrainingPass,
    is_normalising,
    leaves_out,
    make_answering_copy,
    make_training_copy,
    plain_attention,
    say_what_one_row_lacks,
    share_copy,
)
from selffl.training.recurrent import convert_lstms, is_convertible
from selffl.training.unfold import unfold_convolutions

SCORE_TOLERANCE = 1e-3  # of a number that is added to outputs, and of the largest of these
Precision = Literal["full", "bfloat16"]
Found = TypeVar("Found")


def once_per_kind(method: Callable[..., Found]) -> Callable[..., Found]:
    """A method of a model and rows, and more, that is asked once for rows of one kind."""

    @wraps(method)
    def asked(model: FlatModel, features: Features, *more: Any) -> Found:
        key = method.__name__, row_kind(features)
        if key not in model.known_of_rows:
            model.known_of_rows[key] = method(model, features, *more)
        return cast(Found, model.known_of_rows[key])

    return asked


class FlatModel(Layout):
    """A module seen as a function of one flat vector: its answers, its training passes, and copies for many clients."""

    def __init__(
        self, module: nn.Module, batch_norm: BatchNorm = "averaged", precision: Precision = "full"
    ) -> None:  # fmt: skip
        super().__init__(module, batch_norm)
        self.precision = precision
        self.known_of_rows: dict[tuple[str, Hashable], Any] = {}  # by what was asked, and their kind
        self._alters_rows: dict[Hashable, bool] = {}  # as far as `probe_rows` has looked
        self._of_threads: list[FlatModel] = []
        self.gradients: dict[Hashable, Callable[..., Tensor]] = {}  # that were made for it, by loss and way
        self.twins: dict[Hashable, Any] = {}  # of the module, for passes over the rows of many clients

    def __getstate__(self) -> dict[str, Any]:
        """Without the gradients and what they use, which are made anew for a copy."""
        return vars(self) | {"gradients": {}, "twins": {}, "_of_threads": []}

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

    @once_per_kind
    def has_scores(self, features: Features) -> bool:
        """Whether outputs ``[rows, K]`` are that layer's, but for a number added to all.

        What is added to its bias is added to them, and twice its weights and bias make twice of them.
        """
        bias = self.class_bias
        if bias is None:
            return False
        rows, params = _twice(features), self.params.to(features.device)
        more = torch.zeros_like(params)
        width = bias.stop - bias.start
        more[bias.start : bias.stop] = torch.linspace(1.0, 2.0, width, device=params.device)
        with torch.no_grad():
            before, shifted = self(params, rows), self(params + more, rows)
            doubled = self(bias.scale_scores(params, params.new_tensor(2.0)), rows)
        added = more[bias.start : bias.stop].expand(len(rows), -1)
        is_same = before.shape == added.shape
        errors = torch.stack([shifted - before - added, doubled - 2.0 * before]) if is_same else added
        # Softmax leaves a number open that is added to all.
        errors = errors if width == 1 else errors - errors[..., :1]
        return bool((errors.abs() < SCORE_TOLERANCE * (1.0 + before.abs().max())).all())

    @once_per_kind
    def ends_in_head(self, features: Features, tolerance: float) -> bool:
        """Whether outputs are W z + c ``[rows, K]``, where z is the last layer's one input and not changed by W and c.

        Found by passes over a row of ``features`` with the module's own head, and with one that is moved by 1 to 2.
        """
        head = self.head
        if head is None:
            return False
        rows, params = _twice(features), self.params.to(features.device)
        moved = params.clone()
        moved[head.start : head.stop] += torch.linspace(1.0, 2.0, head.stop - head.start, device=params.device)
        outputs, inputs = [], []
        with torch.no_grad():
            for each in (params, moved):
                with self.catch_inputs() as caught:
                    outputs.append(self(each, rows))
                inputs.append(caught)
        z = inputs[0][0]
        if [len(caught) for caught in inputs] != [1, 1] or z.shape != (len(rows), head.num_features):
            return False
        expected = [head.scores(each, z) for each in (params, moved)]
        return all(
            found.shape == right.shape and torch.allclose(found, right, rtol=tolerance, atol=tolerance)
            for found, right in zip(outputs, expected, strict=True)
        )

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
    def doubled(self) -> FlatModel:
        """The module in double precision, frozen parts included."""
        found = FlatModel(copy.deepcopy(self.module).double(), self.batch_norm)
        found.answering = make_answering_copy(found.module)  # now: nothing can be copied while torch transforms it
        return found

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

    @once_per_kind
    def is_vectorisable(self, features: Features, params: Tensor) -> bool:
        """Whether the module goes by vmap over such rows as ``features [B, ...]``: found by a pass over the first."""
        try:
            with torch.no_grad(), self.attention_at_once():
                torch.func.vmap(self.vectorised, randomness="error")(params[None], _twice(features)[None])
        except Exception:  # a module is the user's code; if rows are at fault, the loop will say so
            return False
        return True

    @once_per_kind
    def convolution_work(self, features: Features, params: Tensor) -> int:
        """Multiplications that trained convolutions take in a pass at ``params [P]`` over one such row."""
        products = []

        def count(layer: nn.modules.conv._ConvNd, _: tuple[Tensor, ...], outputs: Tensor) -> None:
            products.append(outputs.numel() * layer.weight[0].numel())

        hooks = [
            part.register_forward_hook(count)
            for part in self.answering.modules()
            if isinstance(part, nn.modules.conv._ConvNd) and part.weight.requires_grad
        ]
        if hooks:
            try:
                with torch.no_grad():
                    self(params, _twice(features))
            finally:
                for hook in hooks:
                    hook.remove()
        return sum(products) // 2


def _writes(buffer: Tensor) -> int:
    """How often a tensor was written into; of one that does not count, always the same."""
    return 0 if buffer.is_inference() else buffer._version


def _twice(features: Features) -> Features:
    """The first row, twice: what normalises by a batch needs two."""
    return features[[0, 0]]
