"""The stand-in for Sentiment140: rated snippets, a client for each document."""

import gzip
import hashlib

import numpy as np
import pytest
import torch

import selffl
from selffl.data import load, text
from selffl.data import sentiment as module
from selffl.errors import ConfigError, DataError
from selffl.models.text import lstm

WORDS = [*(f"w{k}" for k in range(40)), "good", "bad", "not", "."]
HEADER = "source,document,snippet,score,text\n"


def write(path, monkeypatch, content):
    path.write_bytes(content if isinstance(content, bytes) else gzip.compress(content.encode()))
    monkeypatch.setattr(module, "SHA256", hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Ten rows each of four clients, row k with the word wk, and rows that have to be left out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SELFFL_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for folder in ("glove100", "sentiment"):
        (tmp_path / folder).mkdir()
    vectors, words = (tmp_path / "glove100" / name for name in text.COMPACT)
    np.savez(vectors, vectors=np.random.default_rng(0).normal(size=(len(WORDS), 3)).astype(np.float16))
    words.write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (vectors, words)}
    monkeypatch.setattr(text, "COMPACT", digests)
    rows = [
        f'{source},{document},{row},{score},"w{10 * client + row}, {word}"'
        for client, (source, document) in enumerate([("amazon", 1), ("nyt", 1), ("nyt", 10), ("nyt", 2)])
        for row in range(10)
        # nyt-2 is only ever pleased.
        for score, word in [(1.5, "good") if row % 2 or client == 3 else (-1.5, "bad")]
    ]
    rows += [
        "amazon,1,a,0.49,near zero",
        "amazon,1,b,-0.49,near zero",
        'amazon,1,c,2.0," "',
        "amazon,7,a,3.0,alone",
        "nyt,8,a,3.0,with one near zero",
        "nyt,8,b,0.1,near zero",
        *(f"{source},,{row},2.0,of nobody" for source in ("movie", "tweet") for row in range(3)),
    ]
    path = tmp_path / "sentiment" / "snippets.csv.gz"
    write(path, monkeypatch, HEADER + "\n".join(rows) + "\n")
    return path


def every(fed):
    """Client, words and label of each row."""
    return [
        (fed.clients[owner], tuple(ids), label)
        for rows in fed.parts.values()
        for owner, ids, label in zip(rows.owner.tolist(), rows.features.tolist(), rows.labels.tolist(), strict=True)
    ]


def test_rows_go_to_their_documents_by_hand(small):
    fed = module.sentiment(num_tokens=4)
    assert fed.clients == ["amazon-1", "nyt-1", "nyt-10", "nyt-2"]
    good, bad, unknown = 42, 43, 1  # words 40 and 41; the comma is none
    expected = [
        (name, (0, 2 + 10 * client + row, unknown, good if label else bad), label)
        for client, name in enumerate(fed.clients)
        for row in range(10)
        for label in [int(row % 2 or client == 3)]
    ]
    assert sorted(every(fed)) == sorted(expected)
    assert fed.train.features.dtype == torch.int64
    assert fed.train.num_examples.tolist() == [8] * 4
    assert fed.test.num_examples.tolist() == [2] * 4
    assert fed.num_classes == 2


def test_test_rows_are_not_trained_on(small):
    """Each row has a word of its own."""
    fed = module.sentiment(validation_fraction=0.2, num_tokens=4)
    train, test, validation = ({tuple(ids) for ids in rows.features.tolist()} for rows in fed.parts.values())
    assert (len(train), len(test), len(validation)) == (24, 8, 8)
    assert not train & test
    assert not (train | test) & validation


def test_a_seed_decides_which_rows_are_tested(small):
    assert module.sentiment(seed=1).fingerprint() == module.sentiment(seed=1).fingerprint()
    assert module.sentiment(seed=1).fingerprint() != module.sentiment(seed=2).fingerprint()
    assert sorted(every(module.sentiment(seed=1))) == sorted(every(module.sentiment(seed=2)))


def test_the_source_makes_it_again(small):
    fed = load("sentiment", seed=3, validation_fraction=0.1, threshold=1.0, num_tokens=7)
    assert fed.source["name"] == "sentiment"
    assert fed.source["embeddings"] == "glove100"
    assert load(**fed.source).fingerprint() == fed.fingerprint()


def test_the_threshold(small):
    """The two clients with one row get a second at 0, 8's own; 7 stays out, and so does a text without a word."""
    fed = module.sentiment(threshold=0.0)
    assert dict(zip(fed.clients, fed.num_examples.tolist(), strict=True)) == {
        "amazon-1": 12, "nyt-1": 10, "nyt-10": 10, "nyt-2": 10, "nyt-8": 2,
    }  # fmt: skip
    assert module.sentiment(threshold=1.5).num_examples.tolist() == [10] * 4
    with pytest.raises(DataError, match=r"no client of .*snippets\.csv\.gz has 2 rated texts; .*Lower threshold\.$"):
        module.sentiment(threshold=1.51)
    for threshold in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"^threshold is .*; expected a finite rating"):
            module.sentiment(threshold=threshold)


@pytest.mark.parametrize("algorithm", ["fedavg", "self-fl"])
def test_a_client_of_one_class_trains_with_the_others(small, algorithm):
    fed = module.sentiment()
    assert (fed.class_counts() > 0).sum(1).tolist() == [2, 2, 2, 1]
    torch.manual_seed(0)
    model = lstm((25,), 2, hidden=4)
    run = selffl.train(model, fed, algorithm, rounds=2, participation=1.0, learning_rate=0.3, gradients="loop")
    assert len(run.history) == 2
    assert 0.0 <= run.summary["weighted_accuracy"] <= 1.0
    before, after = model.state_dict(), run.personal_model("nyt-2").state_dict()
    for name, part in before.items():
        assert torch.equal(part, after[name]) == (name == "embedding.weight"), name


def test_files_that_are_not_there(small):
    assert [file.find().name for file in module.files()] == ["snippets.csv.gz", *text.COMPACT]
    with pytest.raises(DataError, match=r"^glove\.6B\.300d\.txt of glove was not found"):
        module.sentiment(embeddings="glove300")
    small.unlink()
    with pytest.raises(DataError, match=r"^snippets\.csv\.gz of sentiment was not found in"):
        module.sentiment()


def test_damaged_vectors_are_refused(small, monkeypatch):
    monkeypatch.setattr(text, "COMPACT", dict.fromkeys(text.COMPACT, "0" * 64))
    with pytest.raises(DataError, match=r"glove100_top30k_f16\.npz has SHA-256"):
        module.sentiment()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"plain", r"cannot be read \(Not a gzipped file"),
        (gzip.compress(HEADER.encode(), mtime=0)[:-9], r"cannot be read \(Compressed file ended"),
        (gzip.compress(b"", mtime=0)[:10] + b"\xff" * 20, r"cannot be read \(Error -3 while decompressing"),
        (gzip.compress(b"\xff\xfe", mtime=0), r"cannot be read \('utf-8' codec"),
        ("", r"has no column source; expected a gzipped table with the columns source, document, score, text"),
        ("source,document,snippet,text\n", r"has no column score"),
        (HEADER + "amazon,1,1,good,x\n", r"cannot be read \(could not convert string to float: 'good'\)"),
        (HEADER + "amazon,1,1,nan,x\n", r"has the score nan in line 2"),
        (HEADER + "amazon,1,1,1.0\n", r"has too few or too many columns in line 2"),
        (HEADER + "amazon,1,1,1.0,x,y\n", r"has too few or too many columns in line 2"),
        (HEADER + 'amazon,1,1,1.0,"x\n', r"cannot be read \(unexpected end of data\)"),
    ],
)
def test_a_damaged_table_is_refused_in_one_line(small, monkeypatch, content, message):
    write(small, monkeypatch, content)
    with pytest.raises(DataError, match=rf"snippets\.csv\.gz {message}.*Copy it again\.$") as caught:
        module.sentiment()
    assert "\n" not in str(caught.value)


def test_another_file_is_refused(small):
    small.write_bytes(small.read_bytes() + b"\0")
    with pytest.raises(DataError, match=r"snippets\.csv\.gz has SHA-256 .*; expected .*copy it again\.$"):
        module.sentiment()


def test_the_real_snippets():
    """The numbers of the loader's docstring."""
    try:
        fed = module.sentiment()
    except DataError as error:
        pytest.skip(str(error))
    assert fed.num_clients == 785
    assert sum(client.startswith("amazon-") for client in fed.clients) == 293
    counts = fed.class_counts()
    assert counts.sum(0).tolist() == [3015, 2930]
    assert int(((counts > 0).sum(1) == 1).sum()) == 209
    assert fed.num_examples.min() == 2
    assert torch.equal(fed.test.num_examples == 0, fed.num_examples == 2)
    assert int((fed.num_examples == 2).sum()) == 27
    assert fed.train.features.shape[1:] == (25,)
    assert 0 <= fed.train.features.min() < fed.train.features.max() < 30_002
    assert bool((fed.train.features[:, -1] > 0).all())
