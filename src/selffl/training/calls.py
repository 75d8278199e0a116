"""How a module is called: with one tensor of rows or several by name, and which of its outputs is taken.

A module of Hugging Face takes words and masks by name and returns a record; the loss and the metrics see one tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from selffl.data.named import Features, NamedFeatures
from selffl.errors import ConfigError, first_few
from selffl.models.select import Select

SCORES = "logits"  # what Hugging Face's classifiers call them
MAX_SHOWN = 8  # names in a message


def call(module: nn.Module, features: Features, parts: Mapping[str, Tensor] | None = None) -> Tensor:
    """The outputs of a module for rows, with parameters and buffers by name where ``parts`` are given.

    Features that have names are passed as keywords.
    """
    given, named = ((), dict(features.items())) if isinstance(features, NamedFeatures) else ((features,), {})
    by_parts = torch.func.functional_call
    answer = module(*given, **named) if parts is None else by_parts(module, dict(parts), given, named)
    return answer if isinstance(answer, Tensor) else output_of(answer, type(module).__name__)


def output_of(answer: Any, kind: str) -> Tensor:
    """The tensor that a loss sees of what a module has returned.

    Of a dictionary or a record the entry ``logits``, or the only tensor there is.  What else it may be is the user's to
    say, for a wrong one could train without a word.
    """
    entries: dict[Any, Any] = {}
    if isinstance(answer, Mapping):
        entries = dict(answer)
    elif is_dataclass(answer):
        entries = {each.name: getattr(answer, each.name) for each in fields(answer)}
    tensors = {name: entry for name, entry in entries.items() if isinstance(entry, Tensor)}
    if SCORES in tensors or len(tensors) == 1:
        return tensors.get(SCORES, next(iter(tensors.values())))
    if isinstance(answer, tuple | list):
        tensors = {number: entry for number, entry in enumerate(answer) if isinstance(entry, Tensor)}
    if not tensors:
        raise ConfigError(f"{kind} returns a {type(answer).__name__}; expected one tensor of outputs.")
    shown = first_few(list(tensors), MAX_SHOWN, repr)
    raise ConfigError(
        f"{kind} returns a {type(answer).__name__} with the tensors {shown}; expected one tensor, or a dictionary with "
        f"one or with {SCORES!r}. Say which with selffl.models.Select(module, {next(iter(tensors))!r})."
    )


def check_names(module: nn.Module, features: Features) -> None:
    """Refuse names that ``forward`` does not take, and rows without one that it has to have.

    Names have to stand in ``forward``, unless it takes nothing but ``**inputs``: what is left over goes unseen into the
    ``**kwargs`` of Hugging Face's modules.
    """
    if not isinstance(features, NamedFeatures):
        return
    while isinstance(module, Select):
        module = module.module
    kind = type(module).__name__
    try:
        known = inspect.signature(module.forward).parameters.values()
    except ValueError:  # a module that was compiled by torch.jit, which says itself what it lacks
        return
    by_name = [each for each in known if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    if not by_name and any(each.kind == each.VAR_KEYWORD for each in known):
        return
    names = [each.name for each in by_name]
    strange = next((name for name, _ in features.items() if name not in names), None)
    if strange is not None:
        raise ConfigError(
            f"rows have an entry {strange!r}, and forward of {kind} has no argument of that name; expected some of "
            f"{first_few(names, MAX_SHOWN)}. Rename the entry or leave it out."
        )
    needed = [each.name for each in by_name if each.default is each.empty]
    missing = next((name for name in needed if name not in features), None)
    if missing is not None:
        raise ConfigError(
            f"forward of {kind} needs {missing!r}, and rows have the entries {', '.join(features.keys())}; expected "
            "one for each argument without a default. Add it to the rows' dictionary."
        )
