"""Tables as Markdown and as LaTeX."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "±": r"$\pm$",
    "−": "$-$",
    "×": r"$\times$",
    "÷": r"$\div$",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "→": r"$\rightarrow$",
    "∞": r"$\infty$",
    "ℓ": r"$\ell$",
    "α": r"$\alpha$",
    "β": r"$\beta$",
    "ε": r"$\varepsilon$",
    "η": r"$\eta$",
    "θ": r"$\theta$",
    "λ": r"$\lambda$",
    "μ": r"$\mu$",
    "σ": r"$\sigma$",
    "₀": "$_0$",
    "₁": "$_1$",
    "ₘ": "$_m$",
    "²": "$^2$",
    "–": "--",
    "—": "---",
    "…": r"\dots{}",
}
_BAR = re.compile(r"(?<!\\)\|")  # that ends a cell
_SPECIAL = re.compile("|".join(re.escape(sign) for sign in LATEX))


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """A Markdown table; the keys of the first row are the columns."""
    columns = list(rows[0])
    lines = [_line(columns), "|" + "---|" * len(columns), *(_line([row[c] for c in columns]) for row in rows)]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"  # a bar inside a cell would end it


def read_markdown(text: str) -> list[dict[str, str]]:
    """The rows of the only table in a text, as `markdown` has written it; none: no rows.

    Examples:
        >>> read_markdown(markdown([{"model": "E[y|x]", "error": "0.1"}]))
        [{'model': 'E[y|x]', 'error': '0.1'}]
    """
    lines = [
        [cell.strip().replace("\\|", "|") for cell in _BAR.split(line)[1:-1]]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    return [dict(zip(lines[0], cells, strict=True)) for cells in lines[2:]]


def latex(rows: Sequence[Mapping[str, str]], caption: str = "") -> str:
    """A LaTeX table with the rules of booktabs; the keys of the first row are the columns, numbers to the right."""
    columns = list(rows[0])
    lines = [
        "% needs \\usepackage{booktabs}",
        "\\begin{table}",
        "  \\centering",
        *([f"  \\caption{{{escape_latex(caption)}}}"] if caption else []),
        f"  \\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}",
        "    \\toprule",
        f"    {_row(columns)}",
        "    \\midrule",
        *(f"    {_row([row[column] for column in columns])}" for row in rows),
        "    \\bottomrule",
        "  \\end{tabular}",
        "\\end{table}",
    ]
    return "\n".join(lines) + "\n"


def escape_latex(text: str) -> str:
    """Text as LaTeX sets it: its special signs as signs, the paper's symbols as formulas."""
    return _SPECIAL.sub(lambda match: LATEX[match.group()], " ".join(text.split()))


def _row(cells: Sequence[str]) -> str:
    first, *rest = (escape_latex(cell) for cell in cells)
    # A row that begins with [ would be read as an option of the line break before it.
    first = f"{{{first}}}" if first.startswith(("[", "*")) else first
    return " & ".join([first, *rest]) + r" \\"
