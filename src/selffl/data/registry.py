"""The data sets there are, by name: what each is, what it stands for, where its files come from, how it is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from selffl.data import (
    audio,
    cifar10,
    digits,
    emnist,
    letters,
    mnist,
    multilevel,
    sent140,
    sentiment,
    synthetic,
    wakeword,
)
from selffl.data.federation import Federation
from selffl.data.locate import DataFile
from selffl.data.multilevel import RTable
from selffl.errors import unknown_name


@dataclass(frozen=True)
class Remote:
    """A file at a public home.

    Attributes:
        url: Where it is.
        md5: Of the file as it is served, as published.
        members: What is taken out of it, where it is an archive; else the file itself is kept.
    """

    url: str
    md5: str
    members: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        """Its name there."""
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class DataSet:
    """A data set.

    Attributes:
        name: For `load` and the command line.
        title: What it is, in a line.
        clients: How many there are by default.
        classes: What they are called, by default; empty where numbers say it.
        stands_for: The data set it stands in for, where that could not be had; empty where it is what it says.
        licence: What is known of it.
        load: Makes the federation.
        files: Says which files it is read from; none where it needs no file.
        home: A page about the original.
        remotes: The files that `selffl data fetch` gets; none where it gets none from a server.
        r_table: The table of an R package that `selffl data fetch` writes as a CSV file, where it is one.
    """

    name: str
    title: str
    clients: int
    licence: str
    load: Callable[..., Federation]
    files: Callable[[], list[DataFile]] = list
    classes: tuple[str, ...] = ()
    stands_for: str = ""
    home: str = ""
    remotes: tuple[Remote, ...] = ()
    r_table: RTable | None = None

    @property
    def can_fetch(self) -> bool:
        """Whether `selffl data fetch` can get it."""
        return bool(self.remotes) or self.r_table is not None


def _of_r_table(table: RTable, title: str, licence: str, home: str, classes: tuple[str, ...] = ()) -> DataSet:
    """A data set that comes with an R package."""
    return DataSet(
        name=table.name,
        title=title,
        clients=table.num_groups,
        licence=licence,
        load=multilevel.loader_of(table),
        files=multilevel.files_of(table),
        classes=classes,
        home=home,
        r_table=table,
    )


_EVERY = (
    DataSet(
        name="digits",
        title="1,797 handwritten digits, 8 × 8, embedded in scikit-learn; three digits per client",
        clients=40,
        licence="CC BY 4.0 (UCI)",
        load=digits.digits,
        home="https://archive.ics.uci.edu/dataset/80",
    ),
    DataSet(
        name="mnist",
        title="MNIST, 70,000 handwritten digits; two digits per client, sizes by a power law (FedProx)",
        clients=1000,
        licence="usually distributed under CC BY-SA 3.0",
        load=mnist.mnist,
        files=mnist.files,
        home="http://yann.lecun.com/exdb/mnist/",
        remotes=(
            Remote(
                "https://ossci-datasets.s3.amazonaws.com/mnist/train-images-idx3-ubyte.gz",
                "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            ),
            Remote(
                "https://ossci-datasets.s3.amazonaws.com/mnist/train-labels-idx1-ubyte.gz",
                "d53e105ee54ea40749a09fcbcd1e9432",
            ),
            Remote(
                "https://ossci-datasets.s3.amazonaws.com/mnist/t10k-images-idx3-ubyte.gz",
                "9fb629c4189551a2d022fa330f9573f3",
            ),
            Remote(
                "https://ossci-datasets.s3.amazonaws.com/mnist/t10k-labels-idx1-ubyte.gz",
                "ec29112dd5afa0611ce80d1b7f02629c",
            ),
        ),
    ),
    DataSet(
        name="letters",
        title="OCR letters, 52,152 handwritten lower-case letters, 16 × 8; five of ten letters per client",
        clients=200,
        licence="no licence stated by its authors; this copy comes with a BSD 2-clause package",
        load=letters.letters,
        files=letters.files,
        classes=tuple(letters.FREQUENT),
        stands_for="FEMNIST as FedProx splits it, which emnist reads",
        home="https://ai.stanford.edu/~btaskar/ocr/",
    ),
    DataSet(
        name="emnist",
        title="EMNIST by class, lower-case letters a to j; five of ten letters per client (FedProx)",
        clients=200,
        licence="none stated; from NIST's Special Database 19, cite Cohen et al. 2017",
        load=emnist.emnist,
        files=emnist.files,
        classes=tuple("abcdefghij"),
        home="https://www.nist.gov/itl/products-and-services/emnist-dataset",
        remotes=(
            Remote(
                "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
                "58c8d27c78d21e728a6bc7b3cc06412e",
                tuple(f"gzip/{name}.gz" for names in emnist.PARTS.values() for name in names),
            ),
        ),
    ),
    DataSet(
        name="cifar10",
        title="CIFAR-10, 60,000 colour pictures, 32 × 32; three classes per client (pFedMe)",
        clients=20,
        licence="none stated; cite Krizhevsky 2009",
        load=cifar10.cifar10,
        files=cifar10.files,
        classes=cifar10.CLASSES,
        home="https://www.cs.toronto.edu/~kriz/cifar.html",
        remotes=(
            Remote(
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                "c32a1d4ab5d03f1284b67883e8d87530",
                tuple(f"cifar-10-batches-bin/{name}.bin" for name in cifar10.BATCHES),
            ),
        ),
    ),
    DataSet(
        name="sentiment",
        title="Rated snippets of 785 Amazon reviews and New York Times opinion pieces, a client each; 25 words a row",
        clients=785,
        licence="MIT (vaderSentiment's additional resources); GloVe vectors: PDDL 1.0",
        load=sentiment.sentiment,
        files=sentiment.files,
        classes=("negative", "positive"),
        stands_for="Sentiment140 as FedProx splits it, which sent140 reads",
        home="https://github.com/cjhutto/vaderSentiment",
    ),
    DataSet(
        name="sent140",
        title="Sentiment140, tweets of users with more than 30 in a sample of 30 %; 25 words a row (FedProx)",
        clients=772,
        licence="none stated; cite Go et al. 2009; GloVe vectors: PDDL 1.0",
        load=sent140.sent140,
        files=sent140.files,
        classes=("negative", "positive"),
        home="http://help.sentiment140.com",
    ),
    DataSet(
        name="wakeword",
        title="315 clips of “alexa” and 2,658 of other sounds, rendered for five made-up types of device",
        clients=5,
        licence="CC BY 4.0 (Speech Commands), Apache 2.0 (Picovoice), CC BY-NC 3.0 (ESC-50)",
        load=wakeword.wakeword,
        files=audio.files,
        classes=("other", "wake word"),
        stands_for="the paper's private wake-word data of Amazon Alexa",
        home="https://arxiv.org/abs/1804.03209",
    ),
    DataSet(
        name="synthetic",
        title="Synthetic(α, β): 60 made-up features, ten classes, models that differ between clients (FedProx)",
        clients=30,
        licence="made here",
        load=synthetic.synthetic,
        home="https://arxiv.org/abs/1812.06127",
    ),
    _of_r_table(
        multilevel.EXAM,
        "Examination scores of 4,059 pupils in 65 schools of Inner London; a client is a school (R: mlmRev)",
        "GPL 2 or later (mlmRev); data of the Centre for Multilevel Modelling",
        "https://www.bristol.ac.uk/cmm/learning/support/datasets/",
    ),
    _of_r_table(
        multilevel.MATH_ACHIEVE,
        "Mathematics achievement of 7,185 pupils in 160 schools, High School and Beyond 1982 (R: nlme)",
        "GPL 2 or later (nlme)",
        "https://nces.ed.gov/surveys/hsb/",
    ),
    _of_r_table(
        multilevel.SCOTS_SEC,
        "Attainment of 3,435 pupils of Fife from 148 primary schools; a client is a primary school (R: mlmRev)",
        "GPL 2 or later (mlmRev); data of the Centre for Multilevel Modelling",
        "https://www.bristol.ac.uk/cmm/learning/support/datasets/",
    ),
    _of_r_table(
        multilevel.RADON,
        "Radon in 919 houses of 85 counties of Minnesota; a client is a county (R: rstanarm)",
        "GPL 3 or later (rstanarm)",
        "https://sites.stat.columbia.edu/gelman/arm/",
    ),
    _of_r_table(
        multilevel.SLEEP_STUDY,
        "Reaction times of 18 people over ten days of little sleep; a client is a person (R: lme4)",
        "GPL 2 or later (lme4)",
        "https://doi.org/10.1046/j.1365-2869.2003.00337.x",
    ),
    _of_r_table(
        multilevel.CONTRACEPTION,
        "Use of contraception by 1,934 women in 60 districts of Bangladesh; a client is a district (R: mlmRev)",
        "GPL 2 or later (mlmRev); data of the Centre for Multilevel Modelling",
        "https://www.bristol.ac.uk/cmm/learning/support/datasets/",
        ("no", "yes"),
    ),
    _of_r_table(
        multilevel.IMMUNISATION,
        "Immunisation of 2,159 children in 161 communities of Guatemala; a client is a community (R: mlmRev)",
        "GPL 2 or later (mlmRev)",
        "https://doi.org/10.1111/1467-985X.00206",
        ("no", "yes"),
    ),
)
DATA_SETS: dict[str, DataSet] = {data_set.name: data_set for data_set in _EVERY}


def data_set(name: str) -> DataSet:
    """The data set of a name."""
    if name not in DATA_SETS:
        raise unknown_name("data set", name, DATA_SETS)
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
        if option not in known:
            raise unknown_name(f"option of {name}", option, known)
    return chosen.load(**options)
