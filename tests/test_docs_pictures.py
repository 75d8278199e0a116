"""Pictures of the README and the first pages show what their commands train today, and captions are true of them."""

import hashlib
import html
import json
import re
import shlex
from pathlib import Path

import pytest

from selffl.studies.images import DEMO_COMPARISON
from selffl.studies.own import read_study

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "docs" / "figures"
SHOWN = json.loads((FIGURES / "pictures.json").read_text(encoding="utf-8"))
PICTURES = (
    "report.png",
    "report-client.png",
    "report-film.gif",
    "terminal-run.svg",
    "terminal-film.svg",
    "terminal-compare.svg",
)
MOST_BYTES_OF_A_FILM = 2_000_000
NUMERALS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
AGAIN = "run `make pictures`"


def page(name):
    return (ROOT / name).read_text(encoding="utf-8")


def tutorial_command(name):
    """The words of the first command of that name on docs/tutorial.md."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", page("docs/tutorial.md"), re.M | re.S)
    commands = [shlex.split(block.replace("\\\n", " ")) for block in blocks]
    return next(words for words in commands if words[:2] == ["selffl", name])


def text_of_svg(name):
    """The lines of a picture of the terminal."""
    found = re.findall(r'<text [^>]*y="([\d.]+)"[^>]*>([^<]*)</text>', (FIGURES / name).read_text(encoding="utf-8"))
    lines = {}
    for height, text in found:
        lines.setdefault(height, []).append(html.unescape(text))
    return [" ".join(" ".join(parts).split()) for parts in lines.values()]


def rows(spread):
    """Of a comparison of the tutorial: mean and standard error by method, of both columns."""
    return {
        column: {
            row["method"]: tuple(map(float, row[column].split(" ± ")))
            for row in SHOWN["tutorial"]["by_spread"][spread]
        }
        for column in ("accuracy", "worst 10 %")
    }  # fmt: skip


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The study that the tutorial makes, from its rows and by its command."""
    from selffl.cli.init import study_files
    from selffl.cli.init_table import table_study

    folder = tmp_path_factory.mktemp("tutorial")
    code = re.search(r"^```python\n(.*?)^```$", page("docs/tutorial.md"), re.M | re.S)[1]
    code = code.replace('"rows.csv"', repr(str(folder / "rows.csv")))
    exec(compile(code, "docs/tutorial.md", "exec"), {"__name__": "documentation"})
    words = tutorial_command("init")
    client, label = (words[words.index(option) + 1] for option in ("--client", "--label"))
    place = folder / words[2]
    study = table_study(folder / "rows.csv", place, client, label)
    place.mkdir()
    for name, text in study_files(place, "study_csv.py", study.values, study.num_clients).items():
        (place / name).write_text(text, encoding="utf-8")
    return read_study(place)


@pytest.mark.parametrize("name", [name for name in PICTURES if "film" in name])
def test_a_film_is_small(name):
    assert (FIGURES / name).stat().st_size <= MOST_BYTES_OF_A_FILM


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_the_one_that_was_described(name):
    assert hashlib.sha256((FIGURES / name).read_bytes()).hexdigest() == SHOWN[name]["sha256"], AGAIN


def test_every_picture_made_by_the_script_is_described():
    assert {name for name in SHOWN if name != "tutorial"} == set(PICTURES)


@pytest.mark.parametrize("name", ["report.png", "report-client.png"])
def test_the_report_shows_the_methods_of_the_demonstration(name):
    assert SHOWN[name]["methods"] == list(DEMO_COMPARISON.methods), AGAIN
    assert f"$(RUN)/{SHOWN[name]['command']}\n" in page("Makefile")


def test_the_verdict_of_the_report_is_about_the_default_method():
    assert DEMO_COMPARISON.methods[0] in SHOWN["report.png"]["verdict"], AGAIN


def test_the_report_has_the_numbers_of_the_results():
    """The demonstration and `auto-digits` train some methods alike, on the same splits."""
    section = page("docs/results/auto-digits.md")
    seen = 0
    for row in SHOWN["report.png"]["table"]:
        if found := re.search(rf"^\| {row['method']} \| ([\d.]+) ± ([\d.]+) \|", section, re.M):
            assert float(row["accuracy"].split(" ± ")[0]) == pytest.approx(float(found[1]), abs=0.15), AGAIN
            seen += 1
    assert seen >= 5


def test_the_terminal_shows_the_commands_of_the_tutorial():
    for name in ("run", "compare"):
        shown = SHOWN[f"terminal-{name}.svg"]
        assert shlex.split(shown["command"]) == tutorial_command(name), AGAIN
        assert f"$ {shown['command']}" in text_of_svg(f"terminal-{name}.svg"), AGAIN


def test_the_terminal_shows_the_method_that_a_run_of_the_tutorial_trains(study):
    assert SHOWN["terminal-run.svg"]["methods"] == [study.algorithm], AGAIN
    assert SHOWN["terminal-run.svg"]["rounds"] == study.rounds, AGAIN
    assert any(study.algorithm in line for line in text_of_svg("terminal-run.svg")[1:]), AGAIN


def test_the_terminal_shows_the_methods_that_the_comparison_of_the_tutorial_trains():
    words = tutorial_command("compare")
    methods = words[words.index("--algorithms") + 1].split(",")
    assert SHOWN["terminal-compare.svg"]["methods"] == methods, AGAIN
    first = [line.split()[0] for line in text_of_svg("terminal-compare.svg")[1:] if line]
    shown = dict.fromkeys(word for word in first if word in methods)  # the verdict below the table names them again
    assert list(shown) == methods, AGAIN
    for row in SHOWN["terminal-compare.svg"]["table"]:
        assert any(line.startswith(row["method"]) and row["accuracy"] in line
                   for line in text_of_svg("terminal-compare.svg")), AGAIN  # fmt: skip
    assert f"Train {NUMERALS[len(methods)]} methods, three times each" in page("docs/tutorial.md")
    for name in ("README.md", "docs/tutorial.md"):
        alt = re.search(r"!\[([^]]*)\]\((?:docs/)?figures/terminal-compare\.svg\)", page(name))[1]
        assert re.search(rf"a line for each of (the )?{NUMERALS[len(methods)]} methods", alt)


def test_the_readme_compares_the_methods_of_its_picture():
    shown = set(shlex.split(SHOWN["terminal-compare.svg"]["command"]))
    line = next(line for line in page("README.md").splitlines() if line.startswith("selffl compare "))
    assert set(shlex.split(line)) == shown


def test_the_readme_counts_the_methods_of_the_demonstration():
    first, *others = SHOWN["report.png"]["methods"]
    assert f"{first} and {NUMERALS[len(others)]} other methods" in page("README.md")


@pytest.mark.parametrize("name", ["README.md", "docs/tutorial.md", "docs/howto/report.md"])
def test_the_picture_of_the_report_says_which_command_made_it(name):
    caption = re.search(r"figures/report\.png\)\n\n\*(.*?)\*\n", page(name), re.S)[1]
    command = " ".join(shlex.split(SHOWN["report.png"]["command"])[:2])
    assert f"`{command}`" in caption or "`make demo`" in caption


def test_the_client_of_the_picture_has_the_rows_that_its_caption_says():
    client = SHOWN["report-client.png"]["client"]
    said = f"A client with {NUMERALS[client['num_train']]} training rows and {NUMERALS[client['num_test']]} to test on"
    assert said in page("docs/howto/report.md")


def test_the_tutorial_says_what_its_comparisons_show():
    text = " ".join(page("docs/tutorial.md").split())
    assert list(SHOWN["tutorial"]["by_spread"]) == ["0.05", "0.6", "2.0"]
    assert "rng.normal(0.0, 0.6, 3)" in text
    middle = rows("0.6")
    assert "With these rows `self-fl-auto` has the highest mean, in accuracy and in the worst 10 %." in text
    for column in middle.values():
        assert max(column, key=column.get) == "self-fl-auto", AGAIN
    assert "None of the differences in accuracy is statistically significant" in text
    assert set(SHOWN["terminal-compare.svg"]["claims"].values()) == {"inconclusive"}, AGAIN
    own, *others = (mean for mean, _ in middle["accuracy"].values())  # its own comes first
    assert "The differences in accuracy are about one point" in text
    assert all(0.5 <= own - mean < 1.5 for mean in others), AGAIN
    assert "**Clinics hardly differ (0.05).** One shared model is enough." in text
    alike = rows("0.05")["accuracy"]
    assert alike["fedavg"][0] >= max(mean for mean, _ in alike.values()) - alike["fedavg"][1], AGAIN
    assert (
        "**Clinics differ very much (2.0).** A single shared model fails, and staying alone is as good as joining"
        in text
    )
    apart = rows("2.0")["accuracy"]
    assert apart["fedavg"][0] < apart["local"][0] - 10, AGAIN
    assert abs(apart["self-fl-auto"][0] - apart["local"][0]) <= apart["local"][1], AGAIN
    assert "**At both ends** `self-fl-auto` is as good as the better of the two" in text
    for end in (alike, apart):
        better = max(end["fedavg"], end["local"])
        assert end["self-fl-auto"][0] >= better[0] - better[1], AGAIN
