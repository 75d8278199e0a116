"""How readable the pages are: words per sentence, and the share of sentences with more than thirty words.

    python tools/measure_pages.py [--each] [FOLDER]

FOLDER holds Markdown files; without it, docs.  Results pages, which a command writes, are left out.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

LONG_WORDS = 30  # a sentence with more of them is long
# What is no prose: front matter, fences, tables, headings, HTML, quoted messages, what fills braces.
NO_PROSE = re.compile(
    r"\A---\n.*?^---\n|^ *```.*?^ *```$|^ *\|.*?$|^#.*?$|^<.*?$|^:::.*?$|^    options.*?$|^>.*?$|\{.*?\}|<!--.*?-->",
    re.M | re.S,
)
END = re.compile(r"(?<=[.!?:])[*_)\"']*\s+(?=[*_(\"'\[]*[A-Z0-9Σσθ`])|\n\s*\n|\n\s*(?:[-*]|\d+\.) ")


def sentences(markdown: str) -> list[str]:
    """The sentences of a page's prose, points of a list each for itself."""
    text = NO_PROSE.sub("\n\n", markdown)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    parts = (" ".join(part.split()) for part in END.split(text))
    return [part for part in parts if len(re.findall(r"[A-Za-z]{2,}", part)) >= 3]


def count_words(sentence: str) -> int:
    """Words, a piece of code or a number being one."""
    return len(re.findall(r"\S*\w\S*", re.sub(r"`[^`]*`", "code", sentence)))


def measure(pages: list[Path]) -> tuple[int, float, float]:
    """Of some pages: sentences, mean words of a sentence, share of long ones."""
    lengths = [count_words(one) for page in pages for one in sentences(page.read_text(encoding="utf-8"))]
    if not lengths:
        return 0, 0.0, 0.0
    return len(lengths), sum(lengths) / len(lengths), sum(n > LONG_WORDS for n in lengths) / len(lengths)


def main() -> None:
    """Print the figures of all pages, or of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent.parent / "docs")
    parser.add_argument("--each", action="store_true", help="a line for each page, the longest sentences first")
    given = parser.parse_args()
    pages = [
        page
        for page in sorted(given.folder.rglob("*.md"))
        if not page.relative_to(given.folder).as_posix().startswith("results")
    ]
    if given.each:
        for page in sorted(pages, key=lambda page: -measure([page])[1]):
            number, mean, share = measure([page])
            print(f"{mean:5.1f} {share:6.1%} {number:5} {page.relative_to(given.folder)}")
    number, mean, share = measure(pages)
    print(f"{len(pages)} pages, {number} sentences: {mean:.1f} words a sentence, {share:.1%} over {LONG_WORDS}")


if __name__ == "__main__":
    main()
