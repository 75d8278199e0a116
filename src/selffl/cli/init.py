"""`selffl init`: a folder with a study of the user's own, which runs as it is."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from selffl.cli import console, names
from selffl.errors import ConfigError, DataError, unknown_name

app = typer.Typer()

MOST_CLASSES = 20  # different whole numbers in a column of labels that still count as classes
MOST_WORDS = 20  # different words in a column that still make features
FEWEST_A_ROUND = 10  # clients: variances are estimated from their spread


@dataclass(frozen=True)
class Table:
    """What a CSV file holds, as far as the files of a study have to know."""

    features: list[str]
    categories: dict[str, list[str]]  # columns of words that become features, with their values
    left_out: list[str]  # columns with too many words
    classes: list[Any]  # of the label; none: it is a value
    is_plain: bool  # whether `Federation.from_csv` reads it as it is meant
    num_rows: int
    num_clients: int


@app.command("init")
def init_command(
    folder: Annotated[Path, typer.Argument(help="Folder to make.", metavar="FOLDER")],
    csv: Annotated[
        Path | None, typer.Option("--csv", help="Rows of your own, with a header; without it, rows are made up.")
    ] = None,
    client: Annotated[str, typer.Option(help="Column of the CSV file that says whose row it is.")] = "client",
    label: Annotated[str, typer.Option(help="Column of the CSV file to predict; all others are features.")] = "label",
    as_json: Annotated[bool, typer.Option("--json", help="Print what was made as JSON.")] = False,
) -> None:
    """Write a study file, and the Python file with its rows and its model, to run as they are and to edit.

    Example: selffl init my-study --csv rows.csv --client site --label y
    """
    console.check_folder(folder)
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; expected a new folder, so that nothing is written over.")
    name = folder.resolve().name
    for given in (folder, csv):
        try:
            str(given).encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"{str(given)!r} is not readable in this locale; expected a name in UTF-8. Set LC_ALL=C.UTF-8."
            ) from None
    if name in names.PROBLEMS:
        raise ConfigError(f"{name} is a study that comes with the package; expected another name for your own.")
    table = None if csv is None else read_table(csv, client, label)
    written = texts(folder, csv, table, client, label)
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in written.items():
        (folder / file).write_text(text, encoding="utf-8")
    about = {"folder": str(folder), "files": list(written)} | ({} if table is None else _about(table, label))
    if as_json:
        print(json.dumps(about, ensure_ascii=False))
        return
    if table is not None:
        task = (
            f"classes ({', '.join(map(str, table.classes[:6]))}{', …' if len(table.classes) > 6 else ''})"
            if table.classes
            else "values, to be predicted as such"
        )
        console.tell(
            console.out, f"{table.num_rows:,} rows of {table.num_clients:,} clients; {label} is taken for {task}."
        )
        console.tell(console.out, f"Features: {', '.join([*table.features, *table.categories])}.")
        for column in table.left_out:
            console.tell(console.out, f"Left out: {column}, with more than {MOST_WORDS} different words.")
    console.tell(console.out, f"Written: {', '.join(str(folder / file) for file in written)}")
    console.tell(console.out, f"Next: {shlex.join(['selffl', 'run', str(folder)])}")


def _about(table: Table, label: str) -> dict[str, Any]:
    return {
        "rows": table.num_rows,
        "clients": table.num_clients,
        "features": [*table.features, *table.categories],
        "left_out": table.left_out,
        "label": label,
        "classes": table.classes or None,
    }


def texts(folder: Path, csv: Path | None, table: Table | None, client: str, label: str) -> dict[str, str]:
    """The files of a new study, by name."""
    from importlib.resources import files

    import jinja2

    place, name = shlex.quote(str(folder)), folder.resolve().name
    share = 0.5 if table is None else min(max(round(FEWEST_A_ROUND / table.num_clients, 2), 0.1), 1.0)
    run = f"runs/{name}-self-fl-auto-0"  # where `selffl run` puts it
    given: dict[str, Any] = {
        "run": shlex.quote(run),
        "run_text": _literal(run),
        "place": place,
        "name": name,
        "title": _literal(f"{name}: made-up sites" if csv is None else f"{csv.name} by {client}"),
        "loss": "cross_entropy" if table is None or table.classes else "mse_loss",
        "rounds": 40,
        "participation": share,
        "rate": 0.05 if table is None or table.classes else 0.02,
    }
    if csv is not None and table is not None:
        given |= {
            "is_plain": table.is_plain,
            "csv": _literal(Path(os.path.relpath(csv, folder)).as_posix()),
            "client_text": _literal(client),
            "label_text": _literal(label),
            "features": _literal(table.features),
            "categories": _literal(table.categories) if table.categories else "",
            "classes": _literal(table.classes) if table.classes else "",
            "classes_are_words": bool(table.classes) and isinstance(table.classes[0], str),
        }
    folder_of_templates = files("selffl.cli") / "templates"

    def filled(template: str) -> str:
        text = (folder_of_templates / f"{template}.j2").read_text(encoding="utf-8")
        return str(jinja2.Template(text, undefined=jinja2.StrictUndefined, keep_trailing_newline=True).render(given))

    return {
        "study.toml": filled("study.toml"),
        "study.py": filled("study.py" if table is None else "study_csv.py"),
        "README.md": filled("README.md"),
    }


def _literal(value: Any) -> str:
    """As Python and TOML write it, in double quotes."""
    return json.dumps(value, ensure_ascii=False)


def read_table(path: Path, client: str, label: str) -> Table:
    """Look a CSV file through: which columns are numbers and which words, and what kind of thing the label is."""
    from selffl.data.estimates import csv_lines

    if not path.is_file():
        found = "is a folder" if path.is_dir() else "does not exist"
        raise DataError(f"{path} {found}; expected a CSV file with the columns {client} and {label}.")
    with csv_lines(path) as lines:
        header = [name.strip() for name in next((fields for fields in lines if fields), [])]
        columns = _columns(path, header, client, label)
        for fields in lines:
            if not fields:
                continue
            if len(fields) != len(header):
                raise DataError(
                    f"{path}, line {lines.line_num}: {len(fields)} field(s); expected {len(header)}, as in the header."
                )
            for name, cell in zip(header, fields, strict=True):
                if not cell.strip():
                    raise DataError(
                        f"{path}, line {lines.line_num}: {name} is missing; expected a value. Fill it in, or leave the "
                        "row out."
                    )
                columns[name].append(cell.strip())
    num_rows, num_clients = len(columns[client]), len(set(columns[client]))
    if num_clients < 2:
        found = f"one {client}" if num_rows else "a header but no rows"
        raise DataError(f"{path} has {found}; expected rows of at least two clients.")
    numbers = {name: _numbers(cells) for name, cells in columns.items() if name != client}
    features = [name for name, found in numbers.items() if found is not None and name != label]
    words = {name: sorted(set(columns[name])) for name, found in numbers.items() if found is None and name != label}
    categories = {name: values for name, values in words.items() if len(values) <= MOST_WORDS}
    if not features and not categories:
        raise DataError(f"{path} has no column to predict {label} from; expected numbers, or columns of a few words.")
    classes = _classes(path, label, columns[label], numbers[label])
    return Table(
        features,
        categories,
        [name for name in words if name not in categories],
        classes,
        not categories and _is_read_alike(classes, columns[label]),
        num_rows,
        num_clients,
    )


def _is_read_alike(classes: list[Any], cells: list[str]) -> bool:
    """Whether `Federation.from_csv`, for which whole numbers are classes and words their names, sees the same label."""
    is_whole = all(cell.isdecimal() for cell in cells)
    if not classes:
        return not is_whole
    return isinstance(classes[0], str) or (is_whole and classes == list(range(len(classes))))


def _columns(path: Path, header: list[str], client: str, label: str) -> dict[str, list[str]]:
    if not header:
        raise DataError(f"{path} is empty; expected a header with the columns {client} and {label}, then rows.")
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{path}: the column {twice!r} appears twice; expected names that differ.")
    for sign, word in ((";", "semicolons"), ("\t", "tabs")):
        if len(header) == 1 and sign in header[0]:
            raise DataError(f"{path}, line 1: the columns are separated by {word}; expected commas.")
    for option, name in (("--client", client), ("--label", label)):
        if name not in header:
            raise unknown_name(f"column in {path} ({option})", name, header)
    if client == label:
        raise ConfigError(f"--client and --label are both {client!r}; expected two columns.")
    return {name: [] for name in header}


def _numbers(cells: list[str]) -> list[float] | None:
    """The cells as finite numbers; none if one is a word."""
    from selffl.data.estimates import RowError, as_number

    try:
        return [as_number("", cell) for cell in cells]
    except RowError:
        return None


def _classes(path: Path, label: str, cells: list[str], numbers: list[float] | None) -> list[Any]:
    """The classes of a label, in order; none where it is a value."""
    found: list[Any] = sorted(set(cells)) if numbers is None else sorted(set(numbers))
    if len(found) < 2:
        raise DataError(f"{path}: {label} is {found[0]!r} in every row; expected something to predict.")
    if numbers is None:
        if len(found) > MOST_CLASSES:
            raise DataError(
                f"{path}: {label} has {len(found)} different words; expected numbers or at most {MOST_CLASSES} classes."
            )
        return found
    is_whole = all(value == int(value) for value in found)
    return [int(value) for value in found] if is_whole and len(found) <= MOST_CLASSES else []
