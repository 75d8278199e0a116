"""Make the pictures of the README and the first pages from real runs: ``make pictures``.

The demonstration's report is photographed with headless Chromium; the terminal is drawn from the commands that stand on
docs/tutorial.md, on its rows.  docs/figures/pictures.json says what each picture shows: its command, its
methods, its numbers.  tests/test_docs_pictures.py compares that with what the commands train today.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from rich.color import parse_rgb_hex
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from selffl import cli
from selffl.cli import live
from selffl.reports.record import StudyRecord, load_studies
from selffl.runs.folder import read_config

DOCS = Path(__file__).parent
FIGURES = DOCS / "figures"
SIDECAR = FIGURES / "pictures.json"
DEMO = "selffl demo --out runs/demo"  # what `make demo` runs
SPREADS = ("0.05", "0.6", "2.0")  # how far the tutorial's clinics differ; the second is the page's
TERMINAL_COLUMNS = 88
SHOWN_FOLDER, TELL_PATH = Path("/home/ana"), cli.console.tell_path  # where pictures say that commands were run
REPORT_PIXELS, CLIENT_PIXELS = (1280, 1500), (1280, 1060)
FILM_PIXELS, FILM_WIDTH_PIXELS, FILM_COLOURS = (1280, 900), 800, 64  # as the browser has it, and as it is kept
FRAME_SECONDS, REPORT_FRAME_SECONDS, LAST_FRAME_SECONDS = 0.4, 1.6, 3.0
NUM_TERMINAL_FRAMES = 16
TERMINAL_FILM, REPORT_FILM = "terminal-film.svg", "report-film.gif"
READY_MILLISECONDS, SETTLE_MILLISECONDS = 60_000, 1_000  # until a page is drawn; until its charts have a new width
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER_FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
# Black, red, green, yellow, blue, magenta, cyan, white.
COLOURS = ("484f58", "ff7b72", "3fb950", "d29922", "58a6ff", "bc8cff", "39c5cf", "b1bac4")
THEME = TerminalTheme((22, 27, 34), (201, 209, 217), [parse_rgb_hex(colour) for colour in COLOURS])

Content = dict[str, Any]


# The tutorial


def tutorial_blocks(language: str) -> list[str]:
    """The code blocks of docs/tutorial.md in one language, in their order."""
    page = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.M | re.S)


def tutorial_command(name: str) -> str:
    """The first command ``selffl NAME`` of docs/tutorial.md, on one line."""
    blocks = [" ".join(block.replace("\\\n", " ").split()) for block in tutorial_blocks("sh")]
    return next(block for block in blocks if block.startswith(f"selffl {name} "))


def write_rows(spread: str) -> None:
    """Make rows.csv here, as the page does, with clinics that differ by this much."""
    code, written = tutorial_blocks("python")[0], SPREADS[1]
    if f"rng.normal(0.0, {written}, 3)" not in code:
        raise SystemExit(
            f"docs/tutorial.md makes no rows that differ by {written}; expected its first Python block to."
        )
    exec(compile(code.replace(written, spread), "docs/tutorial.md", "exec"), {"__name__": "tutorial"})


# Commands


def terminal(command: str) -> Console:
    """A terminal that keeps what is printed on it, with the command on its first line."""
    console = Console(
        record=True, width=TERMINAL_COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(Text(f"$ {command}", style="bold"))
    return console


def run_command(command: str) -> Console:
    """Run a command of selffl in this process; return the terminal with what it printed."""
    printed = terminal(command)
    quiet = Console(stderr=True, width=TERMINAL_COLUMNS, force_terminal=False)
    with (
        mock.patch.object(cli.console, "out", printed),
        mock.patch.object(cli.console, "err", quiet),
        mock.patch.object(sys, "argv", shlex.split(command)),
        mock.patch.object(cli.console, "tell_path", _tell_shown_path),
    ):
        try:
            cli.main()
        except SystemExit as stopped:
            if stopped.code:
                raise SystemExit(f"{command} ended with {stopped.code}; see above.") from None
    return printed


def _tell_shown_path(console: Console, before: str, path: Path, after: str = "") -> None:
    """A whole path as pictures have it: the folder that they are made in is nobody's."""
    TELL_PATH(console, before, SHOWN_FOLDER / path, after)


@contextmanager
def in_empty_folder() -> Iterator[None]:
    """Work in a folder that is gone afterwards."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def compared(record: StudyRecord) -> Content:
    """What a comparison found: its methods, its table and its verdicts."""
    return {
        "methods": [row["method"] for row in record.table],
        "table": list(record.table),
        "claims": {claim["text"]: claim["verdict"] for claim in record.claims},
    }


# Terminal


def save_terminal(name: str, console: Console) -> None:
    """Save what a terminal shows as a picture."""
    (FIGURES / name).write_text(terminal_svg(name.removesuffix(".svg"), console), encoding="utf-8")


def terminal_svg(unique_id: str, console: Console) -> str:
    """What a terminal shows, as a picture that needs no font of its own."""
    svg = console.export_svg(title="selffl", theme=THEME, unique_id=unique_id)
    # The fonts that rich would fetch from elsewhere: a reader's own will do, and nothing is asked of the network.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    # Letters as high as their lines, so that the frames have no gaps in other fonts than rich's own.
    svg = svg.replace("Fira Code", "DejaVu Sans Mono").replace("font-size: 20px", "font-size: 21px")
    return re.sub(r"<!-- Generated with Rich [^>]*-->\s*", "", svg)


def save_film(name: str, frames: list[str]) -> None:
    """Save pictures as one that shows each for a while, over and over; the last alone where motion is not wanted."""
    seconds = (len(frames) - 1) * FRAME_SECONDS + LAST_FRAME_SECONDS
    width, height = map(max, zip(*(_view_box(frame) for frame in frames), strict=True))
    rules = ["@media (prefers-reduced-motion: no-preference) { .frame { visibility: hidden; } }"]
    for number in range(len(frames)):
        begin = 100 * number * FRAME_SECONDS / seconds
        end = 100.0 if number == len(frames) - 1 else 100 * (number + 1) * FRAME_SECONDS / seconds
        rules.append(
            f"@keyframes at{number} {{ 0%, {begin:.3f}% {{ visibility: hidden; }} "
            f"{begin + 0.001:.3f}%, {end:.3f}% {{ visibility: visible; }} "
            + ("}" if end == 100.0 else f"{end + 0.001:.3f}%, 100% {{ visibility: hidden; }} }}")
        )
        rules.append(
            "@media (prefers-reduced-motion: no-preference) "
            f"{{ .at{number} {{ animation: at{number} {seconds:g}s step-end infinite; }} }}"
        )
    parts = [f'<g class="frame at{number}">{frame}</g>' for number, frame in enumerate(frames)]
    style = f"<style>{' '.join(rules)}</style>"
    text = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}">{style}{"".join(parts)}</svg>\n'
    (FIGURES / name).write_text(text, encoding="utf-8")


def _view_box(svg: str) -> tuple[float, float]:
    """Width and height of a picture."""
    found = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert found is not None
    return float(found[1]), float(found[2])


def picture_of_a_run(name: str) -> Content:
    """The panel of the tutorial's ``selffl run``: three quarters through, and as a film to the end."""
    command, frames = tutorial_command("run"), []

    class PhotographedView(live.RunView):
        def note(self, row: live.Row) -> None:
            super().note(row)
            number = row["round"]
            if number == self.rounds * 3 // 4:
                save_terminal(name, self.shown())
            if number * NUM_TERMINAL_FRAMES // self.rounds > (number - 1) * NUM_TERMINAL_FRAMES // self.rounds:
                frames.append(terminal_svg(f"frame-{len(frames)}", self.shown()))

        def shown(self) -> Console:
            console = terminal(command)
            console.print(self)
            return console

    with mock.patch.object(live, "RunView", PhotographedView):
        ended = run_command(command)
    save_film(TERMINAL_FILM, [*frames, terminal_svg(f"frame-{len(frames)}", ended)])
    (folder,) = Path("runs").glob("*")
    config = read_config(folder)
    return {"command": command, "methods": [config.algorithm], "rounds": config.rounds}


def picture_of_a_comparison(name: str) -> Content:
    """What the tutorial's ``selffl compare`` ends with."""
    command = tutorial_command("compare")
    save_terminal(name, run_command(command))
    return {"command": command, **compared(load_studies(Path("runs/compare-my-study"))[0][1])}


def tutorial_pictures() -> Content:
    """Both pictures of the terminal, and what the comparison finds where clinics differ less or more."""
    found: Content = {}
    tables = {}
    for spread in SPREADS:
        with in_empty_folder():
            write_rows(spread)
            run_command(tutorial_command("init"))
            if spread == SPREADS[1]:
                found["terminal-run.svg"] = picture_of_a_run("terminal-run.svg")
                found[TERMINAL_FILM] = dict(found["terminal-run.svg"])
                found["terminal-compare.svg"] = picture_of_a_comparison("terminal-compare.svg")
            else:
                run_command(tutorial_command("compare"))
            tables[spread] = compared(load_studies(Path("runs/compare-my-study"))[0][1])["table"]
    return found | {"tutorial": {"command": tutorial_command("compare"), "by_spread": tables}}


# Report


def smallest_client(folder: Path, record: StudyRecord) -> Content:
    """The client with the fewest training rows in the first run of a record."""
    run = record.runs[0]
    with (folder / "runs" / run["folder"] / "clients.csv").open(newline="", encoding="utf-8") as file:
        row = min(csv.DictReader(file), key=lambda row: (int(row["num_train"]), int(row["client"])))
    return {"id": row["client"], "num_train": int(row["num_train"]), "num_test": int(row["num_test"])}


def report_pictures() -> Content:
    """The top of the demonstration's report, and one client followed through it."""
    from playwright.sync_api import sync_playwright

    browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser_path is None:
        raise SystemExit(f"no browser found; expected one of {', '.join(BROWSERS)}. Install Chromium.")
    with in_empty_folder():
        run_command(DEMO)
        ((folder, record),) = load_studies(Path("runs/demo"))
        found = compared(record)
        client = smallest_client(folder, record)
        report = Path("runs/demo/report.html").resolve()
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=browser_path, args=list(BROWSER_FLAGS))
            verdict = photograph(browser, report, client["id"])
            film_report(browser, report, client["id"])
            browser.close()
    return {
        "report.png": {"command": DEMO, "verdict": verdict, **found},
        "report-client.png": {"command": DEMO, "client": client, "methods": found["methods"]},
        REPORT_FILM: {"command": DEMO, "client": client, "methods": found["methods"]},
    }


def photograph(browser: Any, report: Path, client: str) -> str:
    """Take both pictures of a report; return its verdict in one sentence."""
    page = browser.new_page(viewport=_size(REPORT_PIXELS), color_scheme="light", reduced_motion="reduce")
    page.goto(report.as_uri())
    page.wait_for_selector("html[data-ready=yes]", timeout=READY_MILLISECONDS)
    page.screenshot(path=FIGURES / "report.png")
    page.set_viewport_size(_size(CLIENT_PIXELS))
    page.fill("[data-client]", client)
    page.keyboard.press("Enter")
    page.evaluate("document.activeElement.blur()")
    page.evaluate("document.querySelector('.section-clients').scrollIntoView({behavior: 'instant'})")
    page.wait_for_timeout(SETTLE_MILLISECONDS)
    page.screenshot(path=FIGURES / "report-client.png")
    return " ".join(page.locator(".verdict").first.inner_text().split())


def film_report(browser: Any, report: Path, client: str) -> None:
    """A reader's way through a report: down the page, then one client through every picture."""
    from PIL import Image

    page = browser.new_page(viewport=_size(FILM_PIXELS), color_scheme="light", reduced_motion="reduce")
    page.goto(report.as_uri())
    page.wait_for_selector("html[data-ready=yes]", timeout=READY_MILLISECONDS)
    frames, sections = [], page.locator("main section").count()

    def shoot() -> None:
        shot = Image.open(io.BytesIO(page.screenshot()))
        height = round(FILM_WIDTH_PIXELS * shot.height / shot.width)
        small = shot.convert("RGB").resize((FILM_WIDTH_PIXELS, height), Image.Resampling.LANCZOS)
        frames.append(small.quantize(FILM_COLOURS, dither=Image.Dither.NONE))

    shoot()
    for place in (*range(sections), "client", *range(sections)):
        if place == "client":
            page.fill("[data-client]", client)
            page.keyboard.press("Enter")
            page.evaluate("document.activeElement.blur()")
            continue
        page.evaluate(f"document.querySelectorAll('main section')[{place}].scrollIntoView({{behavior: 'instant'}})")
        page.wait_for_timeout(SETTLE_MILLISECONDS // 2)
        shoot()
    seconds = [REPORT_FRAME_SECONDS] * (len(frames) - 1) + [LAST_FRAME_SECONDS]
    frames[0].save(
        FIGURES / REPORT_FILM, save_all=True, append_images=frames[1:], loop=0, optimize=True,
        duration=[round(1000 * each) for each in seconds],
    )  # fmt: skip


def _size(pixels: tuple[int, int]) -> Any:
    return {"width": pixels[0], "height": pixels[1]}


def main() -> None:
    """Make all pictures anew, and say what they show."""
    found = report_pictures() | tutorial_pictures()
    for name, content in found.items():
        if (path := FIGURES / name).is_file():
            content["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    SIDECAR.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"Made: {', '.join(name for name in found if (FIGURES / name).is_file())}; what they show: {SIDECAR.name}")


if __name__ == "__main__":
    main()
