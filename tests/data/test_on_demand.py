"""Federations whose rows are made or read when a client is asked for have the same rows and numbers."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import feather, parquet

import selffl
from selffl.algorithms import auto_closing, auto_mixed
from selffl.data.on_demand import RowsOnDemand
from selffl.errors import ConfigError, DataError
from selffl.randomness import uniform

SIZES = [5, 9, 3, 12, 7, 1, 8, 6]
SHORT = {"rounds": 3, "participation": 0.5, "evaluate_every": 1, "chunk_size": 2}


def make(client):
    """Rows of a client, by its number alone."""
    rng = np.random.default_rng(client)
    x = rng.normal(size=(SIZES[client % 8], 4)).astype(np.float32)
    return x, (x[:, 0] + 0.1 * client > 0).astype(np.int64)


@pytest.fixture
def fed():
    return selffl.Federation.on_demand(make, 8, SIZES, num_classes=2, test_fraction=0.3, seed=5)


def in_memory(fed):
    """The same rows, all of them there."""
    everyone = torch.arange(fed.num_clients)
    return selffl.Federation(list(fed.clients), fed.train.subset(everyone), fed.test.subset(everyone))


def unmeasured(rows):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


# ------------------------------------------------------------------------------------------------------------ the rows


def test_rows_are_those_of_the_client_whoever_else_is_asked_for(fed):
    for client, size in enumerate(SIZES):
        train, test = (rows.subset(torch.tensor([client])) for rows in (fed.train, fed.test))
        assert len(test.labels) == min(round(0.3 * size), size - 1)
        x, y = make(client)
        rows = torch.cat([train.features, test.features]), torch.cat([train.labels, test.labels])
        assert sorted(map(tuple, rows[0].tolist())) == sorted(map(tuple, x.tolist()))
        of_row = {tuple(row): label for row, label in zip(x.tolist(), y.tolist(), strict=True)}
        assert [of_row[tuple(row)] for row in rows[0].tolist()] == rows[1].tolist()
        among = fed.train.subset(torch.tensor([6, client, 1]))
        low, high = among.offset[1:3].tolist()
        assert torch.equal(among.features[low:high], train.features)


def test_which_rows_are_tested_depends_on_the_seed():
    first, second = (selffl.Federation.on_demand(make, 8, SIZES, num_classes=2, seed=seed) for seed in (0, 1))
    everyone = torch.arange(8)
    assert not torch.equal(first.test.subset(everyone).features, second.test.subset(everyone).features)
    none = selffl.Federation.on_demand(make, 8, SIZES, num_classes=2, test_fraction=0.0)
    assert none.test.num_rows == len(none.test.subset(everyone).labels) == 0
    assert none.train.num_rows == sum(SIZES)


def test_it_says_what_it_is(fed):
    assert repr(fed) == "Federation(8 clients, rows (4,): 35 train, 16 test)"
    assert fed.num_classes == 2
    assert fed.fingerprint() == selffl.Federation.on_demand(make, 8, SIZES, num_classes=2, test_fraction=0.3,
                                                            seed=5).fingerprint()  # fmt: skip
    assert "35 train rows of 8 clients" in repr(fed.train)


@pytest.mark.parametrize("act", ["save", "pool", "class_counts", "with_validation"])
def test_what_needs_all_rows_is_refused_in_a_line(fed, act, tmp_path):
    given = {"save": (tmp_path / "a",), "with_validation": (0.1,)}.get(act, ())
    with pytest.raises(DataError, match="never all there; expected a federation with its rows in memory"):
        getattr(fed, act)(*given)


BAD = {
    "wrong size": (lambda client: make(client + 1), {}, "make\\(0\\) gives 9 rows; expected 5"),
    "no labels": (lambda client: make(client)[0], {}, "gives no \\(x, y\\)"),
    "a label too large": (lambda client: (make(client)[0], 2 + make(client)[1]), {}, "client 0 has the label [23]"),
    "targets": (lambda client: (make(client)[0], make(client)[1] / 2), {}, "num_classes is 2; expected the number"),
    "NaN": (lambda client: (make(client)[0] * np.nan, make(client)[1]), {}, "make\\(0\\): x holds NaN"),
    "a label below 0": (lambda client: (make(client)[0], make(client)[1] - 1), {}, "make\\(0\\): y is -1"),
    "rows without labels": (lambda client: (make(client)[0], [0]), {}, "make\\(0\\): x has 5 rows and y 1"),
    "no function": (3, {}, "make is 3; expected a function"),
    "no clients": (make, {"num_clients": 0}, "num_clients is 0; expected"),
    "no rows": (make, {"num_examples": [0] * 8}, "expected a number of rows, 1 or more"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_told(name):
    function, more, message = BAD[name]
    options = {"num_clients": 8, "num_examples": SIZES, "num_classes": 2} | more
    with pytest.raises((DataError, ConfigError), match=message):
        selffl.train("softmax", selffl.Federation.on_demand(function, **options), rounds=1)


# ------------------------------------------------------------------------------------------------------------ training


@pytest.mark.parametrize("name", ["fedavg", "self-fl-auto", "ditto"])
def test_it_trains_to_the_bits_of_the_same_rows_in_memory(fed, name):
    method = selffl.algorithm(name, num_local_steps=3)
    lazy = selffl.train("softmax", fed, method, client_memory="disk", **SHORT)
    plain = selffl.train("softmax", in_memory(fed), method, client_memory="memory", **SHORT)
    assert unmeasured(lazy.history) == unmeasured(plain.history)
    assert unmeasured(lazy.clients) == unmeasured(plain.clients)


def test_what_a_mixed_model_is_found_to_be_has_the_same_bits_wherever_rows_lie(fed, monkeypatch):
    """A line separates these rows, so that equations are nearly singular: a last bit would become a first one.

    Classes have no mixed model otherwise.
    """
    for module in (auto_closing, auto_mixed):
        monkeypatch.setattr(module, "is_mixed", lambda server: True)
    method = selffl.algorithm("self-fl-auto", num_local_steps=3)
    found = [
        selffl.train("softmax", rows, method, **SHORT)._state.server.closing.mixed.covariance
        for rows in (fed, in_memory(fed)) * 3
    ]
    assert found[0].isfinite().all()
    assert all(torch.equal(found[0], other) for other in found)


def test_a_run_is_resumed_with_the_federation(fed, tmp_path):
    method = selffl.algorithm("ditto", num_local_steps=3)
    selffl.train("softmax", fed, method, out=tmp_path / "run", **SHORT)
    assert not (tmp_path / "run" / "federation.safetensors").exists()
    with pytest.raises(ConfigError, match="pass the federation"):
        selffl.resume(tmp_path / "run", rounds=4)
    run = selffl.resume(tmp_path / "run", rounds=4, federation=fed)
    whole = selffl.train("softmax", fed, method, **SHORT | {"rounds": 4})
    assert unmeasured(run.history) == unmeasured(whole.history)
    assert unmeasured(run.clients) == unmeasured(whole.clients)


def test_some_clients_are_evaluated_and_the_others_train_as_before(fed, tmp_path):
    method = selffl.algorithm("self-fl-auto", num_local_steps=3)
    chosen = sorted(uniform(0, "evaluated", torch.arange(8)).argsort()[:3].tolist())
    for rows in (fed, in_memory(fed)):
        whole = selffl.train("softmax", rows, method, **SHORT)
        some = selffl.train("softmax", rows, method, evaluate_clients=3, out=tmp_path / str(rows is fed), **SHORT)
        assert [row["client"] for row in some.clients] == chosen
        known = {row["client"]: row for row in whole.clients}
        for row in some.clients:
            expected = known[row["client"]]
            assert row["accuracy"] == expected["accuracy"]
            assert row["rounds"] == expected["rounds"]
            assert row["gradient_evaluations"] == expected["gradient_evaluations"]
            assert row["num_train"] == expected["num_train"]
        assert [row["gradient_evaluations"] for row in some.history] == [
            row["gradient_evaluations"] for row in whole.history
        ]
        rates = [(row["accuracy"], row["num_test"]) for row in some.clients]
        mean = sum(rate * number for rate, number in rates) / sum(number for _, number in rates)
        assert some.summary["weighted_accuracy"] == pytest.approx(mean)
        later = selffl.resume(tmp_path / str(rows is fed), rounds=4, federation=rows)
        assert [row["client"] for row in later.clients] == chosen


def test_of_rows_on_demand_at_most_a_thousand_clients_are_evaluated():
    many = selffl.Federation.on_demand(lambda client: make(client % 8), 1500, SIZES * 187 + SIZES[:4], num_classes=2)
    run = selffl.train("softmax", many, selffl.algorithm("fedavg", num_local_steps=1), rounds=1, participation=0.01)
    assert len(run.clients) == run.config.evaluate_clients == 1000
    assert run.summary["clients"] == 1500


def test_what_counts_everybodys_classes_is_refused(fed):
    with pytest.raises(ConfigError, match="class_frequencies is True, and rows are there when a client is asked"):
        selffl.train("softmax", fed, class_frequencies=True)


# -------------------------------------------------------------------------------------------------------------- files


def table(client=None, **changed):
    rows = [make(client) for client in range(8)]
    x, y = (np.concatenate(each) for each in zip(*rows, strict=True))
    ids = np.repeat([f"c{number}" for number in range(8)], SIZES) if client is None else client
    columns = {"client": ids, **{f"x{place}": x[:, place] for place in range(4)}, "label": y}
    return pa.table(columns | changed)


def write(rows, path):
    """Few rows a block, so that clients lie in several of them."""
    if path.suffix == ".parquet":
        parquet.write_table(rows, path, row_group_size=7)
    else:
        feather.write_feather(rows, path, compression="uncompressed", chunksize=7)
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_file_is_read_by_client(tmp_path, suffix):
    stored = selffl.Federation.from_large_file(write(table(), tmp_path / f"rows{suffix}"), test_fraction=0.3, seed=5)
    made = selffl.Federation.on_demand(make, 8, SIZES, num_classes=2, test_fraction=0.3, seed=5)
    assert stored.clients == [f"c{number}" for number in range(8)]
    assert isinstance(stored.train, RowsOnDemand)
    assert stored.num_classes == 2
    for cohort in ([3, 0], [7], list(range(8))):
        for part in ("train", "test"):
            found, expected = (each.parts[part].subset(torch.tensor(cohort)) for each in (stored, made))
            assert torch.equal(found.features, expected.features)
            assert torch.equal(found.labels, expected.labels)
            assert torch.equal(found.offset, expected.offset)
    run = selffl.train("softmax", stored, selffl.algorithm("fedavg", num_local_steps=2), rounds=1)
    assert run.clients[0]["client"] == "c0"


def test_a_column_of_lists_and_targets(tmp_path):
    x = np.arange(24, dtype=np.float32)
    rows = pa.table({
        "client": [1] * 3 + [2] * 5,
        "x": pa.FixedSizeListArray.from_arrays(pa.array(x), 3),
        "label": np.linspace(0.0, 1.0, 8),
    })  # fmt: skip
    fed = selffl.Federation.from_large_file(write(rows, tmp_path / "a.arrow"), test_fraction=0.0)
    assert fed.num_classes is None
    found = fed.train.subset(torch.tensor([1]))
    assert found.features.tolist() == x.reshape(8, 3)[3:].tolist()
    assert found.labels.dtype == torch.float32
    words = rows.set_column(1, "x", pa.array([[n, n + 1] for n in range(8)]))
    fed = selffl.Federation.from_large_file(write(words, tmp_path / "b.parquet"), test_fraction=0.0)
    assert fed.train.subset(torch.tensor([0])).features.tolist() == [[0, 1], [1, 2], [2, 3]]


WRONG = {
    "unsorted": (lambda: table(client=np.array(["a", "b"] * 25 + ["a"])), {}, "client 'a' do not lie together"),
    "missing": (lambda: table(x1=pa.array([None] + [1.0] * 50)), {}, "'x1' holds missing values"),
    "text": (lambda: table(x1=["word"] * 51), {}, "'x1' is of type string; expected numbers"),
    "no label": (table, {"label": "y"}, "has no column 'y' for label; expected one of client, x0"),
    "no feature": (table, {"features": ["x9"]}, "has no column 'x9'"),
    "uneven lists": (lambda: table(x1=pa.array([[1.0]] * 50 + [[1.0, 2.0]])), {"features": ["x1"]}, "have 1 to 2"),
    "no rows": (lambda: table().slice(0, 0), {}, "has no rows"),
}


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize("name", WRONG)
def test_what_a_file_may_not_hold_is_told(name, suffix, tmp_path):
    rows, options, message = WRONG[name]
    path = write(rows(), tmp_path / f"rows{suffix}")
    with pytest.raises(DataError, match=message):
        selffl.Federation.from_large_file(path, **options).train.subset(torch.arange(8))


def test_a_file_that_is_none_is_told(tmp_path):
    (tmp_path / "a.parquet").write_text("client,label\n")
    for name in ("a.parquet", "b.arrow"):
        with pytest.raises(DataError, match=r"cannot be read .*expected a Parquet file"):
            selffl.Federation.from_large_file(tmp_path / name)
