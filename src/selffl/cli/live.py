"""What is to be seen while something trains: one run in a panel, or several methods in a table that fills in.

On a terminal it is drawn on standard error and gone at the end; elsewhere it is quiet, but for a plain line per
evaluation where those are asked for.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from selffl.cli import console

Row = Mapping[str, Any]
SPARKS = "▁▂▃▄▅▆▇"  # the full block would touch the line above
WIDE, NARROW = 60, 44  # columns from which there is room for a sparkline and for all columns; below, for the least
MAX_COLUMNS = 100  # of a terminal that a view fills
SCORE, SEEDS_AND_NOW = 15, 24  # columns of a score, and of what stands around the scores, with their lines
LEAST_SHARE = 0.05  # of the work, before the time left means something
TAIL_BYTES = 16_384  # bytes of a history that hold its last evaluation, nearly always


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as small bars over a width, the first one first and the last one last."""
    if width < 1 or not values:
        return ""
    last = len(values) - 1
    chosen = [values[round(k * last / max(width - 1, 1))] for k in range(width - 1)] + [values[last]]
    low, high = min(values), max(values)
    span = high - low or 1.0
    return "".join(SPARKS[round((value - low) / span * (len(SPARKS) - 1))] for value in chosen)


def score(metric: str, value: float | None) -> str:
    """A score as a reader expects it: accuracies in percent."""
    from selffl.training.metrics import PERCENT, plain_number

    if value is None:
        return "–"
    return f"{100 * value:.1f} %" if metric in PERCENT else plain_number(value)


def difference(metric: str, value: float) -> str:
    """Between two scores, with its sign."""
    from selffl.training.metrics import PERCENT, plain_number

    if metric not in PERCENT:
        return plain_number(value, 3, signed=True)
    return f"{100 * value:+.1f} points".replace("-", "−")


def clock_time(seconds: float) -> str:
    """Hours, minutes and seconds."""
    whole = max(round(seconds), 0)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def memory() -> int | None:
    """Bytes that this process holds, where the system says so."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        try:
            import resource
        except ImportError:
            return None
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def _bar(done: float, total: int, width: int) -> ProgressBar:
    return ProgressBar(total=max(total, 1), completed=done, width=width, complete_style="cyan", finished_style="green")


def _megabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def metric_of(*rows: Row) -> str:
    """What runs are told by first, from their summaries or rows of their histories."""
    from selffl.runs.evaluation import leading_metric

    named = (name.removeprefix("weighted_") for row in rows for name in row if name.startswith("weighted_"))
    return leading_metric(rows) or next(named, "accuracy")


class RunView:
    """One run: how far it is, how well it does, what uncertainty has decided, what it takes."""

    def __init__(
        self, title: str, rounds: int, device: str = "cpu", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.title, self.rounds, self.device, self.clock = title, rounds, device, clock
        self.began, self.first = clock(), 0  # the round before the first that is seen
        self.last: Row = {}
        self.scored: Row = {}  # the last round that was evaluated
        self.seen: dict[str, list[float]] = {}

    def note(self, row: Row) -> None:
        """One more round."""
        if not self.last:
            self.first = row["round"] - 1
        self.last = row
        if row.get(f"weighted_{metric_of(row)}") is not None:
            self.scored = row
        for name, value in row.items():
            if isinstance(value, int | float) and math.isfinite(value):
                self.seen.setdefault(name, []).append(value)

    def line(self) -> str:
        """The last round in plain words."""
        metric = self.metric
        scores = [(name, self.last.get(key)) for name, key in self._scores()]
        said = [f"{name} {score(metric, value)}" for name, value in scores if value is not None]
        if self.last.get("num_local_steps") is not None:
            said.append(f"steps {self.last['num_local_steps']:.1f}")
        return f"round {self.last['round']} of {self.rounds}: {', '.join(said)}"

    @property
    def metric(self) -> str:
        """What the run is told by first."""
        return metric_of(self.scored or self.last)

    def _scores(self) -> list[tuple[str, str]]:
        from selffl.training.metrics import name_of

        metric = self.metric
        return [
            (name_of(metric), f"weighted_{metric}"),
            ("global model", f"global_{metric}"),
            ("worst tenth", f"worst10_{metric}"),
        ]

    def _left(self) -> str:
        done = self.last.get("round", 0) - self.first
        if done < max(LEAST_SHARE * (self.rounds - self.first), 1):
            return ""
        return f"{clock_time((self.clock() - self.began) / done * (self.rounds - self.last['round']))} left"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """As wide as there is room; narrow terminals lose the sparklines first."""
        width = min(options.max_width, MAX_COLUMNS)
        room = width - 30 if width >= WIDE and options.encoding.startswith("utf") else 0
        grid = Table.grid(padding=(0, 1))
        grid.add_column(style="dim", no_wrap=True, overflow="ellipsis")
        grid.add_column(justify="right", no_wrap=True, min_width=9)
        if width >= NARROW:
            grid.add_column(no_wrap=True, overflow="ellipsis", style="cyan")

        def add(name: str, value: str | Text, beside: RenderableType = "") -> None:
            grid.add_row(name, value, *([beside] if width >= NARROW else []))

        done = self.last.get("round", 0)
        progress = Table.grid(padding=(0, 1))
        long = max(room - 14, 4)
        bar = _bar(done, self.rounds, long) if room else ""
        room = min(max(round(long * done / max(self.rounds, 1)), 1), long) if room else 0  # in step with the bar
        progress.add_row(bar, Text(self._left(), style="none", no_wrap=True))
        add("round", f"{done} of {self.rounds}", progress)
        metric = self.metric
        for name, key in self._scores():
            values = list(self.seen.get(key, ()))
            add(name, Text(score(metric, values[-1] if values else None), style="bold"), sparkline(values, room))
        if self.seen.get("num_local_steps"):
            steps = list(self.seen["num_local_steps"])
            add("local steps", f"{steps[-1]:.1f}", sparkline(steps, room))
        for name, key in (("σ₀², between", "inter_variance"), ("mean σₘ², within", "intra_variance")):
            if self.seen.get(key):
                logs = [math.log(value) for value in self.seen[key] if value > 0]
                add(name, f"{self.seen[key][-1]:.3g}", sparkline(logs, room))
        add("memory", _megabytes(memory() or 0), self._gpu())
        yield Panel(grid, title=Text(self.title), title_align="left", width=width, box=box.ROUNDED, padding=(0, 1))

    def _gpu(self) -> str:
        torch = sys.modules.get("torch")
        if not self.device.startswith("cuda") or torch is None or not torch.cuda.is_available():
            return ""
        return f"GPU {_megabytes(torch.cuda.memory_allocated(self.device))}"


@contextmanager
def watching(title: str, rounds: int, device: str = "cpu", verbose: bool = False) -> Iterator[Callable[[Row], None]]:
    """A function to call with each row of a run's history, and what is to be seen of it meanwhile."""
    view = RunView(title, rounds, device)

    def note(row: Row) -> None:
        view.note(row)
        if verbose and row.get(f"weighted_{metric_of(row)}") is not None:
            console.tell(console.err, view.line())

    with _shown(view):
        yield note


@contextmanager
def _shown(view: Any) -> Iterator[None]:
    """Drawn on a terminal, again and again; nothing of it is left behind, whatever happens."""
    if not console.err.is_terminal or console.err.is_dumb_terminal:
        yield
        return
    with Live(view, console=console.err, refresh_per_second=4, transient=True):
        yield


# ------------------------------------------------------------------------------------------------------ several methods


@dataclass
class ArmState:
    """One method with one seed: what its files say."""

    label: str
    seed: int
    place: Path
    rounds: int
    is_choosing: bool
    has_global_model: bool = True
    state: str = "waiting"  # running, finished, diverged
    round_number: int = 0
    latest: Row | None = None  # its last evaluation, or its summary

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to come."""
        return self.state in ("finished", "diverged")

    def look(self, since: float) -> None:
        """Read what has been written; a history from before ``since`` is of a run that was interrupted."""
        from selffl.runs.folder import HISTORY, SUMMARY

        if self.is_over:
            return
        try:
            summary = json.loads((self.place / SUMMARY).read_text(encoding="utf-8"))
            if summary.get("status") in ("finished", "diverged"):
                self.state, self.latest, self.round_number = summary["status"], summary, self.rounds
                return
        except (OSError, ValueError):
            pass
        history = self.place / HISTORY
        try:
            if history.stat().st_mtime >= since:
                self._read(history)
        except (OSError, ValueError, StopIteration):
            pass  # not there yet, or being emptied this moment

    def _read(self, history: Path) -> None:
        with history.open("rb") as file:
            header = file.readline().decode("utf-8").rstrip("\r\n").split(",")
            start = file.tell()
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - TAIL_BYTES, start))
            tail = file.read().decode("utf-8", errors="replace")
        lines = tail.split("\n")[:-1]  # what follows the last line's end is being written
        rows = [dict(zip(header, cells, strict=True)) for cells in csv.reader(lines) if len(cells) == len(header)]
        self.state = "running"
        if not rows:
            return
        self.round_number = int(rows[-1]["round"])
        scored = next((row for row in reversed(rows) if any(row[n] for n in header if n.startswith("weighted_"))), None)
        if scored is not None:
            self.latest = {name: float(cell) if cell else None for name, cell in scored.items()}


class ArmsView:
    """Methods with their seeds, as a table that fills in; told by the files that the runs write."""

    def __init__(self, title: str, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        from selffl.studies.arms import INDEX

        self.title, self.folder, self.index, self.clock = title, folder, folder / INDEX, clock
        self.began, self.since = clock(), time.time() - 1.0  # file systems round their times
        self.arms: dict[str, ArmState] = {}
        self.done_before: float | None = None  # runs that were there already

    def look(self) -> None:
        """Read what has changed."""
        try:
            if self.index.stat().st_mtime >= self.since:
                for entry in json.loads(self.index.read_text(encoding="utf-8")):
                    if entry["place"] not in self.arms:
                        self.arms[entry["place"]] = ArmState(**entry | {"place": self.folder / entry["place"]})
        except (OSError, ValueError):
            pass
        for arm in self.arms.values():
            arm.look(self.since)
        if self.arms and self.done_before is None:
            self.done_before = self._done()

    def _done(self) -> float:
        return sum(1.0 if arm.is_over else arm.round_number / max(arm.rounds, 1) for arm in self.arms.values())

    def _groups(self) -> dict[str, list[ArmState]]:
        groups: dict[str, list[ArmState]] = {}
        for arm in self.arms.values():
            groups.setdefault("choosing options" if arm.is_choosing else arm.label, []).append(arm)
        return groups

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """A table, and how far all of it is; narrow terminals have fewer columns."""
        from selffl.training.metrics import name_of

        self.look()
        width = min(options.max_width, MAX_COLUMNS)
        known = [arm.latest for arm in self.arms.values() if arm.latest is not None]
        metric = metric_of(*known)
        table = Table(
            box=box.ROUNDED, title=self.title, title_justify="left", title_style="bold", header_style="dim", width=width
        )
        longest = max((len(label) for label in self._groups()), default=6)
        table.add_column("method", no_wrap=True, overflow="ellipsis", ratio=1, min_width=min(longest, width // 3))
        table.add_column("seeds", justify="right", no_wrap=True)
        columns = {"weighted": name_of(metric), "worst10": "worst 10 %", "global": "global model"}
        room = width - longest - SEEDS_AND_NOW  # a name is whole before there is a further column
        shown = list(columns)[: max(min(room // SCORE, 3), 1)]
        for part in shown:
            table.add_column(columns[part], justify="right", no_wrap=True)
        if width >= NARROW:
            table.add_column("now", no_wrap=True, overflow="ellipsis", min_width=8, max_width=20)
        for label, group in self._groups().items():
            over = [arm for arm in group if arm.is_over]
            cells: list[Text | str] = [label, f"{len(over)}/{len(group)}"]
            void = columns if group[0].is_choosing else () if group[0].has_global_model else ("global",)
            cells += ["" if part in void else _mean_so_far(group, f"{part}_{metric}") for part in shown]
            cells += [_now(group)] if width >= NARROW else []
            table.add_row(
                *cells, style="dim" if group[0].is_choosing or not any(a.state != "waiting" for a in group) else ""
            )
        yield table
        done, total = self._done(), max(len(self.arms), 1)
        spent, gained = self.clock() - self.began, done - (self.done_before or 0.0)
        is_known = gained >= LEAST_SHARE * (total - (self.done_before or 0.0)) and gained > 0
        left = f"{clock_time(spent / gained * (total - done))} left" if is_known else ""
        foot = Table.grid(padding=(0, 1))
        finished = sum(arm.is_over for arm in self.arms.values())
        foot.add_row(
            _bar(done, total, max(min(width - 40, 40), 8)),
            Text(f"{finished} of {len(self.arms)} runs", no_wrap=True),
            Text(left, style="dim", no_wrap=True),
        )
        yield foot


def _mean_so_far(group: Sequence[ArmState], name: str) -> Text:
    """Over the seeds that are done, with its standard error; of a first seed that is not, the last value, dim."""
    from selffl.training.metrics import plain_number

    def shown(value: float, digits: int = 4) -> str:
        return f"{value:.1f}" if is_share else plain_number(value, digits)

    is_share = name.endswith("_accuracy")
    scale = 100.0 if is_share else 1.0
    done = [
        arm.latest[name] * scale
        for arm in group
        if arm.state == "finished" and arm.latest and arm.latest.get(name) is not None
    ]
    if done:
        error = f" ± {shown(statistics.stdev(done) / len(done) ** 0.5, 2)}" if len(done) > 1 else ""
        return Text(f"{shown(statistics.fmean(done))}{error}")
    running = [
        arm.latest[name] for arm in group if arm.state == "running" and arm.latest and arm.latest.get(name) is not None
    ]
    return Text(f"{shown(running[0] * scale)} …" if running else "", style="dim")


def _now(group: Sequence[ArmState]) -> Text:
    running = [arm for arm in group if arm.state == "running"]
    diverged = sum(arm.state == "diverged" for arm in group)
    if running:
        rounds = ", ".join(str(arm.round_number) for arm in running)
        return Text(f"round {rounds} of {running[0].rounds}", style="cyan")
    if all(arm.is_over for arm in group):
        return Text(f"{diverged} diverged", style="red") if diverged else Text("done", style="green")
    return Text("waiting", style="dim")


@contextmanager
def watching_arms(title: str, folder: Path, verbose: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """A function to call with runs done, runs in all and the last one's name, and a table of what they found so far."""
    view = ArmsView(title, folder)

    def progress(done: int, total: int, now: str) -> None:
        if verbose and re.search(r", seed \d+$", now):
            console.tell(console.err, f"{done} of {total} runs: {now}")

    with _shown(view):
        yield progress


def privacy_sentence(unit: str, epsilon: float | None, delta: float) -> str:
    """What the noise of a run protects, clients or rows, in a sentence."""
    begin = f"{unit.capitalize()}-level privacy: ε"
    if epsilon is None:
        return f"{begin} is not computed; install the accountant: pip install 'selffl[privacy]'."
    most = " at most" if unit == "row" else ""  # clients differ in it
    spent = f"{begin} = {epsilon:.3g}{most} at δ = {delta:.3g}"
    return f"{spent}, if the noise were secret, which a simulation's is not."
