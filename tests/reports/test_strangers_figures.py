"""A study's folder may be somebody else's: its pictures draw, and nothing in them runs, loads or covers the page."""

import base64
import hashlib
import re
import shutil

import pytest

from selffl.errors import DataError
from selffl.reports import page, svg
from selffl.reports.collect import Collection, collect
from selffl.reports.record import load_studies, save_study
from selffl.studies.result import Chart, Figure, Series, Study, StudyResult

HOSTILE = """<?xml version="1.0"?><!DOCTYPE svg [<!ENTITY e "x">]>
<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="9pt" onload="window.PWNED=1">
<script>window.PWNED = 2</script>
<style>* { background: url(http://stranger.test/a) } body { display: none }</style>
<foreignObject><body xmlns="http://www.w3.org/1999/xhtml"><img src="x" onerror="window.PWNED=3"/></body></foreignObject>
<a xlink:href="javascript:window.PWNED=4"><text>link</text></a>
<image xlink:href="http://stranger.test/b.png"/><image xlink:href="data:image/svg+xml;base64,AAAA"/>
<image id="own" xlink:href="data:image/png;base64,AAAA"/>
<use xlink:href="http://stranger.test/c.svg#d"/><use id="mine" xlink:href="#line"/>
<animate attributeName="href" values="javascript:window.PWNED=5"/><set attributeName="onload" to="window.PWNED=6"/>
<path id="line" d="M 0 0 L 1 1" onclick="window.PWNED=7" clip-path="url(#box)" fill="url(http://stranger.test/e)"
 style="stroke: #1F77B4; position: fixed; inset: 0; background: red; behavior: url(x)"/>
<text style="font-size: 9px">&lt;script&gt;window.PWNED = 8&lt;/script&gt;</text>
</svg>"""

NAMESPACE = 'xmlns="http://www.w3.org/2000/svg"'
DEEP = "<g>" * 50_000 + "</g>" * 50_000


def study(folder, content):
    """A study with one picture, whose file holds that."""
    drawn = Figure("errors", "Errors", [Chart("", "x", "y", [Series("self-fl", [1, 2], [0.2, 0.1])])])
    result = StudyResult(rows=[{"a": 1}], table=[{"a": "1"}], figures=[drawn], claims=[], config={})
    save_study(
        Study("made-up", "Made up", "", "", lambda *_: None), result, folder, command="", is_quick=True, seconds=1
    )
    if content is not None:
        (folder / "errors.svg").write_text(content, encoding="utf-8")
    return folder


def test_what_draws_is_kept_and_the_rest_is_gone(tmp_path):
    path = tmp_path / "errors.svg"
    path.write_text(HOSTILE, encoding="utf-8")
    text = svg.embed(path, 'Caption "quoted" <b>', "st")
    for word in ("PWNED = 2", "PWNED=", "stranger.test", "javascript:", "<style", "foreignObject", "position", "inset"):
        assert word not in text, word
    assert re.findall(r"<(\w+)", text) == ["svg", "image", "image", "image", "use", "use", "path", "text"]
    assert 'id="st-own" href="data:image/png;base64,AAAA"' in text
    assert 'id="st-mine" href="#st-line"' in text
    assert 'clip-path="url(#st-box)"' in text
    assert "&lt;script&gt;" in text  # text stays text
    assert 'aria-label="Caption &quot;quoted&quot; &lt;b&gt;"' in text


@pytest.mark.parametrize(
    "content",
    ["", "no picture", "<svg", "<svg/>", f"<svg {NAMESPACE}>&e;</svg>", f"<svg {NAMESPACE}>{DEEP}</svg>", "\x00<svg"],
    ids=["empty", "text", "cut off", "no namespace", "entity", "deep", "no text"],
)
def test_a_damaged_picture_is_one_line(tmp_path, content):
    study(tmp_path / "study", content)
    with pytest.raises(DataError, match=r"^\S*errors\.svg is damaged \(.*\); expected an SVG figure\. Run.*again\.$"):
        page.render(Collection([], load_studies(tmp_path / "study")))


def test_a_figure_of_another_folder_is_refused(tmp_path):
    path = study(tmp_path / "study", None) / "record.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"errors"', '"../elsewhere"'), encoding="utf-8")
    with pytest.raises(DataError, match=r"names a figure '\.\./elsewhere'; expected a file in that folder"):
        page.render(Collection([], load_studies(tmp_path / "study")))


def test_the_page_allows_its_own_scripts_and_no_others(tmp_path):
    text = page.render(collect([study(tmp_path / "study", HOSTILE)]))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]
    allowed = re.search(r"script-src ([^;]*);", policy)[1].split()
    scripts = re.findall(r"<script>(.*?)</script>", text, re.S)
    expected = [f"'sha256-{base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()}'" for one in scripts]
    assert allowed == expected
    assert len(expected) == 2
    assert "unsafe" not in re.sub("style-src 'unsafe-inline'", "", policy)


@pytest.mark.slow
def test_nothing_of_a_strangers_picture_runs_in_a_browser(tmp_path):
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    playwright = pytest.importorskip("playwright.sync_api")
    if chromium is None:
        pytest.skip("no Chromium here")
    target = tmp_path / "report.html"
    target.write_text(page.render(collect([study(tmp_path / "study", HOSTILE)])), encoding="utf-8")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        opened, asked, said = browser.new_page(), [], []
        opened.on("request", lambda request: asked.append(request.url))
        opened.on("console", lambda message: said.append(message.text))
        opened.goto(target.as_uri())
        opened.wait_for_selector("html[data-ready=yes]", timeout=20_000)
        opened.locator("svg path").first.dispatch_event("click")
        assert opened.evaluate("typeof window.PWNED") == "undefined"
        assert not [url for url in asked if "stranger.test" in url]
        assert not [text for text in said if "Content Security Policy" in text]  # the page's own scripts all ran
        browser.close()
