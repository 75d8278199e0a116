"""Data sets of Hugging Face: one with a column of clients, or one for each, as flwr-datasets hands them out."""

import numpy as np
import pytest
import torch
from PIL import Image

from selffl import ConfigError, DataError, Federation

datasets = pytest.importorskip("datasets")
NAMES = ["cat", "dog", "eel"]  # of which nobody has an eel


def pixels(mode="L", rows=12):
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (rows, 4, 5, *((3,) if mode == "RGB" else ()))).astype(np.uint8)


def pictures(mode="L", rows=12):
    """Image, label, site and number of each row."""
    kinds = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=NAMES),
            "site": datasets.Value("string"),
            "number": datasets.Value("int64"),
        }
    )
    images = [Image.fromarray(values) for values in pixels(mode, rows)]
    columns = {
        "image": images,
        "label": [0, 1] * (rows // 2),
        "site": list("abc") * (rows // 3),
        "number": list(range(rows)),
    }
    return datasets.Dataset.from_dict(columns, features=kinds)


def numbers(rows=12):
    return datasets.Dataset.from_dict(
        {
            "u": np.arange(rows) / 4,
            "v": list(range(rows)),
            "label": list("yn") * (rows // 2),
            "site": [3, 1] * (rows // 2),
        }
    )


class Federated:
    """What a FederatedDataset of flwr-datasets has, and is used here: partitions of its splits by number."""

    class Partitioner:
        num_partitions = 3

    def __init__(self, whole):
        self.whole, self.partitioners, self.asked = whole, {"train": self.Partitioner()}, []

    def load_partition(self, partition_id, split=None):
        self.asked.append((partition_id, split))
        return self.whole.shard(3, partition_id)


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_images_are_channels_first_from_0_to_1(mode):
    data = pictures(mode).shuffle(seed=3)  # which leaves the rows where they are, and keeps a list of their order
    fed = Federation.from_huggingface(data, client="site", features="image", test_fraction=0)
    given = pixels(mode)
    assert fed.clients == ["a", "b", "c"]
    assert fed.train.features.dtype == torch.float32
    assert fed.train.features.shape == (12, 3 if mode == "RGB" else 1, 4, 5)
    for position, first in enumerate(range(3)):
        own = given[first::3]  # of this client
        low, high = fed.train.offset[position : position + 2].tolist()
        found = fed.train.features[low:high].numpy()
        expected = (own.transpose(0, 3, 1, 2) if mode == "RGB" else own[:, None]) / 255
        np.testing.assert_allclose(
            sorted(found.reshape(4, -1).tolist()), sorted(expected.reshape(4, -1).tolist()), rtol=1e-6
        )


def test_names_of_classes_keep_their_order_and_number():
    fed = Federation.from_huggingface(pictures(), client="site", features=["image"])
    assert fed.classes == NAMES
    assert fed.num_classes == 3
    assert set(fed.train.labels.tolist()) == {0, 1}


def test_columns_of_numbers_go_beside_each_other():
    fed = Federation.from_huggingface(numbers(), client="site", test_fraction=0)
    assert fed.clients == [1, 3]
    assert fed.classes == ["n", "y"]
    assert fed.train.features.dtype == torch.float32
    made = fed.preparation
    rows = np.round(fed.train.features.double().numpy() * np.array(made.scale) + np.array(made.mean), 4)
    found = {(*x, fed.classes[y]) for x, y in zip(rows.tolist(), fed.train.labels.tolist(), strict=True)}
    assert found == {(k / 4, float(k), "yn"[k % 2]) for k in range(12)}


@pytest.mark.parametrize("dtype", [np.int64, np.float64])
def test_lists_keep_their_shape_and_whole_numbers_stay_whole(dtype):
    values = np.arange(6 * 2 * 3).reshape(6, 2, 3).astype(dtype)
    data = datasets.Dataset.from_dict({"x": values.tolist(), "label": [0, 1] * 3, "site": list("aab") * 2})
    fed = Federation.from_huggingface(data, client="site", test_fraction=0)
    assert fed.train.features.dtype == (torch.int64 if dtype == np.int64 else torch.float32)
    assert fed.train.features.shape == (6, 2, 3)
    assert sorted(fed.train.features.flatten(1).tolist()) == sorted(values.reshape(6, -1).tolist())


@pytest.mark.parametrize("kind", ["mapping", "sequence", "federated"])
def test_a_data_set_for_each_client(kind):
    whole = pictures()
    federated = Federated(whole)
    parts = [whole.shard(3, number) for number in range(3)]
    data = {"mapping": dict(zip("xyz", parts, strict=True)), "sequence": parts, "federated": federated}[kind]
    fed = Federation.from_huggingface(data, features="image", test_fraction=0.25, seed=5)
    assert fed.clients == (["x", "y", "z"] if kind == "mapping" else [0, 1, 2])
    assert fed.classes == NAMES
    owner = np.repeat([0, 1, 2], [len(part) for part in parts])
    x = np.concatenate([pixels()[part["number"]] for part in parts])[:, None].astype(np.float32) / 255
    y = np.concatenate([part["label"] for part in parts])
    expected = Federation.from_arrays(x, y, owner, 0.25, 5)
    for part, rows in expected.parts.items():
        for field in ("features", "labels", "offset"):
            assert torch.equal(getattr(fed.parts[part], field), getattr(rows, field))
    if kind == "federated":
        assert federated.asked == [(0, "train"), (1, "train"), (2, "train")]


def test_real_partitions_of_flwr_datasets():
    flwr_datasets = pytest.importorskip("flwr_datasets", reason="flwr-datasets is not installed")
    from flwr_datasets.partitioner import IidPartitioner

    partitioner = IidPartitioner(num_partitions=3)
    federated = flwr_datasets.FederatedDataset(dataset="unused", partitioners={"train": partitioner})
    federated._dataset, federated._dataset_prepared = datasets.DatasetDict({"train": pictures()}), True  # no network
    fed = Federation.from_huggingface(federated, features="image", test_fraction=0)
    assert fed.clients == [0, 1, 2]
    assert fed.train.num_examples.tolist() == [4, 4, 4]


def test_several_columns_of_lists_and_images_are_features_by_name():
    words, kept = [[row, row + 1, 0] for row in range(12)], [[1, 1, row % 2] for row in range(12)]
    data = pictures().add_column("words", words).add_column("kept", kept)
    fed = Federation.from_huggingface(data, "site", test_fraction=0)
    found = fed.train.features
    assert {name: (entry.dtype, tuple(entry.shape)) for name, entry in found.items()} == {
        "image": (torch.float32, (12, 1, 4, 5)),
        "kept": (torch.int64, (12, 3)),
        "number": (torch.int64, (12,)),
        "words": (torch.int64, (12, 3)),
    }
    alone = Federation.from_huggingface(data, "site", features="words", test_fraction=0)
    assert torch.equal(found["words"], alone.train.features)
    assert found["kept"].tolist() == [kept[row[0]] for row in found["words"].tolist()]
    each = [data.select(range(6)), data.select(range(6, 12))]
    parts = Federation.from_huggingface([part.remove_columns("site") for part in each], test_fraction=0)
    assert sorted(parts.train.features["words"].tolist()) == words


def refused(message, data, kind=DataError, **options):
    with pytest.raises(kind, match=message) as error:
        Federation.from_huggingface(data, **options)
    assert "\n" not in str(error.value)


def test_what_is_no_data_set_is_refused():
    whole = pictures()
    splits = datasets.DatasetDict({"train": whole, "test": whole})
    refused(r"data is a DatasetDict with the splits 'train', 'test'; expected one of them", splits, ConfigError)
    refused(
        "data is an IterableDataset; expected a Dataset. Load it without s", whole.to_iterable_dataset(), ConfigError
    )
    # Naming the column of clients does not make it clearer what is wrong.
    refused(r"data is a DatasetDict with the splits", splits, ConfigError, client="site")
    refused("data is an IterableDataset; expected", whole.to_iterable_dataset(), ConfigError, client="site")
    refused(r"data is a str; expected a datasets\.Dataset, .* Load it with datasets\.load", "mnist", ConfigError)
    refused("data is a ndarray; expected a datasets", np.zeros(3), ConfigError)
    refused("client is None, and data is a single data set with the columns image, label, site", whole, ConfigError)
    refused("client is 'site', but data is no single data set", [whole], ConfigError, client="site")
    refused("unknown partitioned split 'tain'; did you mean 'train'", Federated(whole), ConfigError, split="tain")
    refused("data holds no data sets; expected one for each client", [])
    refused("the data set of client 1 is a list; expected a datasets.Dataset", [whole, [1]], features="image")


def test_columns_that_cannot_be_features_are_refused():
    whole = pictures()
    refused("no column 'imgae' among: .*; did you mean 'image'", whole, client="site", features="imgae")
    text = numbers().add_column("text", ["words"] * 12)
    assert "text=words" in Federation.from_huggingface(text, client="site").preparation.inputs
    unlabelled = pictures()
    unlabelled = unlabelled.remove_columns("label").add_column("label", [-1] + [0] * 11)
    unlabelled = unlabelled.cast_column("label", datasets.ClassLabel(names=NAMES))
    refused("the data set, row 0: label is missing", unlabelled, client="site", features="image")
    dropped = Federation.from_huggingface(unlabelled, "site", features="image", missing="drop", test_fraction=0)
    assert len(dropped.train.labels) == 11
    whole_rows = Federation.from_huggingface(whole, "site", features="image", test_fraction=0)
    kept = {tuple(row) for row in whole_rows.train.features.flatten(1).tolist()}
    kept -= {tuple((pixels()[0].reshape(-1).astype(np.float32) / np.float32(255)).tolist())}
    assert {tuple(row) for row in dropped.train.features.flatten(1).tolist()} == kept
    mixed = whole.add_column("text", ["words"] * 12)
    refused("column 'text' is of type .*; expected numbers, .*or choose columns with features=", mixed, client="site")
    ragged = datasets.Dataset.from_dict({"x": [[1], [1, 2]], "label": [0, 1], "site": [0, 1]})
    refused(r"column 'x' is of type .*; expected numbers, and lists of one length", ragged, client="site")
    gap = datasets.Dataset.from_dict({"x": [[1.0], None], "label": [0, 1], "site": [0, 1]})
    refused(r"column 'x' is missing in 1 row\(s\), first in row 1", gap, client="site")
    sizes = datasets.Dataset.from_dict(
        {"image": [Image.new("L", (2, 2)), Image.new("L", (3, 2))], "label": [0, 1], "site": [0, 1]}
    )
    refused(r"image has the shape \(1, 2, 3\) in row 1; expected \(1, 2, 2\), as row 0", sizes, client="site")
    deep = datasets.Dataset.from_dict({"image": [Image.new("I;16", (2, 2))], "label": [0], "site": [0]})
    refused("image has the mode I;16 in row 0; expected 8 bits a channel", deep, client="site")
    undecoded = whole.cast_column("image", datasets.Image(decode=False))
    refused("image is a dict in row 0; expected an image", undecoded, client="site", features="image")


def test_partitions_that_differ_are_refused():
    whole = pictures()
    first = whole.remove_columns(["site", "number"])
    renamed = first.cast_column("label", datasets.ClassLabel(names=["cat", "dog", "fox"]))
    refused("the data set of client 1 has other names of classes than the first", [first, renamed])
    refused("the data set of client 1 has no rows; expected at least one", [first, first.select([])])
    other = whole.select_columns(["label", "number"])
    refused("the data set of client 'b' has the features number; expected image of", {"a": first, "b": other})
    words = numbers().remove_columns("site")
    counts = words.remove_columns("label").add_column("label", [0] * 12)
    refused(
        "the data set of client 1: column 'label' holds numbers, and words in the data set of client 0", [words, counts]
    )
