"""Rated sentences of reviews and opinion pieces, one client each: a stand-in for FedProx's Sent140 (Sentiment140).

It is not Sentiment140, of which no file could be had.  Hutto and Gilbert, VADER (ICWSM 2014), published with their
package vaderSentiment: 23,703 snippets with the mean rating of about 20 people, from −4 to 4.  Clients are the 300
Amazon reviews of one author each and the 498 opinion pieces of the New York Times; movie reviews and tweets, whose
authors are not known, are left out.  `sent140` reads the data set this stands for.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from selffl.data.dataset import DataSet, named
from selffl.data.federation import Federation
from selffl.data.locate import DataFile, read_checked, refuse_unreadable
from selffl.data.split import Split
from selffl.data.text import embedding_files, encode, has_token, read_embeddings
from selffl.errors import ConfigError, DataError

SHA256 = "686458265e18777258dd97750e377b004058b16163bd261dc0e28259fd664c2b"
COLUMNS = ("source", "document", "score", "text")  # and snippet, a number within the document
WITH_AUTHOR = ("amazon", "nyt")
WITHOUT_AUTHOR = ("movie", "tweet")
MIN_ROWS = 2  # rows of a client; with one there is none to test


def read_snippets(
    path: Path, sources: tuple[str, ...] = WITH_AUTHOR
) -> tuple[list[str], npt.NDArray[np.float64], list[str]]:
    """Clients, ratings and texts of some sources, once the checksum is right; else of those with known documents."""
    content = read_checked(path, SHA256, "the sentiment snippets")
    advice = f"expected a gzipped table with the columns {', '.join(COLUMNS)}. Copy it again"
    clients, scores, texts = [], [], []
    with refuse_unreadable(path, advice, OSError, EOFError, zlib.error, ValueError, csv.Error):
        table = csv.DictReader(io.StringIO(gzip.decompress(content).decode(), newline=""), strict=True)
        missing = [column for column in COLUMNS if column not in (table.fieldnames or ())]
        if missing:
            raise DataError(f"{path} has no column {missing[0]}; {advice}.")
        for row in table:
            if None in row or None in row.values():
                raise DataError(f"{path} has too few or too many columns in line {table.line_num}; {advice}.")
            if row["source"] in sources:
                if not math.isfinite(score := float(row["score"])):
                    raise DataError(f"{path} has the score {score} in line {table.line_num}; {advice}.")
                clients.append(f"{row['source']}-{row['document']}")
                scores.append(score)
                texts.append(row["text"])
    return clients, np.asarray(scores, dtype=np.float64), texts


def files(embeddings: str = "glove100") -> list[DataFile]:
    """The snippets, then the files of the word vectors."""
    return [DataFile("sentiment", ("snippets.csv.gz",), read_snippets), *embedding_files(embeddings)]


@named("sentiment", Split(test_fraction=0.2))
def sentiment(split: Split, threshold: float = 0.5, num_tokens: int = 25, embeddings: str = "glove100") -> Federation:
    """Snippets over the documents they are of; rows are the numbers of their first words (`text.encode`).

    Class 1 is a rating above 0.  Ratings nearer to 0 than ``threshold`` are left out, and so are texts without a word
    and then clients with a single row, who could not be tested.  By default 785 clients (293 reviews and 492 opinion
    pieces) keep 5,945 rows, of which 49.3 % are positive.  A fifth of two rows rounds to none, so that the 27 clients
    with two are trained and not tested; 209 clients have one class only.
    """
    if not 0 <= threshold < math.inf:
        raise ConfigError(f"threshold is {threshold}; expected a finite rating, 0 or more.")
    snippets, *_ = files(embeddings)
    clients, scores, texts = snippets.load()
    ids = encode(texts, read_embeddings(embeddings), num_tokens)
    used = has_token(ids) & (np.abs(scores) >= threshold)
    _, owner, count = np.unique(np.asarray(clients)[used], return_inverse=True, return_counts=True)
    used[used] = count[owner] >= MIN_ROWS
    if not used.any():
        raise DataError(
            f"no client of {snippets.find()} has {MIN_ROWS} rated texts; expected some with a rating of at least "
            f"{threshold:g} or at most {-threshold:g}. Lower threshold."
        )
    return Federation.from_arrays(ids[used], (scores > 0)[used], np.asarray(clients)[used], **split.options)


DATA_SET = DataSet.described("sentiment", sentiment, files)
