"""The data sets there are, by name: one file and one line each."""

from __future__ import annotations

import inspect
from typing import Any

from selffl.data import cifar10, digits, emnist, letters, mnist, multilevel, sent140, sentiment, synthetic, wakeword
from selffl.data.dataset import DataSet
from selffl.data.federation import Federation
from selffl.errors import check_known

DATA_SETS: dict[str, DataSet] = {
    data_set.name: data_set
    for data_set in (
        digits.DATA_SET,
        mnist.DATA_SET,
        letters.DATA_SET,
        emnist.DATA_SET,
        cifar10.DATA_SET,
        sentiment.DATA_SET,
        sent140.DATA_SET,
        wakeword.DATA_SET,
        synthetic.DATA_SET,
        *multilevel.DATA_SETS,
    )
}


def data_set(name: str) -> DataSet:
    """The data set of a name."""
    check_known("data set", name, DATA_SETS)
    return DATA_SETS[name]


def load(name: str, **options: Any) -> Federation:
    """A federation by the name of its data set; ``load(**fed.source)`` makes ``fed`` again.

    Examples:
        >>> from selffl.data import load
        >>> fed = load("digits", seed=1, num_clients=10)
        >>> fed.num_clients, fed.num_classes, fed.source["name"]
        (10, 10, 'digits')
    """
    chosen = data_set(name)
    known = inspect.signature(chosen.load).parameters
    for option in options:
        check_known(f"option of {name}", option, known)
    return chosen.load(**options)
