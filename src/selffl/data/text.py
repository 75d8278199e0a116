"""Text as rows of word numbers, and the GloVe vectors behind them.

Pennington, Socher and Manning, GloVe: Global Vectors for Word Representation (EMNLP 2014), the 6B vectors: 400,000
lower-case words of Wikipedia and Gigaword in the order of their frequency, of which the first 30,000 are used.  Three
tables can be asked for by name; which words have a number depends on the table, and so do the rows made with it.

``glove100``
    A compact copy: 100 dimensions in half precision, without single letters, numbers and clitics ('s, n't).  Of the
    177,161 tokens of the Amazon and New York Times snippets that `sentiment` reads, 91.0 % have a number.
``glove100-original``
    The first 30,000 lines of glove.6B.100d.txt.
``glove300``
    The first 30,000 lines of glove.6B.300d.txt.
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from selffl.data.locate import DataFile, read_checked, refuse_unreadable
from selffl.errors import ConfigError, DataError, check_known

Table = Literal["glove100", "glove100-original", "glove300"]
Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

PADDING, UNKNOWN, FIRST_WORD = 0, 1, 2  # numbers of no word, of any other word, of the most frequent word
NUM_WORDS = 30_000
ORIGINALS: dict[str, int] = {"glove100-original": 100, "glove300": 300}  # dimensions
COMPACT = {  # SHA-256 of the two files of the compact copy
    "glove100_top30k_f16.npz": "d2eabb84645372b6468a0e7c5f782405b7e37abd04032a6f9f02c1a40668127f",
    "words_top30k.txt": "8051bafa1e0a754258cf0366c9803cb86e6f0899f8104c3b69549013875e7008",
}

TOKEN = re.compile(
    r"""[^\W\d_]+?(?=n't\b)         # do of don't, ca of can't
      | n't\b | '(?:s|re|ve|ll|m|d)\b
      | \d+(?:[.,:]\d+)+\b          # 1.2 and 2,000; other numbers are words
      | [^\W_]+(?:-[^\W_]+)*        # words, with their hyphens
      | \.\.\. | --
      | [^\w\s] | _                 # any other sign by itself
    """,
    re.VERBOSE,
)
# For what a table lacks.  Without it the compact copy would read "don't like" as "do like".
REPLACEMENTS = {
    "n't": "not", "'re": "are", "'ve": "have", "'ll": "will", "'m": "am", "'d": "would", "...": "…", "--": "-",
}  # fmt: skip


def tokens(text: str) -> list[str]:
    """Words and punctuation as GloVe's 6B vocabulary has them: lower case, contractions split as Stanford's tools do.

    Examples:
        >>> from selffl.data.text import tokens
        >>> tokens("I don't think it's THAT well-known: 2,000 copies...")
        ['i', 'do', "n't", 'think', 'it', "'s", 'that', 'well-known', ':', '2,000', 'copies', '...']
    """
    plain = text.lower().replace("’", "'").replace("``", '"').replace("''", '"')
    return TOKEN.findall(plain)


@dataclass(frozen=True, eq=False)
class Embeddings:
    """Words and their vectors.

    Attributes:
        words: The k-th of them has number k + 2.
        vectors: ``[2 + words, dimensions]``: 0 for padding; the mean of all words for an unknown one, so that it is
            not mistaken for padding (in LEAF, and so in FedProx, both are one vector of zeros); then the words.
    """

    words: tuple[str, ...]
    vectors: Floats

    @classmethod
    def of(cls, words: Sequence[str], vectors: npt.ArrayLike) -> Embeddings:
        """A table from words and their vectors ``[words, dimensions]``, with the two further rows put in front."""
        table = np.asarray(vectors, dtype=np.float32)
        mean = table.mean(0, dtype=np.float64).astype(np.float32)
        every = np.concatenate([np.zeros_like(mean)[None], mean[None], table])
        every.setflags(write=False)  # one table serves everybody who asks for it
        return cls(tuple(words), every)

    @cached_property
    def number(self) -> dict[str, int]:
        """The number of each word."""
        return {word: FIRST_WORD + index for index, word in enumerate(self.words)}

    def ids(self, text: str) -> Iterator[int]:
        """Numbers of a text's tokens.

        A token that the table lacks counts as its longer form (not for n't), else as its parts if it has hyphens, else
        as unknown.
        """
        number = self.number
        for token in tokens(text):
            if (known := number.get(token)) is not None:
                yield known
            elif token in REPLACEMENTS:
                yield number.get(REPLACEMENTS[token], UNKNOWN)
            else:
                yield from (number.get(part, UNKNOWN) for part in token.split("-"))


def encode(texts: Sequence[str], embeddings: Embeddings, num_tokens: int = 25) -> Ids:
    """Texts as numbers ``[rows, num_tokens]``: the first tokens of each, padded in front.

    So the last column is read from the text, and an LSTM has read the text last.  A text without any token is padding
    alone; one of unknown words is not.
    """
    if not isinstance(num_tokens, int) or num_tokens < 1:
        raise ConfigError(f"num_tokens is {num_tokens!r}; expected a whole number, 1 or more.")
    if isinstance(texts, str) or not hasattr(texts, "__len__"):
        raise DataError(f"texts is {texts!r:.40}; expected a list of texts, one for each row.")
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise DataError(f"row {number} of texts is {text!r:.40}; expected a text, empty where there is none.")
    rows = np.full((len(texts), num_tokens), PADDING, dtype=np.int64)
    for row, text in zip(rows, texts, strict=True):
        ids = list(islice(embeddings.ids(text), num_tokens))
        row[num_tokens - len(ids) :] = ids
    return rows


def has_token(ids: Ids) -> npt.NDArray[np.bool_]:
    """Which of the rows of `encode` are of texts with a token, ``[rows]``."""
    return np.asarray(ids[:, -1] != PADDING)


def read_compact_vectors(path: Path) -> Floats:
    """Vectors of the compact copy, ``[words, dimensions]``."""
    content = read_checked(path, COMPACT[path.name], "the vectors of the compact copy of GloVe")
    kinds = (OSError, ValueError, KeyError, BadZipFile, zlib.error)
    with (
        refuse_unreadable(path, "expected an .npz with vectors", *kinds),
        np.load(io.BytesIO(content), allow_pickle=False) as file,
    ):
        return np.asarray(file["vectors"].astype(np.float32))


def read_compact_words(path: Path) -> tuple[str, ...]:
    """Words of the compact copy, one a line."""
    content = read_checked(path, COMPACT[path.name], "the words of the compact copy of GloVe")
    with refuse_unreadable(path, "expected a word in each line, in UTF-8", UnicodeDecodeError):
        return tuple(content.decode().splitlines())


def read_original(path: Path, dimensions: int, num_words: int | None = None) -> Embeddings:
    """The first words of a file of GloVe's: in each line a word and its numbers, with single spaces between."""
    wanted = NUM_WORDS if num_words is None else num_words
    advice = f"expected a word and {dimensions} numbers in each of {wanted:,} lines. It is damaged: get it again"
    words: list[str] = []
    vectors = np.empty((wanted, dimensions), dtype=np.float32)
    try:
        with path.open(encoding="utf-8", newline="\n") as file, np.errstate(over="ignore"):
            for line in islice(file, wanted):
                word, *numbers = line.rstrip("\n").split(" ")
                if len(numbers) != dimensions:
                    raise DataError(f"{path} has {len(numbers)} numbers in line {len(words) + 1}; {advice}.")
                vectors[len(words)] = [float(number) for number in numbers]
                words.append(word)
    except (OSError, ValueError) as error:
        where = "" if isinstance(error, OSError) else f" in line {len(words) + 1}"
        raise DataError(f"{path} cannot be read{where} ({error}); {advice}.") from None
    if len(words) < wanted:
        raise DataError(f"{path} ends after {len(words):,} lines; {advice}.")
    if not np.isfinite(vectors).all():
        line_number = int(np.flatnonzero(~np.isfinite(vectors).all(1))[0]) + 1
        raise DataError(f"{path} holds NaN or infinity in line {line_number}; {advice}.")
    return Embeddings.of(words, vectors)


def embedding_files(embeddings: str = "glove100") -> list[DataFile]:
    """The files of a table."""
    check_known("embeddings", embeddings, get_args(Table))
    if (dimensions := ORIGINALS.get(embeddings)) is not None:
        name = f"glove.6B.{dimensions}d.txt"
        return [DataFile("glove", (name, f"glove.6B/{name}"), partial(read_original, dimensions=dimensions))]
    readers: tuple[Any, ...] = (read_compact_vectors, read_compact_words)
    return [DataFile("glove100", (name,), read) for name, read in zip(COMPACT, readers, strict=True)]


def read_embeddings(embeddings: str = "glove100") -> Embeddings:
    """A table by its name, kept in memory for the next time while its files stay as they are."""
    paths = [file.find().resolve() for file in embedding_files(embeddings)]
    state = tuple((path.stat().st_mtime_ns, path.stat().st_size) for path in paths)
    return _read(embeddings, tuple(paths), state)


@lru_cache(maxsize=2)
def _read(embeddings: str, paths: tuple[Path, ...], state: tuple[tuple[int, int], ...]) -> Embeddings:
    content = [file.read(path) for file, path in zip(embedding_files(embeddings), paths, strict=True)]
    if embeddings in ORIGINALS:
        return content[0]  # type: ignore[no-any-return]
    vectors, words = content
    if vectors.ndim != 2 or len(vectors) != len(words) or not np.isfinite(vectors).all():
        raise DataError(
            f"{paths[0]} holds vectors {vectors.shape} for the {len(words)} words of {paths[1].name}; expected finite "
            "numbers, a vector each. Copy both again."
        )
    return Embeddings.of(words, vectors)
