"""Rows that belong to clients, packed in one tensor, split into what may be trained on and what may not."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import numpy.typing as npt
import torch
from torch import Tensor

from selffl.data.columns import as_features, column_of, rows_of_dataset
from selffl.data.folder import read_folder
from selffl.data.huggingface import read_huggingface
from selffl.data.labels import Task
from selffl.data.leaf import UNDIVIDED, Encode, read_leaf
from selffl.data.named import Features, NamedFeatures, entries_of, row_shape
from selffl.data.on_demand import MadeRows, split_on_demand
from selffl.data.packing import Packed, pack_arrays, pack_parts, pack_table, pack_whole, set_validation_aside
from selffl.data.parts import LabelKind
from selffl.data.pfllib import read_pfllib
from selffl.data.preparation import Preparation
from selffl.data.readers import read_table, table_of_frame
from selffl.data.roles import MissingRule, Roles
from selffl.data.rows import Rows
from selffl.data.split import Split, SplitOptions, split_of, split_of_training_rows
from selffl.data.stored_rows import StoredRows
from selffl.data.tables import Decimals
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
class Federation:
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

    @classmethod
    def from_arrays(
        cls,
        x: npt.ArrayLike | Mapping[str, npt.ArrayLike],
        y: npt.ArrayLike,
        client: npt.ArrayLike,
        test_fraction: float = 0.1,
        seed: int = 0,
        *,
        validation_fraction: float = 0.0,
        stratify: bool = False,
        cluster: npt.ArrayLike | None = None,
        standardise: bool = False,
    ) -> Federation:
        """Group rows by the client column and set aside a share of each client's rows for testing.

        Args:
            x: features, one row each; floating-point features must be finite.  For a module with several inputs a
                dictionary of them by the names of its arguments, each of its own type.
            y: labels or targets, one each.  Whole numbers and truth values are classes: 0 or more, kept as int64.  A
                client may have a single class.
            client: the client of each row; any column of numbers or strings.
            test_fraction: share of each client's rows, rounded to nearest; every client keeps at least one
                training row, and a client with a single row has no test rows.
            seed: of the choice of test rows.
            validation_fraction: share of each client's rows to set aside for choosing a method's options; taken after
                the test rows, which are the same whatever this is, and only as far as one training row stays.
            stratify: take the shares of each client's rows *of each class*, of which one stays for training.
            cluster: the cluster of each row's client, if clients are grouped; numbered in the order of the sorted
                labels.
            standardise: bring every number of a row to mean 0 and standard deviation 1, by the training rows and in
                float64; `preparation` says how, and the models of a run take rows as they are given here.

        Examples:
            >>> import selffl
            >>> x, y = [[0.0], [1.0], [2.0], [3.0]], [0, 1, 0, 1]
            >>> fed = selffl.Federation.from_arrays(x, y, list("abab"), test_fraction=0.5)
            >>> fed.clients, fed.train.num_examples.tolist(), fed.test.num_examples.tolist()
            (['a', 'b'], [1, 1], [1, 1])
        """
        split = Split(test_fraction, validation_fraction, stratify, seed)
        return cls._of(pack_arrays(x, y, client, split, cluster, standardise))

    @classmethod
    def _of(cls, packed: Packed) -> Federation:
        """The federation of rows that are packed."""
        return cls(**vars(packed))

    @classmethod
    def on_demand(
        cls,
        make: Callable[[int], tuple[Any, Any]],
        num_clients: int,
        num_examples: npt.ArrayLike,
        *,
        num_classes: int | None = None,
        test_fraction: float = 0.1,
        seed: int = 0,
    ) -> Federation:
        """Clients 0, 1, … whose rows are made when they are asked for: as many clients as one likes.

        Args:
            make: gives a client's features and labels, as `from_arrays` takes them, by its number; the same rows
                whenever it is asked.
            num_clients: how many there are.
            num_examples: rows of each client, one number for all, or one for each.
            num_classes: of the labels, where they are classes; none: they are targets.
            test_fraction: as in `from_arrays`.
            seed: of the choice of test rows.

        Examples:
            >>> import numpy, selffl
            >>> def make(client):
            ...     x = numpy.random.default_rng(client).normal(size=(20, 3)).astype("float32")
            ...     return x, (x[:, 0] > client % 2).astype(int)
            >>> selffl.Federation.on_demand(make, 1_000_000, 20, num_classes=2)
            Federation(1000000 clients, rows (3,): 18000000 train, 2000000 test)
        """
        source = MadeRows(make, num_clients, num_examples, num_classes)
        return cls(range(num_clients), *split_on_demand(source, Split(test_fraction, seed=seed)))

    @classmethod
    def from_large_file(
        cls,
        path: Path | str,
        client: str = "client",
        label: str = "label",
        features: Sequence[str] | None = None,
        *,
        test_fraction: float = 0.1,
        seed: int = 0,
    ) -> Federation:
        """A file of Parquet or Arrow that need not fit into memory: a client's rows are read when it is asked for.

        The rows of a client lie behind each other: the file is sorted by client.  Numbers are taken as they are; put
        `selffl.models.Standardise` first in the model to scale them.  An Arrow file (``.arrow``, ``.feather``) without
        compression is mapped into memory, of a Parquet file the groups of rows are read that hold the client's.

        Args:
            path: the file.
            client: the column that says whose row it is.
            label: the column to predict: whole numbers are classes, from 0 up, others are targets.
            features: the columns of features, numbers all of them; or one column of lists of equal length; none: all
                other columns.
            test_fraction: as in `from_arrays`.
            seed: of the choice of test rows.
        """
        source = StoredRows(Path(path), client, label, features)
        return cls(source.ids, *split_on_demand(source, Split(test_fraction, seed=seed)))

    @classmethod
    def from_folder(
        cls,
        path: Path | str,
        *,
        label: str = "label",
        task: Task | None = None,
        missing: MissingRule = "refuse",
        decimal: Decimals | None = None,
        **split: Unpack[SplitOptions],
    ) -> Federation:
        """One file per client; the file's name without its ending is the client's id.

        All files are of one kind: ``.npz`` with the arrays x and y, or tables, ``.csv`` or ``.parquet``, with a column
        of labels and all others features, in the order of the first file (by name).  Tables are prepared as in
        `from_frame`.

        Args:
            path: the folder; hidden files in it do not count.
            label: name of the column of labels in tables.
            task: as in `from_frame`.
            missing: as in `from_frame`.
            decimal: as in `from_csv`.
            **split: test_fraction, seed, validation_fraction and stratify, as in `from_arrays`.
        """
        chosen = split_of(split)
        rows, client = read_folder(Path(path), label, decimal)
        if isinstance(rows, tuple):
            return cls._of(pack_arrays(*rows, client, chosen))
        return cls._of(pack_table(rows, Roles(label), chosen, ids=client, task=task, missing=missing))

    @classmethod
    def from_frame(
        cls,
        frame: Any,
        client: Hashable = "client",
        label: Hashable = "label",
        features: Sequence[Hashable] | None = None,
        *,
        exclude: Sequence[Hashable] | None = None,
        task: Task | None = None,
        missing: MissingRule = "refuse",
        preparation: Preparation | None = None,
        cluster: Hashable | None = None,
        **split: Unpack[SplitOptions],
    ) -> Federation:
        """A DataFrame of pandas or polars, or a Table of pyarrow, with a row each and a column of clients.

        Numbers and dates are brought to mean 0 and standard deviation 1, by the training rows and in float64; words
        become inputs of 0 and 1.  `preparation` says how, and travels with the run: models that a run gives back take
        rows, and answer, in the table's own units and names.

        Args:
            frame: the table.
            client: the column that says whose row it is.
            label: the column to predict.
            features: the columns of features, in this order; none: all others.
            exclude: columns that are no features, where ``features`` is none.
            task: what the label is: ``classes``, ``values`` or ``counts``; none: words, truth values and up to 20
                whole numbers are classes, other numbers values, and what is in doubt is refused.
            missing: what to do about missing values, as pandas, R, SQL and spreadsheets write them.  ``refuse`` them;
                ``drop`` their rows; or ``impute`` the mean, with a further input that says where (rows without a label
                or a client are dropped).
            preparation: one that was fitted before, on these sites' rows together, say; none: fitted here.
            cluster: the column of the clients' clusters, if they are grouped.
            **split: test_fraction, seed, validation_fraction and stratify, as in `from_arrays`.

        Examples:
            >>> import pyarrow, selffl
            >>> table = pyarrow.table({"site": list("abab"), "age": [31, 48, 27, 60], "ill": ["no", "yes", "no", "no"]})
            >>> fed = selffl.Federation.from_frame(table, client="site", label="ill", test_fraction=0)
            >>> fed.clients, fed.classes, fed.train.features.shape
            (['a', 'b'], ['no', 'yes'], torch.Size([4, 1]))
        """
        chosen, roles = split_of(split), Roles(label, client, features, exclude, cluster)
        table = table_of_frame(frame)
        return cls._of(pack_table(table, roles, chosen, task=task, missing=missing, preparation=preparation))

    @classmethod
    def from_csv(
        cls,
        path: Path | str,
        client: str = "client",
        label: str = "label",
        features: Sequence[str] | None = None,
        *,
        exclude: Sequence[str] | None = None,
        task: Task | None = None,
        missing: MissingRule = "refuse",
        decimal: Decimals | None = None,
        preparation: Preparation | None = None,
        cluster: str | None = None,
        **split: Unpack[SplitOptions],
    ) -> Federation:
        """One file with a header, a row each and a column of clients: ``.csv`` or ``.parquet``.

        Ids are whole numbers where all of them are written as such, else text.  Cells are separated by commas,
        semicolons, tabs or bars.  ``decimal`` is the decimal sign, ``"."`` or ``","``, where numbers leave it open; the
        rest as in `from_frame`.
        """
        chosen, roles = split_of(split), Roles(label, client, features, exclude, cluster)
        as_text = [*roles.by_name.values(), *(preparation.texts if preparation else ())]
        return cls._of(
            pack_table(
                read_table(Path(path), as_text, decimal),  # held nowhere else, so that columns can be released
                roles,
                chosen,
                task=task,
                missing=missing,
                preparation=preparation,
            )
        )

    @classmethod
    def from_huggingface(
        cls,
        data: Any,
        client: str | None = None,
        label: str = "label",
        features: str | Sequence[str] | None = None,
        *,
        split: str = "train",
        task: Task | None = None,
        missing: MissingRule = "refuse",
        **shares: Unpack[SplitOptions],
    ) -> Federation:
        """Data sets of Hugging Face: one with a column of clients, or one for each client, as flwr-datasets has them.

        A column of images becomes numbers from 0 to 1, ``[channels, height, width]``; one of lists keeps their shape,
        and whole numbers stay whole (words, say); columns of numbers, dates and words are prepared as in `from_frame`.
        Several columns with images or lists among them are features by name, as for `from_arrays`.
        The names of a ClassLabel become `classes`, all of them, in its order; other text in sorted order.

        Args:
            data: a ``datasets.Dataset`` with the column ``client``; or a mapping of ids to data sets, or a sequence of
                them, whose ids are 0, 1, …; or a ``FederatedDataset`` of flwr-datasets.
            client: the column that says whose row it is, of a single data set.
            label: the column of labels or targets.
            features: the column, or the columns, of features; none: all others.
            split: of a ``FederatedDataset``, which of its partitioned splits.
            task: as in `from_frame`.
            missing: as in `from_frame`.
            **shares: test_fraction, seed, validation_fraction and stratify, as in `from_arrays`.
        """
        chosen = split_of(shares)
        rows = read_huggingface(data, client, label, features, split)
        known: dict[str, Any] = {"ids": rows.client, "x": rows.x, "label": rows.label}
        return cls._of(pack_table(rows.table, rows.roles, chosen, task=task, missing=missing, **known))

    @classmethod
    def from_leaf(
        cls,
        path: Path | str,
        *,
        encode: Encode | None = None,
        labels: LabelKind | None = None,
        classes: Sequence[str] | None = None,
        cluster: bool = False,
        **split: Unpack[SplitOptions],
    ) -> Federation:
        """LEAF's JSON files, with the split into training and test rows that they come with.

        A folder with the folders ``train`` and ``test`` keeps that split, and every user's rows stay in their order.
        A single file, or a folder of files, is split as in `from_arrays`.  Users who have no test rows are kept; users
        who have no training rows are refused.

        Features are float32, or int64 where all of them are whole numbers (words, say).  Labels are classes where they
        are whole numbers, and names of classes, numbered in sorted order, where they are text.

        Args:
            path: the folder or the file; in folders, only files that end in ``.json`` count.
            encode: turns features that are text into numbers: called with the list of one user's ``x``, it returns an
                array with a row for each.
            labels: ``"classes"`` or ``"values"``, where files write whole numbers with a decimal point.
            classes: names of the classes in the order of their numbers, as another federation has them.
            cluster: take the users' hierarchies for their clusters.
            **split: test_fraction, seed, validation_fraction and stratify, as in `from_arrays`; where rows are split,
                no test_fraction, and validation_fraction is a share of the training rows.

        Examples:
            >>> import json, pathlib, tempfile, selffl
            >>> data = {"a": {"x": [[0.0], [1.0]], "y": [0, 1]}, "b": {"x": [[2.0], [3.0]], "y": [1, 1]}}
            >>> text = json.dumps({"users": ["a", "b"], "num_samples": [2, 2], "user_data": data})
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     _ = pathlib.Path(folder, "all_data.json").write_text(text)
            ...     selffl.Federation.from_leaf(folder, test_fraction=0.5)
            Federation(2 clients, rows (1,): 2 train, 2 test)
        """
        rows = read_leaf(Path(path), encode, labels, classes, cluster)
        if UNDIVIDED in rows.parts:
            return cls._of(pack_whole(rows, UNDIVIDED, split_of(split)))
        return cls._of(pack_parts(rows, split_of_training_rows(split, path)))

    @classmethod
    def from_pfllib(cls, path: Path | str, *, trusted: bool = False, **split: Unpack[SplitOptions]) -> Federation:
        """PFLlib's folder of a data set, with the split into training and test rows that it comes with.

        The clients' ids are the numbers of their files.  Features are float32, or whole numbers as they are (words,
        say); labels are classes.

        The files are pickles, which can run code when they are read.  They are read only if ``trusted``, and then in a
        way that refuses everything but arrays.  Trust is asked for nevertheless: no reader of pickles is safe for
        certain.

        Args:
            path: the folder with ``train``, ``test`` and, where there is one, ``config.json``.
            trusted: whether you have made the files or know who has.
            **split: seed, validation_fraction (a share of the training rows) and stratify, as in `from_arrays`.
        """
        chosen = split_of_training_rows(split, path)
        return cls._of(pack_parts(read_pfllib(Path(path), trusted), chosen))

    @classmethod
    def from_dataset(
        cls,
        dataset: torch.utils.data.Dataset[Any],
        client: npt.ArrayLike,
        *,
        cluster: npt.ArrayLike | None = None,
        **split: Unpack[SplitOptions],
    ) -> Federation:
        """A torch data set of (features, label) pairs with one client id per item; the rest as in `from_arrays`.

        An item may also be a dictionary of features and, in the entry ``label`` or ``labels``, its label.  Every item
        is read once, so that random transforms are frozen as they fall.
        """
        chosen = split_of(split)
        x, y = rows_of_dataset(dataset, len(column_of(client)))
        return cls._of(pack_arrays(x, y, client, chosen, cluster))

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
            parts = [
                Rows(_stored_features(tensors, part), tensors[f"{part}.labels"], tensors[f"{part}.offset"])
                if f"{part}.labels" in tensors
                else None
                for part in ("train", "test", "validation")
            ]
        except (CheckpointError, KeyError) as error:
            reason = one_line(error).removeprefix(f"{path} ").partition(";")[0]
            raise DataError(f"{path} cannot be read ({reason}); {advice}. Save it again.") from None
        train, test, validation = parts
        if train is None or test is None:
            raise DataError(f"{path} lacks training or test rows; {advice}. Save it again.")
        known = about.get("preparation")
        preparation = None if known is None else Preparation.from_dict(known)
        fed = cls(clients, train, test, validation, tensors.get("cluster"), source, classes, preparation)
        for name, rows in fed.parts.items():
            if len(rows.offset) != len(clients) + 1 or not int(rows.offset[-1]) == len(rows.labels) == len(
                rows.features
            ):
                raise DataError(f"{path}: rows and offsets of {name} do not fit {len(clients)} clients. Save it again.")
        return fed

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
