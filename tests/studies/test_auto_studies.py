"""self-fl-auto against tuned rivals: who is compared, what is chosen on which rows, and what the bar says."""

from dataclasses import replace

import pytest

from selffl.algorithms import algorithm
from selffl.studies import auto
from selffl.studies.arms import Outcome
from selffl.studies.problems import DIGITS
from selffl.studies.result import Job

SMALL = replace(DIGITS, rounds=3, data_options={"test_fraction": 0.3, "num_clients": 8}, num_local_steps=3)


@pytest.fixture(scope="module")
def result():
    return auto._run(auto.Field(lambda: SMALL, others=("self-fl",), fine_tune=(2,)), Job(num_seeds=2))


def test_everybody_is_in_the_table_and_rivals_say_what_they_chose(result):
    chosen = {row["method"]: row["chosen"] for row in result.table}
    assert list(chosen) == [
        *("self-fl-auto", "local", "self-fl", "fedavg"),
        *("ditto, λ chosen", "pfedme, λ chosen", "fedavg, fine-tuned"),
    ]
    assert chosen["ditto, λ chosen"].removeprefix("λ = ") in {f"{penalty:g}" for penalty in auto.PENALTIES}
    assert chosen["pfedme, λ chosen"].removeprefix("λ = ") in {f"{penalty:g}" for penalty in auto.PFEDME_PENALTIES}
    assert chosen["fedavg, fine-tuned"] in ("k = 0", "k = 2")
    assert result.config["num_choosing"] == 2


def test_the_bar_has_six_lines_and_the_budget_is_met(result):
    assert len(result.claims) == 6
    assert result.claims[-1].verdict == "holds"
    assert result.claims[-1].evidence.startswith("2.00 times the gradients, 1.50 times the numbers")


def outcome(*scores):
    return Outcome(0, {}, [], [], 1, clients=[{"accuracy": score, "other": 0.0} for score in scores])


def test_who_is_worse_than_alone_is_counted_among_those_with_test_rows():
    alone = [outcome(0.5, 0.5, 0.5, None), outcome(0.5)]
    joined = [outcome(0.4, 0.5, 0.9, None), outcome(0.6)]
    assert auto.share_losing(joined, alone, "accuracy").tolist() == pytest.approx([1 / 3, 0.0])
    assert auto.share_losing(joined, alone, "other").tolist() == [1.0, 1.0]


def test_a_run_that_diverged_loses_nobody_and_stops_nothing():
    found = auto.share_losing([outcome(), outcome(0.4)], [outcome(0.5), outcome(0.5)], "accuracy")
    assert found.isnan().tolist() == [True, False]


@pytest.mark.parametrize(("name", "models"), [("fedavg", 2), ("ditto", 2), ("self-fl-auto", 3)])
def test_numbers_sent_are_models_and_a_few_numbers(name, models):
    assert models * 1000 < auto.numbers_sent(algorithm(name)) < models * 1000 + 10
