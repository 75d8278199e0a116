"""Features by name: rows of several tensors that are divided, moved, saved and told apart as one."""

import numpy as np
import pytest
import torch

from selffl import Federation
from selffl.data.named import NamedFeatures, join, row_kind, row_shape, row_size
from selffl.errors import ConfigError, DataError

ROWS = 20
CLIENT = ["anna", "ben"] * 10
LARGE = 2**60 + 1  # no floating-point type holds it


def entries():
    """Words, images and ages whose every number says which row it is of."""
    row = torch.arange(ROWS)
    return {
        "words": LARGE + torch.stack([row, row + 100], 1),
        "image": row.double().view(-1, 1, 1, 1).expand(-1, 1, 2, 3) / 7,
        "age": row.float().numpy(),
        "is_known": (row % 2 == 0).tolist(),
    }


def federation(**options):
    return Federation.from_arrays(entries(), torch.arange(ROWS) % 3, CLIENT, **options)


def test_each_entry_keeps_its_type_and_its_rows_stay_together():
    fed = federation(test_fraction=0.3, validation_fraction=0.2)
    rows = []
    for part in fed.parts.values():
        x = part.features
        assert isinstance(x, NamedFeatures)
        assert [x[name].dtype for name in ("words", "image", "age", "is_known")] == [
            torch.int64, torch.float64, torch.float32, torch.bool,
        ]  # fmt: skip
        row = x["words"][:, 0] - LARGE
        rows += row.tolist()
        assert torch.equal(x["words"][:, 1] - LARGE, row + 100)
        assert torch.equal(x["image"], (row.double() / 7).view(-1, 1, 1, 1).expand(-1, 1, 2, 3))
        assert torch.equal(x["age"], row.float())
        assert torch.equal(x["is_known"], row % 2 == 0)
        assert torch.equal(part.labels, row % 3)
        assert torch.equal(part.owner, row % 2)
    assert sorted(rows) == list(range(ROWS))
    # Which rows are held out does not depend on how many entries they have.
    single = Federation.from_arrays(entries()["age"], torch.arange(ROWS) % 3, CLIENT, 0.3, validation_fraction=0.2)
    assert torch.equal(fed.test.features["age"], single.test.features)


def test_the_order_in_which_entries_are_given_does_not_matter():
    turned = dict(reversed(entries().items()))
    other = Federation.from_arrays(turned, torch.arange(ROWS) % 3, CLIENT)
    assert other.fingerprint() == federation().fingerprint()


@pytest.mark.parametrize("name", list(entries()))
def test_the_fingerprint_sees_every_entry(name):
    changed = {key: np.array(torch.as_tensor(value).numpy()) for key, value in entries().items()}
    changed[name][3] = changed[name][4] if name != "is_known" else not changed[name][3]
    whole = {"y": torch.arange(ROWS) % 3, "client": CLIENT}
    assert Federation.from_arrays(changed, **whole).fingerprint() != federation().fingerprint()
    renamed = {key + "s" * (key == name): value for key, value in entries().items()}
    assert Federation.from_arrays(renamed, **whole).fingerprint() != federation().fingerprint()


def test_a_saved_federation_comes_back_to_the_bit(tmp_path):
    fed = federation(validation_fraction=0.2)
    fed.save(tmp_path / "fed.safetensors")
    again = Federation.load(tmp_path / "fed.safetensors")
    assert again.fingerprint() == fed.fingerprint()
    assert again.train.features["words"][:, 0].tolist() == fed.train.features["words"][:, 0].tolist()
    assert repr(again) == repr(fed)


def test_parts_of_a_federation():
    fed = federation(test_fraction=0)
    assert repr(fed).startswith(
        "Federation(2 clients, rows {'age': (), 'image': (1, 2, 3), 'is_known': (), 'words': (2,"
    )
    ben = fed.subset(["ben"]).train.features
    assert set(((ben["words"][:, 0] - LARGE) % 2).tolist()) == {1}
    assert len(ben) == 10
    moved = fed.to("cpu", torch.float16).train.features
    assert [entry.dtype for _, entry in moved.items()] == [torch.float16, torch.float16, torch.bool, torch.int64]
    assert torch.equal(moved["words"], fed.train.features["words"])
    assert len(fed.pool().train.features) == ROWS
    aside = fed.with_validation(0.2)
    assert (len(aside.train.features), len(aside.validation.features)) == (16, 4)
    older = fed.map_features(lambda x: {"age": x["age"] + 1, "words": x["words"]})
    assert torch.equal(older.train.features["age"], fed.train.features["age"] + 1)
    assert list(older.train.features.keys()) == ["age", "words"]
    assert torch.equal(fed.map_features(lambda x: x["age"]).train.features, fed.train.features["age"])


def test_rows_are_indexed_alike_in_every_entry():
    x = NamedFeatures({name: torch.as_tensor(value) for name, value in entries().items()})
    chosen = x[torch.tensor([3, 1])]
    assert chosen["age"].tolist() == [3.0, 1.0]
    assert len(x[2:5]) == 3
    assert x[None]["words"].shape == (1, ROWS, 2)
    assert [row["age"].item() for row in x] == list(range(ROWS))
    assert "age" in x
    assert "wage" not in x
    assert torch.equal(join([x[:4], x[4:]])["words"], x["words"])
    assert row_shape(x) == {"age": (), "image": (1, 2, 3), "is_known": (), "words": (2,)}
    assert row_size(x) == 1 + 6 + 1 + 2
    assert row_kind(x) == row_kind(x[:3])
    assert row_kind(x) != row_kind(NamedFeatures({**dict(x.items()), "age": x["words"]}))


class Items(torch.utils.data.Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, item):
        return self.items[item]


@pytest.mark.parametrize("label", [None, "label", "labels"])
def test_items_of_torch_data_sets_may_be_dictionaries(label):
    rows = [({"words": torch.tensor([row, LARGE]), "age": row / 2}, row % 3) for row in range(ROWS)]
    items = rows if label is None else [{**x, label: y} for x, y in rows]
    fed = Federation.from_dataset(Items(items), CLIENT, test_fraction=0)
    x = fed.train.features
    assert list(x.keys()) == ["age", "words"]
    assert x["words"].dtype == torch.int64
    assert torch.equal(x["words"][:, 0].float() / 2, x["age"])
    assert torch.equal(fed.train.labels, x["words"][:, 0] % 3)
    assert set(x["words"][:, 1].tolist()) == {LARGE}


def refused(message, x, kind=DataError, **options):
    with pytest.raises(kind, match=message) as error:
        Federation.from_arrays(x, [0, 1, 0], list("aab"), **options)
    assert "\n" not in str(error.value)


def test_dictionaries_that_are_no_rows_are_refused_in_a_line():
    words, age = torch.zeros(3, 2, dtype=torch.int64), [1.0, 2.0, 3.0]
    refused(r"^x\['words'\] has 3 rows and x\['age'\] 2; expected as many of each", {"words": words, "age": [1.0, 2.0]})
    refused(r"^x has 2 rows, y 3 and client 3; expected as many", {"words": words[:2], "age": age[:2]})
    refused(r"^x\['more'\] is a dictionary in turn; expected an array for each name", {"age": age, "more": {"a": age}})
    refused(r"^x is a dictionary without entries; expected one", {})
    refused(r"^x has an entry 3; expected names", {3: age})
    refused(r"^x\['age'\] holds NaN or infinity, first in row 1", {"words": words, "age": [1.0, np.nan, 2.0]})
    refused(r"^x\['who'\] is of type <U1 and shape \(3,\); expected numbers", {"who": ["a", "b", "c"]})
    refused(r"^x\['words'\] has rows of different lengths", {"words": [[1], [1, 2], [1]]})
    refused(
        r"^standardise is True, and x is a dictionary of age; expected one", {"age": age}, ConfigError, standardise=True
    )
    with pytest.raises(DataError, match=r"^y is a dictionary of 'a', 'b'; expected one label per row"):
        Federation.from_arrays({"age": age}, {"a": [0, 1, 0], "b": [0, 1, 0]}, list("aab"))
    with pytest.raises(DataError, match=r"^rows are a dictionary of age; expected one array"):
        _ = Federation.from_arrays({"age": age}, [0, 1, 0], list("aab")).train.array


def test_items_that_differ_are_refused_in_a_line():
    def of(*items):
        return Federation.from_dataset(Items(list(items)), list("ab"))

    one = {"words": torch.zeros(2), "age": 1.0}
    with pytest.raises(DataError, match=r"^item 1 has features of words; expected words, age, as item 0"):
        of((one, 0), ({"words": torch.zeros(2)}, 0))
    with pytest.raises(DataError, match=r"^item 1 has words of shape \(3,\); expected \(2,\), as item 0"):
        of((one, 0), ({**one, "words": torch.zeros(3)}, 0))
    with pytest.raises(
        DataError, match=r"dictionary of words, age; expected its label in one of the entries label or l"
    ):
        of(one, one)
