"""From what users have to a federation: arrays, tables, files of several kinds, data sets of other libraries."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, Unpack

import numpy.typing as npt
import torch

from selffl.data.columns import column_of, rows_of_dataset
from selffl.data.folder import read_folder
from selffl.data.huggingface import read_huggingface
from selffl.data.labels import Task
from selffl.data.leaf import UNDIVIDED, Encode, read_leaf
from selffl.data.on_demand import MadeRows, split_on_demand
from selffl.data.packing import Packed, pack_arrays, pack_parts, pack_table, pack_whole
from selffl.data.parts import LabelKind
from selffl.data.pfllib import read_pfllib
from selffl.data.preparation import Preparation
from selffl.data.readers import read_table, table_of_frame
from selffl.data.roles import MissingRule, Roles
from selffl.data.split import Split, SplitOptions, split_of, split_of_training_rows
from selffl.data.stored_rows import StoredRows
from selffl.data.tables import Decimals


class FromSources:
    """How a `selffl.Federation` is made of what users have."""

    @classmethod
    @abstractmethod
    def _of(cls, packed: Packed) -> Self:
        """The federation of rows that are packed."""

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
    ) -> Self:
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
    def on_demand(
        cls,
        make: Callable[[int], tuple[Any, Any]],
        num_clients: int,
        num_examples: npt.ArrayLike,
        *,
        num_classes: int | None = None,
        test_fraction: float = 0.1,
        seed: int = 0,
    ) -> Self:
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
        return cls._of(Packed(range(num_clients), *split_on_demand(source, Split(test_fraction, seed=seed))))

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
    ) -> Self:
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
        return cls._of(Packed(source.ids, *split_on_demand(source, Split(test_fraction, seed=seed))))

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
    ) -> Self:
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
    ) -> Self:
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
    ) -> Self:
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
    ) -> Self:
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
    ) -> Self:
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
    def from_pfllib(cls, path: Path | str, *, trusted: bool = False, **split: Unpack[SplitOptions]) -> Self:
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
    ) -> Self:
        """A torch data set of (features, label) pairs with one client id per item; the rest as in `from_arrays`.

        An item may also be a dictionary of features and, in the entry ``label`` or ``labels``, its label.  Every item
        is read once, so that random transforms are frozen as they fall.
        """
        chosen = split_of(split)
        x, y = rows_of_dataset(dataset, len(column_of(client)))
        return cls._of(pack_arrays(x, y, client, chosen, cluster))
