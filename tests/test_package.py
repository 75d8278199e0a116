"""The package as a whole: its public names, its version, and who may import whom."""

import ast
import importlib
import json
import re
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

import selffl

SOURCE = Path(selffl.__file__).parent
CHANGELOG = Path(__file__).parent.parent / "CHANGELOG.md"

# Each layer may import from itself and from those before it.
LAYERS = (
    ("errors", "randomness", "budget", "_version"),
    ("maths",),
    ("algorithms",),
    ("state",),
    ("data",),
    ("models", "adapters"),
    ("training",),  # a task is made from a federation
    ("engines",),
    ("privacy",),  # what noise protects, which a run's summary says
    ("runs",),
    ("estimator",),
    ("flower",),  # public names of their own, for what an extra brings
    ("studies",),
    ("reports",),
    ("cli",),
    ("__init__", "__main__"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FILES = sorted(SOURCE.rglob("*.py"))


def name_of(path):
    return path.relative_to(SOURCE).as_posix()


@cache
@cache
def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports_of(path):
    """Every part of selffl that a file imports, at its top or inside a function, as a dotted name below selffl."""
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: imports are written in full"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name.removeprefix("selffl.") for name in found if name.split(".")[0] == "selffl"]


def layer_of(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


PURE = [path for path in FILES if layer_of(path) in ("maths", "algorithms")]


# -------------------------------------------------------------------------------------------------------- public names


def test_all_is_sorted_and_without_repetition():
    assert selffl.__all__ == sorted(set(selffl.__all__))


def test_all_names_what_is_imported_and_nothing_else():
    """What __init__.py imports is public, and comes on first use from where type checkers see it come from."""
    imported = {
        alias.asname or alias.name: node.module
        for node in ast.walk(tree_of(SOURCE / "__init__.py"))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("selffl")
        for alias in node.names
    }
    assert set(selffl.__all__) == set(imported) == set(dir(selffl))
    homes = {name: home for home, names in selffl._HOME.items() for name in names}
    assert homes | {"__version__": "selffl._version"} == imported
    for name, home in imported.items():
        assert getattr(selffl, name) is getattr(importlib.import_module(home), name)


STATEMENTS = (
    "import selffl",
    "assert selffl.errors.DataError and selffl.data.load",  # parts without an import of their own
    "assert selffl.train",
    "import selffl.runs.trackers",
    "assert selffl.SelfFLClassifier",
)


@pytest.fixture(scope="module")
def loaded_after():
    """Names of all modules after each of the statements, in a process of its own that goes through them in turn."""
    lines = [f"{statement}; print(json.dumps(sorted(sys.modules)))" for statement in STATEMENTS]
    program = "\n".join(["import json, sys", *lines])
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return dict(zip(STATEMENTS, (set(json.loads(line)) for line in found.stdout.splitlines()), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import selffl", {"torch", "flwr", "selffl.engines.flower"}),
        ("assert selffl.errors.DataError and selffl.data.load", {"sklearn", "PIL", "pandas", "scipy.io", "matplotlib"}),
        ("assert selffl.train", {"sklearn", "scipy.optimize", "flwr", "selffl.engines.flower"}),
        ("import selffl.runs.trackers", {"tensorboard", "mlflow", "wandb", "sklearn"}),
    ],
)
def test_what_an_import_does_not_bring(loaded_after, statement, absent):
    assert not loaded_after[statement] & absent


@pytest.mark.slow
def test_scikit_learn_comes_with_the_estimators(loaded_after):
    assert "sklearn" in loaded_after["assert selffl.SelfFLClassifier"]


def test_a_name_that_the_package_does_not_have():
    with pytest.raises(AttributeError, match="module 'selffl' has no attribute 'nothing'"):
        selffl.nothing  # noqa: B018


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["--version"], ["run", "digits", "--algoritm", "x"]])
def test_help_does_not_wait_for_torch(words):
    program = (
        "import sys; from selffl.cli import main\n"
        f"sys.argv = ['selffl', *{words}]\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'scipy', 'matplotlib', 'sklearn'} & set(sys.modules)), file=sys.stderr)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stderr.splitlines()[-1] == "[]", found.stderr


def test_the_package_is_typed():
    assert (SOURCE / "py.typed").exists()


# ------------------------------------------------------------------------------------------------------------- version


def test_the_version_is_that_of_the_installed_package():
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc|\.dev)\d+)?", selffl.__version__)
    assert metadata.version("selffl") == selffl.__version__


@pytest.mark.skipif(not CHANGELOG.exists(), reason="no CHANGELOG.md beside the tests")
def test_the_changelog_begins_with_this_version():
    entries = re.findall(r"^## \[?v?(\d+\.\d+\.\d+\S*?)\]?(?:\s|$)", CHANGELOG.read_text(encoding="utf-8"), re.M)
    assert entries[0] == selffl.__version__
    assert len(entries) == len(set(entries))


# -------------------------------------------------------------------------------------------------------------- layers


def test_every_file_belongs_to_a_layer():
    assert {layer_of(path) for path in FILES} == set(LEVEL)


@pytest.mark.slow
def test_a_layer_imports_only_from_those_before_it():
    upwards = []
    for path in FILES:
        for name in imports_of(path):
            used = name.split(".")[0]
            used = used if used in LEVEL else "__init__"  # `from selffl import posterior`, say
            if LEVEL[used] > LEVEL[layer_of(path)]:
                upwards.append(f"{name_of(path)} imports selffl.{name}")
    assert upwards == []


def test_the_first_layer_imports_nothing_of_the_package():
    for name in LAYERS[0]:
        assert imports_of(SOURCE / f"{name}.py") == []


def test_maths_and_algorithms_draw_no_random_numbers_know_no_device_touch_no_files_and_print_nothing():
    drawing = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "multinomial", "bernoulli", "normal_"}
    devices = {"cuda", "mps", "xpu"}
    state = {"Generator", "manual_seed", "seed", "default_rng", "random", "uniform_", "fork_rng", "get_rng_state"}
    files = {"open", "read_text", "write_text", "read_bytes", "write_bytes", "savez", "loadtxt"}
    impure = {"random", "secrets", "numpy.random", "io", "os", "pathlib", "torch.random", "torch.cuda"}
    found = []
    for path in PURE:
        nodes = list(ast.walk(tree_of(path)))
        modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        modules |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        calls = {node.func.id for node in nodes if isinstance(node, ast.Call) and hasattr(node.func, "id")}
        used = modules & impure | attributes & (drawing | devices | state | files)
        used |= calls & {"open", "print", "input", "exec", "eval"}
        used |= {name for name in imports_of(path) if name.split(".")[0] == "randomness"}
        found += [f"{name_of(path)} uses {name}" for name in sorted(used)]
    assert found == []


def test_importing_the_package_reaches_neither_studies_nor_reports():
    """The library can be used where there is nothing to draw on, and no command line."""
    reached, waiting = set(), ["__init__"]
    while waiting:
        name = waiting.pop()
        for candidate in (SOURCE / f"{name.replace('.', '/')}.py", SOURCE / name.replace(".", "/") / "__init__.py"):
            if candidate in reached or not candidate.exists():
                continue
            reached.add(candidate)
            for used in imports_of(candidate):
                parts = used.split(".")
                waiting += [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    layers = {layer_of(path) for path in reached}
    assert {"maths", "algorithms", "data"} <= layers
    assert not layers & {"studies", "reports", "cli"}


def test_flower_is_imported_by_its_engine_and_its_records_alone():
    """It is optional, and its pins are tight."""
    users = set()
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            users |= {name_of(path) for name in names if name.split(".")[0] == "flwr"}
    assert users
    apart = {"runs/flower.py", "cli/bench_worker.py"}  # the latter runs in the environment of the library that it times
    assert {user.rpartition("/")[0] for user in users - apart} == {"engines/flower"}


@pytest.mark.slow
def test_a_process_that_trains_on_tensors_does_without_tables_and_statistics():
    """Imports are memory: 70 MB of these, where a round of a thousand clients takes as much."""
    code = "import sys, selffl.engines.cohort, selffl.training.model; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"pyarrow", "scipy.optimize", "scipy.special"} & set(done.stdout.split())


MAX_LINES_OF_CONTRACT, MAX_LINES_OF_TRAIN, MAX_LINES_OF_A_BODY = 170, 40, 80


def lines_of_bodies(path):
    """Lines of each function from the first statement to the last, without its docstring, by file and name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
            yield (path.relative_to(SOURCE).as_posix(), node.name), lines


def test_the_contract_and_functions_stay_short_enough_to_be_read_at_once():
    assert len((SOURCE / "algorithms/contract.py").read_text().splitlines()) <= MAX_LINES_OF_CONTRACT
    lines = {name: count for path in FILES for name, count in lines_of_bodies(path)}
    assert lines["runs/train.py", "train"] <= MAX_LINES_OF_TRAIN
    assert {name: count for name, count in lines.items() if count > MAX_LINES_OF_A_BODY} == {}


LEANING = ("Of ", "Those ", "Likewise", "Itself", "Nobody's", "Zero.", "The same,", "The same of ", "The same for ")


def test_first_lines_of_docstrings_stand_alone():
    """No line begins as an answer to the one above it does."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
    found = [
        f"{path.relative_to(SOURCE)}: {text.splitlines()[0]}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, kinds) and (text := ast.get_docstring(node)) and text.startswith(LEANING)
    ]
    assert found == []
