"""What server and clients say to each other besides tensors."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from selffl.algorithms.contract import Algorithm
from selffl.algorithms.optimisers import Optimiser, optimiser_of
from selffl.errors import DataError
from selffl.training.flat import FlatModel

PROTOCOL = 12  # of these messages; other numbers are refused

MAX_SHOWN_CHARACTERS = 200  # of what others have sent

ABOUT, ARRAYS, METRICS = "about", "arrays", "metrics"  # records of a message

Note = TypeVar("Note")
Found = TypeVar("Found")

_AT = re.compile(r" at 0x[0-9a-f]+")  # where an object lies differs between processes


@dataclass(frozen=True)
class Order:
    """What a client is asked to do, and with which settings.

    Attributes:
        protocol: `PROTOCOL` of the sender.
        experiment: Whose rounds are counted; another experiment, another memory.
        run: Tells two runs of one experiment's name apart.
        round_number: From 1 up.
        is_over: Whether training ended with that round; clients of a method with a closing visit then make it.
        closing: Which of the closing rounds after the last this is, from 1 up; 0: it is none.
        client: The id of the client that is meant.
        number: Its number in the federation, which keys its random numbers.
        seed: Of the minibatches.
        learning_rate: η.
        batch_size: B.
        optimiser: Of the local steps, with its options, as JSON.
        training: What else is done in local training (`selffl.algorithms.training_options`), as JSON.
        privacy: What a client shortens its upload to (`selffl.engines.limits`), as JSON.
        alone: Rounds that the client is to train by itself, as JSON; empty where it trains with the others.
        algorithm: Name of the method.
        options: Of the method, as JSON.
        fingerprint: Of the model.
    """

    protocol: int
    experiment: str
    run: str
    round_number: int
    is_over: bool
    closing: int
    client: str
    number: int
    seed: int
    learning_rate: float
    batch_size: int
    optimiser: str
    training: str
    privacy: str
    alone: str
    algorithm: str
    options: str
    fingerprint: str


@dataclass(frozen=True)
class Introduction:
    """What a client says of itself when it is asked who it is."""

    protocol: int
    client: str
    num_examples: int
    fingerprint: str
    preparation: str = ""  # a digest of how its table became numbers; empty where rows are arrays


@dataclass(frozen=True)
class Answer:
    """What comes with the tensors or the metrics of a client."""

    experiment: str
    round_number: int
    client: str
    num_gradients: int


def shown(value: object) -> str:
    """What somebody else has sent, on one line of bounded length: it may be long, or look like lines of a log."""
    text = repr(value)  # of a string: in quotes, with anything that a terminal would act on spelt out
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}…"


def write(note: Any) -> ConfigRecord:
    """A note of this file as Flower sends it."""
    return ConfigRecord(dataclasses.asdict(note))


def read(kind: type[Note], content: RecordDict) -> Note:
    """The note of that kind in a message; every field has to be there, and of its type."""
    record = find_record(content.config_records, ABOUT, "one that says what it is about")
    types = {"int": int, "str": str, "float": float, "bool": bool}
    found = {}
    for field in fields(kind):  # type: ignore[arg-type]
        value = record.get(field.name)
        if type(value) is not types[str(field.type)]:
            raise DataError(f"{field.name} is {shown(value)} in the message; expected {field.type}.")
        found[field.name] = value
    return kind(**found)


def find_record(records: Mapping[str, Found], name: str, expected: str = "one") -> Found:
    """The record of that name in a message."""
    if name not in records:
        raise DataError(f"the message has no record {name!r}; expected {expected}.")
    return records[name]


def arrays_of(content: RecordDict) -> ArrayRecord:
    """The tensors of a message."""
    return find_record(content.array_records, ARRAYS, "tensors")


def metrics_of(content: RecordDict) -> MetricRecord:
    """The metrics of a message."""
    return find_record(content.metric_records, METRICS, "metrics")


def options_of(algorithm: Algorithm[Any, Any, Any, Any]) -> str:
    """The options of a method as text that is equal for equal options."""
    options: dict[str, Any] = dataclasses.asdict(algorithm) if dataclasses.is_dataclass(algorithm) else {}
    return json.dumps(options, sort_keys=True, default=lambda option: _AT.sub("", repr(option)))


def optimiser_text(optimiser: str | Optimiser) -> str:
    """An optimiser with its options, as JSON that `optimiser_of` takes by keyword."""
    chosen = optimiser_of(optimiser)
    return json.dumps({"name": chosen.name, **vars(chosen)}, sort_keys=True)


def differing(one: str, other: str) -> tuple[str, str]:
    """Options in which two methods differ, of each as text; both whole, if one cannot be read."""
    try:
        ours, theirs = json.loads(one), json.loads(other)
        names = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    except (ValueError, AttributeError):
        return one, other
    first, second = (json.dumps({name: part.get(name) for name in names}) for part in (ours, theirs))
    return first, second


def fingerprint(model: FlatModel) -> str:
    """SHA-256 of the modules, of the parameters' names, shapes and types, and of the values that are not trained.

    Trained values and statistics travel; frozen parameters and constant buffers do not, and have to be the same
    everywhere, as what becomes of BatchNorm has.
    """
    digest = hashlib.sha256(_AT.sub("", repr(model.module)).encode())
    for name, part in model.module.named_parameters():
        digest.update(f"{name}\0{part.dtype}\0{tuple(part.shape)}\0{part.requires_grad}\0".encode())
        if not part.requires_grad:
            digest.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    for name, buffer in model.constants.items():
        digest.update(f"{name}\0{buffer.dtype}\0{tuple(buffer.shape)}\0".encode())
        digest.update(buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    for layer in model.kept_layers:
        digest.update(f"kept\0{layer.name}\0".encode())
    return digest.hexdigest()
