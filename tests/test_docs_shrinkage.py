"""The interactive picture of the idea computes what the library computes."""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import selffl

SCRIPT = Path(__file__).parent.parent / "docs" / "javascripts" / "shrinkage.js"
SPREADS = [1e-3, 0.03, 0.4, 1.0, 7.0, 100.0]


def asked(question):
    """The answer of the script's functions, by node or else by a browser."""
    code = f"""
        const s = module.exports, estimate = s.CLIENTS.map(c => c.estimate), rows = s.CLIENTS.map(c => c.rows);
        const variance = rows.map(n => s.ROW_VARIANCE / n);
        ({question})(s, estimate, variance, rows)
    """
    source = f"const module = {{exports: {{}}}};\n{SCRIPT.read_text(encoding='utf-8')}\n"
    if node := shutil.which("node"):
        program = f"{source}console.log(JSON.stringify(eval({json.dumps(code)})));"
        done = subprocess.run([node, "-e", program], capture_output=True, text=True, check=True)
        return json.loads(done.stdout)
    playwright = pytest.importorskip("playwright.sync_api", reason="neither node nor a browser can be driven here")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("neither node nor chromium is installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        answer = browser.new_page().evaluate(f"() => {{ {source} return eval({json.dumps(code)}); }}")
        browser.close()
    return answer


@pytest.fixture(scope="module")
def clients():
    rows, estimate, variance = asked("(s, estimate, variance, rows) => [rows, estimate, variance]")
    return np.array(rows), np.array(estimate), np.array(variance)


def test_there_are_twenty_clients_of_very_different_size(clients):
    rows, estimate, variance = clients
    assert len(rows) == len(estimate) == len(variance) == 20
    assert rows.max() / rows.min() >= 50


@pytest.mark.parametrize("form", ["paper", "exact"])
def test_the_picture_shows_the_posterior(clients, form):
    _, estimate, variance = clients
    found = asked(f"(s, e, v) => {SPREADS}.map(inter => s.posterior(e, v, inter, '{form}'))")
    for inter, answer in zip(SPREADS, found, strict=True):
        expected = selffl.posterior(estimate, variance, inter, form=form)
        assert answer["global"] == pytest.approx(float(expected.global_mean), rel=0, abs=1e-9)
        for name, values in (
            ("mean", expected.personal_mean),
            ("variance", expected.personal_variance),
            ("trust", expected.local_weight),
            ("gain", expected.gain),
        ):
            assert [client[name] for client in answer["clients"]] == pytest.approx(values, rel=1e-9, abs=1e-9)


def test_the_spread_is_estimated_as_in_the_library(clients):
    _, estimate, variance = clients
    found = asked("(s, e, v) => s.interVariance(e, v)")
    assert found == pytest.approx(selffl.estimate_inter_variance(estimate, variance, "dl"), rel=1e-9)
    assert found > 0


def test_clients_that_agree_have_no_spread():
    assert asked("(s) => s.interVariance([1, 1, 1], [0.5, 1, 2])") == 0
