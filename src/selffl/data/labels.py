"""The label of a user's table: what it is, and how its cells become numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import numpy as np

from selffl.data.arrow import pa
from selffl.data.roles import unknown_column
from selffl.data.tables import PLURAL, Array, Table
from selffl.errors import DataError, check_known, first_few

Task = Literal["classes", "values", "counts"]

MAX_CLASSES_UNASKED = 20  # different whole numbers of a label that are taken for classes without being asked about


@dataclass(frozen=True)
class Label:
    """What is predicted, in the user's own units and names."""

    name: str  # of the column
    task: Task  # classes, values or counts
    classes: tuple[Any, ...] = ()  # their names, or numbers, as the user writes them: output k of a model is classes[k]
    mean: float = 0.0  # of values or counts in the training rows
    scale: float = 1.0  # their standard deviation


def label_of(table: Table, name: str, task: Task | None) -> Label:
    """What a column of labels is: as the user says, or as its values do where they leave no doubt.

    Words and truth values are classes, whole numbers classes where they are few, other numbers values.
    """
    if task is not None:
        known_task(task)
    kind, values = table.interpret_column(name)
    if kind in ("date", "time"):
        raise DataError(f"{table.place}: the label {name!r} holds {PLURAL[kind]}; expected classes or numbers.")
    if kind == "words":
        return Label(name, "classes", _word_classes(table, name, values, task))
    numbers = table.numbers(name)  # which refuses infinity
    is_whole = bool((numbers == np.floor(numbers)).all())
    distinct = values.unique().drop_null().to_pylist() if is_whole and task in (None, "classes") else []
    if task is None:
        is_integer = pa.types.is_integer(values.type)
        is_open = len(distinct) > MAX_CLASSES_UNASKED if is_integer else len(distinct) <= len(table) / 2
        if is_whole and is_open:
            shown = first_few(sorted(distinct), 5, "{:g}".format)
            raise DataError(
                f"{table.place}: the label {name!r} holds {len(distinct):,} different whole numbers ({shown}); "
                'expected to be told what they are. Pass task="classes", task="values" or task="counts".'
            )
        task = "classes" if is_integer else "values"
    is_odd = numbers != np.floor(numbers)
    if task == "counts":
        is_odd |= numbers < 0
    if task != "values" and is_odd.any():
        wanted = "whole numbers or words as classes" if task == "classes" else "counts, whole numbers from 0 up"
        raise DataError(f"{table.where(is_odd)}: the label {name!r} is {numbers[is_odd][0]:g}; expected {wanted}.")
    if task != "classes":
        return Label(name, task)
    kind_of = bool if pa.types.is_boolean(table.columns[name].type) else int
    return Label(name, "classes", sorted_classes(kind_of(value) for value in distinct))


def known_task(task: str) -> Task:
    """A task, once it is one."""
    check_known("task", task, get_args(Task))
    return cast(Task, task)


def _word_classes(table: Table, name: str, words: pa.Array, task: Task | None) -> tuple[Any, ...]:
    """The classes of a label that holds words."""
    if task in ("values", "counts"):
        raise DataError(
            f"{table.place}: the label {name!r} holds words, such as {words.drop_null()[0].as_py()!r}; expected "
            f"numbers for task={task!r}."
        )
    distinct = words.unique().drop_null().to_pylist()
    if task is None and len(distinct) > max(MAX_CLASSES_UNASKED, len(table) / 2):
        raise DataError(
            f"{table.place}: the label {name!r} holds {len(distinct):,} different words in {len(table):,} rows, such "
            f'as {distinct[0]!r}; expected classes that repeat, or numbers. Pass task="classes" if they are classes.'
        )
    return sorted_classes(distinct)


def encode_label(table: Table, label: Label) -> Array:
    """The label of each row of a table: the number of its class, or its value as float64."""
    name = label.name
    if name not in table.columns:
        raise unknown_column(table, name, "Expected the label that the run was trained on.")
    is_missing = table.is_missing(name)
    if is_missing.any():
        raise DataError(
            f"{table.where(is_missing)}: {name} is missing; expected a label in every row. Fill them in, or drop "
            "those rows."
        )
    if label.task != "classes":
        return table.numbers(name)
    values = table.interpret_column(name).values
    is_words = any(isinstance(each, str) for each in label.classes)
    known = {each: number for number, each in enumerate(label.classes)}
    encoded = (table.words(name) if is_words else values).dictionary_encode()
    distinct = encoded.dictionary.to_pylist()
    strange = next((index for index, value in enumerate(distinct) if value not in known), None)
    if strange is not None:
        is_strange = np.asarray(encoded.indices) == strange
        known_ones = first_few(label.classes, 8)
        raise DataError(
            f"{table.where(is_strange)}: {name} is {distinct[strange]!r}; expected one of the classes {known_ones}."
        )
    numbers: Array = np.array([known[value] for value in distinct], dtype=np.int64)[np.asarray(encoded.indices)]
    return numbers


def sorted_classes(classes: Iterable[Any]) -> tuple[Any, ...]:
    """Each class once, in order."""
    return tuple(sorted(set(classes)))
