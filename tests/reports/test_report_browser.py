"""The report in a real browser: numbers, hover, selection, accessibility, print; and live, while a run goes on."""

import csv
import itertools
import json
import math
import os
import random
import re
import shutil
import statistics
from threading import Thread

import pytest

import selffl
from needs import LEARNS_VARIANCES
from selffl.algorithms import traits_recorded
from selffl.data import load
from selffl.reports import data
from selffl.reports.collect import collect
from selffl.reports.live import ReportServer
from selffl.reports.page import render

pytestmark = pytest.mark.slow

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
METHODS = ("self-fl", "ditto", "local")
SEEDS = (0, 1)
# Ids that would break a careless page: as markup, as a script, as a template, as a name of JavaScript's own.
NASTY = (
    "</script><script>alert(1)</script>",
    "quote \" and ' and `",
    "Zürich 🏥",
    "<b>bold</b> &amp; %{y}",
    "__proto__",
)


def rows_of(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write(path, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def lacking(what):
    """Leave a test out for want of something; where browsers are required, fail."""
    if os.environ.get("SELFFL_BROWSER") == "required":
        pytest.fail(f"no {what} here, and SELFFL_BROWSER=required")
    pytest.skip(f"no {what} here")


@pytest.fixture
def axe():
    try:
        from axe_playwright_python.sync_playwright import Axe
    except ImportError:
        lacking("axe-playwright-python")
    return Axe()


@pytest.fixture(scope="module")
def browser():
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sync_playwright = None
    if found is None or sync_playwright is None:
        lacking("Playwright" if sync_playwright is None else f"Chromium ({', '.join(BROWSERS)})")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu", *QUIET])
        yield started
        started.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three methods with two seeds; some clients have difficult names, and all belong to clusters."""
    place = tmp_path_factory.mktemp("runs")
    names = dict(enumerate(NASTY))
    for name in METHODS:
        for seed in SEEDS:
            path = place / f"{name}-{seed}"
            selffl.train(
                "softmax", load("digits", seed=seed), name, rounds=12, participation=0.5, evaluate_every=3, seed=seed,
                out=path,
            )  # fmt: skip
            for file in ("clients.csv", "participation.csv", "partition.csv", "answers.csv"):
                rows = rows_of(path / file)
                for row in rows:
                    if file == "clients.csv":
                        row["cluster"] = int(row["client"]) % 4
                    row["client"] = names.get(int(row["client"]), f"site {row['client']}")
                if rows:
                    write(path / file, rows)
    return place


@pytest.fixture(scope="module")
def file(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "predicts", lambda group, method: method == 0)  # so that there is that picture, too
        path.write_text(render(collect([folder])), encoding="utf-8")
    return path


class Watch:
    """A page, and everything it said or asked for."""

    def __init__(self, browser, width=1280, scheme="light"):
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.said, self.asked = [], []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.said.append(f"dialog {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def open(self, path):
        self.page.goto(path if isinstance(path, str) else path.as_uri())
        self.page.wait_for_selector("html[data-ready=yes]", timeout=60_000)
        return self

    def reset(self):
        """Let go of what was chosen."""
        page = self.page
        page.mouse.move(0, 0)
        for name in ("focus", "seed"):
            if page.locator(f"[data-{name}]").evaluate("one => one.selectedIndex"):
                page.select_option(f"[data-{name}]", index=0)
        if page.locator("[data-part]").first.get_attribute("aria-pressed") == "false":
            page.locator("[data-part]").first.click()
        if page.input_value("[data-client]"):
            page.fill("[data-client]", "")
            page.keyboard.press("Enter")
        page.evaluate("document.querySelectorAll('[data-numbers]').forEach((one) => { one.open = false; })")
        page.evaluate("scrollTo({ top: 0, behavior: 'instant' })")
        self.said.clear()

    def numbers(self, chart):
        """Lines of a picture's table, opened; they are filled in by an event that follows the click."""
        self.page.locator(f"[data-numbers={chart}] summary").click()
        lines = self.page.locator(f"[data-numbers={chart}] tbody tr")
        lines.first.wait_for()
        return lines

    def traces(self, chart):
        """What Plotly holds: as drawn, in the page."""
        return self.page.evaluate(
            """name => document.querySelector(`[data-chart="${name}"] .plot`).data.map(t =>
            JSON.parse(JSON.stringify({name: t.name, meta: t.meta, x: t.x, y: t.y, base: t.base,
            customdata: t.customdata, error: t.error_x?.array, hovertext: t.hovertext})))""",
            chart,
        )

    def of(self, chart, meta):
        return [trace for trace in self.traces(chart) if trace.get("meta") == meta]

    def until(self, expression, seconds=15):
        """Wait until it is so; by asking from outside, since the page's policy forbids to evaluate text inside."""
        for _ in range(10 * seconds):
            if self.page.evaluate(expression):
                return
            self.page.wait_for_timeout(100)
        pytest.fail(f"never: {expression}")

    @property
    def charts(self):
        return self.page.eval_on_selector_all("[data-chart]", "all => all.map(one => one.dataset.chart)")

    @property
    def card(self):
        return self.page.locator("[data-card]").inner_text()


@pytest.fixture(scope="module")
def opened(browser, file):
    """The page, opened once: that takes seconds, and what is done to it can be undone."""
    made = Watch(browser).open(file)
    made.said_when_opened = list(made.said)
    yield made
    made.context.close()


@pytest.fixture
def watch(opened):
    """The page with nothing chosen."""
    yield opened
    opened.reset()


def clients(folder, method, seed):
    return {row["client"]: row for row in rows_of(folder / f"{method}-{seed}" / "clients.csv")}


ALL = ["rounds", "clients", "spread", "tails", "gains", "predicted", "confusion", "sureness", "variances", "weights",
       "steps", "histogram", "trajectory", "clusters", "partition"]  # fmt: skip
MARKED = [name for name in ALL if name not in ("confusion", "sureness")]  # those two show a chosen client alone


def test_it_loads_from_disk_without_a_word_and_asks_for_nothing(watch, file):
    assert watch.charts == ALL
    assert watch.said_when_opened == []
    assert watch.asked == [file.as_uri()]
    assert file.stat().st_size < 6_000_000


def test_each_picture_is_drawn_once(watch):
    """Where margins have to grow, Plotly draws a picture a second time: half of what a page takes to be there."""
    grown = watch.page.evaluate("""[...document.querySelectorAll("[data-chart]")].flatMap((one) => {
      const { margin, _size: size } = one.firstElementChild._fullLayout;
      const sides = ["l", "r", "t", "b"].filter((side) => size[side] > margin[side] + 1);
      return sides.map((side) => [one.dataset.chart, side, size[side]]);
    })""")
    assert grown == []


def test_the_curves_hold_the_numbers_of_the_histories(watch, folder):
    found = {trace["name"]: trace for trace in watch.of("rounds", "line")}
    assert list(found) == list(METHODS)
    for method in METHODS:
        runs = [rows_of(folder / f"{method}-{seed}" / "history.csv") for seed in SEEDS]
        assert found[method]["x"] == [3, 6, 9, 12]
        for number, y in zip(found[method]["x"], found[method]["y"], strict=True):
            values = [100 * float(rows[number - 1]["weighted_accuracy"]) for rows in runs]
            assert y == pytest.approx(statistics.mean(values), rel=1e-4)
    low, high = watch.of("rounds", "low")[0]["y"], watch.of("rounds", "high")[0]["y"]
    values = [
        100 * float(rows_of(folder / f"self-fl-{seed}" / "history.csv")[-1]["weighted_accuracy"]) for seed in SEEDS
    ]
    assert (high[-1] - low[-1]) / 2 == pytest.approx(statistics.stdev(values) / math.sqrt(2), rel=1e-3)


def test_every_client_is_where_its_file_says(watch, folder):
    ids = watch.page.evaluate("payload.groups[0].tables.seeds[0].clients")
    assert set(NASTY) <= set(ids)
    for method, trace in zip(METHODS, watch.of("clients", "points"), strict=True):
        rows = clients(folder, method, 0)
        assert trace["name"] == method
        assert len(trace["x"]) == len(rows) == 40
        for x, y, number in zip(trace["x"], trace["y"], trace["customdata"], strict=True):
            row = rows[ids[number]]
            assert x == pytest.approx(int(row["num_train"]), rel=0.04)  # methods stand side by side
            assert y == pytest.approx(100 * float(row["accuracy"]), rel=1e-4)


def test_gains_and_predictions_are_those_of_the_files(watch, folder):
    joined, alone = clients(folder, "self-fl", 0), clients(folder, "local", 0)
    ids = watch.page.evaluate("payload.groups[0].tables.seeds[0].clients")
    (bars,) = watch.of("gains", "points")
    assert bars["y"] == sorted(bars["y"], reverse=True)
    for y, number in zip(bars["y"], bars["customdata"], strict=True):
        expected = 100 * (float(joined[ids[number]]["accuracy"]) - float(alone[ids[number]]["accuracy"]))
        assert y == pytest.approx(expected, abs=2e-3)
    (points,) = watch.of("predicted", "points")
    known = {client for client, row in joined.items() if row["predicted_gain"]}
    assert {ids[number] for number in points["customdata"]} == known
    for x, number in zip(points["x"], points["customdata"], strict=True):
        assert x == pytest.approx(float(joined[ids[number]]["predicted_gain"]), rel=1e-4)


def test_means_of_bins_are_those_of_their_clients(watch):
    (points,), (bins,) = watch.of("predicted", "points"), watch.of("predicted", "bins")
    pairs = sorted(zip(points["x"], points["y"], strict=True))
    assert len(bins["x"]) == min(len(pairs) // 5, 6)
    edges = [math.sqrt(a * b) for a, b in itertools.pairwise(bins["x"])]
    assert bins["x"] == sorted(bins["x"])
    assert sum(bins["y"]) / len(bins["y"]) == pytest.approx(statistics.mean(y for _, y in pairs), abs=0.5)
    assert pairs[0][0] < edges[0] < edges[-1] < pairs[-1][0]
    layout = watch.page.evaluate("document.querySelector('[data-chart=predicted] .plot').layout")
    assert layout["xaxis"]["type"] == "log"
    assert [(shape["y0"], shape["y1"]) for shape in layout["shapes"]] == [(0, 0)]


def losing(folder, method, seed):
    """Clients that lose by joining, worst first, but those that five rows or fewer speak against last."""
    joined, alone = clients(folder, method, seed), clients(folder, "local", seed)
    gains = {c: 100 * (float(row["accuracy"]) - float(alone[c]["accuracy"])) for c, row in joined.items()}
    down = sorted((gain, c) for c, gain in gains.items() if gain < 0)
    down.sort(key=lambda pair: round(-pair[0] * int(joined[pair[1]]["num_test"]) / 100) <= 5)
    return [(c, gain) for gain, c in down]


def test_who_loses_is_listed_for_the_method_and_the_seed_that_are_chosen(watch, folder):
    for method, seed in ((0, 0), (1, 0), (1, 1)):
        watch.page.select_option("[data-focus]", str(method))
        watch.page.select_option("[data-seed]", str(seed))
        expected = losing(folder, METHODS[method], seed)
        said = watch.page.locator("[data-losing]").text_content()
        assert (f"{len(expected)} of 40 clients" in said) if expected else ("nobody loses" in said)
        lines = watch.page.locator("[data-losers] tbody tr")
        assert lines.count() == min(len(expected), 10)
        for line, (_, gain) in zip(lines.all(), expected, strict=False):
            assert line.locator("td").first.text_content() == f"−{-gain:.1f} points"
            client = line.locator("th").text_content()
            assert dict(expected)[client] == pytest.approx(gain)
            assert line.locator("td").nth(1).text_content()
    watch.page.select_option("[data-focus]", "2")
    assert watch.page.locator("[data-losing]").text_content() == "local is training alone."
    assert watch.page.locator("[data-losers]").is_hidden()


def test_a_client_that_loses_is_chosen_from_the_list(watch, folder):
    watch.page.select_option("[data-focus]", "1")
    assert losing(folder, "ditto", 0)
    button = watch.page.locator("[data-losers] tbody button").first
    name = button.text_content()
    button.click()
    assert watch.card.startswith(name)


def test_the_tails_the_steps_and_the_partition_are_those_of_the_files(watch, folder):
    for part in ("worst10", "weighted", "top10"):
        (trace,) = watch.of("tails", part)
        for method, x, error in zip(reversed(METHODS), trace["x"], trace["error"], strict=True):
            values = [
                100 * json.loads((folder / f"{method}-{seed}" / "summary.json").read_text())[f"{part}_accuracy"]
                for seed in SEEDS
            ]
            assert x == pytest.approx(statistics.mean(values), rel=1e-4)
            assert error == pytest.approx(statistics.stdev(values) / math.sqrt(2), rel=1e-3, abs=1e-9)
    taken = [row for seed in SEEDS for row in rows_of(folder / f"self-fl-{seed}" / "participation.csv")]
    (steps,) = watch.of("steps", "middle")
    for x, y in zip(steps["x"], steps["y"], strict=True):
        assert y == pytest.approx(
            statistics.median(int(r["num_local_steps"]) for r in taken if r["round"] == str(x)), rel=1e-3
        )
    (bars,) = watch.of("histogram", "bars")
    wanted = [float(row["wanted_steps"]) for row in taken if row["wanted_steps"]]
    assert bars["y"][0] == pytest.approx(100 * sum(value < 2 for value in wanted) / len(wanted))
    assert sum(bars["y"]) == pytest.approx(100)
    (bars,) = watch.of("partition", "points")
    ids = watch.page.evaluate("payload.groups[0].tables.seeds[0].clients")
    cells = {(r["client"], r["class"]): int(r["num_train"]) for r in rows_of(folder / "self-fl-0" / "partition.csv")}
    drawn = {}
    for number, base, text in zip(bars["customdata"], bars["base"], bars["hovertext"], strict=True):
        drawn[ids[number], str(round(base + 0.46))] = int(re.search(r"<br>(\d+) of", text)[1])
    assert drawn == {cell: rows for cell, rows in cells.items() if rows}


def test_variances_weights_and_a_clients_course_are_those_of_the_files(watch, folder):
    histories = [rows_of(folder / f"self-fl-{seed}" / "history.csv") for seed in SEEDS]
    for meta, column in (("σ₀² between clients", "inter_variance"), ("σₘ² within, mean", "intra_variance")):
        (curve,) = watch.of("variances", meta)
        assert curve["x"] == list(range(1, 13))
        for number, y in zip(curve["x"], curve["y"], strict=True):
            values = [float(rows[number - 1][column]) for rows in histories if rows[number - 1][column]]
            assert y == (pytest.approx(statistics.mean(values), rel=1e-4) if values else None)
    taken = [row for seed in SEEDS for row in rows_of(folder / f"self-fl-{seed}" / "participation.csv")]
    for place, meta in enumerate(("low", "middle", "high")):
        (band,) = watch.of("weights", meta)
        for number, y in zip(band["x"], band["y"], strict=True):
            weights = [float(row["weight"]) for row in taken if row["round"] == str(number)]
            deciles = statistics.quantiles(weights, n=10, method="inclusive")
            assert y == pytest.approx(100 * deciles[(0, 4, 8)[place]], rel=1e-3)
    cells = watch.numbers("weights").first.locator("th, td").all_text_contents()
    assert float(cells[2]) == pytest.approx(watch.of("weights", "middle")[0]["y"][0])  # in the picture's unit
    client = busiest(folder)
    watch.page.fill("[data-client]", client)
    watch.page.keyboard.press("Enter")
    own = [row for row in rows_of(folder / "self-fl-0" / "participation.csv") if row["client"] == client]
    (course,) = watch.of("trajectory", "selected")
    assert course["x"] == [int(row["round"]) for row in own]
    assert course["y"] == [int(row["num_local_steps"]) for row in own]
    (wanted,) = watch.of("trajectory", "wanted")
    assert wanted["y"] == pytest.approx([float(row["wanted_steps"]) for row in own if row["wanted_steps"]], rel=1e-2)
    for chart, column, scale in (("variances", "intra_variance", 1), ("weights", "weight", 100)):
        (line,) = watch.of(chart, "selected")
        assert line["y"] == pytest.approx([scale * float(row[column]) for row in own if row[column]], rel=1e-2)


def test_clusters_are_those_of_the_files(watch, folder):
    rows = clients(folder, "self-fl", 0)
    ids = watch.page.evaluate("payload.groups[0].tables.seeds[0].clients")
    (points,) = watch.of("clusters", "points")
    assert len(points["customdata"]) == len(rows)
    for x, y, number in zip(points["x"], points["y"], points["customdata"], strict=True):
        row = rows[ids[number]]
        assert abs(x - int(row["cluster"])) <= 0.25
        assert y == pytest.approx(100 * float(row["accuracy"]), rel=1e-4)
    (means,) = watch.of("clusters", "means")
    for cluster in range(4):
        values = [100 * float(row["accuracy"]) for row in rows.values() if int(row["cluster"]) == cluster]
        assert means["y"][3 * cluster] == pytest.approx(statistics.mean(values), rel=1e-4)


def point_of(watch, chart, client):
    """The middle of the drawn mark of a client, on the screen."""
    return watch.page.evaluate(
        """([name, id]) => {
          const plot = document.querySelector(`[data-chart="${name}"] .plot`);
          plot.scrollIntoView({ block: "center", behavior: "instant" });
          const number = payload.groups[0].tables.seeds[0].clients.indexOf(id);
          const trace = plot.data.find((one) => one.meta === "points");
          const at = trace.customdata.indexOf(number);
          const { xaxis, yaxis } = plot._fullLayout;
          const box = plot.getBoundingClientRect();
          return [box.left + xaxis._offset + xaxis.d2p(trace.x[at]), box.top + yaxis._offset + yaxis.d2p(trace.y[at])];
        }""",
        [chart, client],
    )


def smallest(folder, count=1):
    """Clients that lie alone in the picture of sizes: nobody else has about as many rows."""
    rows = clients(folder, "self-fl", 0)
    sizes = {client: int(row["num_train"]) for client, row in rows.items()}
    near = {client: sum(abs(size / own - 1) < 0.08 for size in sizes.values()) for client, own in sizes.items()}
    return [client for client in rows if near[client] == 1][:count]


def test_hover_tells_the_clients_story(watch, folder):
    (client,) = smallest(folder)
    watch.page.mouse.move(*point_of(watch, "clients", client))
    watch.page.wait_for_selector("[data-chart=clients] .hovertext")
    told = watch.page.locator("[data-chart=clients] .hovertext").first.text_content()
    row, alone = clients(folder, "self-fl", 0)[client], clients(folder, "local", 0)[client]
    assert client in told
    assert f"{row['num_train']} training rows" in told
    assert any(
        f"personal model {100 * float(clients(folder, m, 0)[client]['accuracy']):.1f} %" in told for m in METHODS
    )
    assert "classes" in told
    assert f"alone {100 * float(alone['accuracy']):.1f} %" in told or "· local" in told


def selected_everywhere(watch, client):
    """The charts that mark the client."""
    number = watch.page.evaluate("id => payload.groups[0].tables.seeds[0].clients.indexOf(id)", client)
    marked = []
    for chart in watch.charts:
        traces = watch.of(chart, "selected")
        shapes = watch.page.evaluate(
            """name => (document.querySelector(`[data-chart="${name}"] .plot`).layout.shapes ?? []).map(s => s.name)""",
            chart,
        )
        if any(number in (trace["customdata"] or []) for trace in traces) or "selected" in shapes:
            marked.append(chart)
    return marked


def busiest(folder):
    """A client that took part often, with a known variance: there is something to mark in every picture."""
    rows = clients(folder, "self-fl", 0)
    return max((c for c, row in rows.items() if row["predicted_gain"]), key=lambda c: int(rows[c]["rounds"]))


def test_a_click_chooses_a_client_in_every_picture_and_a_second_lets_go(watch, folder):
    client = next(c for c in smallest(folder, 40) if clients(folder, "self-fl", 0)[c]["predicted_gain"])
    assert selected_everywhere(watch, client) == []
    watch.page.mouse.click(*point_of(watch, "clients", client))
    watch.until("document.querySelector('[data-client]').value !== ''")
    assert watch.page.input_value("[data-client]") == client
    assert selected_everywhere(watch, client) == MARKED
    assert client in watch.card
    row = clients(folder, "self-fl", 0)[client]
    assert f"{100 * float(row['accuracy']):.1f} %" in watch.card
    assert f"{row['num_train']} training rows" in watch.card
    own = round(100 / float(row["predicted_gain"]))  # the share of its own rows in the precision of its model
    assert 0 < own < 100
    assert f"{own} % own rows, {100 - own} % the others" in watch.card
    watch.page.mouse.click(*point_of(watch, "gains", client))  # there, too
    watch.until("document.querySelector('[data-client]').value === ''")
    assert selected_everywhere(watch, client) == []
    assert watch.said == []


def test_the_keyboard_chooses_walks_and_lets_go(watch, folder):
    page = watch.page
    page.locator("[data-client]").focus()
    page.keyboard.type(busiest(folder))
    page.keyboard.press("Enter")
    assert selected_everywhere(watch, busiest(folder)) == MARKED
    assert f"Client {busiest(folder)}: personal model" in page.locator("[data-said]").text_content()
    page.locator("[data-chart=clients]").focus()
    page.keyboard.press("Escape")
    assert page.input_value("[data-client]") == ""
    page.keyboard.press("ArrowRight")
    rows = clients(folder, "self-fl", 0)
    assert int(rows[page.input_value("[data-client]")]["num_train"]) == max(int(r["num_train"]) for r in rows.values())
    page.locator("[data-chart=gains]").focus()
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowLeft")  # from the end: who loses most
    (bars,) = watch.of("gains", "points")
    ids = page.evaluate("payload.groups[0].tables.seeds[0].clients")
    assert page.input_value("[data-client]") == ids[bars["customdata"][-1]]


def test_an_unknown_client_is_answered(watch):
    watch.page.fill("[data-client]", "nobody")
    watch.page.keyboard.press("Enter")
    assert "There is no client “nobody”." in watch.card


@pytest.mark.parametrize("client", NASTY)
def test_difficult_names_are_names(watch, client):
    watch.page.fill("[data-client]", client)
    watch.page.keyboard.press("Enter")
    assert watch.page.locator(".card .who .name").text_content() == client
    labels = watch.page.locator("[data-chart=partition] .annotation-text").all_text_contents()
    assert client in labels
    assert watch.said == []


def test_another_seed_and_another_method_are_drawn(watch, folder):
    page = watch.page
    page.fill("[data-client]", "site 30")
    page.keyboard.press("Enter")
    page.select_option("[data-seed]", label="1")
    assert page.input_value("[data-client]") == "site 30"
    rows = clients(folder, "ditto", 1)
    trace = watch.of("clients", "points")[1]
    assert sorted(trace["y"]) == pytest.approx(sorted(100 * float(row["accuracy"]) for row in rows.values()), rel=1e-4)
    page.select_option("[data-focus]", label="ditto")
    assert f"{100 * float(rows['site 30']['accuracy']):.1f} %" in page.locator(".card .big").inner_text()
    page.select_option("[data-focus]", label="local")  # which has nothing to gain over, and no variances
    assert watch.of("gains", "points")[0]["y"] == []
    assert watch.said == []
    page.locator("[data-part=worst10]").click()
    runs = [rows_of(folder / f"self-fl-{seed}" / "history.csv")[-1] for seed in SEEDS]
    expected = statistics.mean(100 * float(row["worst10_accuracy"]) for row in runs)
    assert watch.of("rounds", "line")[0]["y"][-1] == pytest.approx(expected, rel=1e-4)


def test_the_numbers_of_a_picture_are_a_table(watch, folder):
    lines = watch.numbers("clients")
    assert lines.count() == 40
    rows = clients(folder, "self-fl", 0)
    first = lines.first.locator("th, td").all_text_contents()
    assert first[1] == rows[first[0]]["num_train"]
    assert float(first[3]) == pytest.approx(100 * float(rows[first[0]]["accuracy"]), rel=1e-4)


def test_where_a_method_chooses_no_steps_there_are_no_pictures_of_them(browser, tmp_path):
    for name in ("self-fl-auto", "self-fl"):
        selffl.train("softmax", load("digits"), name, rounds=5, participation=1.0, out=tmp_path / name)
    page = tmp_path / "report.html"
    page.write_text(render(collect([tmp_path])), encoding="utf-8")
    watch = Watch(browser).open(page)
    for focus, is_told in (("self-fl-auto", True), ("self-fl", False), ("self-fl-auto", True)):
        watch.page.select_option("[data-focus]", label=focus)
        for chart in ("steps", "histogram", "trajectory"):
            assert watch.page.locator(f"[data-chart={chart}]").is_hidden() is is_told
        assert watch.page.locator("[data-chart=variances]").is_visible()
    assert watch.said == []
    watch.context.close()


def test_curves_are_drawn_along_what_was_spent_and_for_each_seed(watch, folder):
    page = watch.page
    page.select_option("[data-along]", "gradients")
    last = [rows_of(folder / f"self-fl-{seed}" / "history.csv")[-1] for seed in SEEDS]
    mean = statistics.mean(int(row["gradient_evaluations"]) for row in last)
    assert watch.of("rounds", "line")[0]["x"][-1] == pytest.approx(mean, rel=1e-4)
    assert watch.of("rounds", "single") == []
    page.check("[data-single]")
    assert len(watch.of("rounds", "single")) == len(METHODS) * len(SEEDS)
    assert watch.of("rounds", "single")[1]["y"][-1] == pytest.approx(
        100 * float(last[1]["weighted_accuracy"]), rel=1e-4
    )
    page.uncheck("[data-single]")
    page.select_option("[data-along]", "bytes")
    assert watch.of("rounds", "line")[0]["x"][-1] == pytest.approx(int(last[0]["bytes_sent"]), rel=1e-4)
    page.select_option("[data-along]", "x")
    assert watch.said == []


@pytest.mark.parametrize("client", [None, "site 7"])
def test_answers_of_all_clients_and_of_one(watch, folder, client):
    """Discs are classes and answers, points are tenths of confidence: added up from the run's table."""
    rows = [row for row in rows_of(folder / f"self-fl-{SEEDS[0]}" / "answers.csv") if client in (None, row["client"])]
    watch.page.fill("[data-client]", client or "")
    watch.page.locator("[data-client]").press("Enter")
    cells = {}
    for row in rows:
        cells[row["class"], row["answer"]] = cells.get((row["class"], row["answer"]), 0) + int(row["num_test"])
    table = watch.page.evaluate("CHARTS.confusion(views[0].state, views[0].colours(), { height: 300 }).table.rows")
    assert {(held, answer): number for _, held, answer, number in table} == cells
    right, wrong = (watch.of("confusion", kind)[0] for kind in ("right", "wrong"))
    assert right["x"] == right["y"]
    assert len(right["x"]) + len(wrong["x"]) == len(cells)
    points = watch.page.evaluate("CHARTS.sureness(views[0].state, views[0].colours()).table.rows")
    assert sum(number for _, number, _, _ in points) == sum(cells.values())
    right_rows = sum(number for (held, answer), number in cells.items() if held == answer)
    assert sum(number * share for _, number, _, share in points) == pytest.approx(100 * right_rows, rel=1e-3)
    watch.page.fill("[data-client]", "")
    watch.page.locator("[data-client]").press("Enter")
    assert watch.said == []


def test_clients_are_shown_from_the_worst_to_the_best(watch, folder):
    for method, line in zip(METHODS, watch.of("spread", "line"), strict=True):
        expected = sorted(100 * float(row["accuracy"]) for row in clients(folder, method, 0).values())
        assert line["y"] == pytest.approx(expected, rel=1e-4)
        assert (line["x"][0], line["x"][-1]) == (2.5, 100)


def test_gains_of_few_test_rows_are_grey(watch, folder):
    ids = watch.page.evaluate("payload.groups[0].tables.seeds[0].clients")
    colours = watch.page.evaluate("document.querySelector('[data-chart=gains] .plot').data[0].marker.color")
    grey = watch.page.evaluate("views[0].colours().line")
    (bars,) = watch.of("gains", "points")
    few = [int(clients(folder, "self-fl", 0)[ids[number]]["num_test"]) < 10 for number in bars["customdata"]]
    assert [colour == grey for colour in colours] == few
    assert 0 < sum(few) < 40


def test_a_client_has_an_address(browser, file, watch):
    client = "Zürich 🏥"
    watch.page.fill("[data-client]", client)
    watch.page.keyboard.press("Enter")
    address = watch.page.url
    assert "#g0-client=Z%C3%BCrich" in address
    other = Watch(browser).open(address)
    assert other.page.input_value("[data-client]") == client
    assert selected_everywhere(other, client)
    other.page.keyboard.press("Tab")
    other.page.fill("[data-client]", "")
    other.page.keyboard.press("Enter")
    assert "#" not in other.page.url
    assert other.said == []
    other.context.close()


def test_pictures_and_numbers_can_be_saved(watch, folder):
    saved = {}
    for kind in ("svg", "png", "csv"):
        with watch.page.expect_download() as started:
            watch.page.locator(f"[data-export={kind}][data-of=clients]").click()
        assert started.value.suggested_filename == f"g0-clients.{kind}"
        saved[kind] = started.value.path().read_bytes()
    assert b"<svg" in saved["svg"][:200]
    assert saved["png"].startswith(b"\x89PNG")
    lines = list(csv.DictReader(saved["csv"].decode("utf-8").splitlines()))
    rows = clients(folder, "ditto", 0)
    assert {line["client"] for line in lines} == set(rows)
    assert all(
        float(line["ditto"]) == pytest.approx(100 * float(rows[line["client"]]["accuracy"]), rel=1e-4) for line in lines
    )
    assert watch.said == []


def test_tables_are_sorted_and_narrowed(watch, folder):
    page = watch.page
    heading = page.locator(".section-methods thead th").nth(1)
    for order, is_up in (("descending", False), ("ascending", True)):
        heading.locator("button").click()
        assert heading.get_attribute("aria-sort") == order
        cells = page.locator(".section-methods tbody tr td:nth-child(2)").all_text_contents()
        values = [float(cell.split()[0]) for cell in cells]
        assert values == sorted(values, reverse=not is_up)
    lines = watch.numbers("clients")
    page.fill("[data-numbers=clients] input", "ZÜRICH")
    assert [line.is_visible() for line in lines.all()].count(True) == 1
    page.fill("[data-numbers=clients] input", "")
    assert all(line.is_visible() for line in lines.all())


def serious_faults(axe, watch, but=()):
    options = {"resultTypes": ["violations"]}  # the others are counted, not collected
    found = axe.run(watch.page, context={"exclude": [*but]}, options=options).response["violations"]
    return [(v["id"], [n["target"] for n in v["nodes"]][:3]) for v in found if v["impact"] in ("serious", "critical")]


def is_sound_with_and_without_a_client(axe, watch):
    for client in ("site 30", ""):
        watch.page.fill("[data-client]", client)
        watch.page.keyboard.press("Enter")
        if client:
            watch.numbers("rounds")
        # With a client pictures have all that they have without one, and words on them take longest.
        assert serious_faults(axe, watch, but=() if client else ([".plot"],)) == []
        assert watch.page.evaluate("document.documentElement.scrollWidth") <= watch.page.viewport_size["width"]
    assert watch.said == []


def test_axe_finds_no_serious_fault_and_the_page_does_not_scroll_sideways(watch, axe):
    is_sound_with_and_without_a_client(axe, watch)


def test_a_dark_narrow_page_is_as_sound_and_begins_with_the_way_to_its_content(browser, axe, file):
    watch = Watch(browser, width=390, scheme="dark").open(file)
    watch.page.keyboard.press("Tab")
    assert watch.page.evaluate("document.activeElement.textContent") == "Skip to the content"
    is_sound_with_and_without_a_client(axe, watch)
    watch.context.close()


def test_headings_are_in_order_and_the_charts_have_names(watch):
    levels = watch.page.eval_on_selector_all("h1, h2, h3, h4, h5, h6", "all => all.map(one => Number(one.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    names = watch.page.eval_on_selector_all(
        "[data-chart]", "all => all.map(one => [one.getAttribute('role'), one.ariaLabel])"
    )
    assert all(role == "img" and len(name) > 20 for role, name in names)


def test_the_colours_follow_the_button_and_stay(browser, file):
    watch = Watch(browser).open(file)
    ground = "getComputedStyle(document.body).backgroundColor"
    light = watch.page.evaluate(ground)
    watch.page.click("#theme")  # the system is light: dark, at the first click
    assert watch.page.evaluate(ground) != light
    watch.page.reload()
    watch.page.wait_for_selector("html[data-ready=yes]")
    assert watch.page.evaluate(ground) != light
    assert watch.page.get_attribute("#theme", "aria-label") == "Colours: dark"
    watch.context.close()


def test_it_prints(watch, tmp_path):
    watch.page.pdf(path=tmp_path / "report.pdf", format="A4")
    content = (tmp_path / "report.pdf").read_bytes()
    assert content.startswith(b"%PDF")
    assert content.count(b"/Type /Page\n") + content.count(b"/Type /Page ") + content.count(b"/Type /Page/") >= 3
    assert watch.said == []


def test_nothing_that_belongs_together_is_torn_on_paper(watch):
    """What keeps figures, short tables and sentences whole, and headings with what follows them."""
    page = watch.page
    page.emulate_media(media="print")
    whole = ("figure", ".section-methods .scroll", ".takeaway", ".section-inside .pair")
    for selector in whole:
        assert page.locator(selector).first.evaluate("one => getComputedStyle(one).breakInside") == "avoid", selector
    for selector in (".story h2", ".story .takeaway", "figcaption"):
        assert page.locator(selector).first.evaluate("one => getComputedStyle(one).breakAfter") == "avoid", selector
    assert page.locator(".exports").first.is_hidden()
    page.emulate_media(media="screen")


def thousand(place, rounds=200):
    """A comparison of 7 methods with 5 seeds over 1000 clients, as large as the paper's, made up.

    A page holds clients of two seeds: of the others every tenth round is noted, which takes a third of the time to make
    and to read, and the page is as large.
    """
    rng = random.Random(0)
    selffl.train("softmax", load("digits"), "self-fl", rounds=1, out=place / "template")
    config = json.loads((place / "template" / "config.json").read_text())
    shutil.rmtree(place / "template")
    sizes = [int(5 + rng.lognormvariate(3, 1.2)) for _ in range(1000)]
    methods = ("self-fl", "self-fl-exact", "ditto", "pfedme", "perfedavg", "fedavg", "local")
    for method, seed in itertools.product(methods, range(5)):
        path = place / f"{method}-{seed}"
        path.mkdir()
        has_variances = method in LEARNS_VARIANCES
        options = config["config"]["options"] if has_variances else {}
        own = config["config"] | {"algorithm": method, "seed": seed, "rounds": rounds, "options": options}
        own |= traits_recorded(method)
        (path / "config.json").write_text(json.dumps(config | {"config": own}))
        scores = {f"{part}_accuracy": rng.random() for part in ("weighted", "top10", "worst10", "global")}
        summary = {"status": "finished", "clients": 1000, **scores}
        (path / "summary.json").write_text(json.dumps(summary))
        variance = {"inter_variance": rng.random(), "intra_variance": rng.random()} if has_variances else {}
        write(path / "history.csv", [
            {"round": r, "clients": 100, "gradient_evaluations": 2000 * r, "seconds": r, **variance,
             **(scores if r % 10 == 0 else dict.fromkeys(scores, ""))} for r in range(1, rounds + 1)
        ])  # fmt: skip
        own = ({"num_local_steps": 20, "intra_variance": rng.random(), "predicted_gain": 1 + rng.random()}
               if has_variances else {})  # fmt: skip
        write(path / "clients.csv", [
            {"client": c, "num_train": sizes[c], "num_test": 1 + sizes[c] // 9, "accuracy": rng.random(),
             "global_accuracy": rng.random(), "rounds": 20, "gradient_evaluations": 400, **own} for c in range(1000)
        ])  # fmt: skip
        write(path / "partition.csv", [
            {"client": c, "class": (c + k) % 10, "num_train": 1 + sizes[c] // 2, "num_test": 1}
            for c in range(1000) for k in range(2)
        ])  # fmt: skip
        if has_variances:
            write(path / "participation.csv", [
                {"round": r, "client": c, "num_local_steps": rng.randint(1, 40), "wanted_steps": rng.expovariate(0.04),
                 "intra_variance": rng.random(), "weight": rng.random() / 50}
                for r in range(1, rounds + 1, 1 if seed < 2 else 10) for c in rng.sample(range(1000), 100)
            ])  # fmt: skip


def test_a_thousand_clients_fit_into_six_megabytes(browser, tmp_path):
    (tmp_path / "runs").mkdir()
    thousand(tmp_path / "runs")
    (tmp_path / "report.html").write_text(render(collect([tmp_path / "runs"])), encoding="utf-8")
    assert (tmp_path / "report.html").stat().st_size < 6_000_000
    watch = Watch(browser).open(tmp_path / "report.html")
    assert "This page holds those of 2 seeds (0, 1) of 5." in watch.page.locator(".panel .note").text_content()
    assert [len(trace["x"]) for trace in watch.of("clients", "points")] == [1000] * 3
    rows = {row["client"]: row for row in rows_of(tmp_path / "runs" / "self-fl-0" / "clients.csv")}
    ids = watch.page.evaluate("payload.groups[0].tables.seeds[0].clients")
    first = watch.of("clients", "points")[0]
    for y, number in zip(first["y"], first["customdata"], strict=True):
        assert y == pytest.approx(100 * float(rows[ids[number]]["accuracy"]), rel=1e-4)
    watch.page.fill("[data-client]", "123")
    watch.page.keyboard.press("Enter")
    assert selected_everywhere(watch, "123") == [n for n in MARKED if n not in ("clusters", "predicted")]
    assert watch.said == []
    watch.context.close()


# ------------------------------------------------------------------------------------------------------------- live


@pytest.fixture
def served(tmp_path):
    server = ReportServer([tmp_path / "run"])
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def grow(source, target, rounds):
    """The run as it was after so many rounds, with half a line of the next; all at once, as no page sees half of it."""
    state = target.parent.with_name(f"{target.parent.name}-after-{rounds}")
    state.mkdir()
    for name in ("history.csv", "participation.csv"):
        head, *lines = (source / name).read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if int(line.split(",")[0]) <= rounds]
        half = lines[len(kept)][:5] if len(kept) < len(lines) else ""
        (state / name).write_text("".join([head, *kept, half]), encoding="utf-8")
    if rounds >= 3:
        for name in ("clients.csv", "partition.csv"):
            shutil.copy(source / name, state / name)
        summary = json.loads((source / "summary.json").read_text()) | {
            "status": "running" if rounds < 12 else "finished"
        }
        (state / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    shutil.copy(source / "config.json", state / "config.json")
    link = state.with_name(f"{state.name}-link")
    link.symlink_to(state)
    link.replace(target)


def test_a_live_page_waits_grows_and_keeps_what_was_chosen(browser, folder, served, tmp_path):
    watch = Watch(browser)
    source, target = folder / "self-fl-0", tmp_path / "run"
    watch.page.goto(served.url)
    watch.page.wait_for_selector("text=Waiting for the first round")
    grow(source, target, 0)
    watch.page.wait_for_selector(".waiting:has-text('1 run begun, none with a finished round')", timeout=15_000)
    grow(source, target, 4)
    watch.page.wait_for_selector("[data-chart=rounds]", timeout=15_000)  # of itself
    watch.page.wait_for_selector("html[data-ready=yes]")
    assert watch.of("rounds", "line")[0]["x"] == [3]
    assert "round 4 of 12" in watch.page.locator("#live").text_content()
    watch.page.fill("[data-client]", "site 30")
    watch.page.keyboard.press("Enter")
    watch.page.evaluate("window.sameVisit = true")
    before = watch.page.evaluate("scrollTo({ top: 700, behavior: 'instant' }), scrollY")
    grow(source, target, 12)
    watch.until("document.querySelector('[data-chart=rounds] .plot').data.find(t => t.meta === 'line').x.length === 4")
    expected = [100 * float(r["weighted_accuracy"]) for r in rows_of(source / "history.csv") if r["weighted_accuracy"]]
    assert watch.of("rounds", "line")[0]["y"] == pytest.approx(expected, rel=1e-4)
    assert watch.page.evaluate("window.sameVisit")  # no reload
    assert watch.page.evaluate("scrollY") == before
    assert watch.page.input_value("[data-client]") == "site 30"
    assert "site 30" in watch.card
    assert watch.of("clients", "selected")
    watch.until("document.querySelector('#live').textContent === 'live, finished'")
    # An idle page is answered without a body, and nothing was asked of anybody else.
    with watch.page.expect_response("**/data.json") as answer:
        pass
    assert answer.value.status == 304
    assert {url.rsplit("/", 1)[0] for url in watch.asked} == {served.url.rstrip("/")}
    assert watch.said == []
    watch.context.close()
