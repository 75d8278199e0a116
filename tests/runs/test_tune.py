"""Choosing options: on whose rows, by what, and what is trained afterwards."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import selffl
from selffl.algorithms import Ditto, Local
from selffl.errors import ConfigError, DataError, DivergedError
from selffl.studies.problems import DIGITS

TRAINING = {"rounds": 3, "participation": 1.0, "learning_rate": 0.1}
DITTO = Ditto(num_local_steps=4)


def federation(seed=0, clients=5, rows=24, **options):
    """Clients of several sizes whose classes differ."""
    rng = np.random.default_rng(seed)
    client = np.repeat(np.arange(clients), rows - 3 * np.arange(clients))
    y = (rng.integers(0, 2, len(client)) + client) % 3
    x = rng.normal(size=(len(client), 4)).astype(np.float32) + y[:, None]
    return selffl.Federation.from_arrays(x, y, client, 0.25, **options)


def model():
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def tuned(algorithm=DITTO, grid=None, fed=None, **options):
    grid = {"penalty": (0.1, 1.0)} if grid is None else grid
    return selffl.tune(model(), fed or federation(), algorithm, grid, **TRAINING | options)


def right_of(module, rows, client):
    """Of a client's rows, how many a model has right, and how many there are."""
    first, last = rows.offset[client : client + 2].tolist()
    answers = module(rows.features[first:last].float()).argmax(-1)
    return int((answers == rows.labels[first:last]).sum()), last - first


def test_a_score_is_what_clients_have_right_of_their_own_validation_rows():
    fed = federation()
    found = tuned(fed=fed)
    aside = fed.with_validation(0.2)
    assert found.num_rows == len(aside.validation.labels)
    assert found.num_clients == 5
    for row in found.table:
        run = selffl.train(model(), aside, Ditto(num_local_steps=4, penalty=row["penalty"]), **TRAINING)
        counts = [right_of(run.personal_model(client), aside.validation, client) for client in range(5)]
        right, rows = (sum(part) for part in zip(*counts, strict=True))
        assert row["validation_accuracy"] == pytest.approx(right / rows)
    best = max(found.table, key=lambda row: row["validation_accuracy"])
    assert found.chosen == {"penalty": best["penalty"]}
    assert [row["is_chosen"] for row in found.table].count(True) == 1


def test_validation_rows_are_training_rows_and_the_last_run_trains_on_all_of_them():
    fed = federation()
    aside = fed.with_validation(0.2)

    def lines(*parts):
        return sorted(tuple(row) for part in parts for row in part.features.tolist())

    assert lines(aside.train, aside.validation) == lines(fed.train)
    assert lines(aside.test) == lines(fed.test)
    found = tuned(fed=fed)
    plain = selffl.train(model(), fed, Ditto(num_local_steps=4, **found.chosen), **TRAINING)
    assert [row["num_train"] for row in found.run.clients] == fed.train.num_examples.tolist()
    assert found.run.summary["weighted_accuracy"] == plain.summary["weighted_accuracy"]
    for client in range(5):
        ours, theirs = (run.personal_model(client).state_dict() for run in (found.run, plain))
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_test_rows_play_no_part_in_the_choice():
    fed = federation()
    other = selffl.Federation(
        fed.clients, fed.train, type(fed.test)(-fed.test.features, fed.test.labels, fed.test.offset)
    )
    ours, theirs = tuned(fed=fed), tuned(fed=other)
    assert ours.table == theirs.table
    assert ours.run.summary["weighted_accuracy"] != theirs.run.summary["weighted_accuracy"]


def test_validation_rows_of_its_own_are_taken_and_never_trained_on():
    fed = federation(validation_fraction=0.3)
    found = tuned(fed=fed)
    assert found.num_rows == len(fed.validation.labels)
    assert [row["num_train"] for row in found.run.clients] == fed.train.num_examples.tolist()


def test_steps_of_fine_tuning_are_tried_on_one_run_and_are_those_of_train():
    fed = federation()
    method = selffl.algorithm("fedavg", num_local_steps=2)
    found = tuned(method, {"fine_tune": (0, 3, 12)}, fed, max_trials=3)
    assert (found.num_runs, len(found.table)) == (1, 3)
    aside = fed.with_validation(0.2)
    run = selffl.train(model(), aside, method, evaluate_on="validation", fine_tune=(3, 12), **TRAINING)
    names = ("weighted_accuracy", "personal_after_3_weighted_accuracy", "personal_after_12_weighted_accuracy")
    assert [row["validation_accuracy"] for row in found.table] == pytest.approx([run.summary[name] for name in names])
    assert found.chosen["fine_tune"] == 12
    assert found.run.config.fine_tune == (12,)
    assert found.is_at_edge
    assert str(found).endswith("(at most 3; 1 run). fine_tune = 12 is the largest tried, with more beyond it untried.")


def test_a_grid_is_widened_and_settings_are_tuned_beside_options():
    found = tuned(Local(num_local_steps=1), {"learning_rate": (1e-6, 1e-5)}, max_trials=4)
    assert [row["learning_rate"] for row in found.table][:2] == [1e-6, 1e-5]
    assert [row["is_widened"] for row in found.table] == [False, False, True, True][: len(found.table)]
    assert found.run.config.learning_rate == found.chosen["learning_rate"]
    assert found.num_runs == len(found.table)


def test_where_less_is_better_the_least_is_chosen():
    found = tuned(metric="log_loss", grid={"learning_rate": (1e-4, 0.1)}, max_trials=2)
    assert found.chosen == {"learning_rate": 0.1}
    scores = [row["validation_log_loss"] for row in found.table]
    assert 0 < scores[1] < scores[0]


def test_a_setting_that_diverges_is_left_out():
    seen = []
    found = tuned(
        grid={"learning_rate": (0.1, 1e30)}, on_trial=lambda setting, score: seen.append((setting, score)), max_trials=2
    )
    assert found.chosen == {"learning_rate": 0.1}
    assert found.table[1]["validation_accuracy"] is None
    assert seen[1] == ({"learning_rate": 1e30}, None)
    assert seen[0][1] == found.table[0]["validation_accuracy"]


def test_where_every_setting_diverges_it_is_said():
    with pytest.raises(
        DivergedError, match=r"^training diverged with all of 2 settings of the grid; expected one that"
    ):
        tuned(grid={"learning_rate": (1e30, 1e31)}, max_trials=2)


def test_what_was_tried_is_written_beside_the_run(tmp_path):
    found = tuned(out=tmp_path / "run")
    content = json.loads((tmp_path / "run" / "tuning.json").read_text(encoding="utf-8"))
    assert content == found.summary
    assert content["num_trials"] == len(content["trials"]) <= content["max_trials"] == 8
    assert selffl.load(tmp_path / "run").config.options["penalty"] == found.chosen["penalty"]


def test_the_same_call_gives_the_same_table_and_another_seed_other_rows():
    assert tuned().table == tuned().table
    first, second = (federation().with_validation(0.2, seed=seed).validation.features for seed in (0, 1))
    assert not torch.equal(first, second)


def test_a_study_is_tuned_with_its_own_steps(tmp_path):
    from dataclasses import replace

    problem = replace(DIGITS, rounds=2, num_local_steps=3, data_options={"num_clients": 8, "test_fraction": 0.3})
    found = problem.tune("ditto", {"weighting": "equal"}, 1, {"penalty": (0.1, 1.0)}, max_trials=2)
    assert found.run.config.options["num_local_steps"] == 3
    assert found.run.config.options["weighting"] == "equal"
    assert (found.run.config.seed, found.run.config.rounds) == (1, 2)
    aside = problem.federation(1, 0.2)
    assert found.num_rows == len(aside.validation.labels)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"grid": {"penalti": (1, 2)}}, ConfigError, "unknown name in the grid 'penalti'; did you mean 'penalty'"),
        ({"grid": {"penalty": (1.0, -1.0)}}, ConfigError, "penalty is -1.0; expected a number 0 or more"),
        ({"grid": {"fine_tune": (5, -1)}}, ConfigError, "fine_tune is -1; expected a whole number, 0 or more."),
        ({"grid": {"learning_rate": (0.1, 0.0)}}, ConfigError, "learning_rate is 0.0; expected a number above 0"),
        ({"evaluate_on": "test"}, ConfigError, "evaluate_on is given to tune; expected none. Leave it out: the last"),
        ({"fine_tune": (5,)}, ConfigError, "fine_tune is given to tune; expected none. Leave it out: give it in the"),
        ({"max_trials": 0}, ConfigError, "max_trials is 0; expected a whole number, 1 or more."),
        ({"max_trials": 1}, ConfigError, "the grid has 2 settings, and max_trials is 1; expected no more than that."),
        ({"metric": "f1"}, ConfigError, "unknown metric 'f1'; expected one of"),
        ({"validation_fraction": 0.0}, DataError, "no client has validation rows to choose on; expected some."),
        ({"validation_fraction": 1.5}, ConfigError, "validation_fraction is 1.5; expected a share from 0 up to"),
        (
            {"algorithm": Ditto(num_local_epochs=2), "grid": {"num_local_steps": (5, 10)}},
            ConfigError, "num_local_steps is in the grid, and num_local_epochs takes its place; expected one of them.",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_tuned_is_refused(options, kind, message):
    with pytest.raises(kind) as caught:
        tuned(**options)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_without_a_grid_the_methods_own_is_taken_or_it_is_said_that_there_is_none():
    found = selffl.tune(model(), federation(), "perfedavg", **TRAINING)
    assert [row["adaptation_steps"] for row in found.table][:3] == [1, 5, 20]
    with pytest.raises(ConfigError, match=r"^self-fl-auto has nothing to tune; expected a method that has, or a grid"):
        selffl.tune(model(), federation(), **TRAINING)
    with pytest.raises(ConfigError, match=r"^federation is a list; expected a Federation"):
        selffl.tune(model(), [], "ditto")


def test_a_taken_folder_is_refused_before_anything_is_trained(tmp_path):
    tuned(out=tmp_path / "run")

    def never(*_):
        raise AssertionError("trained")

    with pytest.raises(ConfigError, match=r"already holds a run"):
        tuned(out=tmp_path / "run", on_trial=never)


def test_the_sentence_says_how_much_was_tried():
    found = tuned(grid={"penalty": (0.1, 1.0, 10.0)})
    rest = len(found.table) - 3
    assert str(found).startswith(
        f"ditto with penalty = {found.chosen['penalty']:g}: the best accuracy on {found.num_rows} validation rows of 5 "
        f"clients, of {len(found.table)} settings tried" + (f", {rest} of them beyond the grid" if rest else "")
    )
    assert not math.isnan(found.search.chosen.score)


@pytest.mark.parametrize(
    ("grid", "beside"),
    [
        ({"keep_optimiser": (False, True)}, {"optimiser": "momentum"}),
        ({"optimiser": ("momentum", "adam"), "keep_optimiser": (False, True)}, {}),
        ({"learning_rate_schedule": ("constant", "exponential 0.5")}, {}),
    ],
    ids=["a setting beside the grid", "two settings of the grid", "the rounds of the run"],
)
def test_settings_are_checked_as_they_are_trained(grid, beside):
    assert tuned(grid=grid, max_trials=4, **beside).chosen.keys() == grid.keys()


def test_a_value_beyond_the_grid_that_the_model_does_not_allow_ends_no_search():
    """FedALA of a model with two layers; four would be next, were all of them the best."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    found = selffl.tune(network, federation(), "fedala", {"mixed_layers": (1, 2)}, **TRAINING)
    assert found.chosen["mixed_layers"] in (0, 1, 2)
    tried = [row for row in found.table if row["mixed_layers"] > 2]
    assert all(row["validation_accuracy"] is None for row in tried)
