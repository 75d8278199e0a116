"""Draw docs/figures/terminal-run.svg and terminal-compare.svg from real runs on the embedded digits.

python docs/make_terminal_pictures.py
"""

from __future__ import annotations

import io
import re
import shutil
import tempfile
from pathlib import Path
from threading import Thread

from rich.color import parse_rgb_hex
from rich.console import Console, Group
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from selffl.cli import live
from selffl.studies.comparison import METHODS, Comparison, run
from selffl.studies.problems import DIGITS
from selffl.studies.result import Job

FIGURES = Path(__file__).parent / "figures"
WIDTH = 88
ROUNDS, STOP, SEEDS = 60, 44, 3
# Black, red, green, yellow, blue, magenta, cyan, white.
COLOURS = ("484f58", "ff7b72", "3fb950", "d29922", "58a6ff", "bc8cff", "39c5cf", "b1bac4")
THEME = TerminalTheme((22, 27, 34), (201, 209, 217), [parse_rgb_hex(colour) for colour in COLOURS])


def save(name: str, command: str, shown: object) -> None:
    """One picture: the command, and what is to be seen below it."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Group(Text(f"$ {command}", style="bold"), shown))  # type: ignore[arg-type]
    svg = console.export_svg(title="selffl", theme=THEME, unique_id=name)
    # The fonts that rich would fetch from elsewhere: a reader's own will do, and nothing is asked of the network.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    # Letters as high as their lines, so that the frames have no gaps in other fonts than rich's own.
    svg = svg.replace("Fira Code", "DejaVu Sans Mono").replace("font-size: 20px", "font-size: 21px")
    svg = re.sub(r"<!-- Generated with Rich [^>]*-->\s*", "", svg)
    (FIGURES / f"{name}.svg").write_text(svg, encoding="utf-8")


class FarEnoughError(Exception):
    """Far enough for a picture."""


def picture_of_a_run() -> None:
    """The panel of `selffl run`, three quarters through."""
    view = live.RunView("self-fl on digits, seed 0", ROUNDS)

    def note(row: live.Row) -> None:
        view.note(row)
        if row["round"] == STOP:
            save("terminal-run", "selffl run digits", view)
            raise FarEnoughError

    try:
        DIGITS.run("self-fl", {}, seed=0, on_round=note)
    except FarEnoughError:
        return


def picture_of_a_comparison() -> None:
    """The table of `selffl compare`, while methods of the second seed are at work."""
    folder = Path(tempfile.mkdtemp())
    view = live.ArmsView(f"digits: {ROUNDS} rounds, {SEEDS} seeds", folder)
    compared = Comparison(DIGITS, {}, METHODS, is_tuned=False, num_seeds=SEEDS)
    done = Thread(target=lambda: run(compared, Job(folder=folder, num_processes=2)), daemon=True)
    done.start()
    while done.is_alive():
        view.look()
        over = sum(arm.is_over for arm in view.arms.values())
        running = [arm for arm in view.arms.values() if arm.state == "running" and arm.round_number > 4]
        if over > 1.6 * len(METHODS) and running:
            save("terminal-compare", f"selffl compare digits --seeds {SEEDS}", view)
            break
        done.join(0.05)
    done.join()
    shutil.rmtree(folder)


if __name__ == "__main__":
    picture_of_a_run()
    picture_of_a_comparison()
