"""The JSON that a page is drawn from, as charts.js and report.js read it.

A test compares the keys that the scripts read with those that are declared here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict

Number = Any  # or None where it is not known
Numbers = list[Any]  # likewise


class Curve(TypedDict):
    """A score of one method at the rounds that were evaluated."""

    x: list[int]
    y: Numbers
    error: Numbers | None  # standard errors over seeds
    gradients: Numbers  # evaluated up to then, bytes sent and seconds spent, by a run on average
    bytes: Numbers
    seconds: Numbers
    single: list[Numbers]  # the score of each seed by itself


class Bins(TypedDict):
    """Clients in bins of about equal counts by their predicted gain."""

    x: Numbers
    y: Numbers  # mean realised gains
    error: Numbers
    count: list[int]


class Loser(TypedDict):
    """A client that loses by joining, and why."""

    client: str
    gain: Number
    train: Number
    test: Number
    why: str


class Losing(TypedDict):
    """How many clients lose, of how many, and those that are named."""

    lose: int
    of: int
    most: list[Loser]


# Some keys are keywords of Python.
Classes = TypedDict(
    "Classes",
    {
        "names": list[str],
        "client": list[int],  # number of the client, of the class, and how many rows, cell by cell
        "class": list[int],
        "rows": list[int],
    },
)
Classes.__doc__ = "Training rows by client and class; only the cells that are not empty."

AnswerCells = TypedDict(
    "AnswerCells",
    {
        "names": list[str],  # of the classes
        "client": list[int],  # number of the client, of the true class, of the answer, and how many rows, cell by cell
        "class": list[int],
        "answer": list[int],
        "rows": list[int],
        "confidence": Numbers,  # the probability of the answer by the model, on average
    },
)
AnswerCells.__doc__ = "Which classes the rows of clients got: a cell for each tenth of confidence that there is."

ClientColumns = TypedDict(
    "ClientColumns",
    {
        "personal": Numbers,
        "global": NotRequired[Numbers],
        "alone": NotRequired[Numbers],
        "rounds": NotRequired[Numbers],
        "steps": NotRequired[Numbers],
        "variance": NotRequired[Numbers],
        "predicted": NotRequired[Numbers],
        "weight": NotRequired[Numbers],
        "losing": NotRequired[Losing],
        "bins": NotRequired[Bins],
        "answers": NotRequired[AnswerCells],
    },
)
ClientColumns.__doc__ = "What one method did for each client of a seed."


class SeedTable(TypedDict):
    """The clients of one seed, largest first."""

    seed: int
    clients: list[str]
    total: int  # clients there are, of whom a page may show fewer
    train: Numbers
    test: Numbers
    cluster: list[int | None] | None
    classes: Classes | None
    methods: list[ClientColumns | None]


class Bands(TypedDict):
    """The tenth, the middle and the ninth tenth of clients in each round."""

    x: list[int]
    low: Numbers
    middle: Numbers
    high: Numbers


class Inside(TypedDict):
    """Variances, weights and steps of one method over rounds."""

    method: int
    rounds: list[int]
    totalRounds: int
    inter: Numbers
    closing: Number  # what closing rounds have learned between clients, where there were any
    interval: list[Number] | None  # between what that, or else the last of `inter`, lies, 95 % confidence
    intra: Numbers
    steps: Bands | None
    weight: Bands | None
    equal: Number  # a client's share if all weighed the same
    bins: list[int]  # lower ends of numbers of steps
    counts: list[int] | None
    most: int | None  # steps that a client may take


class Trajectory(TypedDict):
    """The rounds that clients took part in, one after the other, with one method and seed."""

    seed: int
    method: int
    every: int  # of each client's rounds
    client: list[int]
    round: list[int]
    steps: list[int | None]
    wanted: Numbers
    variance: Numbers
    weight: Numbers


class Tables(TypedDict):
    """Everything that the charts of a group are drawn from."""

    metric: str
    clientMetric: str
    unit: str
    higher: bool  # whether higher is better
    parts: dict[str, str]
    methods: list[str]
    fewest: int  # test rows of a client whose gain counts
    predicts: list[bool]  # of each method, whether its predictions order the gains of its clients
    alone: int | None  # the method that is training alone
    shared: int | None  # the first that gives all clients one model
    scores: list[dict[str, Numbers]]  # mean and standard error, by part
    rounds: dict[str, list[Curve | None]]
    seeds: list[SeedTable]
    allSeeds: list[int]
    inside: list[Inside]
    paths: list[Trajectory]


class Entry(TypedDict):
    """A group on the page; sentences and tables only where a live page asks for news."""

    id: str
    tables: Tables
    palette: Sequence[tuple[str, str]]  # of the methods, on a light ground and on a dark one
    text: NotRequired[dict[str, str]]
    html: NotRequired[dict[str, str]]


class Payload(TypedDict):
    """What the script of the page works on."""

    shape: str  # other where the page has to be made anew
    groups: list[Entry]
    tag: NotRequired[str]
    every: NotRequired[int]  # milliseconds between two questions of a live page
    state: NotRequired[str]
