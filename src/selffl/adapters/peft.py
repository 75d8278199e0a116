"""Adapters of peft, both ways: modules that peft has prepared, and folders that peft reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from selffl.adapters.layers import DOWN, UP, Adapted, AdaptedEmbedding
from selffl.errors import ConfigError
from selffl.state.files import atomic_write, write_json

ROOT = "base_model.model."  # what peft puts before the names of the module that it has wrapped
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def from_peft(model: nn.Module, *, train_a: bool = False) -> nn.Module:
    """A module that peft has prepared, with its A frozen: clients train and send B, and what else peft trains.

    The module itself is changed, and returned: peft's own calls go on working.

    Args:
        model: what ``peft.get_peft_model`` has made.
        train_a: whether A is trained, too.
    """
    names = [name for name, _ in model.named_parameters() if _is_down(name)]
    if not names:
        raise ConfigError(
            f"{type(model).__name__} has no parameters named {DOWN}; expected a module that peft has prepared with a "
            "LoraConfig. Use selffl.adapters.lora for plain modules."
        )
    for name, part in model.named_parameters():
        if _is_down(name):
            part.requires_grad_(train_a)
    return model


def _is_down(name: str) -> bool:
    return f".{DOWN}." in name or ".lora_embedding_A" in name


def save_peft(module: nn.Module, folder: str | Path, base: str = "") -> Path:
    """Write the adapters of a module as a folder that ``peft.PeftModel.from_pretrained`` reads.

    Parts that are trained as a whole become peft's ``modules_to_save``.  Attention of torch's has no counterpart in
    such a folder: write a plain module instead, with `merge`.

    Args:
        module: what `lora` has made, such as a client's model of a run.
        folder: made if it is not there.
        base: name or path of the pre-trained model, as peft writes it down.
    """
    adapted = {name: part for name, part in module.named_modules() if isinstance(part, Adapted)}
    if not adapted:
        raise ConfigError(
            f"{type(module).__name__} has no adapters; expected a module that selffl.adapters.lora has made."
        )
    parts = dict(module.named_modules())
    if any(type(parts[name.rpartition(".")[0]]).__name__ == "AdaptedAttention" for name in adapted):
        raise ConfigError(
            f"{type(module).__name__} has adapters within torch's attention, which peft writes otherwise; expected "
            "linear layers, convolutions and embeddings. Take a plain module by selffl.adapters.merge."
        )
    owners = [name.rpartition(".")[0] for name, part in module.named_parameters() if part.requires_grad]
    inside = {f"{name}.{kind}" for name in adapted for kind in (DOWN, UP)}
    whole = [name for name in dict.fromkeys(owners) if name not in inside]
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    first = next(iter(adapted.values()))
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": first.rank,
        "lora_alpha": first.scale * first.rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(adapted),
        "modules_to_save": whole or None,
    }
    tensors = _tensors(module, adapted, whole)
    with atomic_write(path / WEIGHTS) as file:
        save_file(tensors, file, metadata={"format": "pt"})
    write_json(path / CONFIG, config)
    return path


def _tensors(module: nn.Module, adapted: Mapping[str, Adapted], whole: list[str]) -> dict[str, Tensor]:
    """What is written, by peft's names."""
    found: dict[str, Any] = {}
    for name, part in adapted.items():
        pair = (part.lora_A.weight, part.lora_B.weight)
        kinds = ("lora_embedding_A", "lora_embedding_B")
        if not isinstance(part, AdaptedEmbedding):
            kinds = (f"{DOWN}.weight", f"{UP}.weight")
        found |= {f"{ROOT}{name}.{kind}": own for kind, own in zip(kinds, pair, strict=True)}
    for name in whole:
        found |= {f"{ROOT}{name}.{kind}": own for kind, own in module.get_submodule(name).named_parameters()}
    return {name: own.detach().cpu().contiguous() for name, own in found.items()}
