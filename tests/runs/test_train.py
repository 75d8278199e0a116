"""`selffl.train`: what comes back, what is written, and what is refused."""

import json
import os
import pickle
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import nn

import selffl
from needs import NEEDS_BATCH_NORM, ONE_OF_A_KIND
from selffl.algorithms import ALGORITHMS, FedAvg, SelfFL
from selffl.data import load as load_data
from selffl.errors import CheckpointError, ConfigError, DataError, DivergedError
from selffl.runs import folder as files
from selffl.runs.folder import read_records

FAST = {"rounds": 6, "participation": 0.5, "evaluate_every": 3}
NAMED = {"algorithm", "data", "seed", "rounds", "weighted_accuracy", "top10_accuracy", "worst10_accuracy"}
NAMED |= {"global_accuracy", "gradient_evaluations", "seconds"}


@pytest.fixture(scope="module")
def fed():
    return load_data("digits", num_clients=12, test_fraction=0.3, seed=1)


def made_up(num_clients=5, rows=20, features=3, classes=3, seed=0, **options):
    rng = np.random.default_rng(seed)
    client = np.repeat([f"c{m:02}" for m in range(num_clients)], rows)
    x = rng.normal(size=(num_clients * rows, features))
    return selffl.Federation.from_arrays(x, rng.integers(0, classes, len(x)), client, 0.25, seed, **options)


class TwoLayers(nn.Module):
    """A user's own module."""

    def __init__(self, features=3, classes=3):
        super().__init__()
        self.body, self.head = nn.Linear(features, 8), nn.Linear(8, classes)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


def tilted_loss(outputs, labels):
    """A user's own loss."""
    return nn.functional.cross_entropy(outputs, labels, label_smoothing=0.1)


def without_time(rows):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def bits(run):
    return [part for model in (run.global_model(), run.personal_model(run.clients[3]["client"])) for part in
            (tensor.tolist() for tensor in model.state_dict().values())]  # fmt: skip


# ------------------------------------------------------------------------------------------------------ what comes back


def test_the_tables_of_a_run(fed):
    run = selffl.train("softmax", fed, "self-fl", seed=4, **FAST)
    assert run.summary.keys() >= NAMED
    assert (run.summary["algorithm"], run.summary["data"], run.summary["seed"]) == ("self-fl", "digits", 4)
    assert [row["round"] for row in run.history] == [1, 2, 3, 4, 5, 6]
    assert [row["weighted_accuracy"] is not None for row in run.history] == [False, False, True] * 2
    assert [row["client"] for row in run.clients] == list(fed.clients)
    assert sum(row["gradient_evaluations"] for row in run.clients) == run.summary["gradient_evaluations"]
    assert sum(row["rounds"] for row in run.clients) == 6 * 6
    assert run.history[-1]["gradient_evaluations"] == run.summary["gradient_evaluations"]
    assert run.history[-1]["bytes_sent"] == run.summary["bytes_sent"]
    assert len(run.participation) == 36


@pytest.mark.parametrize(
    ("method", "numbers"),
    [
        ("fedavg", 2 * 650 + 1),  # the model both ways, and a number of rows
        ("scaffold", 4 * 650 + 1),  # and control variates
        ("local", 0),
    ],
)
def test_the_traffic_of_a_run(fed, method, numbers):
    run = selffl.train("softmax", fed, method, rounds=3, participation=0.5, evaluate_every=0)
    assert [row["bytes_sent"] for row in run.history] == [4 * 6 * numbers * number for number in (1, 2, 3)]


def test_traffic_is_counted_on_after_a_resume(fed, tmp_path):
    whole = selffl.train("softmax", fed, "fedavg", rounds=3, participation=0.5, evaluate_every=0)
    selffl.train("softmax", fed, "fedavg", rounds=2, participation=0.5, evaluate_every=0, out=tmp_path / "run")
    run = selffl.resume(tmp_path / "run", rounds=3)
    assert [row["bytes_sent"] for row in run.history] == [row["bytes_sent"] for row in whole.history]


def test_the_scores_are_those_of_the_models_that_are_handed_out(fed):
    """By hand: each client's own model on its own test rows."""
    run = selffl.train("softmax", fed, "ditto", **FAST)
    right, sizes, shared = [], [], 0
    for number, client in enumerate(fed.clients):
        low, high = fed.test.offset[number : number + 2].tolist()
        x, y = fed.test.features[low:high], fed.test.labels[low:high]
        right.append(int((run.personal_model(client)(x).argmax(1) == y).sum()))
        shared += int((run.global_model()(x).argmax(1) == y).sum())
        sizes.append(high - low)
        assert run.clients[number]["accuracy"] == right[-1] / sizes[-1]
    largest = int(fed.train.num_examples.argmax())
    assert run.summary["weighted_accuracy"] == sum(right) / sum(sizes)
    assert run.summary["global_accuracy"] == shared / sum(sizes)
    assert run.summary["top10_accuracy"] == right[largest] / sizes[largest]  # 12 clients: a tenth is one
    assert run.summary["worst10_accuracy"] == min(r / n for r, n in zip(right, sizes, strict=True))


def test_fine_tuning_by_hand(fed):
    """k plain steps on each client's training rows, in the order of its minibatches, on top of the global model."""
    run = selffl.train("softmax", fed, "fedavg", fine_tune=(2, 5), batch_size=1000, learning_rate=0.5, **FAST)
    right = 0
    for number in range(fed.num_clients):
        rows = slice(*fed.train.offset[number : number + 2].tolist())
        test = slice(*fed.test.offset[number : number + 2].tolist())
        model = run.global_model()
        # A batch of 1000 of a client with n rows goes round them: rows weigh as often as they are met.
        task = run._session.source.task(torch.tensor([number]), 7)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
        for draw in range(5):
            x, y = (part[0] for part in task.batch(draw, torch.tensor([0])))
            assert {tuple(row) for row in x.tolist()} == {tuple(row) for row in fed.train.features[rows].tolist()}
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimiser.step()
        right += int((model(fed.test.features[test]).argmax(1) == fed.test.labels[test]).sum())
    total = int(fed.test.num_examples.sum())
    assert run.summary["global_after_5_weighted_accuracy"] == pytest.approx(right / total, abs=1.5 / total)
    assert run.summary["personal_after_5_weighted_accuracy"] == run.summary["global_after_5_weighted_accuracy"]
    assert "global_after_2_worst10_accuracy" in run.summary


def test_the_module_is_left_as_it_was_and_may_be_anything():
    fed, module = made_up(), TwoLayers()
    before = pickle.dumps(module.state_dict())
    run = selffl.train(module, fed, "fedavg", **FAST)
    assert pickle.dumps(module.state_dict()) == before
    assert isinstance(run.global_model(), TwoLayers)
    assert run.summary["data"] == "arrays"


@pytest.mark.parametrize(
    "name", [name for name in ALGORITHMS if name not in NEEDS_BATCH_NORM]
)  # those are in test_batch_norm.py
def test_every_method_trains_and_hands_out_models(name, short):
    clusters = np.repeat([0, 0, 1, 1, 1], 20)
    run = selffl.train(TwoLayers(), made_up(cluster=clusters), short(name), rounds=2, participation=0.4)
    assert run.summary["algorithm"] == name
    assert 0 <= run.summary["weighted_accuracy"] <= 1
    for row in run.clients:
        assert all(part.isfinite().all() for part in run.personal_model(row["client"]).parameters())


def test_a_method_with_options_has_the_name_that_fits_it_best(fed):
    for method, name in (
        (SelfFL(form="exact"), "self-fl-exact"),
        (SelfFL(max_local_steps=3), "self-fl"),
        (FedAvg(weighting="equal"), "fedavg-equal"),
    ):
        run = selffl.train("softmax", fed, method, rounds=1)
        assert run.summary["algorithm"] == name
        assert run.config.options["weighting" if name == "fedavg-equal" else "form"]


def test_the_same_seed_gives_the_same_numbers_and_another_gives_others(fed):
    runs = [selffl.train("softmax", fed, "self-fl", seed=seed, **FAST) for seed in (5, 5, 6)]
    assert without_time(runs[0].history) == without_time(runs[1].history)
    assert bits(runs[0]) == bits(runs[1])
    assert bits(runs[0]) != bits(runs[2])


def test_validation_rows_are_looked_at_when_asked_for():
    fed = made_up(validation_fraction=0.25)
    on_test = selffl.train(TwoLayers(), fed, "local", **FAST)
    on_validation = selffl.train(TwoLayers(), fed, "local", evaluate_on="validation", **FAST)
    assert [row["num_test"] for row in on_validation.clients] == fed.validation.num_examples.tolist()
    assert [row["num_test"] for row in on_test.clients] == fed.test.num_examples.tolist()
    assert on_validation.summary["evaluated_on"] == "validation"


def test_training_rows_are_looked_at_beside_them_when_asked_for(fed, tmp_path):
    run = selffl.train("softmax", fed, "local", evaluate_train=True, out=tmp_path / "run", **FAST)
    right = 0
    for number, client in enumerate(fed.clients):
        rows = slice(*fed.train.offset[number : number + 2].tolist())
        guess = run.personal_model(client)(fed.train.features[rows]).argmax(1)
        right += int((guess == fed.train.labels[rows]).sum())
    assert run.summary["train_accuracy"] == right / len(fed.train.labels)
    assert run.summary["train_accuracy"] > run.summary["weighted_accuracy"]
    assert selffl.load(tmp_path / "run").history == run.history


def test_without_test_rows_there_are_no_scores_and_no_fault(tmp_path):
    fed = selffl.Federation.from_arrays(np.eye(4), [0, 1, 0, 1], list("aabb"), test_fraction=0)
    run = selffl.train(nn.Linear(4, 2), fed, "fedavg", rounds=2, participation=1.0, out=tmp_path / "r")
    assert run.summary["weighted_accuracy"] is None
    assert run.clients[0]["accuracy"] is None
    assert json.loads((tmp_path / "r" / "summary.json").read_text()) == run.summary


def test_double_precision(fed):
    run = selffl.train("softmax", fed, "fedavg", dtype=torch.float64, **FAST)
    assert run.global_model().weight.dtype == torch.float64


def test_rounds_are_told_as_they_happen(fed):
    seen = []
    run = selffl.train("softmax", fed, "self-fl", on_round=seen.append, **FAST)
    assert seen == run.history


# ----------------------------------------------------------------------------------------------------------- warm start


def test_a_warm_start_from_a_run_a_folder_and_a_state_dict(fed, tmp_path):
    first = selffl.train("softmax", fed, "fedavg", out=tmp_path / "first", **FAST)
    runs = [
        selffl.train("softmax", fed, "ditto", start=start, **FAST)
        for start in (
            *(first, tmp_path / "first", str(tmp_path / "first")),
            *(first.global_model(), first.global_model().state_dict()),
        )
    ]
    assert all(bits(run) == bits(runs[0]) for run in runs[1:])
    assert bits(runs[0]) != bits(selffl.train("softmax", fed, "ditto", **FAST))


@pytest.mark.parametrize(
    "name", [name for name in ONE_OF_A_KIND if name not in NEEDS_BATCH_NORM]
)  # those are in test_batch_norm.py
def test_every_kind_of_method_starts_from_where_it_is_told(name, short):
    """With steps of next to no length the models stay at the start, whatever the method."""
    fed = made_up(cluster=np.repeat([0, 0, 1, 1, 1], 20))
    start = {key: torch.full_like(part, 0.25) for key, part in TwoLayers().state_dict().items()}
    method = short(name)
    own_rates = {field.name: None for field in fields(method) if field.name == "adam_learning_rate"}
    method = replace(method, **own_rates)
    run = selffl.train(TwoLayers(), fed, method, rounds=3, participation=0.6, learning_rate=1e-12, start=start)
    for place, model in enumerate((run.global_model(), *(run.personal_model(client) for client in fed.clients))):
        for layer, part in model.state_dict().items():
            # Class frequencies, which no step has to find, move the bias of a personal model a little.
            slack = 0.03 if place > 0 and layer == "head.bias" else 1e-6
            torch.testing.assert_close(part, torch.full_like(part, 0.25), rtol=0, atol=slack)


def test_a_start_that_does_not_fit(fed):
    with pytest.raises(ConfigError, match="state_dict"):
        selffl.train("softmax", fed, start={"weight": torch.zeros(10, 64)}, rounds=1)
    other = selffl.train(TwoLayers(), made_up(), "fedavg", rounds=1)
    with pytest.raises(ConfigError, match="expected a run of the same model"):
        selffl.train("softmax", fed, start=other, rounds=1)


# ------------------------------------------------------------------------------------------------------ what is written


def test_a_run_is_written_and_read(fed, tmp_path):
    run = selffl.train("softmax", fed, "self-fl", out=tmp_path / "run", **FAST)
    again = selffl.load(tmp_path / "run")
    for name in ("config", "history", "clients", "summary", "participation"):
        assert getattr(again, name) == getattr(run, name), name
    assert bits(again) == bits(run)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["config"]["options"]["max_local_steps"] == 40
    assert config["environment"]["torch"] == torch.__version__
    assert not (tmp_path / "run" / "module.pt").exists()  # everything has a name: nothing to unpickle
    assert not (tmp_path / "run" / "federation.safetensors").exists()


def test_a_run_with_everything_of_the_users_own(tmp_path):
    run = selffl.train(TwoLayers(), made_up(), "self-fl", loss=tilted_loss, out=tmp_path / "run", **FAST)
    again = selffl.load(tmp_path / "run", trusted=True)
    assert bits(again) == bits(run)
    assert [row["client"] for row in again.clients] == ["c00", "c01", "c02", "c03", "c04"]
    assert again.clients == run.clients


def test_saving_later_is_as_good_as_writing_at_once(fed, tmp_path):
    run = selffl.train("softmax", fed, "ditto", **FAST)
    run.save(tmp_path / "run")
    again = selffl.load(tmp_path / "run")
    assert again.summary == run.summary
    assert bits(again) == bits(run)
    with pytest.raises(ConfigError, match="already holds a run"):
        run.save(tmp_path / "run")


def test_rows_stay_out_of_the_folder_when_asked_to(tmp_path):
    fed, module = made_up(), TwoLayers()
    run = selffl.train(module, fed, "perfedavg", out=tmp_path / "run", keep_rows=False, **FAST)
    assert not (tmp_path / "run" / "federation.safetensors").exists()
    with pytest.raises(ConfigError, match="pass the federation"):
        selffl.load(tmp_path / "run", trusted=True)
    with pytest.raises(ConfigError, match="not the one"):
        selffl.load(tmp_path / "run", federation=made_up(seed=1), trusted=True)
    assert bits(selffl.load(tmp_path / "run", federation=fed, trusted=True)) == bits(run)


@pytest.mark.parametrize("change", [{"loss": None}, {"has_own_method": True}])
def test_with_a_module_given_nothing_is_ever_unpickled(tmp_path, change):
    """Whatever the folder says of itself: its author may not be trusted."""
    selffl.train(TwoLayers(), made_up(), "ditto", out=tmp_path / "run", **FAST)
    path = tmp_path / "run" / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["config"] |= change
    path.write_text(json.dumps(content), encoding="utf-8")
    (tmp_path / "run" / "module.pt").write_bytes(b"not a pickle")
    with pytest.raises(ConfigError, match=r"has its own (loss|algorithm); pass"):
        selffl.load(tmp_path / "run", model=TwoLayers())
    given = {"loss": nn.functional.cross_entropy} if "loss" in change else {"algorithm": selffl.algorithm("ditto")}
    selffl.load(tmp_path / "run", model=TwoLayers(), **given)
    selffl.train(TwoLayers(), made_up(), "fedavg", start=tmp_path / "run", **FAST)  # only the checkpoint is opened


def test_a_module_that_is_given_is_not_unpickled(tmp_path):
    module = TwoLayers()
    run = selffl.train(module, made_up(), "ditto", out=tmp_path / "run", **FAST)
    (tmp_path / "run" / "module.pt").write_bytes(b"not a pickle")
    assert bits(selffl.load(tmp_path / "run", model=TwoLayers())) == bits(run)
    with pytest.raises(CheckpointError, match=r"module\.pt cannot be read"):
        selffl.load(tmp_path / "run", trusted=True)


def test_divergence_keeps_what_was_recorded(tmp_path):
    fed = made_up()
    with pytest.raises(DivergedError, match="round"):
        selffl.train(TwoLayers(), fed, "fedavg", learning_rate=1e30, out=tmp_path / "run", **FAST)
    assert read_records(tmp_path / "run").summary["status"] == "diverged"


def test_personal_models_that_diverge_are_divergence(fed, tmp_path):
    """DITTO's global model is fine when a large penalty sends every personal model to infinity."""
    with pytest.raises(
        DivergedError,
        match=r"models of 12 clients of ditto .* after round \d+ \(the first is client 0\)",
    ):
        selffl.train(
            "softmax", fed, selffl.algorithm("ditto", penalty=100.0), rounds=40, participation=1.0, out=tmp_path / "run"
        )
    records = read_records(tmp_path / "run")
    assert records.summary["status"] == "diverged"
    assert records.history


def test_without_evaluations_the_last_models_are_kept(fed, tmp_path):
    run = selffl.train("softmax", fed, "ditto", rounds=3, evaluate_every=0, out=tmp_path / "run")
    assert bits(selffl.load(tmp_path / "run")) == bits(run)
    assert run.summary["weighted_accuracy"] is not None  # the last round always has one


def test_a_folder_becomes_a_run_only_when_it_is_whole(fed, tmp_path, monkeypatch):
    """Killed while it is being made, it can be made again."""
    monkeypatch.setattr(files, "write_json", lambda *_: os._exit(3))
    child = os.fork()
    if child == 0:
        try:
            selffl.train("softmax", fed, "ditto", out=tmp_path / "run", **FAST)
        finally:  # whatever happens, this process does not go on with the other tests
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    monkeypatch.undo()
    selffl.train("softmax", fed, "ditto", out=tmp_path / "run", **FAST)


def test_what_the_user_does_with_the_module_later_is_no_matter(tmp_path):
    module = TwoLayers()
    run = selffl.train(module, made_up(), "ditto", **FAST)
    with torch.no_grad():
        module.body.weight.fill_(7.0)
    module.head = nn.Identity()
    run.save(tmp_path / "run")
    assert bits(selffl.load(tmp_path / "run", trusted=True)) == bits(run)


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(fed):
    with pytest.raises(ConfigError, match="no GPU"):
        selffl.train("softmax", fed, device="cuda", rounds=1)


@pytest.mark.parametrize(
    ("labels", "outputs"),
    [
        (lambda y: y.astype(float), 3),  # what a table makes of classes as soon as one is missing
        (lambda y: y.reshape(-1, 1), 3),
        (lambda y: np.eye(3, dtype=int)[y], 3),
        (lambda y: y, 1),
    ],
)
def test_labels_that_the_loss_cannot_take(labels, outputs, tmp_path):
    rng = np.random.default_rng(0)
    y = np.concatenate([[0, 1, 2], rng.integers(0, 3, 27)])
    fed = selffl.Federation.from_arrays(rng.normal(size=(30, 4)), labels(y), np.repeat(list("abc"), 10))
    with pytest.raises(ConfigError, match="no loss follows from labels") as caught:
        selffl.train(nn.Linear(4, outputs), fed, "fedavg", rounds=1, out=tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_label_out_of_range_among_the_test_rows_is_seen():
    fed = made_up()
    fed.test.labels[7] = 9
    with pytest.raises(DataError, match="client 'c01' has the label 9"):
        selffl.train(TwoLayers(), fed, "fedavg", rounds=1)


def test_a_run_says_what_it_is_in_a_line(fed):
    text = repr(selffl.train("softmax", fed, "fedavg", rounds=1))
    assert text.startswith("Run(algorithm='fedavg', data='digits', rounds=1, weighted_accuracy=0.")
    assert len(text) < 150


def test_an_unknown_client(fed):
    run = selffl.train("softmax", fed, "fedavg", rounds=1)
    with pytest.raises(ConfigError, match=r"unknown client '3'; did you mean 3\? Expected one of the 12 ids: 0, 1, "):
        run.personal_model("3")
    with pytest.raises(ConfigError, match="unknown client 'nobody'"):
        run.personal_model("nobody")


def test_convolutions_are_asked_to_sum_in_one_order_while_training_and_only_then(fed):
    before, seen = torch.backends.cudnn.deterministic, []
    selffl.train(
        "softmax", fed, "fedavg", rounds=1, on_round=lambda row: seen.append(torch.backends.cudnn.deterministic)
    )
    assert seen == [True]
    assert torch.backends.cudnn.deterministic == before


@pytest.mark.slow
def test_without_a_method_clients_with_opposite_answers_are_learned():
    # Half of the clients have their labels flipped: one model for all is right half of the time.
    drawn = np.random.default_rng(0)
    rows = drawn.normal(size=(1200, 4)).astype(np.float32)
    client = np.repeat(np.arange(20), 60)
    labels = ((rows[:, 0] + rows[:, 1] > 0) ^ (client % 2 == 1)).astype(int)
    fed = selffl.Federation.from_arrays(rows, labels, client, test_fraction=0.5)
    torch.manual_seed(0)
    run = selffl.train(nn.Linear(4, 2), fed, rounds=60, evaluate_every=0)
    assert run.config.algorithm == selffl.algorithms.DEFAULT_ALGORITHM
    assert run.summary["weighted_accuracy"] > 0.9  # self-fl reaches 0.75
