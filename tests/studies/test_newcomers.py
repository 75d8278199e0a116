"""The study of newcomers, on embedded digits: who is left out, which rows they get, and what is said of it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from selffl.data.federation import Rows
from selffl.runs import new_client
from selffl.studies.newcomers import SIZES, WithNewcomers, first_rows, newcomers_study, view
from selffl.studies.problems import DIGITS
from selffl.studies.result import Job

SHORT = replace(DIGITS, rounds=10)
LOOK = replace(DIGITS, rounds=2, num_local_steps=5)
COUNTS = (0, 1, 20, 50)


@pytest.fixture(autouse=True, scope="module")
def _few_visits():
    """Models need not have settled here; training alone would go on for long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(new_client, "MAX_VISITS", 5)
        yield


def test_a_fifth_of_the_clients_take_no_part_and_others_with_another_seed():
    problem = WithNewcomers.of(SHORT)
    late = [set(problem.newcomers(seed).clients) for seed in (0, 1)]
    assert [len(group) for group in late] == [8, 8]
    assert late[0] != late[1]
    for seed in (0, 1):
        assert late[seed] | set(problem.federation(seed).clients) == set(SHORT.federation(seed).clients)
        assert not late[seed] & set(problem.federation(seed).clients)
    whole = SHORT.federation(0)
    for client in late[0]:
        alone, same = whole.subset([client]), problem.newcomers(0).subset([client])
        assert torch.equal(alone.train.features, same.train.features)
        assert torch.equal(alone.test.labels, same.test.labels)


def test_a_newcomer_is_given_rows_of_its_own_more_of_them_the_same_and_more():
    sizes = [3, 1, 6]
    rows = Rows(torch.arange(10.0).reshape(-1, 1), torch.arange(10), torch.tensor([0, *np.cumsum(sizes)]))
    owner = rows.owner
    before = [set(), set(), set()]
    for count in (0, 1, 2, 5, 9):
        found = first_rows(rows, count, seed=4)
        assert found.num_examples.tolist() == [min(count, size) for size in sizes]
        assert torch.equal(found.features[:, 0].long(), found.labels)
        parts = [set(part.tolist()) for part in found.labels.split(found.num_examples.tolist())]
        for client, (smaller, part) in enumerate(zip(before, parts, strict=True)):
            assert smaller <= part
            assert {int(owner[row]) for row in part} <= {client}
        before = parts
    orders = {tuple(first_rows(rows, 9, seed).labels.tolist()) for seed in range(5)}
    assert len(orders) > 1


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The whole study on a short problem, with two seeds; and where its runs lie."""
    place = tmp_path_factory.mktemp("newcomers")
    return newcomers_study((LOOK,), Job(folder=place, num_seeds=2), counts=COUNTS), place


@pytest.mark.slow
def test_every_line_has_a_number_for_every_number_of_rows(found):
    result, _ = found
    methods = ["self-fl-auto", "fedavg, as it is", "fedavg, 5 steps", "fedavg, 80 steps", "ditto, λ = 1", "local"]
    assert [line["method"] for line in result.table] == [*methods, "newcomers with as many rows"]
    assert len(result.rows) == len(methods) * len(COUNTS) * 2
    assert all(0 <= row["accuracy"] <= 100 for row in result.rows)
    by = {(row["method"], row["rows"], row["seed"]): row["accuracy"] for row in result.rows}
    for seed in (0, 1):
        # One model for all whatever they bring; fine-tuned on nothing it is the same.
        assert len({by["fedavg, as it is", count, seed] for count in COUNTS}) == 1
        assert by["fedavg, 5 steps", 0, seed] == by["fedavg, 80 steps", 0, seed] == by["fedavg, as it is", 0, seed]
        assert by["fedavg, 5 steps", 50, seed] != by["fedavg, as it is", 50, seed]
    late = [WithNewcomers.of(SHORT).newcomers(seed).train.num_examples for seed in (0, 1)]
    share = (torch.cat(late) >= 20).double().mean()
    assert result.table[-1]["k = 20"] == f"{share:.0%}"
    assert result.table[-1]["k = 0"] == "100%"
    [figure] = result.figures
    assert [series.name for series in figure.charts[0].series] == methods
    assert figure.charts[0].series[0].x == [1, 20, 50]


@pytest.mark.slow
def test_verdicts_follow_from_the_numbers(found):
    result, _ = found
    assert len(result.claims) == 6
    by = {(row["method"], row["rows"], row["seed"]): row["accuracy"] for row in result.rows}
    gaps = [by["self-fl-auto", 1, seed] - by["local", 1, seed] for seed in (0, 1)]
    assert f"1: {np.mean(gaps):+.2f} ± {np.std(gaps, ddof=1) / 2**0.5:.2f}" in result.claims[-1].evidence


def test_fine_tuning_is_plain_descent_from_the_global_model():
    problem = replace(WithNewcomers.of(SHORT), batch_size=1)
    run = problem.run("fedavg", {}, 0, evaluate_every=0)
    late = problem.newcomers(0)
    right = problem.scores(run, (3,))
    assert torch.equal(right[SIZES], late.train.num_examples)
    rows = first_rows(late.train, 1, 0)  # a single row, over and over
    answers = []
    for client in range(late.num_clients):
        model = run.global_model()
        descent = torch.optim.SGD(model.parameters(), lr=problem.learning_rate)
        for _ in range(3):
            descent.zero_grad()
            cross_entropy(
                model(rows.features[client : client + 1].float()), rows.labels[client : client + 1]
            ).backward()
            descent.step()
        low, high = late.test.offset[client : client + 2].tolist()
        answers.append(model(late.test.features[low:high].float()).argmax(1) == late.test.labels[low:high])
    assert torch.equal(right[view("3 steps", 1)].bool(), torch.cat(answers))


@pytest.mark.slow
def test_runs_keep_no_rows_and_are_not_made_again(found, monkeypatch):
    result, place = found
    assert not list(place.rglob("federation.safetensors"))
    monkeypatch.setattr(WithNewcomers, "run", lambda *_, **__: pytest.fail("it is there already"))
    assert newcomers_study((LOOK,), Job(folder=place, num_seeds=2), counts=COUNTS).rows == result.rows


@pytest.mark.slow
def test_two_problems_are_one_below_the_other(tmp_path):
    problems = LOOK, replace(LOOK, name="mnist")
    result = newcomers_study(problems, Job(folder=tmp_path, num_seeds=1), counts=(0, 1, 2))
    assert [line["problem"] for line in result.table] == ["digits"] * 7 + ["mnist"] * 7
    assert [chart.title for chart in result.figures[0].charts] == ["digits", "mnist"]
