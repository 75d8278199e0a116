"""Sentiment140 as FedProx takes it: tweets of users with more than 30 of them, in a sample of 30 %.

Go, Bhayani and Huang, Twitter Sentiment Classification using Distant Supervision (2009): 1,600,000 tweets, labelled by
the emoticons that were then taken out; read from the original table.  The choice of users follows the FedProx authors'
procedure (Li et al., MLSys 2020), which is LEAF's (Caldas et al., 2018; ``preprocess.sh -s niid --sf 0.3 -k 30``):

1. users, in random order, are taken with all their tweets until 30 % of all tweets are reached, the last user's cut
   there;
2. users with more than 30 tweets are kept: 772 with 40,783 tweets, as published;
3. a fifth of each user's tweets is held out.

The random numbers are this library's own, so that other users come out.  FedProx also reads the 498 tweets of the test
table, takes words as they are written and pads behind; here the training table alone is read, words are lower case, as
GloVe's are, and rows are padded in front (`text.encode`).  The original file could not be had: this reader has seen
made-up files of its form only.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from sys import intern

import numpy as np
import numpy.typing as npt

from selffl.data.dataset import DataSet, named
from selffl.data.federation import Federation
from selffl.data.locate import DataFile, refuse_unreadable
from selffl.data.split import Split
from selffl.data.text import embedding_files, encode, has_token, read_embeddings
from selffl.errors import ConfigError, DataError

FILE = "training.1600000.processed.noemoticon.csv"
LABELS = {"0": 0, "4": 1}  # by polarity
NUM_TWEETS = 1_600_000  # no checksum is published; a file that was cut off has fewer

Tweets = tuple[npt.NDArray[np.uint8], list[str], list[str]]


def read_tweets(path: Path) -> Tweets:
    """Labels, users and texts, in the order of the table: polarity, id, date, query, user, text, without a header."""
    advice = "expected polarity (0 or 4), id, date, query, user and text. It is damaged or another file: get it again"
    labels, users, texts = bytearray(), [], []
    with refuse_unreadable(path, advice, OSError, csv.Error), path.open(encoding="latin-1", newline="") as file:
        table = csv.reader(file)  # not strict, as in LEAF: nothing is known of stray quotes
        for row in table:
            if len(row) != 6 or row[0] not in LABELS:
                begin = ",".join(row)[:40]
                raise DataError(
                    f"{path} has {len(row)} columns in line {table.line_num}, which begins {begin!r}; {advice}."
                )
            labels.append(LABELS[row[0]])
            users.append(intern(row[4]))
            texts.append(row[5])
    if len(users) != NUM_TWEETS:
        raise DataError(f"{path} holds {len(users):,} tweets; expected {NUM_TWEETS:,}. It was cut off: get it again.")
    return np.frombuffer(labels, dtype=np.uint8), users, texts


def sample_tweets(users: Sequence[str], fraction: float, more_than: int, seed: int) -> npt.NDArray[np.int64]:
    """Positions of the tweets that LEAF's sample keeps, given the user of each.

    Args:
        users: of each tweet.
        fraction: of all tweets to reach, taking users in random order with all they have; the last one is cut.
        more_than: tweets that a user has to have in the sample to be kept.
        seed: of the order.
    """
    number = {user: index for index, user in enumerate(sorted(set(users)))}
    owner = np.fromiter((number[user] for user in users), dtype=np.int64, count=len(users))
    count = np.bincount(owner)
    order = np.random.default_rng(seed).permutation(len(count))
    left = int(fraction * len(users)) - (np.cumsum(count[order]) - count[order])  # when a user's turn comes
    taken = np.zeros_like(count)
    taken[order] = np.clip(left, 0, count[order])
    taken[taken <= more_than] = 0
    by_user = np.argsort(owner, kind="stable")
    rank = np.empty(len(owner), dtype=np.int64)  # of a tweet among its user's
    rank[by_user] = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    return np.flatnonzero(rank < taken[owner])


def files(embeddings: str = "glove300") -> list[DataFile]:
    """The table of tweets, then the files of the word vectors."""
    return [DataFile("sent140", (FILE,), read_tweets), *embedding_files(embeddings)]


@named("sent140", Split(test_fraction=0.2))
def sent140(
    split: Split, fraction: float = 0.3, more_than: int = 30, num_tokens: int = 25, embeddings: str = "glove300"
) -> Federation:
    """Tweets over their users; rows are the numbers of their first words (`text.encode`), class 1 is positive.

    Users are those with ``more_than`` 30 tweets in a ``fraction`` of 30 % (`sample_tweets`), whom the seed chooses too.
    Tweets without a word are left out after that.
    """
    if not 0 < fraction <= 1:
        raise ConfigError(f"fraction is {fraction}; expected a share above 0, up to 1.")
    if not isinstance(more_than, int) or more_than < 0:
        raise ConfigError(f"more_than is {more_than!r}; expected a whole number, 0 or more.")
    table, *_ = files(embeddings)
    path = table.find()
    vectors = read_embeddings(embeddings)  # before the table, which takes longer
    labels, users, texts = table.read(path)
    chosen = sample_tweets(users, fraction, more_than, split.seed)
    ids = encode([texts[row] for row in chosen], vectors, num_tokens)
    chosen, ids = chosen[has_token(ids)], ids[has_token(ids)]
    if not len(chosen):
        raise DataError(
            f"no user of {path} has more than {more_than} tweets in a sample of {fraction:g}; expected some. "
            "Raise fraction, or lower more_than."
        )
    return Federation.from_arrays(ids, labels[chosen], np.asarray([users[row] for row in chosen]), **split.options)


DATA_SET = DataSet.described("sent140", sent140, files)
