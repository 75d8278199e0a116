"""Validation rows, classes, clusters, strata; data sets of torch; moving, fingerprints, saving and loading."""

import hashlib
import json
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from selffl import Federation
from selffl.errors import ConfigError, DataError
from selffl.state.checkpoint import save_tensors


def numbered(sizes, classes=3, seed=0):
    """Rows whose feature is their number, with random classes, in random order of clients."""
    rng = np.random.default_rng(seed)
    client = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    return np.arange(len(client), dtype=np.float32)[:, None], rng.integers(0, classes, len(client)), client


def numbers(rows):
    return rows.features[:, 0].long().tolist()


def all_tensors(fed):
    parts = [fed.train, fed.test, *([fed.validation] if fed.validation is not None else [])]
    return [getattr(rows, name) for rows in parts for name in ("features", "labels", "offset")]


def assert_same(one, two):
    assert list(one.clients) == list(two.clients)
    assert [type(name) for name in one.clients] == [type(name) for name in two.clients]
    for first, second in zip(all_tensors(one), all_tensors(two), strict=True):
        assert first.dtype == second.dtype
        assert torch.equal(first, second)
    assert (one.cluster is None) == (two.cluster is None)
    assert one.cluster is None or torch.equal(one.cluster, two.cluster)
    assert one.source == two.source


# ---------------------------------------------------------------------------------------------------------- validation

SIZES = st.lists(st.integers(1, 20), min_size=1, max_size=8)
SHARE = st.floats(0, 1, exclude_max=True)


@settings(deadline=None, max_examples=60)
@given(sizes=SIZES, share=SHARE, seed=st.integers(0, 10**6))
def test_validation_rows_set_aside_later_are_training_rows_of_the_same_clients(sizes, share, seed):
    x, y, client = numbered(sizes, seed=seed % 5)
    whole = Federation.from_arrays(x, y, client, 0.3)
    fed = whole.with_validation(share, seed=seed)
    assert torch.equal(fed.test.features, whole.test.features)
    assert sorted(numbers(fed.train) + numbers(fed.validation)) == sorted(numbers(whole.train))
    for position, size in enumerate(whole.train.num_examples.tolist()):
        assert int(fed.validation.num_examples[position]) == min(int(np.rint(share * size)), size - 1)
        for rows in (fed.train, fed.validation):
            low, high = rows.offset[position : position + 2].tolist()
            assert (client[rows.features[low:high, 0].long().numpy()] == position).all()
    with pytest.raises(DataError, match=r"^the federation has validation rows already; expected none\."):
        fed.with_validation(0.1)


@settings(deadline=None, max_examples=60)
@given(sizes=SIZES, test=SHARE, validation=SHARE, seed=st.integers(0, 10**6), stratify=st.booleans())
def test_every_row_is_in_one_part_and_the_test_rows_do_not_depend_on_validation(
    sizes, test, validation, seed, stratify
):
    x, y, client = numbered(sizes, seed=seed % 5)
    fed = Federation.from_arrays(x, y, client, test, seed, validation_fraction=validation, stratify=stratify)
    without = Federation.from_arrays(x, y, client, test, seed, stratify=stratify)
    assert torch.equal(fed.test.features, without.test.features)
    assert torch.equal(fed.test.offset, without.test.offset)
    assert without.validation is None
    parts = [fed.train, fed.test, *([fed.validation] if validation else [])]
    assert sorted(number for rows in parts for number in numbers(rows)) == list(range(len(client)))
    assert set(numbers(fed.train)) <= set(numbers(without.train))
    for rows in parts:
        for position in range(len(sizes)):
            low, high = rows.offset[position : position + 2].tolist()
            held = rows.features[low:high, 0].long().numpy()
            assert (client[held] == position).all()
            assert rows.labels[low:high].tolist() == y[held].tolist()
    # Sizes, by plain counting: the shares of each client's rows, or of each client's rows of each class.
    groups = [(u, c) for u in range(len(sizes)) for c in (range(3) if stratify else [None])]
    for u, c in groups:
        rows = [i for i in range(len(client)) if client[i] == u and (c is None or y[i] == c)]
        if not rows:
            continue
        num_test = min(round(test * len(rows)), len(rows) - 1)
        num_validation = min(round(validation * len(rows)), len(rows) - 1 - num_test)
        assert len(set(rows) & set(numbers(fed.test))) == num_test
        if validation:
            assert len(set(rows) & set(numbers(fed.validation))) == num_validation


def test_validation_gives_way_to_test_and_both_to_training():
    x, y, client = numbered([4, 1, 2])
    fed = Federation.from_arrays(x, y, client, 0.5, validation_fraction=0.9)
    assert fed.test.num_examples.tolist() == [2, 0, 1]
    assert fed.validation.num_examples.tolist() == [1, 0, 0]
    assert fed.train.num_examples.tolist() == [1, 1, 1]
    assert fed.num_examples.tolist() == [4, 1, 2]


def test_plain_splits_are_what_they_always_were():
    """Pinned when there was neither validation nor strata."""
    x, y, client = np.arange(60.0).reshape(30, 2), np.arange(30) % 4, np.arange(30) % 7
    digest = hashlib.sha256()
    for tensor in all_tensors(Federation.from_arrays(x, y, client, 0.3, 5)):
        digest.update(tensor.numpy().tobytes())
    assert digest.hexdigest() == "9b3e34c4ccf11c9769346c6a54cd4b62f487ca475dc5ddbaa57fc28a8619fa50"


@pytest.mark.parametrize("share", [-0.1, 1, float("nan")])
def test_a_validation_share_that_leaves_nothing_is_refused(share):
    with pytest.raises(ConfigError, match=r"^validation_fraction is .*; expected a share from 0 up to"):
        Federation.from_arrays(*numbered([5]), validation_fraction=share)


def test_strata_want_classes():
    x, y, client = numbered([5])
    with pytest.raises(ConfigError, match=r"^stratify wants classes; y is torch.float64 of shape \(5,\)"):
        Federation.from_arrays(x, y.astype(float), client, stratify=True)
    with pytest.raises(ConfigError, match="stratify wants classes"):
        Federation.from_arrays(x, y[:, None], client, stratify=True)


def test_rows_of_a_stratified_client_are_not_sorted_by_class():
    x, y, client = numbered([200], classes=2)
    labels = Federation.from_arrays(x, y, client, 0.25, stratify=True).train.labels
    assert 40 < int((labels.diff() != 0).sum()) < 110  # half of 150 neighbours differ


# ------------------------------------------------------------------------------------------------------------- classes


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int32, np.int64, bool])
def test_whole_labels_become_class_numbers(dtype):
    x, y, client = numbered([6, 9], classes=2)
    fed = Federation.from_arrays(x, y.astype(dtype), client, 0.3)
    assert fed.train.labels.dtype == fed.test.labels.dtype == torch.int64
    assert fed.num_classes == 2
    assert_same(fed, Federation.from_arrays(x, torch.from_numpy(y.astype(dtype)), client, 0.3))
    assert_same(fed, Federation.from_arrays(x, y, client, 0.3))


def test_the_number_of_classes_counts_all_parts():
    x, client = np.zeros((4, 1)), [0, 0, 0, 0]
    fed = Federation.from_arrays(x, [7, 1, 2, 3], client, 0.25, validation_fraction=0.25)
    assert fed.num_classes == 8
    for seed in range(8):  # the largest label falls into every part at some seed
        assert Federation.from_arrays(x, [7, 1, 2, 3], client, 0.25, seed, validation_fraction=0.25).num_classes == 8


def test_targets_have_no_classes():
    x, y, client = numbered([6, 9])
    fed = Federation.from_arrays(x, y - 1.5, client)
    assert fed.num_classes is None
    with pytest.raises(DataError, match=r"^labels are torch.float64 of shape \(13,\); expected one class number"):
        fed.class_counts()


def test_a_negative_class_is_refused_with_its_row():
    x, y, client = numbered([6, 9])
    y[[4, 9]] = -2, -7
    with pytest.raises(DataError, match=r"^y is -2 in row 4; expected classes from 0 up, or floating-point targets\.$"):
        Federation.from_arrays(x, y, client)


def test_a_client_with_a_single_class_is_a_client():
    fed = Federation.from_arrays(np.zeros((6, 1)), [2, 2, 2, 0, 1, 0], [0, 0, 0, 1, 1, 1], 1 / 3)
    assert fed.class_counts().tolist() == [[0, 0, 3], [2, 1, 0]]


@settings(deadline=None, max_examples=30)
@given(sizes=SIZES, seed=st.integers(0, 10**6))
def test_class_counts_count_every_row(sizes, seed):
    x, y, client = numbered(sizes, classes=4, seed=seed)
    counts = Federation.from_arrays(x, y, client, 0.3, seed, validation_fraction=0.2).class_counts()
    expected = [[sum((client == u) & (y == c)) for c in range(y.max() + 1)] for u in range(len(sizes))]
    assert counts.tolist() == expected
    assert counts.dtype == torch.int64


# ------------------------------------------------------------------------------------------------------------ clusters


def test_clusters_are_numbered_by_sorted_label():
    x, y, client = numbered([2, 3, 2, 4])
    of_client = np.array(["north", "east", "north", "south"])
    fed = Federation.from_arrays(x, y, client, cluster=of_client[client])
    assert fed.cluster.tolist() == [1, 0, 1, 2]
    assert fed.cluster.dtype == torch.int64
    assert Federation.from_arrays(x, y, client).cluster is None


def test_a_client_in_two_clusters_is_refused():
    x, y, client = numbered([2, 3, 2])
    cluster = np.array(list("aab"))[client]
    cluster[np.flatnonzero(client == 1)[1]] = "b"
    with pytest.raises(DataError, match=r"^client 1 is in the clusters 'a', 'b'; expected one cluster"):
        Federation.from_arrays(x, y, client, cluster=cluster)
    with pytest.raises(DataError, match=r"^cluster has shape \(2,\); expected one label for each of 7 rows"):
        Federation.from_arrays(x, y, client, cluster=[0, 1])
    with pytest.raises(DataError, match=r"^the cluster column holds NaN"):
        Federation.from_arrays(x, y, client, cluster=np.full(7, np.nan))


# --------------------------------------------------------------------------------------------------- torch's data sets


class Pairs(Dataset):
    """Items made one by one, with labels of Python's own kind."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, item):
        return self.x[item], int(self.y[item])


def test_a_torch_data_set_is_its_rows():
    x, y, client = numbered([5, 8, 3])
    expected = Federation.from_arrays(x, y, client, 0.3, 2, validation_fraction=0.2, stratify=True)
    fast = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    for dataset in (fast, Pairs(x, y), Pairs(torch.from_numpy(x), y), torch.utils.data.Subset(fast, range(16))):
        found = Federation.from_dataset(
            dataset, client, test_fraction=0.3, seed=2, validation_fraction=0.2, stratify=True
        )
        assert_same(found, expected)


def test_the_fast_path_looks_at_no_item(monkeypatch):
    x, y, client = numbered([5, 8])
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda *_: pytest.fail("an item was read"))
    Federation.from_dataset(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), client)


def test_images_and_targets_of_a_torch_data_set_keep_their_shape_and_type():
    x = torch.arange(24, dtype=torch.uint8).view(2, 3, 2, 2)
    fed = Federation.from_dataset(Pairs(x, [0, 1]), ["a", "a"], test_fraction=0.5)
    assert fed.train.features.shape == (1, 3, 2, 2)
    assert fed.train.features.dtype == torch.uint8
    targets = TensorDataset(x.float(), x.float(), x)  # three tensors are no pairs
    with pytest.raises(
        DataError, match=r"^item 0 of TensorDataset is no pair of numbers; expected \(features, label\)"
    ):
        Federation.from_dataset(targets, ["a", "a"])


def test_a_data_set_that_is_no_list_of_pairs_is_refused():
    x, y, client = numbered([5])

    class Stream(IterableDataset):
        def __iter__(self):
            yield 1

    with pytest.raises(DataError, match=r"^Stream has no length; expected a data set of numbered items"):
        Federation.from_dataset(Stream(), client)
    with pytest.raises(DataError, match=r"^the data set has 5 items and client 4; expected as many"):
        Federation.from_dataset(Pairs(x, y), client[:4])
    with pytest.raises(DataError, match=r"^client has shape \(\); expected one id per row"):
        Federation.from_dataset(Pairs(x, y), 7)
    with pytest.raises(DataError, match=r"^item 0 of Pairs is no pair of numbers"):
        Federation.from_dataset(Pairs(["a", "b"], [0, 1]), [0, 0])
    with pytest.raises(DataError, match=r"^item 1 has features of shape \(3,\); expected \(2,\), as item 0"):
        Federation.from_dataset(Pairs([[1, 2], [1, 2, 3]], [0, 1]), [0, 0])
    with pytest.raises(DataError, match=r"^there are no rows"):
        Federation.from_dataset(Pairs([], []), [])


# ------------------------------------------------------------------------------------ moving, fingerprints, saving


def rich_federation(ids="abc"):
    x, y, client = numbered([5, 8, 3])
    names = np.array(list(ids))[client]
    return Federation.from_arrays(x, y, names, 0.3, validation_fraction=0.2, cluster=client % 2)


def test_a_federation_moves_whole():
    fed = rich_federation().to("meta")
    assert all(tensor.device.type == "meta" for tensor in [*all_tensors(fed), fed.cluster])
    assert_same(rich_federation().to("cpu"), rich_federation())


def test_features_are_mapped_in_every_part():
    fed = rich_federation()
    found = fed.map_features(lambda x: 2 * x)
    for part in ("train", "test", "validation"):
        assert torch.equal(getattr(found, part).features, 2 * getattr(fed, part).features)
        assert torch.equal(getattr(found, part).labels, getattr(fed, part).labels)
    assert torch.equal(found.cluster, fed.cluster)


def test_the_fingerprint_knows_every_part():
    fed = rich_federation()
    assert fed.fingerprint() == rich_federation().fingerprint()
    assert len(bytes.fromhex(fed.fingerprint())) == 32
    seen = {fed.fingerprint(), rich_federation("abd").fingerprint(), rich_federation([0, 1, 2]).fingerprint()}
    seen.add(replace(fed, cluster=None).fingerprint())
    seen.add(replace(fed, cluster=1 - fed.cluster).fingerprint())
    seen.add(replace(fed, validation=None).fingerprint())
    seen.add(replace(fed, train=fed.test, test=fed.train).fingerprint())
    for part in ("train", "test", "validation"):
        rows = getattr(fed, part)
        changed = rows.features.clone()
        changed[-1, 0] += 1
        seen.add(replace(fed, **{part: replace(rows, features=changed)}).fingerprint())
        seen.add(replace(fed, **{part: replace(rows, features=rows.features.double())}).fingerprint())
        seen.add(replace(fed, **{part: replace(rows, labels=1 - rows.labels)}).fingerprint())
        seen.add(replace(fed, **{part: replace(rows, offset=rows.offset.flip(0))}).fingerprint())
    assert len(seen) == 7 + 12
    assert replace(fed, source={"name": "x"}).fingerprint() == fed.fingerprint()


def test_the_fingerprint_does_not_depend_on_how_tensors_lie_in_memory():
    fed = rich_federation()
    wide = torch.zeros(len(fed.train.features), 2)
    wide[:, :1] = fed.train.features
    assert replace(fed, train=replace(fed.train, features=wide[:, :1])).fingerprint() == fed.fingerprint()


def test_the_fingerprint_knows_types_that_share_their_bytes():
    x, y, client = np.zeros((4, 2), np.float32), [0, 1, 0, 1], [0, 0, 1, 1]
    assert (
        Federation.from_arrays(x, y, client).fingerprint()
        != Federation.from_arrays(x.astype(np.int32), y, client).fingerprint()
    )


@pytest.mark.parametrize("ids", ["abc", [3, 1, 2], [0.5, 1.0, 2.5], ["ä", "b 1", "$"]])
def test_what_is_saved_is_loaded(tmp_path, ids):
    fed = replace(rich_federation(ids), source={"name": "mine", "seed": 0})
    fed.save(tmp_path / "fed.safetensors")
    found = Federation.load(str(tmp_path / "fed.safetensors"))
    assert_same(found, fed)
    assert found.fingerprint() == fed.fingerprint()
    assert [path.name for path in tmp_path.iterdir()] == ["fed.safetensors"]  # nothing is left beside it


def test_tensors_in_one_piece_of_memory_are_saved(tmp_path):
    fed = rich_federation()
    both = replace(fed, validation=fed.test)
    both.save(tmp_path / "a")
    assert_same(Federation.load(tmp_path / "a"), both)
    plain = Federation.from_arrays(*numbered([3, 4]), test_fraction=0)
    plain.save(tmp_path / "b")
    assert_same(Federation.load(tmp_path / "b"), plain)


def test_ids_that_the_file_cannot_give_back_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"^client \(1, 2\) is a tuple; expected strings or numbers"):
        replace(rich_federation(), clients=["a", (1, 2), "c"]).save(tmp_path / "a")
    with pytest.raises(DataError, match=r"cannot be written \(Object of type set is not JSON"):
        replace(rich_federation(), source={"name": {1}}).save(tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(DataError, match=r"cannot be written \(.*\); expected a file in a folder") as error:
        rich_federation().save(tmp_path / "no" / "folder")
    assert "\n" not in str(error.value)
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"folder cannot be written"):
        rich_federation().save(tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]  # no half-written file is left


def safetensors_bytes(header, body=b""):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"PK\x03\x04 something else altogether", "cannot be read"),
        (safetensors_bytes({}), r"cannot be read \(was not written by selffl\)"),
        (safetensors_bytes({"__metadata__": {"format": "pt"}}), "was not written by selffl"),
        (safetensors_bytes({"__metadata__": {"format": "selffl", "version": "1"}}), "checksum differs"),
    ],
)
def test_a_foreign_file_is_refused_in_one_line(tmp_path, content, message):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        Federation.load(tmp_path / "a")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({}, "calls itself None, not 'federation'"),
        ({"kind": "run"}, "calls itself 'run'"),
        ({"kind": "federation"}, "cannot be read"),
        ({"kind": "federation", "clients": [], "source": None}, "lacks training"),
    ],
)
def test_a_file_of_ours_that_is_no_federation_is_refused(tmp_path, about, message):
    save_tensors(tmp_path / "a", {"other": torch.zeros(1)}, about)
    with pytest.raises(DataError, match=message):
        Federation.load(tmp_path / "a")


def test_a_changed_number_is_noticed(tmp_path):
    rich_federation().save(tmp_path / "a")
    content = bytearray((tmp_path / "a").read_bytes())
    content[-3] ^= 1
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(DataError, match="checksum"):
        Federation.load(tmp_path / "a")


@pytest.mark.parametrize("keep", [0.05, 0.5, 0.99])
def test_a_cut_file_is_refused(tmp_path, keep):
    rich_federation().save(tmp_path / "a")
    content = (tmp_path / "a").read_bytes()
    (tmp_path / "a").write_bytes(content[: int(keep * len(content))])
    with pytest.raises(DataError, match=r"a cannot be read \(.*\); expected a file that Federation.save has written"):
        Federation.load(tmp_path / "a")


def test_a_file_whose_parts_do_not_fit_is_refused(tmp_path):
    fed = rich_federation()
    replace(fed, clients=["a", "b"]).save(tmp_path / "a")
    with pytest.raises(DataError, match="rows and offsets of train do not fit 2 clients"):
        Federation.load(tmp_path / "a")
    replace(fed, test=replace(fed.test, labels=fed.test.labels[1:])).save(tmp_path / "a")
    with pytest.raises(DataError, match="rows and offsets of test do not fit 3 clients"):
        Federation.load(tmp_path / "a")
    with pytest.raises(DataError, match="does not exist or is not a file"):
        Federation.load(tmp_path / "b")


def test_clusters_can_be_given_later_and_the_source_is_forgotten():
    """The call that made the rows would make them without the clusters."""
    fed = replace(rich_federation(), source={"name": "mine"})
    found = fed.with_clusters([1, 0, 1])
    assert found.cluster.tolist() == [1, 0, 1]
    assert found.source is None
    for wrong in ([0, 1], [0, 1, -1], [0.0, 1.0, 2.0]):
        with pytest.raises(DataError, match="expected a whole number, 0 or more, for each of 3 clients"):
            fed.with_clusters(wrong)


# --------------------------------------------------------------------------------------------------------- some clients


def test_some_clients_keep_their_rows_in_the_order_asked_for():
    x, y, client = numbered([4, 2, 7, 3])
    fed = Federation.from_arrays(x, y, client, 0.3, validation_fraction=0.2, cluster=client % 2)
    some = fed.subset([3, 0])
    assert some.clients == [3, 0]
    assert some.cluster.tolist() == [1, 0]
    for mine, theirs in zip(some.parts.values(), fed.parts.values(), strict=True):
        groups = [numbers(theirs)[low:high] for low, high in zip(theirs.offset, theirs.offset[1:], strict=False)]
        assert numbers(mine) == groups[3] + groups[0]
        assert mine.offset.tolist() == [0, len(groups[3]), len(groups[3]) + len(groups[0])]
        assert [y[row] for row in numbers(mine)] == mine.labels.tolist()
    assert_same(fed.subset(fed.clients), fed)


def test_some_clients_of_a_named_data_set_are_no_longer_that_data_set():
    fed = replace(Federation.from_arrays(*numbered([4, 2])), source={"name": "digits"}, classes=["a", "b", "c"])
    assert fed.subset([1]).source is None
    assert fed.subset([1]).classes == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("clients", "reason"), [([], "hold no client"), ([0, 9], "hold 9, which is none of 2 clients")]
)
def test_clients_that_are_not_there_cannot_be_kept(clients, reason):
    fed = Federation.from_arrays(*numbered([4, 2]))
    with pytest.raises(DataError, match=reason):
        fed.subset(clients)
