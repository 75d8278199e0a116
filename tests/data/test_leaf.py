"""LEAF's folders: rows and split as the files have them, bit by bit, and one line for what is wrong."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import selffl
from selffl import Federation
from selffl.errors import ConfigError, DataError


def user_rows(sizes=(5, 3, 8), shape=(4,), seed=0):
    """Features and classes of made-up users, as Python's own numbers, in the order in which LEAF lists them."""
    rng = np.random.default_rng(seed)
    return {
        f"f{9 - number}_{number:02}": {
            "x": rng.random((size, *shape)).tolist(),
            "y": rng.integers(0, 3, size).tolist(),
        }
        for number, size in enumerate(sizes)
    }


def write(path, user_data, **other):
    """A file as LEAF writes it: json.dump of lists, with the users in one more list."""
    path.parent.mkdir(parents=True, exist_ok=True)
    users = other.pop("users", list(user_data))
    counts = other.pop("num_samples", [len(user_data[user]["y"]) for user in users if user in user_data])
    everything = {"users": users, "num_samples": counts, "user_data": user_data, **other}
    path.write_text(json.dumps(everything), encoding="utf-8")
    return path


@pytest.fixture
def split(tmp_path):
    """A folder with train and test, several files in the first, and the rows in them."""
    train, test = user_rows(), user_rows((2, 2, 1), seed=1)
    names = list(train)
    write(tmp_path / "train" / "all_data_0_train_9.json", {name: train[name] for name in names[:2]})
    write(tmp_path / "train" / "all_data_1_train_9.json", {name: train[name] for name in names[2:]})
    write(tmp_path / "test" / "all_data_0_test_9.json", test)
    (tmp_path / "train" / "notes.txt").write_text("no rows")
    return tmp_path, train, test


def of_user(rows, place):
    begin, end = rows.offset[place : place + 2].tolist()
    return rows.features[begin:end], rows.labels[begin:end]


def test_the_split_of_the_files_is_kept_bit_by_bit(split):
    folder, train, test = split
    found = Federation.from_leaf(str(folder))
    assert found.clients == sorted(train)
    assert found.source is None
    assert found.classes is None
    assert found.validation is None
    for part, expected in ((found.train, train), (found.test, test)):
        assert part.features.dtype == torch.float32
        assert part.labels.dtype == torch.int64
        for place, user in enumerate(found.clients):
            x, y = of_user(part, place)
            assert torch.equal(x, torch.tensor(expected[user]["x"], dtype=torch.float32))
            assert y.tolist() == expected[user]["y"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_files_without_a_split_are_split_as_arrays_are(tmp_path, kind):
    every = user_rows((6, 4, 9))
    names = list(every)
    if kind == "file":
        path = write(tmp_path / "all_data.json", every)
    else:
        path = tmp_path / "all_data"
        for number, name in enumerate(names):
            write(path / f"all_data_{number}.json", {name: every[name]})
    found = Federation.from_leaf(path, test_fraction=0.3, seed=4, validation_fraction=0.2)
    client = [name for name in sorted(every) for _ in every[name]["y"]]
    x = np.concatenate([every[name]["x"] for name in sorted(every)]).astype(np.float32)
    y = np.concatenate([every[name]["y"] for name in sorted(every)])
    expected = Federation.from_arrays(x, y, client, 0.3, 4, validation_fraction=0.2)
    assert found.fingerprint() == expected.fingerprint()
    plain = Federation.from_leaf(path)
    assert plain.fingerprint() == Federation.from_arrays(x, y, client).fingerprint()


def test_validation_rows_are_taken_from_the_training_rows(split):
    folder, train, _ = split
    whole = Federation.from_leaf(folder)
    found = Federation.from_leaf(folder, validation_fraction=0.4, seed=3)
    assert torch.equal(found.test.features, whole.test.features)
    assert found.validation.num_examples.tolist() == [round(0.4 * len(train[name]["y"])) for name in found.clients]
    for place in range(3):
        kept, _ = of_user(found.train, place)
        aside, _ = of_user(found.validation, place)
        every = of_user(whole.train, place)[0].tolist()
        assert sorted(kept.tolist() + aside.tolist()) == sorted(every)
        assert [every.index(row) for row in kept.tolist()] == sorted(every.index(row) for row in kept.tolist())
    again = Federation.from_leaf(folder, validation_fraction=0.4, seed=3)
    other = Federation.from_leaf(folder, validation_fraction=0.4, seed=4)
    assert found.fingerprint() == again.fingerprint() != other.fingerprint()


def test_a_validation_folder_is_kept_too(split):
    folder, _, _ = split
    aside = user_rows((1, 2, 1), seed=5)
    write(folder / "val" / "reddit_0_val.json", aside)
    found = Federation.from_leaf(folder)
    assert found.validation.labels.tolist() == [label for name in found.clients for label in aside[name]["y"]]
    with pytest.raises(ConfigError, match=r"validation_fraction is 0.1, and the rows have a validation part"):
        Federation.from_leaf(folder, validation_fraction=0.1)


def test_users_whom_leaf_left_without_rows_do_not_count(split):
    folder, train, _ = split
    one = next(iter(train))
    empty = {"x": [], "y": []}
    write(folder / "train" / "all_data_2.json", {"few": empty}, users=[], num_samples=[])  # too few to split
    write(folder / "test" / "all_data_2.json", {"few": empty}, users=["few"], num_samples=[0])
    (folder / "test" / "all_data_0_test_9.json").unlink()
    write(folder / "test" / "all_data_0_test_9.json", {one: user_rows(seed=2)[one]})
    found = Federation.from_leaf(folder)
    assert found.clients == sorted(train)
    assert found.test.num_examples.tolist() == [5 if name == one else 0 for name in found.clients]


def test_rows_of_any_shape_and_whole_numbers_stay_as_they_are(tmp_path):
    images = {"a": {"x": np.arange(24).reshape(2, 3, 2, 2).tolist(), "y": [True, False]}}
    found = Federation.from_leaf(write(tmp_path / "a.json", images), test_fraction=0)
    assert found.train.features.dtype == torch.int64
    assert found.train.features.shape == (2, 3, 2, 2)
    assert sorted(found.train.labels.tolist()) == [0, 1]
    images["b"] = {"x": (np.arange(12).reshape(1, 3, 2, 2) / 2).tolist(), "y": [0]}
    found = Federation.from_leaf(write(tmp_path / "a.json", images), test_fraction=0)
    assert found.train.features.dtype == torch.float32  # where one user's are not whole


def test_names_of_classes_are_numbered_in_sorted_order_over_all_files(tmp_path):
    train = {"u": {"x": [[1.0], [2.0]], "y": ["t", "h"]}, "v": {"x": [[3.0]], "y": ["é"]}}
    write(tmp_path / "train" / "a.json", train)
    write(tmp_path / "test" / "a.json", {"u": {"x": [[4.0]], "y": ["a"]}})
    found = Federation.from_leaf(tmp_path)
    assert found.classes == ["a", "h", "t", "é"]
    assert found.train.labels.tolist() == [2, 1, 3]
    assert found.test.labels.tolist() == [0]
    again = Federation.from_leaf(tmp_path / "test", test_fraction=0, classes=["h", "a", "t", "é"])
    assert (again.train.labels.tolist(), again.num_classes) == ([1], 4)
    with pytest.raises(DataError, match=r"a.json: user 'v': unknown class 'é'; expected one of: a, h, t"):
        Federation.from_leaf(tmp_path, classes=list("aht"))
    with pytest.raises(ConfigError, match="classes holds a name twice"):
        Federation.from_leaf(tmp_path, classes=list("ahtéa"))
    with pytest.raises(DataError, match="y holds names of classes; expected numbers, for labels is 'values'"):
        Federation.from_leaf(tmp_path, labels="values")


def test_what_a_decimal_point_means_has_to_be_said(tmp_path):
    rows = user_rows((4, 4))
    for record in rows.values():
        record["y"] = [float(label) for label in record["y"]]  # as FedProx writes MNIST
    path = write(tmp_path / "mnist.json", rows)
    with pytest.raises(DataError, match=r"user 'f9_00'.*decimal point.*labels='classes', or labels='values'"):
        Federation.from_leaf(path)
    classes = Federation.from_leaf(path, labels="classes")
    values = Federation.from_leaf(path, labels="values")
    assert (classes.train.labels.dtype, values.train.labels.dtype) == (torch.int64, torch.float32)
    assert torch.equal(classes.train.labels, values.train.labels.long())
    rows["f8_01"]["y"][2] = 0.5
    path = write(tmp_path / "mnist.json", rows)
    assert Federation.from_leaf(path).train.labels.dtype == torch.float32
    with pytest.raises(DataError, match=r"user 'f8_01': y is 0.5 in row 2; expected classes"):
        Federation.from_leaf(path, labels="classes")
    with pytest.raises(ConfigError, match="unknown kind of labels 'class'; did you mean 'classes'"):
        Federation.from_leaf(path, labels="class")
    whole = write(tmp_path / "whole.json", user_rows())
    assert Federation.from_leaf(whole, labels="values").train.labels.dtype == torch.float32


TEXTS = {"romeo": {"x": ["abc", "bca"], "y": ["a", "b"]}, "juliet": {"x": ["cab", "aaa"], "y": ["b", "b"]}}


def test_text_is_read_by_a_function_of_the_user_alone(tmp_path):
    path = write(tmp_path / "shakespeare.json", TEXTS)
    advice = r"user 'romeo': x holds text; expected numbers. Pass encode= to Federation.from_leaf: a function"
    with pytest.raises(DataError, match=advice):
        Federation.from_leaf(path)
    seen = []

    def letters(texts):
        seen.append(texts)
        return [[ord(letter) - ord("a") for letter in text] for text in texts]

    found = Federation.from_leaf(path, encode=letters, test_fraction=0)
    assert seen == [TEXTS["romeo"]["x"], TEXTS["juliet"]["x"]]
    assert found.train.features.dtype == torch.int64
    assert sorted(found.train.features.tolist()) == [[0, 0, 0], [0, 1, 2], [1, 2, 0], [2, 0, 1]]
    assert found.classes == ["a", "b"]
    tweets = {"me": {"x": [["1", "Mon", "NO_QUERY", "me", "hello"], ["2", "Tue", "NO_QUERY", "me", "no"]], "y": [1, 0]}}
    path = write(tmp_path / "sent140.json", tweets)
    with pytest.raises(DataError, match="user 'me': x holds text"):
        Federation.from_leaf(path)
    found = Federation.from_leaf(path, encode=lambda rows: torch.tensor([[len(row[4]) / 2] for row in rows]))
    assert found.train.features.dtype == torch.float32
    assert sorted(found.train.features.flatten().tolist()) == [1.0, 2.5]


@pytest.mark.parametrize(
    ("encode", "said"),
    [
        (lambda texts: [[1.0]], r"encode returned float64 of shape \(1, 1\) for 2 rows; expected numbers, a row each"),
        (lambda texts: texts, r"encode returned <U3 of shape \(2,\) for 2 rows"),
    ],
)
def test_what_encode_returns_is_checked(tmp_path, encode, said):
    with pytest.raises(DataError, match=f"shakespeare.json: user 'romeo': {said}"):
        Federation.from_leaf(write(tmp_path / "shakespeare.json", TEXTS), encode=encode)


def test_hierarchies_are_clusters_on_request(split):
    folder, train, test = split
    names = list(train)
    plays = dict(zip(names, ("Hamlet", "Lear", "Hamlet"), strict=True))
    for path in (folder / "train").glob("*.json"):
        path.unlink()
    write(folder / "train" / "a.json", train, hierarchies=[plays[name] for name in names])
    write(folder / "test" / "all_data_0_test_9.json", test, hierarchies=[plays[name] for name in names])
    assert Federation.from_leaf(folder).cluster is None
    found = Federation.from_leaf(folder, cluster=True)
    assert found.cluster.tolist() == [0 if plays[name] == "Hamlet" else 1 for name in found.clients]
    alone = Federation.from_leaf(folder / "train", cluster=True)
    assert alone.cluster.tolist() == found.cluster.tolist()
    # LEAF's split leaves users out, but not their hierarchies.
    write(folder / "train" / "a.json", train, hierarchies=["Macbeth", *plays.values()])
    with pytest.raises(DataError, match=r"a.json: user 'f9_00' has no hierarchy that can be told"):
        Federation.from_leaf(folder, cluster=True)
    write(folder / "train" / "a.json", train, hierarchies=["Hamlet", "Hamlet", "Hamlet"])
    with pytest.raises(DataError, match=r"user 'f8_01': the hierarchy is 'Lear', and 'Hamlet' in another part"):
        Federation.from_leaf(folder, cluster=True)
    write(folder / "train" / "a.json", train, hierarchies=[["Hamlet", "Denmark"]] * 3)
    with pytest.raises(DataError, match=r"user 'f9_00': the hierarchy is \['Hamlet', 'Denmark'\]; expected text"):
        Federation.from_leaf(folder, cluster=True)


def test_a_split_by_user_is_recognised(tmp_path):
    rows = user_rows()
    one, two, three = rows
    write(tmp_path / "train" / "a.json", {one: rows[one], two: rows[two]})
    write(tmp_path / "test" / "a.json", {three: rows[three]})
    with pytest.raises(DataError, match=r"share no user, as LEAF's split by user leaves them.*Run\.welcome"):
        Federation.from_leaf(tmp_path)
    fed = Federation.from_leaf(tmp_path / "train", test_fraction=0.2)
    run = selffl.train(nn.Linear(4, 3), fed, "fedavg", rounds=2, learning_rate=0.1, seed=0)
    newcomer = run.welcome(Federation.from_leaf(tmp_path / "test").subset([three]))  # what the message says to do
    assert newcomer(torch.zeros(1, 4)).shape == (1, 3)
    write(tmp_path / "test" / "a.json", {three: rows[three], one: rows[one]})
    with pytest.raises(DataError, match=rf"a.json: user '{three}' has no rows in .*train; expected training rows"):
        Federation.from_leaf(tmp_path)


def test_a_share_of_test_rows_is_refused_where_rows_are_split(split):
    with pytest.raises(ConfigError, match=r"test_fraction is 0.2, and .* is split into train and test"):
        Federation.from_leaf(split[0], test_fraction=0.2)
    with pytest.raises(ConfigError, match=r"validation_fraction is 1.5"):
        Federation.from_leaf(split[0], validation_fraction=1.5)
    with pytest.raises(ConfigError, match="seed is -1"):
        Federation.from_leaf(split[0], seed=-1)


GOOD = {"users": ["a", "b"], "num_samples": [2, 1], "user_data": {
    "a": {"x": [[1.0], [2.0]], "y": [0, 1]}, "b": {"x": [[3.0]], "y": [1]},
}}  # fmt: skip


def changed(**keys):
    return json.dumps({**GOOD, **keys})


def with_user(**keys):
    return changed(user_data={"a": GOOD["user_data"]["a"], "b": {**GOOD["user_data"]["b"], **keys}})


MALFORMED = {
    "cut off": (json.dumps(GOOD)[:60], "data.json cannot be read (Unterminated string"),
    "empty": ("", "data.json cannot be read (Expecting value"),
    "not UTF-8": (b'{"users": ["\xff"]}', "data.json cannot be read ('utf-8' codec"),
    "too deep": ("[" * 100_000, "data.json cannot be read ("),
    "too many digits": ('{"users": [' + "1" * 5000 + "]}", "data.json cannot be read (Exceeds the limit"),
    "a list": ("[1, 2]", "data.json holds a list; expected LEAF's JSON with the keys users, num_samples, user_data"),
    "other keys": ('{"clients": []}', "data.json has no key 'users' among: clients; expected LEAF's JSON"),
    "no keys": ("{}", "data.json has no key 'users' among: none"),
    "no counts": (json.dumps({key: GOOD[key] for key in ("users", "user_data")}), "has no key 'num_samples' among"),
    "users is no list": (changed(users="ab"), "data.json: users is a str; expected a list"),
    "rows in a list": (changed(user_data=[]), "data.json: user_data is a list; expected a dict"),
    "odd user": (changed(users=["a", None]), "data.json: users holds None; expected text or whole numbers"),
    "fewer counts": (changed(num_samples=[2]), "data.json: 2 users and 1 num_samples; expected as many"),
    "listed twice": (changed(users=["a", "a"]), "data.json: user 'a' is listed twice; expected every user once"),
    "not listed": (changed(users=["a"], num_samples=[2]), "data.json: user 'b' has rows but is not listed in users"),
    "lacking": (changed(user_data={"a": GOOD["user_data"]["a"]}), "user 'b' has no lists x and y in user_data"),
    "no labels": (changed(user_data={**GOOD["user_data"], "b": {"x": [[3.0]]}}), "user 'b' has no lists x and y"),
    "another count": (changed(num_samples=[2, 4]), "user 'b' has 1 rows in x and 1 in y, and num_samples says 4"),
    "count of text": (changed(num_samples=[2, "1"]), "user 'b' has 1 rows in x and 1 in y, and num_samples says '1'"),
    "more features": (with_user(x=[[3.0], [4.0]]), "user 'b' has 2 rows in x and 1 in y, and num_samples says 1"),
    "more labels": (with_user(y=[1, 1]), "user 'b' has 1 rows in x and 2 in y, and num_samples says 1"),
    "key twice": (json.dumps(GOOD).replace('"b": {', '"a": {'), "data.json: the key 'a' appears twice"),
    "ragged": (changed(user_data={**GOOD["user_data"], "a": {"x": [[1.0], [2.0, 3.0]], "y": [0, 1]}}),
               "user 'a': x is no table of numbers; expected numbers, and rows of one shape"),
    "null": (with_user(x=[[None]]), "user 'b': x is no table of numbers"),
    "other shape": (with_user(x=[[3.0, 4.0]]), "user 'b': rows of x have shape (2,); expected (1,), as in"),
    "other labels": (with_user(y=[[1]]), "user 'b': rows of y have shape (1,); expected (), as in"),
    "NaN": (with_user(x=[[float("nan")]]), "user 'b': x holds NaN or infinity, first in row 0"),
    "beyond float32": (with_user(x=[[1e300]]), "user 'b': x holds NaN or infinity, first in row 0"),
    "NaN label": (with_user(y=[float("nan")]), "user 'b': y holds NaN or infinity, first in row 0"),
    "negative class": (with_user(y=[-1]), "user 'b': y is -1 in row 0; expected classes from 0 up"),
    "name and numbers": (with_user(y=["one"]), "user 'b': labels are names, and numbers in"),
    "mixed names": (changed(user_data={**GOOD["user_data"], "a": {"x": [[1.0], [2.0]], "y": [0, "one"]}}),
                    "user 'a': y is 'one' in row 1; expected numbers, or names of classes, throughout"),
    "dictionaries": (with_user(y=[{"subreddit": "x"}]), "user 'b': y is {'subreddit': 'x'} in row 0; expected numbers"),
    "no rows": (changed(num_samples=[2, 0], user_data={**GOOD["user_data"], "b": {"x": [], "y": []}}),
                "user 'b' has no rows to train on; expected at least one"),
    "no users": ('{"users": [], "num_samples": [], "user_data": {}}', "data.json holds no users; expected at least"),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_file_is_named_in_one_line(tmp_path, case):
    text, said = MALFORMED[case]
    path = tmp_path / "data.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError) as found:
        Federation.from_leaf(path)
    assert said in str(found.value)
    assert "data.json" in str(found.value)
    assert "\n" not in str(found.value)


def test_the_good_file_of_these_is_good(tmp_path):
    (tmp_path / "data.json").write_text(json.dumps(GOOD))
    assert Federation.from_leaf(tmp_path / "data.json", test_fraction=0).train.labels.tolist() in ([0, 1, 1], [1, 0, 1])
    a, b = GOOD["user_data"].values()
    (tmp_path / "data.json").write_text(changed(users=[0, 1], user_data={"0": a, "1": b}))
    assert Federation.from_leaf(tmp_path).clients == ["0", "1"]


def test_folders_that_are_not_leafs_are_named(tmp_path, split):
    folder, train, _ = split
    with pytest.raises(DataError, match=r"nowhere does not exist; expected a .json file, a folder"):
        Federation.from_leaf(tmp_path / "nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match=r"empty holds no .json files; expected"):
        Federation.from_leaf(empty)
    (empty / "train").mkdir()
    with pytest.raises(DataError, match="empty has the folder train and no folder test; expected both"):
        Federation.from_leaf(empty)
    (empty / "test").mkdir()
    with pytest.raises(DataError, match=r"train holds no .json files"):
        Federation.from_leaf(empty)
    one = next(iter(train))
    write(folder / "train" / "all_data_9.json", {one: train[one]})
    with pytest.raises(DataError, match=rf"all_data_9.json: user '{one}' is in .*all_data_0_train_9.json too"):
        Federation.from_leaf(folder)


def test_a_file_takes_little_more_memory_than_its_text(tmp_path):
    """Lists of a user's numbers are gone before the next user is read: as Python's own, all would take 8 times more."""
    import tracemalloc

    rng = np.random.default_rng(0)
    rows = {f"u{number:02}": {"x": rng.random((20, 500)).round(6).tolist(), "y": [0] * 20} for number in range(40)}
    path = write(tmp_path / "all_data.json", rows)
    num_bytes = 40 * 20 * 500 * 4
    del rows
    tracemalloc.start()
    Federation.from_leaf(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (
        peak < path.stat().st_size * 2 + 3 * num_bytes
    )  # the text twice while it is decoded, the rows in three stages


def test_a_leaf_folder_is_trained_on_saved_and_resumed(split, tmp_path):
    folder, train, _ = split
    fed = Federation.from_leaf(folder)
    options = {"learning_rate": 0.1, "batch_size": 4, "seed": 0, "out": tmp_path / "run"}
    run = selffl.train(nn.Linear(4, 3), fed, "ditto", rounds=3, **options)
    assert [row["client"] for row in run.clients] == sorted(train)
    again = selffl.load(tmp_path / "run", model=nn.Linear(4, 3))
    assert again.federation.fingerprint() == fed.fingerprint()
    client = fed.clients[0]
    for mine, theirs in zip(
        run.personal_model(client).parameters(), again.personal_model(client).parameters(), strict=True
    ):
        assert torch.equal(mine, theirs)
