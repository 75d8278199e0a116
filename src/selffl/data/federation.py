"""Rows that belong to clients, packed in one tensor, split into what may be trained on and what may not."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from selffl.data.columns import as_features
from selffl.data.named import Features, NamedFeatures, entries_of, row_shape
from selffl.data.packing import Packed, set_validation_aside
from selffl.data.preparation import Preparation
from selffl.data.rows import Rows
from selffl.data.sources import FromSources
from selffl.data.split import Split
from selffl.errors import CheckpointError, DataError, one_line
from selffl.state.checkpoint import load_tensors, save_tensors

__all__ = ["Federation", "Rows", "check_ids"]

KIND = "federation"  # what a saved file calls itself


def check_ids(ids: Sequence[Hashable]) -> None:
    """Refuse ids that a file could not give back as they were."""
    odd = next((name for name in ids if type(name) not in (str, int, float, bool)), None)
    if odd is not None:
        raise DataError(f"client {odd!r} is a {type(odd).__name__}; expected strings or numbers to save.")


@dataclass(frozen=True)
class Federation(FromSources):
    """Clients with their training rows and, kept apart, their test rows.

    Tasks are made from ``train`` alone; only the evaluator looks at ``test``.

    Attributes:
        clients: Their ids, in the order of the rows.
        train: What tasks are made from.
        test: What only the evaluator looks at.
        validation: Rows set aside for choosing a method's options, where there are any; never trained on either.
        cluster: Number of each client's cluster ``[M]``, from 0 up, where clients are grouped.
        source: The call that makes it again, ``{"name": ..., **options}`` for `selffl.data.load`; none for a user's own
            rows.
        classes: Their names, or numbers other than 0, 1, …, as the user writes them: class k is ``classes[k]``.
        preparation: How the features were made of a user's table, and what its units and names are; none where rows
            are taken as they come.
    """

    clients: Sequence[Hashable]
    train: Rows
    test: Rows
    validation: Rows | None = None
    cluster: Tensor | None = None
    source: Mapping[str, Any] | None = None
    classes: Sequence[Any] | None = None
    preparation: Preparation | None = None

    @classmethod
    def _of(cls, packed: Packed) -> Self:
        return cls(**vars(packed))

    def __repr__(self) -> str:
        """What it holds, in a line."""
        parts = ", ".join(f"{rows.num_rows} {name}" for name, rows in self.parts.items())
        shape = row_shape(self.train.sample.features)
        return f"Federation({self.num_clients} clients, rows {shape}: {parts})"

    @property
    def num_clients(self) -> int:
        """M."""
        return len(self.clients)

    @property
    def parts(self) -> dict[str, Rows]:
        """The parts there are, by name: train, test and, where it is set aside, validation."""
        parts = {"train": self.train, "test": self.test}
        return parts if self.validation is None else parts | {"validation": self.validation}

    @property
    def num_examples(self) -> Tensor:
        """Rows of each client in all parts together, ``[clients]``."""
        return torch.stack([rows.num_examples for rows in self.parts.values()]).sum(0)

    @property
    def num_classes(self) -> int | None:
        """Largest label + 1 over all rows, or as many as have names; none where labels are floating-point targets.

        No client has to hold every class, or more than one.
        """
        if self.train.sample.labels.is_floating_point():
            return None
        if self.classes is not None:
            return len(self.classes)
        return max(rows.num_classes or 0 for rows in self.parts.values())

    def class_counts(self, *names: str) -> Tensor:
        """How many rows of each class a client has in the parts named, or in all, ``[clients, classes]``."""
        classes = self.num_classes
        if classes is None or self.train.labels.ndim != 1:
            raise DataError(
                f"labels are {self.train.labels.dtype} of shape {tuple(self.train.labels.shape)}; expected one class "
                "number per row to count."
            )
        chosen = [self.parts[name] for name in names or self.parts]
        cells = torch.cat([rows.owner * classes + rows.labels for rows in chosen])
        return torch.bincount(cells, minlength=self.num_clients * classes).view(self.num_clients, classes)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Federation:
        """This federation with its tensors on a device, rows in a precision as `Rows.to` has it."""
        moved = {name: rows.to(device, dtype) for name, rows in self.parts.items()}
        return replace(self, cluster=None if self.cluster is None else self.cluster.to(device), **moved)  # type: ignore[arg-type]

    def pool(self) -> Federation:
        """All clients' rows as those of one client: what could be trained if rows were allowed to meet."""

        def whole(rows: Rows) -> Rows:
            return replace(rows, offset=rows.offset[[0, -1]])

        parts: dict[str, Any] = {name: whole(rows) for name, rows in self.parts.items()}
        return replace(self, clients=["all"], cluster=None, source=None, **parts)

    def subset(self, clients: Sequence[Hashable]) -> Federation:
        """This federation with some of its clients, by their ids; the rest can come later, as new clients.

        Examples:
            >>> import selffl
            >>> fed = selffl.Federation.from_arrays([[0.0], [1.0], [2.0]], [0, 1, 0], list("abc"))
            >>> fed.subset(["a", "c"]).clients
            ['a', 'c']
        """
        position = {client: number for number, client in enumerate(self.clients)}
        chosen = list(dict.fromkeys(clients))
        strange = next((client for client in chosen if client not in position), None)
        if strange is not None or not chosen:
            what = "no client" if not chosen else f"{strange!r}, which is none of {self.num_clients} clients"
            raise DataError(f"the clients to keep hold {what}; expected ids of some, such as {self.clients[0]!r}.")
        at = torch.tensor([position[client] for client in chosen], device=self.train.offset.device)
        parts: dict[str, Any] = {name: rows.subset(at) for name, rows in self.parts.items()}
        # The source would make it again with all of them.
        return replace(
            self, clients=chosen, cluster=None if self.cluster is None else self.cluster[at], source=None, **parts
        )

    def with_validation(self, fraction: float, *, seed: int = 0, stratify: bool = False) -> Federation:
        """This federation with a share of each client's training rows set aside for choosing options.

        Test rows stay as they are.  Every client keeps a training row, so that one with a single row has no validation
        rows.  Features stay as they are prepared.

        Args:
            fraction: Share of each client's training rows, rounded to nearest.
            seed: Of the choice of rows.
            stratify: Whether the share is taken of each client's rows of each class.

        Examples:
            >>> import selffl
            >>> fed = selffl.Federation.from_arrays([[0.0]] * 10, [0, 1] * 5, ["a"] * 8 + ["b"] * 2, 0.0)
            >>> fed.with_validation(0.25)
            Federation(2 clients, rows (1,): 8 train, 0 test, 2 validation)
        """
        if self.validation is not None:
            raise DataError("the federation has validation rows already; expected none. Use those, or leave this out.")
        train, validation = set_validation_aside(self.train, Split(0.0, fraction, stratify, seed))
        # The source would make it again without them.
        return replace(self, train=train, validation=validation, source=None)

    def with_clusters(self, cluster: Sequence[int]) -> Federation:
        """This federation with its clients in clusters, one number for each client in their order, from 0 up."""
        numbers = torch.as_tensor(cluster)
        if numbers.shape != (self.num_clients,) or numbers.is_floating_point() or (numbers < 0).any():
            raise DataError(
                f"cluster has shape {tuple(numbers.shape)} and type {numbers.dtype}; expected a whole number, 0 or "
                f"more, for each of {self.num_clients} clients."
            )
        # The source would make it again without them.
        return replace(self, cluster=numbers.to(torch.int64), source=None)

    def map_features(self, transform: Callable[[Any], Any]) -> Federation:
        """This federation with ``transform`` applied to the features of each part, ``[rows, ...]`` at once.

        Where they are a dictionary it is given that, as `selffl.data.named.NamedFeatures`; it returns a tensor or a
        dictionary.
        """

        def changed(rows: Rows) -> Rows:
            features = transform(rows.features)
            return replace(rows, features=features if isinstance(features, Tensor) else as_features(features))

        mapped = {name: changed(rows) for name, rows in self.parts.items()}
        # The source would make it again without the change, and the preparation prepare rows without it.
        return replace(self, source=None, preparation=None, **mapped)  # type: ignore[arg-type]

    def fingerprint(self) -> str:
        """SHA-256 of ids, rows, labels, offsets and their types: equal federations, equal fingerprints, on any device.

        What runs store to say which rows they saw; the source is no part of it, names of classes are.
        """
        digest = hashlib.sha256(repr(list(self.clients)).encode())
        if self.classes is not None:
            digest.update(repr(list(self.classes)).encode())
        if self.preparation is not None:
            digest.update(self.preparation.digest().encode())
        # Of rows on demand those of the first client: what is the same of them says that the others are.
        for name, tensor in self._tensors(is_sampled=True):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def save(self, path: Path | str) -> None:
        """Write everything to one safetensors file, whole or not at all.

        Ids must be strings or numbers, which the file can give back as they were.
        """
        path, ids = Path(path), list(self.clients)
        check_ids(ids)
        source = None if self.source is None else dict(self.source)
        try:
            about = {"kind": KIND, "clients": ids, "source": source}
            if self.classes is not None:
                about["classes"] = list(self.classes)
            if self.preparation is not None:
                about["preparation"] = self.preparation.to_dict()
            save_tensors(path, dict(self._tensors()), about)
        except Exception as error:  # safetensors has its own kind of error for a folder that is not there
            raise DataError(f"{path} cannot be written ({one_line(error)}); expected a file in a folder.") from None

    @classmethod
    def load(cls, path: Path | str) -> Federation:
        """Read what `save` has written."""
        path = Path(path)
        advice = "expected a file that Federation.save has written"
        if not path.is_file():
            raise DataError(f"{path} does not exist or is not a file; {advice}.")
        try:
            tensors, about = load_tensors(path)
            if about.get("kind") != KIND:
                raise DataError(f"{path} calls itself {about.get('kind')!r}, not {KIND!r}; {advice}.")
            clients, source, classes = about["clients"], about["source"], about.get("classes")
            parts: dict[str, Any] = {
                part: Rows(_stored_features(tensors, part), tensors[f"{part}.labels"], tensors[f"{part}.offset"])
                for part in ("train", "test", "validation")
                if f"{part}.labels" in tensors
            }
        except (CheckpointError, KeyError) as error:
            reason = one_line(error).removeprefix(f"{path} ").partition(";")[0]
            raise DataError(f"{path} cannot be read ({reason}); {advice}. Save it again.") from None
        if not {"train", "test"} <= parts.keys():
            raise DataError(f"{path} lacks training or test rows; {advice}. Save it again.")
        known = about.get("preparation")
        preparation = None if known is None else Preparation.from_dict(known)
        for name, rows in parts.items():
            sizes = {int(rows.offset[-1]), len(rows.labels), len(rows.features)}
            if len(rows.offset) != len(clients) + 1 or len(sizes) > 1:
                raise DataError(f"{path}: rows and offsets of {name} do not fit {len(clients)} clients. Save it again.")
        cluster = tensors.get("cluster")
        return cls(clients, cluster=cluster, source=source, classes=classes, preparation=preparation, **parts)

    def _tensors(self, is_sampled: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Everything there is, by name; of rows on demand a sample, where one will do."""
        for part, rows in self.parts.items():
            found = rows.sample if is_sampled else rows
            for name, entry in entries_of(found.features).items():
                yield f"{part}.features{name and '.'}{name}", entry
            yield f"{part}.labels", found.labels
            yield f"{part}.offset", rows.offset
        if self.cluster is not None:
            yield "cluster", self.cluster


def _stored_features(tensors: Mapping[str, Tensor], part: str) -> Features:
    """The features of a part as a file has them: one tensor, or one for each name."""
    begin = f"{part}.features."
    named = {name.removeprefix(begin): entry for name, entry in tensors.items() if name.startswith(begin)}
    return NamedFeatures(named) if named else tensors[f"{part}.features"]
