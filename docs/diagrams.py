"""The diagrams of docs/architecture.md, as SVG that takes the colours of the page."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

LINE_PIXELS = 17  # from one line of text to the next


@dataclass(frozen=True)
class Box:
    """A rectangle with a heading and lines below it, in pixels."""

    x: int
    y: int
    width: int
    height: int
    heading: str
    lines: Sequence[str] = ()
    kind: str = "part"  # or "site", "group": how it is coloured

    def svg(self) -> str:
        """The rectangle with its words in the middle; those of a group at its top."""
        middle, count = self.x + self.width / 2, len(self.lines)
        top = self.y + 20 if self.kind == "group" else self.y + self.height / 2 - count * LINE_PIXELS / 2 + 5
        words = [f'<text class="heading" x="{middle:g}" y="{top:g}">{html.escape(self.heading)}</text>']
        words += [
            f'<text x="{middle:g}" y="{top + (number + 1) * LINE_PIXELS:g}">{html.escape(line)}</text>'
            for number, line in enumerate(self.lines)
        ]
        place = f'x="{self.x}" y="{self.y}" width="{self.width}" height="{self.height}"'
        return f'<g class="{self.kind}"><rect {place} rx="6"/>{"".join(words)}</g>'


@dataclass(frozen=True)
class Arrow:
    """A straight line with a head, and words above its middle."""

    start: tuple[int, int]
    end: tuple[int, int]
    words: str = ""
    name: str = "parts"  # of the diagram: ids are the page's

    def svg(self) -> str:
        """The line and its words."""
        (x1, y1), (x2, y2) = self.start, self.end
        line = f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" marker-end="url(#head-{self.name})"/>'
        if not self.words:
            return line
        return f'{line}<text x="{(x1 + x2) / 2:g}" y="{(y1 + y2) / 2 - 7:g}">{html.escape(self.words)}</text>'


def drawing(name: str, label: str, size: tuple[int, int], shapes: Sequence[Box | Arrow]) -> str:
    """A diagram as one HTML element."""
    head = (
        f'<marker id="head-{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0,0 L10,5 L0,10 z"/></marker>'
    )
    inside = "".join(shape.svg() for shape in shapes)
    return (
        f'<div class="diagram" tabindex="0" role="group" aria-label="{html.escape(label)}">'
        f'<svg viewBox="0 0 {size[0]} {size[1]}" role="img" aria-label="{html.escape(label)}">'
        f"<defs>{head}</defs>{inside}</svg></div>"
    )


def parts() -> str:
    """Rows, engine, method, model, run, and what is made from a run."""
    label = (
        "Rows become a federation. The engine takes it and calls method and model. It returns a run, from which "
        "reports, predictions and exported models are made."
    )
    shapes = [
        Box(0, 105, 140, 90, "Your rows", ["CSV, arrays,", "data frames"]),
        Box(180, 110, 120, 80, "Federation", ["rows of each", "client, split"]),
        Box(340, 10, 330, 280, "Engine: cohort, or Flower", kind="group"),
        Box(360, 50, 290, 60, "Method", ["what is sent, trained, averaged"]),
        Box(360, 130, 290, 60, "Task", ["gradients of a model on a client's rows"]),
        Box(360, 210, 135, 60, "Your model", ["nn.Module, loss"], kind="site"),
        Box(515, 210, 135, 60, "Memory", ["of each client"], kind="site"),
        Box(710, 110, 120, 80, "Run", ["personal models,", "records"]),
        Box(870, 20, 120, 60, "Report", ["HTML page"]),
        Box(870, 90, 120, 60, "Predict", ["by own model"]),
        Box(870, 160, 120, 60, "Export", ["safetensors"]),
        Box(870, 230, 120, 60, "New client", ["from its rows"]),
        Arrow((140, 150), (178, 150)),
        Arrow((300, 150), (338, 150)),
        Arrow((670, 150), (708, 150)),
        *(Arrow((830, 150), (868, y)) for y in (50, 120, 190, 260)),
    ]
    return drawing("parts", label, (1000, 300), shapes)


def one_round() -> str:
    """Between the server and a site."""
    label = (
        "In a round the server sends the global model and settings to a site. The site trains on its rows and sends an "
        "upload back. Rows, labels and the personal model's memory stay at the site."
    )
    shapes = [
        Box(10, 20, 240, 250, "Server", kind="group"),
        Box(30, 55, 200, 50, "Global model θ", ["and σ₀² with Self-FL"]),
        Box(30, 125, 200, 50, "Average", ["over this round's clients"]),
        Box(30, 195, 200, 55, "Measurements", ["sums of metrics"]),
        Box(700, 20, 290, 250, "Site: one client", kind="group"),
        Box(720, 55, 250, 50, "Trains", ["from θ, towards its own model"]),
        Box(720, 125, 250, 55, "Rows and labels", ["never leave"], kind="site"),
        Box(720, 195, 250, 55, "Personal model, memory", ["stay on its disk"], kind="site"),
        Arrow((230, 80), (718, 80), "1. the model, method, settings, round", "round"),
        Arrow((718, 150), (232, 150), "2. the upload: a change of the model, weights", "round"),
        Arrow((718, 222), (232, 222), "3. sums of metrics over test rows", "round"),
    ]
    return drawing("round", label, (1000, 290), shapes)


DIAGRAMS = {"parts": parts, "round": one_round}
