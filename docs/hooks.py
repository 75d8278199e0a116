"""What the site takes from the code when it is built: options, costs, commands, equations, sources, notebooks.

On a page, ``{{ options NAME }}`` becomes the table of a method's options, ``{{ settings }}`` that of a run's settings,
``{{ grids }}`` what is tuned in each method, ``{{ costs }}`` what each method sends and
computes, ``{{ commands alone }}`` and ``{{ commands grouped }}`` the command line with every option,
``{{ count WHAT }}`` a number of `counts`, ``{{ diagram NAME }}`` a drawing of docs/diagrams.py, ``{{ security }}``
SECURITY.md,
``{{ statements WHOSE }}`` how many statements of the results hold, ``{{ benchmark WHAT }}`` a table of
docs/benchmarks.py, ``{{ spreads }}`` the tutorial's comparison from
docs/figures/pictures.json, ``{{ attacks WHAT }}`` what honest clients lose to hostile
ones; the first use of a word of docs/glossary.md becomes a link to it; a fence ``math`` becomes
MathML, which browsers draw without any script.  Notebooks are run and become pages, as do the source files that the
methods' pages point to.
"""

from __future__ import annotations

import html
import importlib
import inspect
import json
import math
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parent.parent
EXPLAINED = ("tutorial.md", "idea.md", "howto/", "methods/", "tasks.md", "flower.md", "privacy.md", "research")
EXPLAINED += (
    "threat-model.md",
    "design.md",
    "coming-from.md",
    "architecture.md",
)  # pages whose words are linked to the glossary
UNEXPLAINED = ("howto/trackers.md",)  # where a server is another
SOURCES = ("src/selffl/algorithms", "src/selffl/maths", "tests/algorithms", "tests/maths")  # that pages link to


# Methods


def descriptions(*documented: Any) -> dict[str, str]:
    """What each attribute of classes, or argument of functions, means, as their docstrings have it."""
    from griffe import Docstring, DocstringSectionAttributes, DocstringSectionParameters

    found: dict[str, str] = {}
    for text in (each.__dict__.get("__doc__") or each.__doc__ for each in documented):
        for section in Docstring(inspect.cleandoc(text or "")).parse("google", warnings=False):
            if isinstance(section, DocstringSectionAttributes | DocstringSectionParameters):
                found |= {item.name: " ".join(item.description.split()) for item in section.value}
    return found


def options_table(name: str) -> str:
    """The options of a method, as the registry makes it: name, default, meaning."""
    from selffl.algorithms import algorithm

    method = algorithm(name)
    meaning = descriptions(*reversed(type(method).__mro__))  # those of its class, and of those that it inherits from
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for field in fields(method):  # type: ignore[arg-type]
        default = html.escape(repr(getattr(method, field.name))).replace("&#x27;", '"')
        lines.append(f"| `{field.name}` | <code>{default}</code> | {meaning[field.name].replace('|', '&#124;')} |")
    return "\n".join(lines)


def grids_table() -> str:
    """What is worth tuning in each method, and the values to begin with."""
    from selffl.algorithms import ALGORITHMS

    lines = ["| method | option | values |", "|---|---|---|"]
    for name, make in ALGORITHMS.items():
        grid = make().grid
        for option, values in grid.items():
            lines.append(f"| `{name}` | `{option}` | {', '.join(f'{value:g}' for value in values)} |")
        if not grid:
            lines.append(f"| `{name}` | nothing to tune | |")
    return "\n".join(lines)


def settings_table() -> str:
    """The settings of a run: name, default, where else it can be given, meaning."""
    from selffl import train
    from selffl.runs.recipe import FLOWER_SETTINGS, SETTINGS, STUDY_SETTINGS, Recipe

    meaning, defaults = descriptions(train), {field.name: field.default for field in fields(Recipe)}
    lines = ["| setting | default | study file, `--set` | over Flower | meaning |", "|---|---|---|---|---|"]
    for name in SETTINGS:
        default = html.escape(repr(defaults[name])).replace("&#x27;", '"')
        where = " | ".join("yes" if name in places else "" for places in (STUDY_SETTINGS, FLOWER_SETTINGS))
        lines.append(f"| `{name}` | <code>{default}</code> | {where} | {meaning[name].replace('|', '&#124;')} |")
    return "\n".join(lines)


def costs(
    is_whole: bool = True,
) -> Iterator[tuple[str, float, tuple[float, float], tuple[float, float], tuple[float, float]]]:
    """Of each method: gradients of a client in its first round, and bytes down, up and kept, each as a·P + b.

    Measured by one round of the real code on two models of different size, with twenty local steps.  Unless
    ``is_whole``, no client comes to rest, and the gradients of methods that wait for it are too few.
    """
    import torch
    from torch import nn

    from selffl.algorithms import ALGORITHMS
    from selffl.algorithms.records import tensors_of
    from selffl.data import load
    from selffl.training.flat import FlatModel
    from selffl.training.model import ModelSource

    federation = load("digits", num_clients=2, seed=0).with_clusters([0, 1])
    clients = torch.arange(2)

    def round_of(name: str, width: int, **options: int) -> tuple[int, float, list[int]]:
        model = FlatModel(nn.Sequential(nn.Linear(64, width), nn.Linear(width, 10)))
        source = ModelSource(federation, model, nn.functional.cross_entropy, 0.01, 10, 0, "loop")
        method = ALGORITHMS[name](**options)
        server = method.start(model.params, source.population)
        sent = method.broadcast(server, clients)
        task = source.task(clients, 1)
        upload, kept = method.client_round(sent, method.newcomer(model.params.expand(2, -1)), task)
        size = [sum(part[0].nbytes for part in tensors_of(record).values()) for record in (sent, upload, kept)]
        return model.params.numel(), float(task.num_gradients.double().mean()), size

    for name in ALGORITHMS:
        # Bytes do not depend on steps: the larger model need not come to rest.
        least = {"max_convergence_steps": 1} if hasattr(ALGORITHMS[name](), "max_convergence_steps") else {}
        small, gradients, less = round_of(name, 4, **({} if is_whole else least))
        large, _, more = round_of(name, 8, **least)
        slope = [(b - a) / (large - small) for a, b in zip(less, more, strict=True)]
        down, up, kept = ((rate, size - rate * small) for rate, size in zip(slope, less, strict=True))
        yield name, gradients, down, up, kept


def costs_table() -> str:
    """What a client computes, receives, sends and keeps, method by method."""
    lines = ["| method | gradients | received | sent | kept |", "|---|---|---|---|---|"]
    for name, gradients, *sizes in costs():
        cells = [" + ".join([*([f"{a:g} P"] if a else []), *([f"{b:g}"] if b else [])]) or "0" for a, b in sizes]
        lines.append(f"| `{name}` | {gradients:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def counts() -> dict[str, int]:
    """How many there are: names of methods, methods, names of personalised methods, data sets."""
    from selffl.algorithms import ALGORITHMS
    from selffl.data import DATA_SETS

    kinds = {name: type(make()) for name, make in ALGORITHMS.items()}
    return {
        "names": len(kinds),
        "methods": len(set(kinds.values())),
        "personalised": sum(kind.personalises != "nothing" and kind.is_federated for kind in kinds.values()),
        "data": len(DATA_SETS),
    }


def count(what: str) -> str:
    """One of `counts`, in figures."""
    return str(counts()[what])


# Results


def statements() -> dict[Any, Counter[str]]:
    """Verdicts on the lines of the results pages: the paper's statements, our own, and targets."""
    from selffl.reports.results import count_statements

    return count_statements(results().values())


def results() -> dict[str, str]:
    """The results page of each study, by its name."""
    from selffl.reports.results import read_pages

    return read_pages(ROOT / "docs" / "results.md")


# Verdicts by their colours; the words stay, so that nothing is said by a colour alone.
COLOURS = {"Holds": "good", "Met": "good", "Does not hold": "bad", "Not met": "bad"}
COLOURS |= {"Holds in part": "open", "Met in part": "open", "Inconclusive": "open"}


def colour_verdicts(markdown: str) -> str:
    """Verdicts on results pages, such as ``*Met.*``, with their colours."""
    words = "|".join(sorted(COLOURS, key=len, reverse=True))
    return re.sub(
        rf"\*({words})\.\*", lambda match: f'<span class="verdict {COLOURS[match[1]]}">{match[1]}</span>', markdown
    )


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of studies behind the summary of the results, in its groups."""
    from selffl.reports.results import GROUPS, group_studies

    entries = next(entry["Results"] for entry in config.nav or [] if "Results" in entry)
    entries += [
        {GROUPS[kind]: [f"results/{name}.md" for name in names]} for kind, names in group_studies(results()).items()
    ]
    return config


def statements_line(whose: Any) -> str:
    """How many statements of the paper, or of our own, hold, or how many targets are met, and how many not."""
    from selffl.reports.tallies import tally_of

    return tally_of(whose, statements()[whose])


def module_of_docs(name: str) -> Any:
    """The module docs/NAME.py."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "docs"))


def benchmarks() -> Any:
    """The module docs/benchmarks.py."""
    return module_of_docs("benchmarks")


def diagram(name: str) -> str:
    """A drawing of docs/diagrams.py."""
    return str(module_of_docs("diagrams").DIAGRAMS[name]())


def security() -> str:
    """SECURITY.md, whose links begin at the root of the repository, as a page."""
    return (ROOT / "SECURITY.md").read_text(encoding="utf-8").replace("](docs/", "](").replace("[docs/", "[")


def benchmark_table(what: str) -> str:
    """A table of the page on benchmarks."""
    module = benchmarks()
    makers = {
        "headline": module.headline_sentence,
        "data": module.data_table,
        "regimes": module.regimes_table,
        "published": module.published_tables,
        "machines": module.machines_table,
        "peers": module.peers_table,
        "peers-machine": module.peers_machine,
    }
    return str(makers[what]())


def spreads_table() -> str:
    """What the tutorial's comparison finds where clinics differ less or more, as docs/make_pictures.py has seen it."""
    pictures = json.loads((ROOT / "docs" / "figures" / "pictures.json").read_text(encoding="utf-8"))
    tables = pictures["tutorial"]["by_spread"]
    names = [row["method"] for row in next(iter(tables.values()))]
    heading = " | ".join(f"`{name}`" for name in names)
    lines = [f"| clinics differ by | | {heading} |", "|---|---|" + "---|" * len(names)]
    for spread, table in tables.items():
        for column in ("accuracy", "worst 10 %"):
            lines.append(f"| {spread} | {column} | {' | '.join(row[column] for row in table)} |")
    return "\n".join(lines)


ATTACKS = {  # of the study `attacks`, in words
    "none": "nobody",
    "flip": "signs flipped",
    "flip ×10": "flipped, ten times as far",
    "scale ×100": "a hundred times as far",
    "random": "noise",
    "colluding": "colluding",
    "rows": "false rows",
    "variances": "false variances",
    "classes": "false classes",
}
LOST = "personal models, lost"


@cache
def losses() -> dict[tuple[str, str, str], str]:
    """Points that honest clients lose at the study's main share: by method, attack and defence, from its page."""
    from selffl.reports.results import read_results
    from selffl.studies.attacks import MAIN_SHARE

    table = read_results(ROOT / "docs" / "results.md")["attacks"].table
    return {
        (row["method"], row["attack"], row["defence"]): row[LOST].replace("-", "−")
        for row in table
        if row["hostile"] in ("0%", f"{MAIN_SHARE:.0%}")
    }


def attacks_table(what: str) -> str:
    """What attacks cost each method: ``losses`` with and without the recommended defence, ``worst`` in a sentence."""
    from selffl.studies.attacks import DEFENCES, attacks_on

    found = losses()
    if what == "worst":
        said = []
        for method, (robust, *_) in DEFENCES.items():
            cells = {attack: found[method, attack, robust] for attack in attacks_on(method)}
            worst = max(cells, key=lambda attack: _mean_of(cells[attack]))
            said.append(f"`{method}` with `{robust}` {cells[worst]} ({ATTACKS[worst]})")
        return "; ".join(said)
    columns = [(method, robust) for method, defences in DEFENCES.items() for robust in ("none", defences[0])]
    titles = [f"`{method}`" if robust == "none" else f"with `{robust}`" for method, robust in columns]
    lines = [f"| attack | {' | '.join(titles)} |", "|---" * (len(columns) + 1) + "|"]
    for attack, words in ATTACKS.items():
        cells = [found.get((method, attack, robust), "–") for method, robust in columns]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean_of(cell: str) -> float:
    """The mean of what a cell says; who diverged has lost everything."""
    return math.inf if cell == "diverged" else float(cell.split(" ± ")[0].replace("−", "-"))


# The command line


def commands() -> Iterator[tuple[str, Any]]:
    """Every command of the command line with its full name, groups left out."""
    from typer.main import get_command

    from selffl.cli import app

    def below(name: str, command: Any) -> Iterator[tuple[str, Any]]:
        for word, part in getattr(command, "commands", {}).items():
            yield from below(f"{name} {word}", part)
        if not hasattr(command, "commands"):
            yield name, command

    return below("selffl", get_command(app))


def command_reference(which: str = "all") -> str:
    """Each command: what it does, an example, its arguments and options; or of those alone, or in groups."""
    parts: list[str] = []
    for name, command in commands():
        if which != "all" and (len(name.split()) > 2) != (which == "grouped"):
            continue
        text, _, example = inspect.cleandoc(command.help or "").partition("Example:")
        shown = [param for param in command.params if not getattr(param, "hidden", False) and param.name != "help"]
        arguments = [param for param in shown if param.param_type_name == "argument"]
        usage = " ".join([name, *(_called(param) for param in arguments), "[OPTIONS]"])
        parts += [f"## {name}", text.strip(), f"```text\n{usage}\n```"]
        if example.strip():
            parts.append(f"For example: <code>{html.escape(' '.join(example.split()).strip('`'))}</code>")
        if shown:
            rows = ["| argument or option | default | meaning |", "|---|---|---|"]
            for param in shown:
                if param.param_type_name == "argument":
                    words = _called(param)
                else:
                    words = ", ".join([*param.opts, *param.secondary_opts])
                default = param.default
                is_said = default is not None and not callable(default) and default not in (False, (), [])
                rows.append(
                    f"| <code>{html.escape(words)}</code> "
                    f"| {f'<code>{html.escape(str(default))}</code>' if is_said else ''} "
                    f"| {(getattr(param, 'help', None) or '').replace('|', '&#124;')} |"
                )
            parts.append("\n".join(rows))
    return "\n\n".join(parts)


def _called(param: Any) -> str:
    name = param.metavar or param.name.upper()
    return name if param.required else f"[{name}]"


# Pages


def equations(markdown: str) -> str:
    """Fences of the language ``math``, LaTeX inside, as MathML."""
    from latex2mathml.converter import convert

    def drawn(match: re.Match[str]) -> str:
        lines = [line for line in match[1].strip().split("\n\n") if line.strip()]
        made = "".join(f"<div>{convert(' '.join(line.split()), display='block')}</div>" for line in lines)
        return f'<div class="formula" tabindex="0" role="group" aria-label="equation">{made}</div>'

    return re.sub(r"^```math\n(.*?)^```$", drawn, markdown, flags=re.M | re.S)


# What no link may be put into: fences, lines of HTML, headings, rows of tables, tags, code, links, what fills braces.
NO_LINKS = re.compile(
    r"(^```.*?^```$|^<.*?>$|^#.*?$|^\|.*?$|<[^>]*>|`[^`]*`|!?\[[^\]]*\]\([^)]*\)|\{[^}]*\})", re.M | re.S
)


@cache
def glossary() -> tuple[re.Pattern[str], list[str]]:
    """A pattern with a group for each word of the glossary, long ones first, and the anchors of these words."""
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    anchor_of = {
        name: anchor or name.replace(" ", "-")
        for names, anchor in re.findall(r"^### (.+?)(?: \{#([\w-]+)\})?$", text, re.M)
        for name in names.split(", ")
    }
    names = sorted(anchor_of, key=len, reverse=True)
    words = [rf"([{name[0].upper()}{name[0]}]{re.escape(name[1:])}s?)" for name in names]
    return re.compile(rf"(?<![\w-])(?:{'|'.join(words)})(?![\w-])"), [anchor_of[name] for name in names]


def link_terms(markdown: str, path: str) -> str:
    """A page with the first use of each word of the glossary linked to its entry."""
    pattern, anchors = glossary()
    target, seen = "../" * path.count("/") + "glossary.md", set()

    def linked(match: re.Match[str]) -> str:
        anchor = anchors[(match.lastindex or 1) - 1]
        if anchor in seen:
            return match[0]
        seen.add(anchor)
        return f"[{match[0]}]({target}#{anchor})"

    pieces = NO_LINKS.split(markdown)  # text at even places
    pieces[::2] = [pattern.sub(linked, text) for text in pieces[::2]]
    return "".join(pieces)


def on_page_markdown(markdown: str, page: Any = None, **_: Any) -> str:
    """Fill in what the code says, and link the words of the glossary."""
    path = "" if page is None else page.file.src_uri
    if path == "results.md" or path.startswith("results/"):
        page.meta["hide"] = ["navigation", "toc"]  # tables of many columns need the width
    if path.startswith("research/"):
        page.meta["hide"] = ["toc"]
    if path.startswith("results/"):
        title, _, rest = markdown.partition("\n")
        markdown = f"{title}\n\n[All results](../results.md){{ .wide-page }}\n{rest}"
    if path.startswith("results"):
        markdown = colour_verdicts(markdown)
    if path.startswith(EXPLAINED) and path not in UNEXPLAINED:
        markdown = link_terms(markdown, path)
    makers: dict[str, Callable[..., str]] = {
        "options": options_table,
        "settings": settings_table,
        "grids": grids_table,
        "costs": costs_table,
        "commands": command_reference,
        "count": count,
        "statements": statements_line,
        "benchmark": benchmark_table,
        "spreads": spreads_table,
        "attacks": attacks_table,
        "diagram": diagram,
        "security": security,
    }

    def filled(match: re.Match[str]) -> str:
        word, *rest = match[1].split()
        return makers[word](*rest)

    return equations(re.sub(rf"\{{\{{ ((?:{'|'.join(makers)})(?: [\w-]+)*) \}}\}}", filled, markdown))


def executed(path: Path) -> Any:
    """A notebook with the outputs of running it, in a folder of its own."""
    import nbformat
    from nbclient import NotebookClient
    from traitlets.config import Config

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(
            notebook,
            timeout=300,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
            # Sockets in the folder: no port is opened for it.
            config=Config({"KernelManager": {"transport": "ipc", "ip": f"{folder}/kernel"}}),
        ).execute()
    return notebook


@cache
def notebook_page(path: Path, content: str) -> str:
    """A notebook, run, as Markdown; ``content`` is what its page is remembered by while the site is served."""
    parts = [f"[The notebook itself]({path.name}) runs as it stands.\n"]
    for cell in executed(path).cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        said = "".join(output.get("text") or "" for output in cell.outputs)  # printed piece by piece
        for output in cell.outputs:
            data = output.get("data", {})
            if "image/png" in data:
                alt = html.escape(cell.metadata["alt"])  # a picture without words for it is a mistake
                picture = f"data:image/png;base64,{data['image/png'].strip()}"
                parts.append(f'<img class="notebook" alt="{alt}" src="{picture}">')
            else:
                said += data.get("text/plain", "")
        if said:
            parts.append(f"```text\n{said.rstrip()}\n```")
    # The title stays the first thing on the page.
    parts[0], parts[1] = parts[1], parts[0]
    return "\n\n".join(parts)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is made: the technical report, pages of notebooks and of sources."""
    files.append(File.generated(config, "report.pdf", content=module_of_docs("make_report").report()))
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        page = notebook_page(path, path.read_text(encoding="utf-8"))
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=page))
    for folder in SOURCES:
        for path in sorted((ROOT / folder).glob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            code = path.read_text(encoding="utf-8")
            page = f"---\nsearch:\n  exclude: true\n---\n# {name}\n\n````python\n{code}\n````\n"
            target = f"source/{name.removesuffix('.py')}.md"
            files.append(File.generated(config, target, content=page, inclusion=InclusionLevel.NOT_IN_NAV))
    return files
