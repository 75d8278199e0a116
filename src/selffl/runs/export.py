"""Personal models in one file: the global model, and of each client what differs from it.

A file of personal models is one that `selffl.state.checkpoint` writes, safetensors with a checksum.  It holds::

    global.NAME    each parameter of the global model, frozen ones too; of those that are tied, one
    rows.NAME      the rows of that parameter, along its first axis, in which clients differ from the global model,
                   client by client: their values, or differences in units of a scale where precision was given up
    offset.NAME    where each client's rows begin and end
    where.NAME     which rows they are; not there if clients that differ do so in all

Rows are compared bit by bit, so that what a method leaves alone takes no room: clients that never took part, bodies
that all share, words that a client has never seen.
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from selffl.algorithms.options import check_choice
from selffl.data.federation import check_ids
from selffl.data.named import RowShape
from selffl.data.preparation import Preparation
from selffl.errors import CheckpointError, ConfigError, DataError, first_few
from selffl.models import build
from selffl.models.layers import build_layers
from selffl.runs.folder import Row
from selffl.runs.predict import Predictor
from selffl.state.checkpoint import load_tensors, save_tensors, write_safetensors
from selffl.state.files import atomic_write
from selffl.training.answers import LabelScale, present_model, trained_module
from selffl.training.layout import check_entries

Precision = Literal["exact", "float16", "bfloat16"]

KIND = "personal models"  # what a file calls itself
ENDINGS = (".safetensors", ".pt")  # of a plain state_dict
CLIENT_COLUMNS = ("num_train", "rounds", "cluster", "intra_variance", "predicted_gain")  # columns of the run's clients


class PersonalModels:
    """A file of personal models, as `Run.export` writes it; nothing in it is code.

    Attributes:
        clients: The ids of those whose models it holds.
        info: What the file says of itself: ``algorithm``, ``data``, ``seed``, ``round``, ``inter_variance`` (σ₀², of
            methods that estimate it), ``precision`` and, where that is not ``exact``, ``max_error``: the largest
            deviation of any parameter from the model that was trained, as it was measured.
        preparation: How a user's table becomes inputs of the models; none where they were trained on arrays.

    Examples:
        >>> import numpy as np, selffl, tempfile, pathlib
        >>> x = np.random.default_rng(0).normal(size=(60, 2))
        >>> fed = selffl.Federation.from_arrays(x, (x[:, 0] > 0).astype(int), ["anna", "ben", "carl"] * 20)
        >>> run = selffl.train("softmax", fed, rounds=3, participation=1.0)
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "people.safetensors"
        >>> run.export(file)
        >>> models = selffl.PersonalModels(file)
        >>> models.clients
        ['anna', 'ben', 'carl']
        >>> models.model("ben")
        Linear(in_features=2, out_features=2, bias=True)
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        advice = "expected a file of several models, as `selffl export` or Run.export writes it"
        try:
            self._tensors, about = load_tensors(self._path)
            if about.get("kind") != KIND:
                raise CheckpointError(f"{self._path} calls itself {about.get('kind')!r}, not {KIND!r}; {advice}.")
            self.clients: list[Any] = about.pop("clients")
            self._rows: list[Row] = about.pop("rows")
            self._entries: dict[str, str] = dict(about.pop("entries"))
            self._scale: dict[str, float] = about.pop("scale")
            self._recipe: dict[str, Any] | None = about.pop("model")
            self._layers: dict[str, Any] | None = about.pop("layers", None)
            self._row_shape: Any = about.pop("shape", None)
            known, scale = about.pop("preparation", None), about.pop("label_scale", None)
            self.preparation = None if known is None else Preparation.from_dict(json.loads(known))
            self._label_scale = LabelScale(**json.loads(scale)) if scale else LabelScale()
            self._classes = json.loads(about.pop("classes", "null"))
        except KeyError as error:
            raise CheckpointError(f"{self._path} lacks {error}; {advice}.") from None
        except CheckpointError as error:
            if (client := _client_of_plain(self._path)) is not None:
                raise CheckpointError(
                    f"{self._path} is a plain state_dict, the model of client {client} alone; {advice} with --all. "
                    "Load it with module.load_state_dict, or take the folder of the run."
                ) from None
            found = str(error).removeprefix(f"{self._path} ").partition(";")[0]
            raise CheckpointError(f"{self._path} {found}; {advice}. Export it again.") from None
        self.info: Row = {name: value for name, value in about.items() if name != "kind"}

    def __repr__(self) -> str:
        """What is in it, in a line."""
        said = ", ".join(f"{name}={self.info.get(name)!r}" for name in ("algorithm", "data", "round", "precision"))
        return f"PersonalModels({len(self.clients)} clients, {said})"

    def about(self, client: Hashable) -> Row:
        """What was known of a client: its rows, rounds and, where the method estimates variances, its uncertainty.

        ``intra_variance`` is σₘ², ``predicted_gain`` the factor by which the others' information shrinks it, and
        ``personal_variance`` what is left of it; all of the whole vector of parameters.
        """
        return dict(self._rows[position_of(client, self.clients)])

    def stored_bytes(self, client: Hashable) -> int:
        """What the difference of a client's model to the global one takes in the file."""
        place = position_of(client, self.clients)
        return sum(
            self._tensors[f"{kind}.{name}"][slice(*self._bounds(name, place))].nbytes
            for name in dict.fromkeys(self._entries.values())
            for kind in ("rows", "where")
            if f"{kind}.{name}" in self._tensors
        )

    def state_dict(self, client: Hashable | None = None) -> dict[str, Tensor]:
        """A client's parameters by name, as ``module.load_state_dict`` takes them; none: those of the global model."""
        place = None if client is None else position_of(client, self.clients)
        found = {name: self._entry(name, place) for name in dict.fromkeys(self._entries.values())}
        return {name: found[twin] for name, twin in self._entries.items()}

    def model(self, client: Hashable | None, module: nn.Module | None = None) -> nn.Module:
        """A client's model; none: the global one.

        ``module`` is a module of the kind that was trained, whose values do not matter; it is left as it is.  One that
        selffl has by name, or that is made of torch's own layers alone, need not be given.
        """
        state = self.state_dict(client)
        if module is None and self._recipe is None and self._layers is None:
            raise ConfigError(
                f"the models in {self._path} are of the kind {self.info.get('module')}, which is the user's own; "
                "expected a module to load them into. Pass module= in Python, or take the folder of the run."
            )
        if module is not None:
            loaded = copy.deepcopy(module)
        else:
            loaded = build_layers(self._layers) if self._recipe is None else build(**self._recipe)
        check_entries(loaded, state, loaded.state_dict())
        if module is None and self._recipe is None:
            loaded.to_empty(device="cpu")
        dtype = next((entry.dtype for entry in state.values() if entry.is_floating_point()), torch.float32)
        loaded.to(dtype).load_state_dict(state)
        return present_model(loaded.eval(), self.preparation, self._label_scale)

    def predict(self, rows: Any, client: npt.ArrayLike | None = None, *, module: nn.Module | None = None) -> Any:
        """Answers to new rows in the user's classes and units, as `Run.predict` gives them.

        ``module`` is a module of the kind that was trained, as in `model`.
        """

        def model_of(position: int | None) -> nn.Module:
            return trained_module(self.model(None if position is None else self.clients[position], module))

        known = self.preparation
        return Predictor(self.clients, model_of, known, self._label_scale, self._classes, self._shape).predict(
            rows, client
        )

    def save(self, client: Hashable, path: str | Path) -> None:
        """Write one client's model as a plain state_dict, which opens without selffl."""
        about = {"client": client, **{name: self.info.get(name) for name in ("algorithm", "data", "round")}}
        about |= describe_answers(self.preparation, self._label_scale, self._classes)
        save_state_dict(Path(path), self.state_dict(client), about)

    @property
    def _shape(self) -> RowShape:
        if self.preparation is not None:
            return self.preparation.shape
        found = (self._recipe or {}).get("shape") if self._row_shape is None else self._row_shape
        if found is None:
            raise ConfigError(f"{self._path} does not say what a row looks like; take a model with model(client).")
        return {name: tuple(shape) for name, shape in found.items()} if isinstance(found, dict) else tuple(found)

    def _bounds(self, name: str, place: int) -> tuple[int, int]:
        low, high = self._tensors[f"offset.{name}"][place : place + 2].tolist()
        return low, high

    def _entry(self, name: str, place: int | None) -> Tensor:
        entry = self._tensors[f"global.{name}"].clone()
        if place is None or f"rows.{name}" not in self._tensors:
            return entry
        low, high = self._bounds(name, place)
        rows, table = self._tensors[f"rows.{name}"][low:high], _as_rows(entry)
        where = self._tensors[f"where.{name}"][low:high].long() if f"where.{name}" in self._tensors else slice(None)
        if high > low:
            table[where] = _restore(table[where], rows, self._scale[name]) if name in self._scale else rows
        return entry


def write_personal(
    path: Path,
    shared: nn.Module,
    personal: Iterable[Mapping[str, Tensor]],
    clients: Sequence[Hashable],
    about: Mapping[str, Any],
    precision: Precision = "exact",
) -> None:
    """Write a file of personal models.

    Args:
        path: the file.
        shared: the global model.
        personal: each client's trained parameters by name.
        clients: their ids, in that order.
        about: what else the file says of itself: ``rows``, one for each client, and ``model``, how to build it.
        precision: ``exact``, or a type to keep differences in.
    """
    check_choice("precision", precision, get_args(Precision))
    check_ids(clients)
    entries = _twins(shared.state_dict())
    state = {name: entry.detach().cpu() for name, entry in shared.state_dict().items()}
    tensors = {f"global.{name}": state[name] for name in dict.fromkeys(entries.values())}
    changes: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for parts in personal:
        for name, part in parts.items():
            own, common = _as_rows(part.detach().cpu()), _as_rows(state[name])
            where = (_bits(own) != _bits(common)).any(1).nonzero().flatten()
            changes.setdefault(name, []).append((where, own[where]))
    scale: dict[str, float] = {}
    errors = [0.0]
    for name, found in changes.items():
        sizes = torch.tensor([0, *(len(where) for where, _ in found)])
        where, rows = (torch.cat(part) for part in zip(*found, strict=True))
        if len(where) == 0:
            continue
        if precision != "exact":
            common = _as_rows(state[name])[where]
            scale[name], stored = _shorten(rows, common, getattr(torch, precision))
            errors.append(float((_restore(common, stored, scale[name]).double() - rows.double()).abs().max()))
            rows = stored
        tensors[f"rows.{name}"], tensors[f"offset.{name}"] = rows, sizes.cumsum(0)
        if set(sizes.tolist()) - {0, len(_as_rows(state[name]))}:
            tensors[f"where.{name}"] = where.to(torch.int32)
    named = list(entries.items())  # pairs, which keep their order in JSON
    known = {"kind": KIND, "clients": list(clients), "entries": named, "scale": scale, "precision": precision}
    _check_place(path)
    save_tensors(path, tensors, {**about, **known, "max_error": max(errors)})


def save_state_dict(path: Path, state: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write a plain state_dict, all or nothing, as safetensors or for ``torch.load``, as the name ends."""
    check_ending(path)
    _check_place(path)
    if path.suffix == ".pt" and "preparation" in about:
        raise ConfigError(
            f"{path} could not say how rows are prepared for its model; expected a name that ends in .safetensors."
        )
    # Each a copy of its own: tied entries share memory, which safetensors does not store.
    plain = {name: entry.detach().cpu().clone(memory_format=torch.contiguous_format) for name, entry in state.items()}
    with atomic_write(path) as partial:
        if path.suffix == ".pt":
            torch.save(plain, partial)
        else:
            write_safetensors(partial, plain, {"format": "pt"} | {name: str(value) for name, value in about.items()})


def describe_answers(
    preparation: Preparation | None, label_scale: LabelScale, classes: Sequence[Any] | None
) -> dict[str, str]:
    """What a file says of its models' inputs and answers, as JSON: nothing of runs on arrays without names."""
    found: dict[str, Any] = {} if classes is None else {"classes": list(classes)}
    if preparation is not None:
        found |= {
            "preparation": preparation.to_dict(),
            "label_scale": asdict(label_scale),
            "inputs": preparation.inputs,
        }
    return {name: json.dumps(value, ensure_ascii=False) for name, value in found.items()}


def _client_of_plain(path: Path) -> str | None:
    """Whose model a file of `save_state_dict` holds; none where it is no such file."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
    except (SafetensorError, OSError, UnicodeDecodeError):
        return None
    return header.get("client") if header.get("format") == "pt" else None


def check_ending(path: Path) -> None:
    """Refuse a file whose name does not say how a state_dict is to be written."""
    if path.suffix not in ENDINGS:
        raise ConfigError(f"the output file is named {path}; expected a name that ends in {' or '.join(ENDINGS)}.")


def position_of(client: Hashable, ids: Sequence[Hashable]) -> int:
    """The place of a client among the ids."""
    if client in ids:
        return ids.index(client)
    # The number 7 and the text 7 are two ids, and the likeliest mistake.
    names = {str(name): name for name in reversed(ids)}
    near = difflib.get_close_matches(str(client), names, n=1, cutoff=0.5)
    hint = f"did you mean {names[near[0]]!r}? Expected" if near else "expected"
    some = first_few(ids, 5, repr)
    raise ConfigError(f"unknown client {client!r}; {hint} one of the {len(ids)} ids: {some}")


def client_about(row: Row) -> Row:
    """What goes with a client's model: its row of the run's clients, as far as it tells how sure the model is."""
    found = {name: row[name] for name in CLIENT_COLUMNS if row.get(name) is not None}
    if "intra_variance" in found and "predicted_gain" in found:
        found["personal_variance"] = found["intra_variance"] / found["predicted_gain"]
    return found


def _check_place(path: Path) -> None:
    if path.is_dir() or not path.parent.is_dir():
        raise DataError(f"{path} cannot be written; expected the name of a file in a folder that is there.")


def _twins(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Every entry of a state_dict, and the first that has the same memory: itself, unless they are tied."""
    first: dict[Any, str] = {}
    return {
        name: first.setdefault((entry.data_ptr(), entry.shape, entry.stride()) if entry.numel() else name, name)
        for name, entry in state.items()
    }


def _as_rows(entry: Tensor) -> Tensor:
    """A parameter as a table, a view if it is contiguous: by its first axis, a vector as one row."""
    return entry.reshape(len(entry), -1) if entry.ndim > 1 and entry.numel() else entry.reshape(1, -1)


def _bits(table: Tensor) -> Tensor:
    """-0 is not 0, and whatever NaN holds is itself."""
    return table.contiguous().view(torch.uint8)


def _shorten(rows: Tensor, common: Tensor, dtype: torch.dtype) -> tuple[float, Tensor]:
    """Differences in units of the largest, which neither overflow nor vanish in a short type; the unit first."""
    difference = rows.double() - common.double()
    scale = float(difference.abs().max()) or 1.0
    return scale, (difference / scale).to(dtype)


def _restore(common: Tensor, stored: Tensor, scale: float) -> Tensor:
    return (common.double() + scale * stored.double()).to(common.dtype)
