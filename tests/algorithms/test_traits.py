"""What methods declare of themselves, and that nobody asks for their names instead."""

import ast
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import nn

import selffl
from selffl.algorithms import ALGORITHMS, FedAvg
from selffl.algorithms.contract import Algorithm, Personalises
from selffl.algorithms.records import tensors_of
from selffl.algorithms.suggestions import suggest
from selffl.errors import ConfigError

SOURCE = Path(selffl.__file__).parent
TESTS = Path(__file__).parent.parent
MAY_NAME_METHODS = ("algorithms/__init__.py", "studies/")  # the registry, studies
WORDS = {"local"}  # of English, too: names of methods where they stand alone
FIND_ROWS = ("studies/", "reports/", "maths/", "test_docs.py")  # tests that find a method's row or line in a table
CONTRACT = {"Algorithm", "Safeguards", "Hierarchy"}  # which a method of anybody's is made of


def upload_fields(method):
    """Of an upload, by one round on two clients."""
    torch.manual_seed(0)
    fed = selffl.Federation.from_arrays(torch.randn(40, 3), torch.arange(40) % 2, torch.arange(40) % 2, 0.2)
    fed = replace(fed, cluster=torch.tensor([0, 1]))
    reports = []
    between = [nn.BatchNorm1d(3)] if method.batch_norm == "kept" else []
    module = nn.Sequential(nn.Linear(3, 3), *between, nn.Linear(3, 2))
    run = selffl.train(module, fed, method, rounds=1, participation=1.0)
    run._session.engine.advance(run._state, 1, reports.append)
    return reports[0].upload, reports[0].server


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_a_method_declares_is_there(name, short):
    method = short(name)
    assert isinstance(method, Algorithm)
    assert method.personalises in get_args(Personalises)
    upload, server = upload_fields(method)
    for field in {*method.fields_by_client(), *method.may_be_unknown, *method.capped, *method.averaged}:
        assert isinstance(getattr(upload, field), torch.Tensor)
    options = {each.name for each in fields(method)}
    assert set(method.steps_options) <= options
    assert bool(method.steps_options) is ("num_local_epochs" in options)
    assert not method.capped or method.uploads_add  # only sums are held back
    has_clients = all(tensor.shape[0] == 2 for tensor in tensors_of(upload).values())
    assert has_clients is not method.uploads_add
    for field in method.per_client:
        assert getattr(server, field).shape[0] == 2
    assert method.has_inter_variance is (method.inter_variance(server) is not None)
    assert method.has_group_variances is (method.group_variances(server) is not None)


# Also after a hyphen, and before a number: as a part of a path.
NAMES = re.compile(rf"(?<!\w)({'|'.join(sorted(ALGORITHMS, reverse=True))})(?!\w|-[a-z])")


def names_in(text):
    """Methods that are named in a text."""
    return set(NAMES.findall(text)) - (set() if text in ALGORITHMS else WORDS)


def tree_of(path):
    """A file's syntax tree; of nothing, where it has no name of a method between quotation marks."""
    text = path.read_text(encoding="utf-8")
    return ast.parse(text if any(names_in(part) for part in text.split('"')[1:]) else "")


def names_of_methods(tree):
    """Methods that string constants name, also in the middle, outside docstrings and beside a method's own ``name``."""
    exempt = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    exempt |= {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "name"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in exempt:
            yield from ((name, node.lineno) for name in names_in(node.value))


def test_no_other_file_knows_a_method_by_its_name():
    found = [
        f"{path.relative_to(SOURCE)}:{line} {name!r}"
        for path in sorted(SOURCE.rglob("*.py"))
        if not str(path.relative_to(SOURCE)).startswith(MAY_NAME_METHODS)
        for name, line in names_of_methods(tree_of(path))
    ]
    assert found == []


def test_no_template_and_no_script_of_a_page_names_a_method():
    paths = [path for kind in ("*.j2", "*.js", "*.html", "*.css") for path in SOURCE.rglob(kind)]
    assert len(paths) > 8
    found = {
        str(path.relative_to(SOURCE)): names
        for path in paths
        if not path.name.endswith(".min.js")  # somebody else's
        and (names := names_in(path.read_text(encoding="utf-8")))
    }
    assert found == {}


def classes_of_methods():
    """Names of the registry's classes, and of what they are made of, but for the contract."""
    kinds = {kind for make in ALGORITHMS.values() for kind in type(make()).__mro__}
    return {kind.__name__ for kind in kinds if kind.__module__.startswith("selffl.algorithms")} - CONTRACT


def test_no_other_file_asks_for_the_class_of_a_method():
    kinds = classes_of_methods()
    assert {"FedAvg", "SharedBody", "FixedLocalSteps"} <= kinds
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno} {ast.unparse(node)}"
        for path in sorted(SOURCE.rglob("*.py"))
        if "isinstance(" in (text := path.read_text(encoding="utf-8")) or "issubclass(" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass")
        if kinds & {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
    ]
    assert found == []


def branches_on_names(tree):
    """Comparisons with a method's name, or differences of sets of them, that are no assertion."""
    asserted = {id(part) for node in ast.walk(tree) if isinstance(node, ast.Assert) for part in ast.walk(node.test)}
    for node in ast.walk(tree):
        is_choice = isinstance(node, ast.Compare) or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub))
        if is_choice and id(node) not in asserted:
            constants = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
            if any(constant in ALGORITHMS for constant in constants):
                yield node.lineno, ast.unparse(node)


def test_no_test_of_every_method_asks_for_a_name():
    """What is expected of a method may be a table by name, or an assertion; what a test does follows from traits."""
    found = [
        f"{path.relative_to(TESTS)}:{line} {text}"
        for path in sorted(TESTS.rglob("*.py"))
        if not str(path.relative_to(TESTS)).startswith(FIND_ROWS)
        for line, text in branches_on_names(tree_of(path))
    ]
    assert found == []


def test_messages_suggest_methods_that_fit():
    assert suggest(lambda method: True) == "fedavg or ditto"
    assert suggest(lambda method: method.personalises == "model") == "ditto or self-fl-auto"
    assert suggest(lambda method: method.has_group_variances) == "self-fl-auto"


class Localised(FedAvg):
    """FedAvg under a name that begins as another method's does."""

    name = "localised-fedavg"


class Alone(FedAvg):
    """A method of the user's own that has no global model."""

    name = "hermit"
    has_global_model = False


@pytest.mark.parametrize(("method", "models"), [(Localised(), ["personal", "global"]), (Alone(), ["personal"])])
def test_whether_there_is_a_global_model_is_not_read_off_a_name(method, models, tmp_path):
    torch.manual_seed(0)
    fed = selffl.Federation.from_arrays(torch.randn(60, 3), torch.arange(60) % 2, torch.arange(60) % 3, 0.3)
    run = selffl.train("softmax", fed, method, rounds=2, participation=1.0, out=tmp_path / "run", gain=True)
    assert [row["model"] for row in run.calibration()] == models
    assert run.config.has_global_model == method.has_global_model
    assert selffl.load(tmp_path / "run", trusted=True).config.has_global_model == method.has_global_model


def test_a_method_is_a_subclass_of_the_contract():
    class Loose:
        name = "loose"

        def client_round(self, broadcast, memory, task):
            return broadcast, memory

    fed = selffl.Federation.from_arrays(torch.randn(20, 3), torch.arange(20) % 2, torch.arange(20) % 2, 0.2)
    for wrong in (Loose(), FedAvg, 3):
        with pytest.raises(ConfigError, match="expected a name such as 'self-fl-auto', or a method with options, an"):
            selffl.train("softmax", fed, wrong)
