"""Adapters of networks that were trained before: whose rows train what, what is chosen on which rows, and verdicts."""

import importlib.metadata
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from selffl.errors import ConfigError, DataError
from selffl.randomness import draw_network
from selffl.studies import adapter_images, adapter_problem, adapter_rows, adapter_speech, adapter_text
from selffl.studies.adapter_problem import A_AND_B, B_ALONE, EVERYTHING, AdapterProblem
from selffl.studies.adapter_rows import HEAD, Benchmark, Rows, of_some_clients, pretrain
from selffl.studies.adapters import (
    AUTO,
    DESIGNS,
    FEDAVG,
    LOCAL,
    METHODS,
    Adapters,
    Chooser,
    Line,
    adapters_study,
    bytes_sent,
    claims_of,
    level,
)
from selffl.studies.arms import Outcome
from selffl.studies.result import Estimate, Job

# ------------------------------------------------------------------------------------------------------------- networks


def test_spectrograms_are_those_of_a_plain_transform():
    sound = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 1600)))
    padded = np.pad(sound.numpy(), ((0, 0), (200, 200)))
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)
    frames = np.stack([padded[:, start : start + 400] * window for start in range(0, 1601, 160)], axis=1)
    power = np.abs(np.fft.rfft(frames)) ** 2
    # Slaney's scale, tabulated: 200/3 Hz a mel up to 1 kHz, then a factor of 6.4 in 27 mels.
    tops = np.interp(np.linspace(0, 15 + 27 * np.log(8) / np.log(6.4), 42), np.arange(0, 46, 0.001), [
        200 / 3 * m if m < 15 else 1000 * 6.4 ** ((m - 15) / 27) for m in np.arange(0, 46, 0.001)
    ])  # fmt: skip
    hertz = np.arange(201) * 40.0
    bands = [np.interp(hertz, tops[k : k + 3], [0, 2 / (tops[k + 2] - tops[k]), 0], left=0, right=0) for k in range(40)]
    expected = power @ np.stack(bands, axis=1)
    found = adapter_speech.spectrogram(sound).numpy()
    assert found.shape == (2, 11, 40)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)


def test_quiet_clips_become_louder_and_loud_ones_stay():
    clips = torch.stack([torch.full((100,), 0.5), torch.full((100,), 0.001)])
    found = adapter_speech.louder(clips)
    assert torch.equal(found[0], clips[0])
    assert found[1, 0] == pytest.approx(10**-1.5, rel=1e-5)


def test_without_the_package_one_line_says_how_to_get_its_weights(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(ConfigError, match=r"pip install --no-deps resemblyzer\.$"):
        adapter_speech.weights_file()
    assert "resemblyzer" not in sys.modules


def test_other_weights_are_refused(tmp_path):
    (tmp_path / "pretrained.pt").write_bytes(b"something else")
    with pytest.raises(DataError, match=r"pretrained\.pt"):
        adapter_speech.read_weights(tmp_path / "pretrained.pt")


def test_a_text_is_its_first_bytes_and_the_rest_is_no_text():
    found = adapter_text.as_bytes(["é!", "x" * 200])
    assert found.shape == (2, 96)
    assert found[0].tolist() == [0xC3, 0xA9, 0x21, *[0] * 93]
    assert (found[1] == ord("x")).all()


def test_the_states_of_a_text_and_the_last_layer_are_the_whole_network_and_no_text_says_nothing():
    network = draw_network(lambda: adapter_text.ByteNetwork(16)).eval()
    text = torch.from_numpy(adapter_text.as_bytes(["short", "a somewhat longer text"]))
    states = network.states(text)
    assert torch.equal(network.last(states), network(text))
    assert (states[0, 2:] == 0).all()
    assert (states[0, :2] != 0).any(-1).all()


def test_no_author_of_a_client_trains_the_transformer(monkeypatch, tmp_path):
    def snippets(path, sources):
        documents = [f"{source}-{number}" for source in sources for number in range(10) for _ in range(number)]
        scores = np.resize([1.0, -1.0, 0.2], len(documents))
        return documents, scores, [f"{document} {place}" for place, document in enumerate(documents)]

    monkeypatch.setattr(adapter_text, "files", lambda: [type("File", (), {"find": lambda self: tmp_path})()])
    monkeypatch.setattr(adapter_text, "read_snippets", snippets)
    before, rest = adapter_text.halves.__wrapped__()
    assert not set(before.client) & set(rest.client)
    assert {name.split("-")[0] for name in rest.client} <= {"amazon", "nyt"}
    assert {"movie", "tweet"} <= {name.split("-")[0] for name in before.client}
    assert np.unique(rest.client, return_counts=True)[1].min() >= adapter_text.MIN_ROWS
    assert set(before.labels) == {0, 1}


def test_no_picture_of_a_client_trains_the_residual_network(monkeypatch):
    images = np.repeat(np.arange(200, dtype=np.uint8), 12).reshape(200, 3, 2, 2)
    monkeypatch.setattr(adapter_images.cifar10, "images_and_labels", lambda: (images, np.arange(200) % 10))
    (first, labels), (second, _) = adapter_images.halves.__wrapped__()
    assert len(labels) == len(second) == 100
    assert sorted(np.concatenate([first[:, 0, 0, 0], second[:, 0, 0, 0]])) == sorted(
        images[:, 0, 0, 0].astype(np.float32) / 127.5 - 1
    )


def test_the_states_of_a_picture_and_the_last_block_are_the_whole_network():
    network = draw_network(lambda: adapter_images.PictureNetwork((4, 8, 8))).eval()
    pictures = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 3, 32, 32)).astype(np.float32))
    before, last = network.cut()
    assert [name for name, _ in last.named_children()] == ["block1", "mean", "flat", HEAD]
    assert torch.equal(last(before(pictures)), network(pictures))


def test_training_before_learns_and_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rng = np.random.default_rng(0)
    features = torch.from_numpy(rng.standard_normal((200, 4)).astype(np.float32))
    labels = (features[:, 0] > 0).long()

    def trained():
        return pretrain(draw_network(lambda: nn.Linear(4, 2)), features, labels, 60, 20, 0.1)

    network = trained()
    assert (network(features).argmax(-1) == labels).float().mean() > 0.95
    (kept,) = tmp_path.rglob("*.safetensors")
    kept.unlink()
    assert torch.equal(network.weight, trained().weight)
    monkeypatch.setattr(adapter_rows, "_train", lambda *_: pytest.fail("trained once more"))
    assert torch.equal(network.weight, trained().weight)
    assert not network.weight.requires_grad
    labels = 1 - labels
    with pytest.raises(pytest.fail.Exception, match="once more"):  # of other rows
        trained()


def test_training_before_needs_no_place_to_keep_it(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    features, labels = torch.eye(4), torch.tensor([0, 1, 0, 1])
    network = pretrain(draw_network(lambda: nn.Linear(4, 2)), features, labels, 40, 4, 0.1)
    assert torch.equal(network(features).argmax(-1), labels)


# -------------------------------------------------------------------------------------------------------------- studies


def made_up_rows(seed, is_small):
    rng = np.random.default_rng(seed)
    client = np.repeat(np.arange(6), [6, 8, 10, 12, 14, 16])
    features = rng.standard_normal((len(client), 5)).astype(np.float32)
    rows = Rows(features, (features[:, 0] + 0.5 * client * features[:, 1] > 0).astype(np.int64), client)
    return of_some_clients(rows, 4) if is_small else rows


def made_up_network(is_small):
    del is_small
    network = draw_network(lambda: nn.Sequential())
    network.add_module("body", draw_network(lambda: nn.Linear(5, 6)))
    network.add_module("relu", nn.ReLU())
    network.add_module(HEAD, draw_network(lambda: nn.Linear(6, 2)))
    return network.requires_grad_(False)


@pytest.fixture
def tiny(monkeypatch):
    made_up = Benchmark(made_up_rows, made_up_network)
    monkeypatch.setattr(adapter_problem, "BENCHMARKS", {"made-up": made_up})
    adapter_problem._federation.cache_clear()
    problem = AdapterProblem(
        "tiny", "made-up rows", data="made-up", model="tiny", rounds=3, participation=1.0, num_local_steps=2, rank=2
    )
    yield Adapters(problem, {"sgd": (0.1, 0.5), "adam": (0.01,)}, fine_tune=(2,), num_seeds=2)
    adapter_problem._federation.cache_clear()


def test_clients_train_what_the_problem_says(tiny):
    def trained(trains):
        module = replace(tiny.problem, trains=trains).module(None, 0)
        return {name for name, part in module.named_parameters() if part.requires_grad}

    head = {f"{HEAD}.weight", f"{HEAD}.bias"}
    assert trained(B_ALONE) == head | {"body.lora_B.weight"}
    assert trained(A_AND_B) == head | {"body.lora_A.weight", "body.lora_B.weight"}
    assert trained(EVERYTHING) == head | {"body.weight", "body.bias"}


def test_a_study_shows_every_method_by_the_view_that_it_has_chosen(tiny, tmp_path):
    labels = (AUTO, FEDAVG, "fedavg, B, fine-tuned", "ditto, B", "FedSA-LoRA", LOCAL)
    methods = tuple(replace(method, options=method.options[:2]) for method in METHODS if method.label in labels)
    study = replace(tiny, rates={"sgd": (0.1, 0.5), "adam": ()}, methods=methods, num_seeds=1)
    result = adapters_study(study, Job(folder=tmp_path))
    lines = {line["method"]: line for line in result.table}
    assert list(lines) == list(labels)
    assert all(lines[label]["chosen"].endswith("(2 tried)") for label in (AUTO, FEDAVG, "FedSA-LoRA", LOCAL))
    assert lines["ditto, B"]["chosen"].startswith(lines[FEDAVG]["chosen"].split(" (")[0])  # FedAvg's rate
    assert "k = 2" in lines["fedavg, B, fine-tuned"]["chosen"]
    assert lines[LOCAL]["worse than alone"] == "–"
    assert lines[LOCAL]["kB a round"] == "0"
    assert len(result.claims) == 3
    # Two settings each of four methods, two of DITTO; then what was chosen: two views of FedAvg may be two runs.
    assert len(list(tmp_path.rglob("config.json"))) in (2 * 4 + 2 + 5, 2 * 4 + 2 + 6)


def test_scores_are_those_of_the_library_itself(tiny, tmp_path):
    methods = tuple(method for method in METHODS if method.label in (AUTO, FEDAVG, LOCAL, "fedavg, B, fine-tuned"))
    study = replace(tiny, rates={"sgd": (0.5,), "adam": ()}, methods=methods, num_seeds=1)
    table = {line["method"]: line for line in adapters_study(study, Job(folder=tmp_path)).table}
    run = replace(tiny.problem, learning_rate=0.5).run("fedavg", {}, 0, fine_tune=(2,))
    for label, name in ((FEDAVG, ""), ("fedavg, B, fine-tuned", "global_after_2_")):
        assert table[label]["accuracy"] == f"{100 * run.summary[f'{name}weighted_accuracy']:.1f}"


def outcome(label, seed, accuracies, sizes=(10, 20, 30)):
    clients = [
        {"num_train": size, "num_test": size // 10, "accuracy": each}
        for size, each in zip(sizes, accuracies, strict=True)
    ]
    total = sum(row["num_test"] for row in clients)
    mean = sum(row["num_test"] * row["accuracy"] for row in clients) / total
    scores = {"weighted_accuracy": mean, "worst10_accuracy": min(accuracies)}
    return Outcome(seed, {"status": "finished", "algorithm": label, **scores}, [], [], 1, clients=clients)


def test_clients_are_shown_by_how_many_rows_they_have():
    line = Line(type("Choice", (), {"view": "personal"})(), [outcome("fedavg", 0, (1.0, 0.0, 0.5))])
    assert [each.mean for each in line.by_size()] == [100.0, 0.0, 50.0]


@pytest.mark.parametrize(("ours", "verdict"), [(0.9, "holds"), (0.5, "does not hold")])
def test_being_level_is_not_below_the_best_adapter_by_a_standard_error(ours, verdict):
    values = {AUTO: ours, FEDAVG: 0.7, LOCAL: 0.6, "fedavg, everything": 1.0}
    outcomes = {
        label: [outcome(label, seed, (value + 0.01 * seed,) * 3) for seed in range(3)]
        for label, value in values.items()
    }
    losing = {AUTO: torch.zeros(3), FEDAVG: torch.full((3,), 30.0)}
    level, worst, fewer = claims_of(outcomes, losing)
    assert level.verdict == verdict
    assert f"against {FEDAVG}" in level.evidence
    assert worst.verdict == verdict
    assert fewer.verdict == "holds"


def test_one_seed_does_not_say_who_is_level():
    assert [level(Estimate(-0.5, error)) for error in (1.0, 0.4, float("nan"))] == [
        "holds",
        "does not hold",
        "inconclusive",
    ]


def test_bytes_are_those_of_what_is_trained(tiny):
    def sent(label, trains):
        method = next(method for method in METHODS if method.label == label)
        settings = {"trains": trains, "optimiser": "sgd", "learning_rate": 0.1}
        return bytes_sent(tiny, tiny.arm(method, settings, method.options[0]))

    numbers = 12 + 12 + 2  # B of the body, and the head
    assert sent(FEDAVG, B_ALONE) == pytest.approx(2 * 4 * numbers, rel=0.1)
    assert sent("fedavg, A and B", A_AND_B) == pytest.approx(2 * 4 * (numbers + 10), rel=0.1)
    assert sent("FedSA-LoRA", A_AND_B) == 4 * (numbers + 10 + 10 + 1)  # all of it there, A alone and a weight back


def test_what_diverges_is_not_chosen(tiny):
    chooser = Chooser(tiny, Job(), 0)
    method = next(method for method in METHODS if method.label == FEDAVG)
    for settings, score in zip(tiny.settings(method, {}), (None, 0.2, 0.1), strict=True):
        status = "diverged" if score is None else "finished"
        chooser.found[tiny.arm(method, settings, {}).label] = Outcome(
            0, {"status": status, "weighted_accuracy": score}, [], [], 1
        )
    assert chooser.choose(method, {}).settings["learning_rate"] == 0.5


def test_a_quick_look_is_of_few_clients_and_a_small_network(tiny):
    quick = tiny.quick()
    assert quick.problem.is_small
    assert quick.problem.rounds == 1
    assert quick.problem.federation(0).num_clients == 4
    assert all(design.quick().problem.rank <= 2 for design in DESIGNS.values())
