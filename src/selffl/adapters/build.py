"""A pre-trained module with adapters, and back: what is trained, what is frozen, and a plain module of both."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import nn

from selffl.adapters.attention import PROJECTIONS, AdaptedAttention, check_attention
from selffl.adapters.layers import Adapted, Draw, adapted_kind, problem_with
from selffl.adapters.prefix import PrefixAttention
from selffl.algorithms.options import check_integer, check_number
from selffl.data.split import check_seed
from selffl.errors import ConfigError, first_few

MAX_SHOWN = 8  # names in a message


def freeze(module: nn.Module) -> nn.Module:
    """A copy of a module whose parameters are the very same numbers, not to be trained; the module stays as it is.

    BatchNorm keeps the statistics that it has.
    """
    frozen = {id(part): nn.Parameter(part.detach(), requires_grad=False) for part in module.parameters()}
    twin = copy.deepcopy(module, frozen)
    for part in twin.modules():
        if isinstance(part, nn.modules.batchnorm._NormBase):
            part.eval()
    return twin


def train_only(module: nn.Module, names: Sequence[str]) -> nn.Module:
    """A copy of a module of which clients train and send some parameters; all others are frozen.

    Args:
        module: a pre-trained module; it is left as it is.
        names: of parameters, or of parts with all their parameters; an ending such as ``bias`` stands for all names
            that end in ``.bias``.

    Examples:
        >>> from torch import nn
        >>> from selffl.adapters import train_only
        >>> body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> [name for name, part in train_only(body, ["2"]).named_parameters() if part.requires_grad]
        ['2.weight', '2.bias']
    """
    twin = freeze(module)
    unfreeze(twin, names)
    return twin


def bias_only(module: nn.Module) -> nn.Module:
    """A copy of a module of which clients train and send nothing but biases.

    Ben Zaken, Ravfogel and Goldberg, BitFit, ACL 2022.

    Examples:
        >>> from torch import nn
        >>> from selffl.adapters import bias_only
        >>> body = bias_only(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
        >>> [name for name, part in body.named_parameters() if part.requires_grad]
        ['0.bias', '2.bias']
    """
    return train_only(module, ["bias"])


def unfreeze(module: nn.Module, names: Sequence[str]) -> None:
    """Let parameters be trained, by copies of their own."""
    own = dict(module.named_parameters())
    for name in parameters_named(module, names):
        owner, _, kind = name.rpartition(".")
        if not own[name].requires_grad:
            part = nn.Parameter(own[name].detach().clone(), requires_grad=True)
            module.get_submodule(owner)._parameters[kind] = part


def parameters_named(module: nn.Module, names: Sequence[str]) -> list[str]:
    """Parameters that names or endings stand for; a name that stands for none is refused."""
    if isinstance(names, str):
        raise ConfigError(f"names are {names!r}; expected a list of names, such as [{names!r}].")
    own, found = [name for name, _ in module.named_parameters()], []
    for name in names:
        chosen = [each for each in own if matches(each, name) or f".{name}." in f".{each}"]
        if not chosen:
            raise ConfigError(
                f"{type(module).__name__} has no parameters named {name!r}; expected names or endings among "
                f"{first_few(own, MAX_SHOWN)}."
            )
        found += chosen
    return list(dict.fromkeys(found))


def matches(name: str, target: str) -> bool:
    """Whether a target is that name or its ending, as in peft."""
    return name == target or name.endswith(f".{target}")


def lora(
    module: nn.Module,
    rank: int = 8,
    targets: Sequence[str] | None = None,
    *,
    alpha: float | None = None,
    also: Sequence[str] | None = None,
    train_a: bool = False,
    seed: int = 0,
) -> nn.Module:
    """A copy of a pre-trained module whose layers have changes of low rank: W + (alpha/r) B A.

    Frozen weights are shared with ``module``, which is left as it is; the whole cohort uses them, and they are never
    sent.  Clients train B.  A is drawn from the seed and the same for all: the mean of the clients' B then is the mean
    of their changes, and a prior on B one on the change.  With ``train_a`` both are trained, and neither is exact any
    more: the mean of B times the mean of A is not the mean of the changes.

    Args:
        module: the pre-trained module.
        rank: r.
        targets: names of layers, or their endings, such as ``["query", "value"]``: linear layers, convolutions,
            embeddings, and attention of torch's (all its projections, or ``self_attn.value`` alone).  None: attention
            and every linear layer and convolution that has room for the rank, except those named by ``also``.
        alpha: the change is multiplied by alpha/r.  None: r, a factor of 1.
        also: names of parts that are trained as a whole, as a new head is.  None: the last linear layer.
        train_a: whether to train A, too.
        seed: of A.

    Examples:
        >>> from torch import nn
        >>> from selffl.adapters import lora
        >>> body = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        >>> adapted = lora(body, rank=4)
        >>> [name for name, part in adapted.named_parameters() if part.requires_grad]
        ['0.lora_B.weight', '2.weight', '2.bias']
    """
    check_integer("rank", rank, 1)
    if alpha is not None:
        check_number("alpha", alpha, above=0.0, alternative=", or none")
    check_seed(seed)
    twin = freeze(module)
    whole = _last_linear(twin) if also is None else also
    parameters_named(twin, whole)  # before layers get other names
    chosen = _chosen(twin, targets, whole, rank)

    def adapt(name: str, part: nn.Module) -> nn.Module:
        if (problem := problem_with(name, part, rank)) is not None:
            raise ConfigError(problem)
        kind = cast("type[Adapted]", adapted_kind(part))
        return kind(part, rank, (rank if alpha is None else alpha) / rank, Draw(seed, name), train_a)

    for name, inner in chosen.items():
        part = twin.get_submodule(name)
        if isinstance(part, nn.MultiheadAttention):
            check_attention(name, part)
            new: nn.Module = AdaptedAttention(part, _attention_adapter(name, inner, adapt)).train(part.training)
        else:
            new = adapt(name, part).train(part.training)
        twin = _replace(twin, name, new)
    unfreeze(twin, whole)
    return twin


def prefix(
    module: nn.Module,
    length: int = 8,
    targets: Sequence[str] | None = None,
    *,
    also: Sequence[str] | None = None,
    seed: int = 0,
) -> nn.Module:
    """A copy of a pre-trained module whose attention also meets learned keys and values.

    Clients train and send the values, which begin at 0: the copy answers as ``module`` does.  Keys are drawn from the
    seed, the same for all, and frozen; they have a softmax of their own, so that attention is linear in the values.

    Args:
        module: the pre-trained module; it is left as it is, and shares its frozen weights.
        length: how many keys and values each attention has.
        targets: names of attention layers of torch's, or their endings.  None: all of them.
        also: names of parts that are trained as a whole.  None: the last linear layer.
        seed: of the keys.

    Examples:
        >>> from torch import nn
        >>> from selffl.adapters import prefix
        >>> layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        >>> adapted = prefix(nn.Sequential(layer, nn.Linear(16, 4)), length=3)
        >>> [name for name, part in adapted.named_parameters() if part.requires_grad]
        ['0.self_attn.prefix_values.weight', '1.weight', '1.bias']
    """
    check_integer("length", length, 1)
    check_seed(seed)
    twin = freeze(module)
    whole = _last_linear(twin) if also is None else also
    parameters_named(twin, whole)
    inside = {name: part for name, part in twin.named_modules() if isinstance(part, nn.MultiheadAttention)}
    if not inside:
        raise ConfigError(
            f"{type(module).__name__} has no attention of torch's; expected nn.MultiheadAttention. Use "
            "selffl.adapters.lora, which adapts linear layers, too."
        )
    for target in _listed(targets):
        if not any(matches(name, target) for name in inside):
            raise ConfigError(
                f"{type(module).__name__} has no attention named {target!r}; expected names or endings among "
                f"{first_few(list(inside), MAX_SHOWN)}."
            )
    for name, part in inside.items():
        if targets is None or any(matches(name, target) for target in targets):
            check_attention(name, part)
            twin = _replace(twin, name, PrefixAttention(part, length, seed, name).train(part.training))
    unfreeze(twin, whole)
    return twin


def _listed(targets: Sequence[str] | None) -> Sequence[str]:
    """Targets, once they are seen to be a list."""
    if isinstance(targets, str):
        raise ConfigError(f"targets are {targets!r}; expected a list of names, such as [{targets!r}].")
    return targets or ()


def _attention_adapter(
    name: str, inner: Sequence[str], adapt: Callable[[str, nn.Module], nn.Module]
) -> Callable[[str, nn.Linear], nn.Module]:
    """What adapts those projections of attention that are chosen."""

    def adapter(projection: str, part: nn.Linear) -> nn.Module:
        return adapt(f"{name}.{projection}".removeprefix("."), part) if projection in inner else part

    return adapter


def _last_linear(module: nn.Module) -> list[str]:
    """The name of the last linear layer, as a list; empty where there is none, or it is the whole module."""
    inside = [name for name, part in module.named_modules() if isinstance(part, nn.MultiheadAttention)]
    names = [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear) and name.rpartition(".")[0] not in inside
    ]
    return [name for name in names[-1:] if name]


def _chosen(
    module: nn.Module, targets: Sequence[str] | None, whole: Sequence[str], rank: int
) -> dict[str, tuple[str, ...]]:  # fmt: skip
    """Names of layers to adapt, and of attention which projections."""
    targets = None if targets is None else _listed(targets)
    layers: dict[str, tuple[str, ...]] = {}
    parts = dict(module.named_modules())
    inside = [name for name, part in parts.items() if isinstance(part, nn.MultiheadAttention)]
    is_whole = {name for name in parts for each in whole if f".{each}." in f".{name}."}
    met: set[str] = set()
    for name, part in parts.items():
        if name in is_whole or name.rpartition(".")[0] in inside:
            continue
        if isinstance(part, nn.MultiheadAttention):
            own = [each for each in PROJECTIONS if targets is None or _meets(f"{name}.{each}", name, targets, met)]
            if own:
                layers[name] = tuple(own)
        elif _has_room(part, rank) if targets is None else _meets(name, name, targets, met):
            layers[name] = ()
    missing = [target for target in targets or () if target not in met]
    if missing:
        possible = [name for name, part in parts.items() if adapted_kind(part) or name in inside]
        raise ConfigError(
            f"{type(module).__name__} has no part named {missing[0]!r}; expected names or endings among "
            f"{first_few(possible, MAX_SHOWN)}."
        )
    if not layers:
        raise ConfigError(
            f"{type(module).__name__} has no layers to adapt; expected linear layers, convolutions, embeddings or "
            "attention besides those that are trained as a whole. Name some in targets, or others in also."
        )
    return layers


def _meets(full: str, name: str, targets: Sequence[str], met: set[str]) -> bool:
    """Whether a target names a part; notes which."""
    found = [target for target in targets if matches(full, target) or matches(name, target)]
    met.update(found)
    return bool(found)


def _has_room(part: nn.Module, rank: int) -> bool:
    """Whether a layer is adapted where nobody names any."""
    if not isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return False
    return problem_with("", part, rank) is None


def _replace(module: nn.Module, name: str, part: nn.Module) -> nn.Module:
    """The module with another part of that name; the part itself where that is all there is."""
    if not name:
        return part
    owner, _, own = name.rpartition(".")
    module.get_submodule(owner).register_module(own, part)
    return module


def merge(module: nn.Module) -> nn.Module:
    """A plain module that answers as one with adapters does: weights with their changes, all of them to be trained.

    Examples:
        >>> from torch import nn
        >>> from selffl.adapters import lora, merge
        >>> merge(lora(nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)), rank=2))[0]
        Linear(in_features=8, out_features=4, bias=True)
    """
    adapted = {name: part for name, part in module.named_modules() if isinstance(part, Adapted | AdaptedAttention)}
    if not adapted:
        raise ConfigError(
            f"{type(module).__name__} has no adapters; expected a module that selffl.adapters.lora has made."
        )
    for name, inner in adapted.items():
        if isinstance(inner, PrefixAttention):
            raise ConfigError(
                f"{name} has learned keys and values, which plain attention has not; expected changes of low rank. "
                "Keep the module as it is."
            )
    with torch.no_grad():
        found = copy.deepcopy(module)
        for name in adapted:
            if any(name.startswith(f"{other}.") for other in adapted):
                continue  # a projection, which its attention merges
            found = _replace(found, name, cast(Adapted, found.get_submodule(name)).merge())
    for part in found.parameters():
        part.requires_grad_(True)
    return found
