"""Modules with several inputs by name train, answer, resume and welcome as modules with one do."""

import copy
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from two_towers import CLIENTS, Packed, Towers, federation, packed, plain_rounds, rows, towers

import selffl
from selffl.errors import ConfigError, DataError
from selffl.models import Select

SETTINGS = {"rounds": 2, "participation": 1.0, "learning_rate": 0.2, "batch_size": 4, "seed": 1}


def train(module=None, fed=None, method="fedavg", **options):
    return selffl.train(module or towers(), fed or federation(), method, **SETTINGS | options)


def some(number=3):
    return {name: entry[:number] for name, entry in rows().items()}


def assert_close(found, expected, within=1e-7):
    for name, entry in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], entry, rtol=within, atol=within)


@pytest.mark.parametrize("gradients", ["auto", "vmap", "loop", "unfold"])
def test_a_cohort_trains_as_the_plain_loop_does(gradients):
    method = selffl.algorithm("fedavg", num_local_steps=3)
    run = train(method=method, gradients=gradients, dtype="float64")
    expected = plain_rounds(towers().double(), run, 2, 3, 0.2)
    assert_close(run.global_model(), expected)
    assert not torch.equal(expected.words.weight, towers().double().words.weight)
    test = run.federation.test
    with torch.no_grad():
        right = expected(**run.federation.test.features)["logits"].argmax(1) == test.labels
    assert run.summary["global_accuracy"] == pytest.approx(right.double().mean().item())


def test_minibatches_hold_whole_rows_of_their_clients():
    source = train(rounds=1, dtype="float64")._session.source
    features, labels = source.task(torch.arange(3), 1).batch(2, torch.tensor([0, 2]))
    known = [x.tobytes() for x in packed(rows()).numpy()]
    assert [tuple(entry.shape[:2]) for _, entry in features.items()] == [(2, 4)] * 4
    for client, (x, y) in enumerate(zip(features, labels, strict=True)):
        given = [x.tobytes() for x in packed(x).numpy()]
        found = [known.index(each) for each in given]
        assert y.tolist() == [row % 3 for row in found]
        assert all((row % 4 in (2, 3)) if client else (row % 4 == 0) for row in found)


def twins(method, **options):
    """Runs by name, and of one tensor that has the same numbers."""
    fed = federation()
    options = {"method": method, "dtype": "float64", "gradients": "loop"} | options
    return train(fed=fed, **options), train(towers(Packed), fed.map_features(packed), **options)


@pytest.mark.parametrize(
    ("method", "engine"),
    [
        ("self-fl-auto", "cohort"), ("ditto", "cohort"), ("ditto", "serial"), ("fedper", "cohort"),
        ("fedpac", "cohort"), ("feddbe", "cohort"), ("perfedavg", "cohort"),
    ],
)  # fmt: skip
def test_methods_need_not_know_of_names(method, engine, short):
    by_name, by_place = twins(short(method), engine=engine, fine_tune=[2])
    for name in CLIENTS:
        assert_close(by_name.personal_model(name), by_place.personal_model(name), 1e-12)
    scores = [
        {name: score for name, score in run.summary.items() if name.endswith(("accuracy", "loss"))}
        for run in (by_name, by_place)
    ]
    assert scores[0] == pytest.approx(scores[1])
    assert "personal_after_2_weighted_accuracy" in scores[0]


def test_a_run_that_is_taken_up_again_ends_with_the_same_bits(tmp_path, short):
    whole = train(method=short("ditto"), out=tmp_path / "whole")
    train(method=short("ditto"), rounds=1, out=tmp_path / "again")
    again = selffl.resume(tmp_path / "again", rounds=2, model=towers())  # its rows are in the folder
    for name, entry in whole.global_model().state_dict().items():
        assert torch.equal(again.global_model().state_dict()[name], entry)
    for client in CLIENTS:
        ours, theirs = (run.personal_model(client)(**floats(some()))["logits"] for run in (again, whole))
        assert torch.equal(ours, theirs)
    with pytest.raises(ConfigError, match="the federation is not the one that the run was trained on"):
        selffl.load(tmp_path / "whole", model=towers(), federation=federation(age=rows()["age"] + 1))


def floats(x, dtype=torch.float32):
    return {name: entry.to(dtype) if entry.is_floating_point() else entry for name, entry in x.items()}


@pytest.fixture(scope="module")
def run(short):
    return train(method=short("self-fl-auto"), class_frequencies=True, neighbours=3, fine_tune=[1])


def test_a_saved_run_has_its_rows_in_it(run, tmp_path):
    run.save(tmp_path / "run")
    again = selffl.load(tmp_path / "run", model=towers())
    assert again.federation.fingerprint() == run.federation.fingerprint()
    assert again.evaluate().numbers["personal"].equal(run.evaluate().numbers["personal"])


def test_answers_are_those_of_the_clients_own_modules(run):
    given = {name: entry.numpy() for name, entry in some().items()}
    answers = run.predict(given, client=["ben", "anna", "nobody"]).to_pylist()
    models = [run.personal_model("ben"), run.personal_model("anna"), run.global_model()]
    for row, (answer, model) in enumerate(zip(answers, models, strict=True)):
        with torch.no_grad():
            scores = model(**{name: entry[row : row + 1] for name, entry in floats(some()).items()})["logits"][0]
        expected = scores.double().softmax(0).tolist()
        assert [answer[f"probability_{k}"] for k in range(3)] == pytest.approx(expected, abs=1e-6)
    with torch.no_grad():
        scores = models[1](**floats(some()))["logits"].double().softmax(1)
    torch.testing.assert_close(run.probabilities("anna", given, moderated=False), scores, rtol=0, atol=1e-6)
    assert run.probabilities("anna").shape == (3, 3)
    assert run.probabilities("anna").sum(1).tolist() == pytest.approx([1.0] * 3)


def test_other_views_on_the_models_are_there(run):
    kinds = ("global_with_classes", "global_with_neighbours", "personal_after_1", "global_with_classes_after_1")
    assert all(0.0 <= run.summary[f"{kind}_weighted_accuracy"] <= 1.0 for kind in kinds)


def test_a_new_client_is_welcome_however_it_brings_its_rows(short):
    by_name, by_place = twins(short("self-fl-auto"), rounds=1)
    given, labels = some(6), [0, 0, 2, 1, 0, 0]
    expected = by_place.welcome((packed(given), labels))
    alone = selffl.Federation.from_arrays(given, labels, ["new"] * 6, test_fraction=0)
    lists = {name: entry.tolist() for name, entry in given.items()}
    for newcomer in ((given, labels), (alone.train.features, alone.train.labels), alone, (lists, labels)):
        assert_close(by_name.welcome(newcomer), expected, 1e-6)  # rows come in other orders
    assert not torch.equal(expected.head.bias, by_place.global_model().head.bias)


def test_exports_hold_the_same_models(run, tmp_path):
    run.export(tmp_path / "people.safetensors")
    models = selffl.PersonalModels(tmp_path / "people.safetensors")
    x = floats(some())
    with torch.no_grad():
        assert torch.equal(models.model("ben", towers())(**x)["logits"], run.personal_model("ben")(**x)["logits"])
    whose = ["ben", "carl", "nobody"]
    assert models.predict(some(), whose, module=towers()).to_pylist() == run.predict(some(), whose).to_pylist()
    with pytest.raises(DataError, match=r"^features are a dictionary of words; expected age, image, is_word, words"):
        models.predict({"words": x["words"]}, module=towers())


@dataclass
class Answer:
    scores: torch.Tensor
    hidden: torch.Tensor | None = None
    cache: tuple = ()


class Other(Towers):
    """Returns what `made` makes of scores and hidden numbers."""

    made = None

    def forward(self, **inputs):
        answer = super().forward(**inputs)
        return type(self).made(answer["logits"], answer["hidden"])


def returning(made):
    return towers(type("Returning", (Other,), {"made": staticmethod(made)}))


@cache
def trained_on_one_tensor(gradients):
    """A round of the module that returns its scores and nothing else; nobody alters it."""
    return train(rounds=1, gradients=gradients)


@pytest.mark.parametrize("gradients", ["vmap", "loop"])
@pytest.mark.parametrize(
    ("made", "entry"),
    [
        (lambda scores, hidden: {"out": scores}, None),
        (lambda scores, hidden: {"out": scores, "cache": (hidden, hidden), "loss": None}, None),
        (lambda scores, hidden: Answer(scores), None),
        (lambda scores, hidden: {"hidden": hidden, "out": scores}, "out"),
        (lambda scores, hidden: Answer(scores, hidden), "scores"),
        (lambda scores, hidden: (hidden, scores), 1),
    ],
)
def test_outputs_of_many_forms(made, entry, gradients):
    module = returning(made)
    run = train(module if entry is None else Select(module, entry), rounds=1, gradients=gradients)
    expected = trained_on_one_tensor(gradients)
    found = run.global_model() if entry is None else run.global_model().module
    assert_close(found, expected.global_model(), 1e-6)
    assert run.summary["global_accuracy"] == expected.summary["global_accuracy"]
    answers = [each.predict(some()).to_pylist() for each in (run, expected)]
    assert answers[0][0]["probability_0"] == pytest.approx(answers[1][0]["probability_0"], abs=1e-6)


class InPlace(Towers):
    """Writes over one of its inputs."""

    def forward(self, words, image, age, is_word):
        age.mul_(2).div_(2, rounding_mode="floor")
        image *= 2.0
        return super().forward(words, image / 2.0, age, is_word)


@pytest.mark.parametrize("gradients", ["vmap", "loop"])
def test_rows_are_left_alone_by_a_module_that_writes_over_them(gradients):
    fed = federation(image=rows()["image"].float())  # the type that it trains in, so that nothing is copied
    before = copy.deepcopy(fed)
    run = train(towers(InPlace), fed, gradients=gradients)
    run.evaluate()
    for part, rows_before in before.parts.items():
        for name, entry in rows_before.features.items():
            assert torch.equal(fed.parts[part].features[name], entry)
    assert_close(run.global_model(), train(gradients=gradients).global_model(), 1e-6)


def refused(message, kind=ConfigError, **given):
    with pytest.raises(kind, match=message) as error:
        train(**given)
    assert "\n" not in str(error.value)


class Wants(Towers):
    """Takes whatever comes, as Hugging Face's modules do."""

    def forward(self, words, image, age, is_word=None, **others):
        return super().forward(words, image, age, is_word)


def test_rows_that_do_not_fit_forward_are_refused_in_a_line():
    extra = federation(idx=torch.arange(48))
    message = (
        r"^rows have an entry 'idx', and forward of {} has no argument of that name; expected some of words, image, "
        r"age, is_word\. Rename"
    )
    refused(message.format("Towers"), fed=extra)
    refused(message.format("Wants"), fed=extra, module=towers(Wants))  # nobody would see what goes into **others
    refused(message.format("Towers"), fed=extra, module=Select(towers(), "logits"))
    fewer = {name: entry for name, entry in rows().items() if name in ("words", "image")}
    fewer = selffl.Federation.from_arrays(fewer, torch.arange(48) % 3, list("abcd") * 12)
    refused(r"^forward of Towers needs 'age', and rows have the entries image, words; expected one for each", fed=fewer)
    refused(r"^rows have an entry 'age', and forward of Linear has no argument of that name", module=nn.Linear(3, 2))
    refused(
        r"^model 'softmax' takes one tensor, and rows are a dictionary of age, image, is_word, words", module="softmax"
    )
    refused(
        r"^augmentation is 'flip', and rows are a dictionary of age, image, is_word, words; expected one tensor",
        augmentation="flip",
    )
    wrong = federation(image=torch.zeros(48, 2, 6, 6))
    refused(r"^Towers cannot take a row of age \(\) int64, image \(2, 6, 6\) float32, .*: ", DataError, fed=wrong)


@pytest.mark.parametrize("number", [-1, 12])
@pytest.mark.parametrize("row", [0, 17, 47])
def test_words_that_no_embedding_has_are_refused_wherever_they_are(number, row):
    words = rows()["words"]
    words[row, 2] = number
    message = rf"^Towers looks up the number {number} in its embedding words, which has 12; expected 0 to 11"
    refused(message, DataError, fed=federation(words=words))


def test_outputs_that_leave_a_choice_are_refused_in_a_line():
    refused(
        r"^Returning returns a dict with the tensors 'a', 'b'; .*Say which with selffl.models.Select\(module, 'a'\)\.$",
        module=returning(lambda scores, hidden: {"a": scores, "b": hidden}),
    )
    refused(
        r"^Returning returns a tuple with the tensors 0, 1; .*Select\(module, 0\)\.$",
        module=returning(lambda scores, hidden: (scores, hidden)),
    )
    refused(r"^Returning returns a str; expected one tensor", module=returning(lambda scores, hidden: "scores"))
    refused(r"^Towers returns a dict in which 'scores' is no tensor", module=Select(towers(), "scores"))
    refused(
        r"^Returning returns a Tensor in which 0 is no tensor",
        module=Select(returning(lambda scores, hidden: scores), 0),
    )


def test_rows_to_answer_that_are_not_as_those_trained_on_are_refused(run):
    def refused(message, given):
        for ask in (run.predict, lambda x: run.probabilities("anna", x)):
            with pytest.raises(DataError, match=message) as error:
                ask(given)
            assert "\n" not in str(error.value)

    known = some()
    refused("^features are a Tensor; expected a dictionary of age, image, is_word, words, as", known["words"])
    fewer = {name: entry for name, entry in known.items() if name != "age"}
    refused("^features are a dictionary of words, is_word, image; expected age, image, is_word, words", fewer)
    refused("^features are a dictionary of .*, idx; expected age, image", {**known, "idx": known["age"]})
    refused("^features differ in their numbers of rows: age 2, image 3", {**known, "age": known["age"][:2]})
    refused(
        r"^features\['words'\] have shape \(3, 4\); expected rows of shape \(5,\)", known | {"words": np.zeros((3, 4))}
    )
    refused(r"^features\['image'\] hold NaN", known | {"image": known["image"] * np.nan})
    with pytest.raises(
        DataError, match=r"^features\['age'\] are torch.float32; expected whole numbers that torch.int64"
    ):
        run.probabilities("anna", known | {"age": known["age"] + 0.5})
    with pytest.raises(DataError, match=r"^Towers looks up the number 12 in its embedding words"):
        run.probabilities("anna", known | {"words": known["words"] + 12 - known["words"].max()})
    with pytest.raises(DataError, match=r"^a row of the new client has shape .*; expected \{'age': \(\), 'image'"):
        run.welcome((fewer, [0, 1, 0]))
