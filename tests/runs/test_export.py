"""Personal models in one file: every bit back, nothing twice, and what is refused."""

import json
import struct

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import selffl
from needs import NEEDS_BATCH_NORM, ONE_OF_A_KIND
from selffl.errors import CheckpointError, ConfigError, DataError
from selffl.runs import export as exporting
from selffl.runs.export import PersonalModels
from selffl.state.checkpoint import load_tensors

NUM_CLIENTS, FEATURES, CLASSES = 6, 4, 3


def rows(seed=0, make=None):
    rng = np.random.default_rng(seed)
    client = np.repeat([f"ward {m:02}" for m in range(NUM_CLIENTS)], 12)
    x = rng.normal(size=(len(client), FEATURES)).astype(np.float32) if make is None else make(rng, len(client))
    return selffl.Federation.from_arrays(x, rng.integers(0, CLASSES, len(client)), client, 0.25, seed)


class Network(nn.Module):
    """A body, a head, a frozen layer between them, and a bias that two layers share."""

    def __init__(self):
        super().__init__()
        self.body, self.fixed, self.head = nn.Linear(FEATURES, 5), nn.Linear(5, 5), nn.Linear(5, CLASSES)
        self.fixed.requires_grad_(False)
        self.fixed.bias = self.body.bias
        with torch.no_grad():
            for number, part in enumerate(self.parameters()):
                part.copy_(torch.linspace(-0.5, 0.7 + number, part.numel()).view_as(part))

    def forward(self, x):
        return self.head(torch.tanh(self.fixed(torch.tanh(self.body(x)))))


class Words(nn.Module):
    """Embeddings, of which a client meets a few."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(40, 3), nn.Linear(3, CLASSES)

    def forward(self, x):
        return self.head(self.words(x).mean(-2))


def trained(algorithm="self-fl", module=None, fed=None, participation=0.5, rounds=3, **options):
    return selffl.train(
        Network() if module is None else module, fed or rows(), algorithm, rounds=rounds, participation=participation,
        **options,
    )  # fmt: skip


def bits(state):
    return {name: (entry.dtype, entry.shape, entry.numpy().tobytes()) for name, entry in state.items()}


def stored(path):
    """Names and sizes in the file, read off its bytes: eight of length, then JSON."""
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
    return {name: np.diff(entry["data_offsets"])[0] for name, entry in header.items() if name != "__metadata__"}


# ------------------------------------------------------------------------------------------------------------ and back


@pytest.mark.parametrize(
    "algorithm", [name for name in ONE_OF_A_KIND if name not in NEEDS_BATCH_NORM]
)  # those are in test_batch_norm.py
def test_every_bit_of_every_model_comes_back(algorithm, tmp_path, short):
    run = trained(short(algorithm), fed=rows().with_clusters([0, 0, 0, 1, 1, 1]))
    run.export(tmp_path / "all.safetensors")
    models = PersonalModels(tmp_path / "all.safetensors")
    assert models.clients == list(run.federation.clients)
    for client in models.clients:
        assert bits(models.state_dict(client)) == bits(run.personal_model(client).state_dict())
        assert list(models.state_dict(client)) == list(Network().state_dict())
        loaded = models.model(client, Network())
        assert bits(loaded.state_dict()) == bits(run.personal_model(client).state_dict())
        assert loaded.fixed.bias is loaded.body.bias
    assert bits(models.state_dict()) == bits(run.global_model().state_dict())
    assert bits(models.model(None, Network()).state_dict()) == bits(run.global_model().state_dict())
    assert models.info["precision"] == "exact"
    assert models.info["max_error"] == 0.0


def test_frozen_values_are_the_runs_and_the_module_is_left_as_it_is(tmp_path):
    run = trained("local")
    run.export(tmp_path / "all.safetensors")
    other = Network()
    with torch.no_grad():
        for part in other.parameters():
            part.fill_(7.0)
    loaded = PersonalModels(tmp_path / "all.safetensors").model("ward 01", other)
    assert torch.equal(loaded.fixed.weight, Network().fixed.weight)
    assert not loaded.fixed.weight.requires_grad
    assert all((part == 7.0).all() for part in other.parameters())
    x = rows(1).train.features
    assert torch.equal(loaded(x), run.personal_model("ward 01")(x))


def test_signs_of_zero_and_other_precisions_are_kept(tmp_path):
    module = nn.Linear(FEATURES, CLASSES)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    run = trained("ditto", module, dtype=torch.float64)
    run.export(tmp_path / "double.safetensors")
    models = PersonalModels(tmp_path / "double.safetensors")
    assert models.model("ward 02", module).weight.dtype == torch.float64
    shared = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(shared.weight)
    own = [{"weight": torch.tensor([[-0.0, 0.0]])}, {"weight": torch.zeros(1, 2)}]
    about = {"rows": [{}, {}], "model": None}
    for precision in ("exact", "float16"):
        exporting.write_personal(tmp_path / "zero", shared, own, ["a", "b"], about, precision)
        assert "rows.weight" in stored(tmp_path / "zero")
        assert PersonalModels(tmp_path / "zero").stored_bytes("b") == 0
        assert PersonalModels(tmp_path / "zero").state_dict("a")["weight"].tolist() == [[0.0, 0.0]]
    exporting.write_personal(tmp_path / "zero", shared, own, ["a", "b"], about)
    found = PersonalModels(tmp_path / "zero").state_dict("a")["weight"]
    assert found.signbit().tolist() == [[True, False]]


def test_a_model_by_name_needs_no_module(tmp_path):
    run = trained("self-fl", "softmax")
    run.export(tmp_path / "all.safetensors", ["ward 03", "ward 01", "ward 03"])
    models = PersonalModels(tmp_path / "all.safetensors")
    assert models.clients == ["ward 03", "ward 01"]
    assert bits(models.model("ward 01").state_dict()) == bits(run.personal_model("ward 01").state_dict())


def test_one_model_opens_without_selffl(tmp_path):
    run = trained()
    run.export(tmp_path / "one.safetensors", ["ward 03"], full=True)
    plain = Network()
    plain.load_state_dict(load_file(tmp_path / "one.safetensors"))
    assert bits(plain.state_dict()) == bits(run.personal_model("ward 03").state_dict())
    with safe_open(tmp_path / "one.safetensors", framework="pt") as file:
        about = file.metadata()
    assert "(head): Linear(in_features=5" in about.pop("module")
    assert about == {
        "format": "pt", "algorithm": "self-fl", "data": "arrays", "round": "3", "client": "ward 03",
        "classes": "[0, 1, 2]",
    }  # fmt: skip
    run.export(tmp_path / "one.pt", ["ward 03"], full=True)
    assert bits(torch.load(tmp_path / "one.pt", weights_only=True)) == bits(plain.state_dict())
    run.export(tmp_path / "all.safetensors")
    PersonalModels(tmp_path / "all.safetensors").save("ward 03", tmp_path / "again.safetensors")
    assert bits(load_file(tmp_path / "again.safetensors")) == bits(plain.state_dict())


# ------------------------------------------------------------------------------------------------------------- how much


@pytest.mark.parametrize("algorithm", ["fedavg", "fedavg-equal", "fedprox"])
def test_one_model_for_all_is_stored_once(algorithm, tmp_path):
    trained(algorithm).export(tmp_path / "all.safetensors")
    shared = {"body.weight": 80, "body.bias": 20, "fixed.weight": 100, "head.weight": 60, "head.bias": 12}
    assert stored(tmp_path / "all.safetensors") == {f"global.{name}": size for name, size in shared.items()}


@pytest.mark.parametrize("algorithm", ["fedper", "fedrep"])
def test_of_a_shared_body_only_heads_are_stored_and_only_of_those_who_took_part(algorithm, tmp_path):
    run = trained(algorithm, rounds=2, participation=0.34)  # two of six, twice
    run.export(tmp_path / "all.safetensors")
    active = [row["client"] for row in run.clients if row["rounds"]]
    assert 2 <= len(active) <= 4
    kept = {name: size for name, size in stored(tmp_path / "all.safetensors").items() if not name.startswith("global.")}
    assert kept == {
        "rows.head.weight": len(active) * 60, "rows.head.bias": len(active) * 12,
        "offset.head.weight": 7 * 8, "offset.head.bias": 7 * 8,
    }  # fmt: skip
    models = PersonalModels(tmp_path / "all.safetensors")
    assert [client for client in models.clients if models.stored_bytes(client)] == active
    assert {models.stored_bytes(client) for client in active} == {72}


def test_of_embeddings_only_the_words_that_were_met_are_stored(tmp_path):
    """PerFedAvg's personal model is the global one after a few steps: words of others stay as they are."""

    def few_words(rng, count):
        own = np.arange(count) // 12 * 5  # five words for each client
        return own[:, None] + rng.integers(0, 5, (count, 7))

    module = Words()
    run = trained("perfedavg", module, rows(make=few_words))
    run.export(tmp_path / "all.safetensors")
    models = PersonalModels(tmp_path / "all.safetensors")
    shared = models.state_dict()["words.weight"]
    for client in models.clients:
        own = run.personal_model(client).state_dict()["words.weight"]
        assert torch.equal(models.state_dict(client)["words.weight"], own)
        changed = int((own != shared).any(1).sum())
        assert 0 < changed <= 5
        # Rows of three numbers with their place, and the head, whole.
        assert models.stored_bytes(client) == changed * (3 + 1) * 4 + (3 * CLASSES + CLASSES) * 4


def test_a_shorter_type_takes_half_and_says_what_it_costs(tmp_path):
    run = trained("local", participation=1.0)
    run.export(tmp_path / "exact")
    exact = stored(tmp_path / "exact")
    for precision, unit in (("float16", 2.0**-11), ("bfloat16", 2.0**-8)):
        run.export(tmp_path / precision, precision=precision)
        assert {
            name: size * (2 if name.startswith("rows.") else 1) for name, size in stored(tmp_path / precision).items()
        } == exact
        models = PersonalModels(tmp_path / precision)
        worst = 0.0
        shared = run.global_model().state_dict()
        for name in ("body.weight", "body.bias", "head.weight", "head.bias"):
            own = [run.personal_model(client).state_dict()[name].double() for client in models.clients]
            back = [models.state_dict(client)[name].double() for client in models.clients]
            errors = [float((a - b).abs().max()) for a, b in zip(own, back, strict=True)]
            largest = max(float((a - shared[name].double()).abs().max()) for a in own)
            bound = unit * largest + max(float(a.abs().max()) for a in own) * 2.0**-24
            assert 0.0 < max(errors) <= bound
            worst = max(worst, *errors)
        assert models.info["max_error"] == worst
        assert models.info["precision"] == precision


# ------------------------------------------------------------------------------------------------------- how sure it is


def test_models_come_with_their_uncertainty(tmp_path):
    run = trained("self-fl-exact", participation=0.5, rounds=6)
    run.clients[0]["predicted_gain"] = 2.0
    run.clients[0]["intra_variance"] = 0.5
    run.export(tmp_path / "all.safetensors", [row["client"] for row in reversed(run.clients)])
    models = PersonalModels(tmp_path / "all.safetensors")
    assert models.about("ward 00") | {"personal_variance": 0.25, "predicted_gain": 2.0} == models.about("ward 00")
    for row in run.clients:
        found = models.about(row["client"])
        assert found["rounds"] == row["rounds"]
        assert found["num_train"] == row["num_train"]
        assert found.get("intra_variance") == row["intra_variance"]
    assert models.info["inter_variance"] == pytest.approx(run.history[-1]["inter_variance"])
    assert {name: models.info[name] for name in ("algorithm", "round", "seed", "module")} == {
        "algorithm": "self-fl-exact", "round": 6, "seed": 0, "module": "Network"
    }  # fmt: skip
    assert repr(models) == (
        "PersonalModels(6 clients, algorithm='self-fl-exact', data='arrays', round=6, precision='exact')"
    )


def test_a_loaded_run_exports_the_same_file(tmp_path):
    fed = rows()
    run = selffl.train("softmax", fed, "ditto", rounds=3, participation=0.5, out=tmp_path / "run")
    run.export(tmp_path / "a")
    selffl.load(tmp_path / "run").export(tmp_path / "b")
    (ours, about), (theirs, other) = load_tensors(tmp_path / "a"), load_tensors(tmp_path / "b")
    assert bits(ours) == bits(theirs)
    assert about == other


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.fixture(scope="module")
def run():
    return trained()


@pytest.fixture(scope="module")
def file(run, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "all.safetensors"
    run.export(path)
    return path


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"clients": ["ward 3"]}, r"unknown client 'ward 3'; did you mean 'ward 03'\? Expected one of the 6 ids: "),
        ({"clients": "ward 03"}, r"clients is 'ward 03'; expected a list of ids"),
        ({"clients": 3}, r"clients is 3; expected a list of ids, such as \[3\]"),
        ({"clients": [["ward 03"]]}, r"unknown client \['ward 03'\]; did you mean 'ward 03'"),
        ({"precision": "float8"}, r"precision is 'float8'"),
        ({"full": True}, r"full=True is given for 6 clients in precision 'exact'; expected one client"),
        ({"full": True, "clients": ["ward 03"], "precision": "float16"}, "in precision 'float16'; expected one client"),
    ],
)
def test_what_cannot_be_written_is_refused(options, reason, run, tmp_path):
    with pytest.raises(ConfigError, match=reason):
        run.export(tmp_path / "x.safetensors", **options)
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_be_written(run, tmp_path):
    with pytest.raises(DataError, match="cannot be written; expected the name of a file in a folder that is there"):
        run.export(tmp_path / "nowhere" / "x.safetensors")
    with pytest.raises(DataError, match="cannot be written"):
        run.export(tmp_path)
    with pytest.raises(ConfigError, match=r"x.bin; expected a name that ends in .safetensors or .pt"):
        run.export(tmp_path / "x.bin", ["ward 03"], full=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("harm", ["cut", "flipped", "emptied", "plain", "other", "missing"])
def test_a_file_that_is_not_whole_is_refused_in_a_line(harm, run, file, tmp_path):
    path = tmp_path / "x.safetensors"
    content = bytearray(file.read_bytes())
    if harm == "flipped":
        content[-3] ^= 1
    path.write_bytes({"cut": content[:-5], "flipped": content, "emptied": b""}.get(harm, b""))
    if harm == "plain":
        run.export(path, ["ward 03"], full=True)
    elif harm == "other":
        run.federation.save(path)
    elif harm == "missing":
        path.unlink()
    advice = r"with --all\. Load it with" if harm == "plain" else r"Run\.export writes it\. Export it again"
    with pytest.raises(CheckpointError, match=rf"expected a file of several models, .*{advice}") as found:
        PersonalModels(path)
    assert str(found.value).startswith(f"{path} ")
    assert len(str(found.value).splitlines()) == 1


def test_modules_and_clients_that_do_not_fit(file):
    models = PersonalModels(file)
    with pytest.raises(ConfigError, match=r"unknown client 'ward 3'; did you mean 'ward 03'\?"):
        models.model("ward 3", Network())
    with pytest.raises(ConfigError, match=r"unknown client 3; expected one of the 6 ids: 'ward 00', "):
        models.state_dict(3)
    with pytest.raises(ConfigError, match="are of the kind Network, which is the user's own"):
        models.model("ward 03")
    wide = Network()
    wide.head = nn.Linear(5, CLASSES + 1)
    with pytest.raises(ConfigError, match=r"'head.weight' has shape \(3, 5\) in that state_dict; expected \(4, 5\)"):
        models.model("ward 03", wide)
    with pytest.raises(ConfigError, match=r"Linear does not know 'body.weight' and 5 more of that state_dict"):
        models.model("ward 03", nn.Linear(2, 2))
    more = Network()
    more.extra = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match=r"Network misses 'extra.weight' and 1 more of that state_dict"):
        models.model("ward 03", more)


def test_ids_that_a_file_cannot_hold_are_refused(tmp_path):
    fed = rows()
    odd = selffl.Federation([(m, m) for m in range(NUM_CLIENTS)], fed.train, fed.test)
    with pytest.raises(DataError, match=r"client \(0, 0\) is a tuple; expected strings or numbers to save"):
        trained(fed=odd).export(tmp_path / "x.safetensors")
