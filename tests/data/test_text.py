"""Tokens, word vectors and rows of word numbers."""

import hashlib
import zipfile

import numpy as np
import pytest

from selffl.data import sentiment
from selffl.data import text as module
from selffl.data.text import Embeddings, encode, has_token, read_embeddings, tokens
from selffl.errors import ConfigError, DataError

WORDS = ("the", ".", "not", "good", "well-known", "star", "…")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A data place of its own, and originals of two words."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SELFFL_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "NUM_WORDS", 2)
    return tmp_path


@pytest.fixture
def compact(place, monkeypatch):
    """A compact copy of seven words; the vector of word k is (k, −k)."""
    (place / "glove100").mkdir()
    vectors, words = (place / "glove100" / name for name in module.COMPACT)
    column = np.arange(len(WORDS), dtype=np.float16)
    np.savez_compressed(vectors, vectors=np.stack([column, -column], 1))
    words.write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    trust(monkeypatch, vectors, words)
    return vectors, words


def trust(monkeypatch, *paths):
    """Make what the files hold now what is expected."""
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    monkeypatch.setattr(module, "COMPACT", module.COMPACT | digests)


def original(place, content, dimensions=100):
    (place / "glove").mkdir(exist_ok=True)
    path = place / "glove" / f"glove.6B.{dimensions}d.txt"
    path.write_text(content, encoding="utf-8")
    return path


def line(word, value="0.5", dimensions=100):
    return " ".join([word, *[value] * dimensions]) + "\n"


# -------------------------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (" \t\n", []),
        ("Good.", ["good", "."]),
        ("I don't, can't, WON'T!", ["i", "do", "n't", ",", "ca", "n't", ",", "wo", "n't", "!"]),
        ("it’s we're I've you'll I'm he'd", ["it", "'s", "we", "'re", "i", "'ve", "you", "'ll", "i", "'m", "he", "'d"]),
        ("the dogs' 'best' bowl", ["the", "dogs", "'", "'", "best", "'", "bowl"]),
        ("rock 'n' roll, o'clock", ["rock", "'", "n", "'", "roll", ",", "o", "'", "clock"]),
        ("``so'' ''he'' said", ['"', "so", '"', '"', "he", '"', "said"]),
        ("$1.20, 2,000 in 2004; 9:30", ["$", "1.20", ",", "2,000", "in", "2004", ";", "9:30"]),
        ("a 256mb well-known ad-2500 -- b/w", ["a", "256mb", "well-known", "ad-2500", "--", "b", "/", "w"]),
        ("hmm... so....", ["hmm", "...", "so", "...", "."]),
        ("@user_name #fun :)", ["@", "user", "_", "name", "#", "fun", ":", ")"]),
        ("Café 日本 😀", ["café", "日本", "😀"]),
    ],
)
def test_tokens_by_hand(text, expected):
    assert tokens(text) == expected


# ---------------------------------------------------------------------------------------------------------------- rows


def test_rows_by_hand():
    """Numbers 0 and 1 are padding and unknown; word k has k + 2; n't is not, ... is …, parts stand for a compound."""
    table = Embeddings.of(WORDS, np.zeros((len(WORDS), 2)))
    texts = ["The good.", "Isn't good", "well-known", "good-star rock-the", "...", "zzz", "", "the " * 5 + "good"]
    assert encode(texts, table, num_tokens=5).tolist() == [
        [0, 0, 2, 5, 3],
        [0, 0, 1, 4, 5],
        [0, 0, 0, 0, 6],
        [0, 5, 7, 1, 2],
        [0, 0, 0, 0, 8],
        [0, 0, 0, 0, 1],
        [0, 0, 0, 0, 0],
        [2, 2, 2, 2, 2],
    ]
    ids = encode(texts, table)
    assert ids.shape == (8, 25)
    assert ids.dtype == np.int64
    assert has_token(ids).tolist() == [True] * 6 + [False, True]
    assert encode([], table).shape == (0, 25)


def test_a_short_form_that_the_table_has_is_its_own_word():
    table = Embeddings.of(["do", "n't", "not"], np.zeros((3, 2)))
    assert encode(["don't do not"], table, 4).tolist() == [[2, 3, 2, 4]]


@pytest.mark.parametrize("num_tokens", [0, -1, 2.0])
def test_a_row_has_at_least_one_token(num_tokens):
    with pytest.raises(ConfigError, match=r"^num_tokens is .*; expected a whole number, 1 or more\.$"):
        encode(["the"], Embeddings.of(["the"], [[0.0]]), num_tokens)


# ------------------------------------------------------------------------------------------------------------- vectors


def test_the_compact_copy_is_read(compact):
    table = read_embeddings()
    assert table.words == WORDS
    assert table.vectors.dtype == np.float32
    # Padding is 0, an unknown word the mean of 0 … 6.
    assert table.vectors.tolist() == [[0, 0], [3, -3], *([k, -k] for k in range(7))]
    assert read_embeddings("glove100") is table
    assert not table.vectors.flags.writeable


def test_an_original_is_read_up_to_the_number_of_words_wanted(place):
    # U+2028 ends a line for str.splitlines; here it is part of a word.
    original(place, line("the", "1.5") + line("a\u2028b", "-0.5") + "rest that is not read\n")
    table = read_embeddings("glove100-original")
    assert table.words == ("the", "a\u2028b")
    assert table.vectors.shape == (4, 100)
    assert table.vectors[:, 0].tolist() == table.vectors[:, 99].tolist() == [0, 0.5, 1.5, -0.5]
    original(place, line("the", "1", 300) + line("of", "2", 300), 300)
    assert read_embeddings("glove300").vectors[:, 7].tolist() == [0, 1.5, 1, 2]


def test_a_file_that_has_changed_is_read_again(place):
    path = original(place, line("the") + line("of"))
    assert read_embeddings("glove100-original").words == ("the", "of")
    path.write_text(line("the") + line("and"), encoding="utf-8")
    assert read_embeddings("glove100-original").words == ("the", "and")


def test_the_tables_are_not_mistaken_for_each_other(compact, place):
    """The compact copy lacks words that the original has, so that one does not stand in for the other unasked."""
    original(place, line("the") + line("of"))
    assert read_embeddings("glove100").words == WORDS
    assert read_embeddings("glove100-original").words == ("the", "of")
    compact[0].unlink()
    with pytest.raises(DataError, match=r"^glove100_top30k_f16\.npz of glove100 was not found in .* Put it into one"):
        read_embeddings("glove100")


def test_an_unknown_table_is_refused():
    with pytest.raises(ConfigError, match=r"^unknown embeddings 'glove30'; did you mean 'glove300'\? Expected one of:"):
        read_embeddings("glove30")


def test_missing_vectors_say_where_they_were_looked_for(place):
    with pytest.raises(DataError, match=r"^glove\.6B\.300d\.txt of glove was not found in .*glove.* set SELFFL_DATA"):
        read_embeddings("glove300")


@pytest.mark.parametrize("which", [0, 1])
def test_a_damaged_compact_copy_is_refused(compact, which):
    compact[which].write_bytes(compact[which].read_bytes()[:-1])
    with pytest.raises(DataError, match=r"has SHA-256 .*; expected .*damaged or another file: copy it again\.$"):
        read_embeddings()


def test_a_compact_copy_that_is_another_is_refused(compact, monkeypatch):
    vectors, words = compact

    def refused(message):
        trust(monkeypatch, vectors, words)
        with pytest.raises(DataError, match=message) as caught:
            read_embeddings()
        assert "\n" not in str(caught.value)

    words.write_text("the\nof\n", encoding="utf-8")
    refused(r"holds vectors \(7, 2\) for the 2 words of words_top30k\.txt; expected .*Copy both again")
    np.savez(vectors, vectors=np.array([[0, 1], [np.nan, 1]], dtype=np.float16))
    refused(r"holds vectors \(2, 2\) for the 2 words .*expected finite")
    np.savez(vectors, vector=np.zeros((2, 2)))
    refused(r"cannot be read .*expected an \.npz with vectors")
    vectors.write_bytes(b"not an archive")
    refused(r"cannot be read .*expected an \.npz with vectors")
    np.savez_compressed(vectors, vectors=np.random.default_rng(0).random((2, 500)))
    with zipfile.ZipFile(vectors) as archive:
        start = archive.infolist()[0].header_offset + 100
    content = bytearray(vectors.read_bytes())
    content[start : start + 200] = bytes(200)
    vectors.write_bytes(content)
    refused(r"cannot be read .*expected an \.npz with vectors")  # zlib.error, which is no OSError
    np.savez(vectors, vectors=np.zeros((2, 2)))
    words.write_bytes(b"the\n\xff\n")
    refused(r"cannot be read .*expected a word in each line, in UTF-8")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"ends after 0 lines; expected a word and 100 numbers in each of 2 lines"),
        (line("the"), r"ends after 1 lines"),
        (line("the") + line("of", dimensions=99), r"has 99 numbers in line 2; expected a word and 100 numbers"),
        (line("the", dimensions=300) + line("of"), r"has 300 numbers in line 1"),
        (line("the") + line("of")[:-21], r"has 95 numbers in line 2"),
        (line("the") + line("of", "x"), r"cannot be read in line 2 \(could not convert string to float: 'x'\)"),
        (line("the") + line("of", "nan"), r"holds NaN or infinity in line 2"),
        (line("the", "1e999") + line("of"), r"holds NaN or infinity in line 1"),
        (line("the", "1e300") + line("of"), r"holds NaN or infinity in line 1"),
    ],
)
def test_a_damaged_original_is_refused_in_one_line(place, content, message):
    original(place, content)
    with pytest.raises(DataError, match=message + ".* It is damaged: get it again") as caught:
        read_embeddings("glove100-original")
    assert "\n" not in str(caught.value)


def test_an_original_that_is_no_text_is_refused(place):
    original(place, "").write_bytes(b"\x80\x81" * 50)
    with pytest.raises(DataError, match=r"cannot be read in line 1 \('utf-8' codec"):
        read_embeddings("glove100-original")


# ------------------------------------------------------------------------------------------------------ the real files


def test_the_real_compact_copy_and_the_share_of_known_tokens():
    """The numbers of the module's docstring."""
    try:
        table, snippets = read_embeddings(), sentiment.files()[0].load()
    except DataError as error:
        pytest.skip(str(error))
    assert table.vectors.shape == (30_002, 100)
    assert len(set(table.words)) == 30_000
    # The vector of "the" begins so in glove.6B.100d.txt; half precision has eleven bits.
    published = [-0.038194, -0.24487, 0.72812, -0.39961, 0.083172]
    np.testing.assert_allclose(table.vectors[table.number["the"], :5], published, rtol=2**-11)
    assert not {"a", "i", "n't", "'s", "10"} & set(table.words)
    ids = [number for text in snippets[2] for number in table.ids(text)]
    assert len(ids) == 177_161
    assert np.mean(np.asarray(ids) != module.UNKNOWN) == pytest.approx(0.9101, abs=5e-5)


def test_the_real_originals():
    found = 0
    for name, dimensions in module.ORIGINALS.items():
        try:
            table = read_embeddings(name)
        except DataError as error:
            reason = str(error)
            continue
        found += 1
        assert table.vectors.shape == (30_002, dimensions)
        assert table.words[:3] == ("the", ",", ".")
        assert {"a", "i", "n't", "'s"} <= set(table.words)
    if not found:
        pytest.skip(reason)
