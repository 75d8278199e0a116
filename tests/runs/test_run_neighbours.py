"""The global model with each client's nearest training rows (kNN-Per): against a plain loop, and where it cannot be."""

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier
from torch import nn

import selffl
from selffl import budget
from selffl.errors import ConfigError
from selffl.runs.folder import read_config, read_records

FAST = {"rounds": 4, "participation": 0.5, "evaluate_every": 2, "learning_rate": 0.2}
NEAR = "global_with_neighbours_"
SIZES = (1, 2, 5, 9, 16, 31)  # blocks are filled up to twice the rows of a client


def network(outputs=3, **options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs, **options))


def clients_with_labels_of_their_own(classes=3, seed=0, label=lambda y: y, sizes=SIZES):
    """What a group of rows is called differs from client to client, so that neighbours know more than the model."""
    rng = np.random.default_rng(seed)
    train, test = ([], []), ([], [])
    for client, size in enumerate(sizes):
        for (xs, ys), number in ((train, size), (test, 3 + client % 4)):
            group = rng.integers(classes, size=number)
            xs.append((3 * np.eye(classes, 4)[group] + 1.2 * rng.normal(size=(number, 4))).astype(np.float32))
            ys.append(label((group + client) % classes))
    rows = [
        selffl.data.federation.Rows(
            torch.tensor(np.concatenate(xs)),
            torch.tensor(np.concatenate(ys)),
            torch.tensor([0, *map(len, ys)]).cumsum(0),
        )
        for xs, ys in (train, test)
    ]
    return selffl.Federation(range(len(sizes)), *rows)


def rows_of(rows, number):
    low, high = rows.offset[number : number + 2].tolist()
    return rows.features[low:high], rows.labels[low:high]


def by_hand(run, fed, k, num_classes=3):
    """Probabilities of the test rows, client by client and row by row, with scikit-learn's neighbours."""
    model = run.global_model().double()
    body, head = model[:-1], model[-1]

    def look(x):
        with torch.no_grad():
            z = body(x.double())
            scores = head(z)
        scores = torch.cat([0 * scores, scores], 1) if scores.shape[1] == 1 else scores
        return z.numpy(), scores.softmax(1).numpy()

    def shares(z, y, asked):
        found = np.zeros((len(asked), num_classes))
        if len(y):
            near = KNeighborsClassifier(min(k, len(y)), weights=lambda d: np.exp(-(d**2) / z.shape[1]))
            near.fit(z, y)
            found[:, near.classes_] = near.predict_proba(asked)
        return found

    found, chosen = [], []
    for number in range(fed.num_clients):
        (x, y), (asked, _) = rows_of(fed.train, number), rows_of(fed.test, number)
        y = y.reshape(-1).long().numpy()
        (z, p), (asked_z, asked_p) = look(x), look(asked)
        others = [np.delete(np.arange(len(y)), i) for i in range(len(y))]
        left_out = np.concatenate([shares(z[o], y[o], z[i : i + 1]) for i, o in enumerate(others)])
        values = []
        for share in np.arange(100) / 100:
            right = (share * left_out + (1 - share) * p)[np.arange(len(y)), y]
            values.append(np.log(right).sum() if right.min() > 0 else -np.inf)
        chosen.append(int(np.argmax(values)) / 100)
        found.append(chosen[-1] * shares(z, y, asked_z) + (1 - chosen[-1]) * asked_p)
    return np.concatenate(found), chosen


# ---------------------------------------------------------------------------------------------------------- by a loop


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
@pytest.mark.parametrize("k", [1, 7, 100])
def test_answers_are_those_of_a_loop_over_clients_and_rows(method, k):
    fed = clients_with_labels_of_their_own()
    run = selffl.train(network(), fed, method, neighbours=k, dtype="float64", **FAST)
    expected, chosen = by_hand(run, fed, k)
    found, labels = run.evaluate(neighbours=k), fed.test.labels.numpy()
    losses = -np.log(expected[np.arange(len(labels)), labels])
    np.testing.assert_allclose(found.log_losses["global+neighbours"].numpy(), losses, rtol=1e-6, atol=1e-9)
    right = expected.argmax(1) == labels
    assert found.numbers["global+neighbours"].tolist() == right.tolist()
    assert run.summary[f"{NEAR}weighted_accuracy"] == pytest.approx(right.mean())
    assert chosen[0] == 0.0  # of one row nothing can be left out
    assert len(set(chosen)) > (2 if k == 7 else 1)
    if k == 7:  # and it is worth something
        assert run.summary[f"{NEAR}weighted_accuracy"] > run.summary["global_accuracy"] + 0.1
    assert len(run.clients[3].keys() & {f"{NEAR}accuracy", f"{NEAR}log_loss"}) == 2


def test_one_score_for_two_classes_becomes_log_odds():
    fed = clients_with_labels_of_their_own(classes=2)
    run = selffl.train(network(1), fed, "fedavg", neighbours=3, dtype="float64", **FAST)
    expected, _ = by_hand(run, fed, 3, 2)
    found = run.evaluate(neighbours=3).numbers["global+neighbours"].numpy()
    np.testing.assert_allclose(found, np.log(expected[:, 1] / expected[:, 0]), rtol=1e-6)
    assert f"{NEAR}weighted_auc" in run.summary


def test_test_rows_decide_nothing():
    """Whatever the labels of test rows are, answers stay the same."""
    fed = clients_with_labels_of_their_own()
    run = selffl.train(
        network(), fed, "fedavg", neighbours=5, metrics={"first": lambda out, _: float(out[0, 0])}, **FAST
    )
    turned = selffl.data.federation.Rows(fed.test.features, (fed.test.labels + 1) % 3, fed.test.offset)
    other = selffl.train(
        network(),
        selffl.Federation(fed.clients, fed.train, turned),
        "fedavg",
        neighbours=5,
        metrics={"first": lambda out, _: float(out[0, 0])},
        **FAST,
    )
    assert [row[f"{NEAR}first"] for row in run.clients] == [row[f"{NEAR}first"] for row in other.clients]
    assert run.summary[f"{NEAR}weighted_accuracy"] != other.summary[f"{NEAR}weighted_accuracy"]


# ---------------------------------------------------------------------------------------------- beside everything else


def test_blocks_and_chunks_change_nothing(monkeypatch):
    fed = clients_with_labels_of_their_own(sizes=(*SIZES, 70, 3, 0)[:-1])
    plain = selffl.train(network(), fed, "fedavg", neighbours=4, dtype="float64", **FAST)
    whole = plain.evaluate(neighbours=4).log_losses["global+neighbours"]
    monkeypatch.setitem(budget.BUDGETS, "cpu", budget.Budget(evaluated_numbers=300))
    found = plain.evaluate(neighbours=4).log_losses["global+neighbours"]
    torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-12)
    chunks = selffl.train(network(), fed, "fedavg", neighbours=4, dtype="float64", chunk_size=2, **FAST)
    torch.testing.assert_close(chunks.evaluate(neighbours=4).log_losses["global+neighbours"], whole)


def test_batch_norm_by_batches_alone_sees_each_clients_rows_together():
    fed = clients_with_labels_of_their_own(sizes=(6, 9, 12, 20))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    run = selffl.train(module, fed, "fedavg", batch_norm="batch", neighbours=3, dtype="float64", **FAST)
    expected, _ = by_hand(run, fed, 3)
    right = expected.argmax(1) == fed.test.labels.numpy()
    assert run.evaluate(neighbours=3).numbers["global+neighbours"].tolist() == right.tolist()


def test_folders_keep_them_and_only_the_last_round_has_them(tmp_path):
    fed = clients_with_labels_of_their_own()
    options = FAST | {"neighbours": 5, "class_frequencies": True, "fine_tune": (2,)}
    run = selffl.train(network(), fed, "fedavg", out=tmp_path / "run", **options)
    kept = read_records(tmp_path / "run")
    assert [row[f"{NEAR}weighted_accuracy"] is not None for row in run.history] == [False] * 3 + [True]
    assert kept.history[-1][f"{NEAR}worst10_accuracy"] == run.summary[f"{NEAR}worst10_accuracy"]
    assert read_config(tmp_path / "run").neighbours == 5
    plain = selffl.train(network(), fed, "fedavg", **FAST | {"class_frequencies": True, "fine_tune": (2,)})
    assert {name for name in run.summary.keys() - plain.summary.keys() if not name.startswith(NEAR)} == set()
    again = selffl.load(tmp_path / "run").evaluate(neighbours=5).scores()
    assert again[f"{NEAR}weighted_log_loss"] == pytest.approx(run.summary[f"{NEAR}weighted_log_loss"])


# ------------------------------------------------------------------------------------------------------------- refused


class Squashed(nn.Sequential):
    """A model whose outputs are those of its last layer but for a number added to all."""

    def forward(self, x):
        hidden = self[1](self[0](x))
        return self[2](hidden) + hidden.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (
            network(1),
            {"label": lambda y: y + 0.5},
            "neighbours is 3, and rows have no classes to take from their neigh",
        ),
        (network(), {"loss": nn.CrossEntropyLoss(weight=torch.ones(3))}, "neighbours is 3, and rows have no classes"),
        (Squashed(*network()), {}, "the outputs of Squashed are not those of its last layer"),
    ],
)
def test_what_has_no_classes_or_features_is_refused_in_one_line(module, options, message, tmp_path):
    fed = clients_with_labels_of_their_own(label=options.get("label", lambda y: y))
    options = FAST | {name: value for name, value in options.items() if name != "label"}
    with pytest.raises(ConfigError, match=message) as caught:
        selffl.train(module, fed, "fedavg", neighbours=3, out=tmp_path / "run", **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
    run = selffl.train(module, fed, "fedavg", **options)
    with pytest.raises(ConfigError, match=message):
        run.evaluate(neighbours=3)


def test_a_number_of_neighbours_that_cannot_be_is_refused():
    run = selffl.train(network(), clients_with_labels_of_their_own(), "fedavg", **FAST)
    with pytest.raises(ConfigError, match="neighbours is 0; expected a whole number, 1 or more"):
        run.evaluate(neighbours=0)
