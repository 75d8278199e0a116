"""Sentiment140 on made-up files of its form: LEAF's sample of users, FedProx's rows."""

from collections import Counter

import numpy as np
import pytest
import torch

from selffl.data import load, text
from selffl.data import sent140 as module
from selffl.errors import ConfigError, DataError

SIZES = {"ann": 40, "Bob": 31, "cat": 30, "dan": 35, "eve": 1, "Zoë": 33}  # 170 tweets


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Tweets of six users in mixed order; the word of tweet k is wk, and every third is positive."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SELFFL_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    users = np.random.default_rng(0).permutation([user for user, size in SIZES.items() for _ in range(size)])
    words = [f"w{k}" for k in range(len(users))]
    for folder in ("glove", "sent140"):
        (tmp_path / folder).mkdir()
    with (tmp_path / "glove" / "glove.6B.300d.txt").open("w", encoding="utf-8") as file:
        file.writelines(f"{word} {' '.join(['0.5'] * 300)}\n" for word in words)
    monkeypatch.setattr(text, "NUM_WORDS", len(words))
    monkeypatch.setattr(module, "NUM_TWEETS", len(users))
    path = tmp_path / "sent140" / module.FILE
    path.write_text(
        "".join(
            f'"{0 if k % 3 else 4}","{k}","Mon Apr 06 22:19:45 PDT 2009","NO_QUERY","{user}","W{k} déjà, ""vu"" "\r\n'
            for k, user in enumerate(users)
        ),
        encoding="latin-1",
        newline="",
    )
    return path, list(users)


def leaf(users, order, fraction, more_than):
    """LEAF's sample.py and remove_users.py as a plain loop: positions of the tweets that are kept."""
    wanted, total, kept = int(fraction * len(users)), 0, []
    for user in order:
        if total >= wanted:
            break
        own = [k for k, name in enumerate(users) if name == user][: wanted - total]
        total += len(own)
        if len(own) > more_than:
            kept += own
    return sorted(kept)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("fraction", "more_than"), [(0.3, 30), (0.5, 0), (0.77, 20), (1.0, 30), (1.0, 0)])
def test_the_sample_is_leafs(small, seed, fraction, more_than):
    _, users = small
    order = np.unique(users)[np.random.default_rng(seed).permutation(len(SIZES))]
    assert module.sample_tweets(users, fraction, more_than, seed).tolist() == leaf(users, order, fraction, more_than)


def test_tweets_go_to_their_users_by_hand(small):
    _, users = small
    fed = module.sent140(fraction=1.0, num_tokens=6)
    sizes = dict(zip(fed.clients, fed.num_examples.tolist(), strict=True))
    assert sizes == {user: size for user, size in SIZES.items() if size > 30}  # 31 is more than 30, 30 is not
    for rows in fed.parts.values():
        # wk, déjà, a comma, a quote, vu, a quote: only the first has a number.
        assert rows.features.dtype == torch.int64
        assert torch.equal(rows.features[:, 1:], torch.ones(len(rows.labels), 5, dtype=torch.int64))
        tweet = rows.features[:, 0] - text.FIRST_WORD
        assert torch.equal(rows.labels, (tweet % 3 == 0).long())
        assert [users[k] for k in tweet] == [fed.clients[k] for k in rows.owner]
    assert fed.test.num_examples.tolist() == [6, 7, 8, 7]  # a fifth of 31, 33, 40 and 35
    train, test = (set(rows.features[:, 0].tolist()) for rows in fed.parts.values())
    assert not train & test
    assert len(train | test) == 139


def test_a_seed_draws_the_users(small):
    drawn = Counter()
    for seed in range(20):
        fed = module.sent140(seed=seed, fraction=0.45)
        assert fed.fingerprint() == module.sent140(seed=seed, fraction=0.45).fingerprint()
        assert 1 <= fed.num_clients <= 2
        drawn.update(fed.clients)
    assert set(drawn) == {"ann", "Bob", "dan", "Zoë"}


def test_the_source_makes_it_again(small):
    fed = load("sent140", seed=2, fraction=0.9, validation_fraction=0.1, more_than=10)
    assert fed.source == {
        "name": "sent140", "seed": 2, "test_fraction": 0.2, "validation_fraction": 0.1, "fraction": 0.9,
        "more_than": 10, "num_tokens": 25, "embeddings": "glove300",
    }  # fmt: skip
    assert load(**fed.source).fingerprint() == fed.fingerprint()


def test_tweets_without_a_word_are_left_out(small):
    path, users = small
    lines = path.read_text(encoding="latin-1").splitlines()
    first = users.index("ann")
    lines[first] = lines[first].rpartition(',"W')[0] + ',"  "'
    path.write_text("\n".join(lines) + "\n", encoding="latin-1")
    fed = module.sent140(fraction=1.0)
    assert dict(zip(fed.clients, fed.num_examples.tolist(), strict=True))["ann"] == 39
    assert bool((fed.train.features[:, -1] > 0).all())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fraction": 0.0}, r"fraction is 0\.0; expected a share above 0, up to 1\."),
        ({"fraction": 1.1}, r"fraction is 1\.1"),
        ({"more_than": -1}, r"more_than is -1; expected a whole number, 0 or more\."),
        ({"more_than": 30.5}, r"more_than is 30\.5"),
        ({"num_tokens": 0}, r"num_tokens is 0"),
        ({"embeddings": "glove"}, r"unknown embeddings 'glove'"),
    ],
)
def test_options_that_cannot_work_are_refused(small, options, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        module.sent140(**options)


def test_nobody_with_enough_tweets(small):
    with pytest.raises(
        DataError, match=r"^no user of .* has more than 40 tweets in a sample of 1; expected some\. Raise"
    ):
        module.sent140(fraction=1.0, more_than=40)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: b"", r"holds 0 tweets; expected 170\. It was cut off: get it again\."),
        (lambda content: content[: content.rindex(b'"0"')], r"holds 16\d tweets; expected 170"),
        (lambda content: content[:-60], r"has \d columns in line 170, which begins"),
        (lambda content: b"polarity,id,date,query,user,text\n" + content, r"in line 1, which begins 'polarity,id"),
        (lambda content: content.replace(b'"4"', b'"2"', 1), r"has 6 columns in line 1, which begins '2,0,Mon"),
        (lambda content: b'"' + b"x" * 200_000, r"cannot be read \(field larger than field limit"),
    ],
)
def test_a_damaged_table_is_refused_in_one_line(small, change, message):
    path, _ = small
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=message) as caught:
        module.sent140()
    assert "\n" not in str(caught.value)


def test_files_that_are_not_there(small):
    path, _ = small
    vectors = path.parent.parent / "glove" / "glove.6B.300d.txt"
    assert [file.find() for file in module.files()] == [path, vectors]
    vectors.unlink()
    with pytest.raises(DataError, match=r"^glove\.6B\.300d\.txt of glove was not found"):
        module.sent140()
    path.unlink()
    with pytest.raises(DataError, match=r"^training\.1600000.* of sent140 was not found"):
        module.sent140()


def test_the_real_tweets():
    """FedProx's published sample has 772 users and 40,783 tweets; another sample has about as many."""
    try:
        fed = module.sent140()
    except DataError as error:
        pytest.skip(str(error))
    assert 600 < fed.num_clients < 950
    assert 32_000 < int(fed.num_examples.sum()) < 50_000
    assert fed.num_examples.min() >= 30
