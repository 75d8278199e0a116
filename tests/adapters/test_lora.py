"""Low-rank changes of frozen modules: what they answer, what is trained, and that cohorts train them as a loop does."""

import copy

import pytest
import torch
from torch import nn

import selffl
from selffl.adapters import bias_only, lora, merge, train_only
from selffl.data import load
from selffl.errors import ConfigError
from selffl.training.blocks import gradient_of
from selffl.training.flat import FlatModel

RANK = 3


def moved(module, seed=0):
    """The module with trained parameters away from where they start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for part in module.parameters():
            if part.requires_grad:
                part += 0.2 * torch.randn(part.shape, generator=generator)
    return module


def trained_names(module):
    return [name for name, part in module.named_parameters() if part.requires_grad]


def make(kind):
    """A module, rows of it, and the layers to adapt."""
    torch.manual_seed(3)
    rows = torch.Generator().manual_seed(4)
    if kind == "embedding":
        body = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(32, 5))
        return body, torch.randint(0, 20, (6, 4), generator=rows), ["0"]
    if kind == "conv1d":
        body = nn.Sequential(nn.Conv1d(3, 8, 3, padding=1, dilation=2), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))
        return body, torch.randn(6, 3, 10, generator=rows), ["0"]
    if kind == "conv2d":
        first = nn.Conv2d(3, 8, 3, padding=1, stride=2, padding_mode="reflect")
        body = nn.Sequential(first, nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(128, 5))
        return body, torch.randn(6, 3, 8, 8, generator=rows), ["0"]
    if kind.startswith("attention"):
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=kind == "attention")
        return (
            nn.Sequential(layer, nn.Flatten(), nn.Linear(32, 5)),
            torch.randn(6, 4, 8, generator=rows),
            ["self_attn", "linear1"],
        )
    body = nn.Sequential(nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, 5))
    return body, torch.randn(6, 7, generator=rows), ["0"]


KINDS = ("linear", "conv1d", "conv2d", "embedding", "attention", "attention, places first")
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
def test_a_change_begins_at_nothing_and_answers_as_a_plain_module_of_w_and_ba(kind):
    body, rows, targets = make(kind)
    before = copy.deepcopy(body.state_dict())
    adapted = lora(body, RANK, targets, alpha=6.0)
    torch.testing.assert_close(adapted(rows), body(rows), rtol=1e-5, atol=1e-6)
    moved(adapted)
    plain = merge(adapted)
    assert [type(part) for part in plain.modules()] == [type(part) for part in body.modules()]
    for is_training in (True, False):
        for grad in (torch.no_grad(), torch.enable_grad()):  # eval() without gradients takes torch's fast path
            with grad:
                answer = adapted.train(is_training)(rows)
                torch.testing.assert_close(answer, plain.train(is_training)(rows), rtol=1e-4, atol=1e-5)
    assert (answer - body.eval()(rows)).abs().max() > 1e-2
    assert all(torch.equal(entry, before[name]) for name, entry in body.state_dict().items())
    assert all(part.requires_grad for part in body.parameters())


def test_a_merged_weight_is_w_and_the_scaled_product():
    body, _, targets = make("linear")
    adapted = moved(lora(body, RANK, targets, alpha=6.0))
    down, up = adapted[0].lora_A.weight, adapted[0].lora_B.weight
    expected = body[0].weight + (6.0 / RANK) * up @ down
    torch.testing.assert_close(merge(adapted)[0].weight, expected)
    assert merge(adapted)[0].bias is not body[0].bias


@every_kind
@pytest.mark.parametrize("way", ["auto", "vmap", "loop"])
def test_a_cohort_has_the_gradients_of_a_loop_over_plain_modules(kind, way):
    """A plain loop: each client's module by itself, by autograd."""
    body, _, targets = make(kind)
    model = FlatModel(lora(body, RANK, targets))
    torch.manual_seed(6)
    params = model.params + 0.2 * torch.randn(4, len(model.params))
    rows = torch.stack([make(kind)[1].roll(client, 0) for client in range(4)])
    labels = torch.randint(0, 5, rows.shape[:2])
    loss = nn.functional.cross_entropy
    found = gradient_of(model, loss, way)(params, rows, labels)
    for client in range(4):
        own = model.load(params[client])
        leaves = [part for part in own.parameters() if part.requires_grad]
        slopes = torch.autograd.grad(loss(own(rows[client]), labels[client]), leaves)
        expected = torch.cat([slope.reshape(-1) for slope in slopes])
        torch.testing.assert_close(found[client], expected, rtol=1e-4, atol=1e-6)


def test_frozen_weights_exist_once():
    body, _, targets = make("linear")
    adapted = lora(body, RANK, targets)
    model = FlatModel(adapted)
    pointers = [module[0].base.weight.data_ptr() for module in (adapted, model.answering, model.vectorised.module)]
    assert set(pointers) == {body[0].weight.data_ptr()}
    assert len(model.params) == 8 * RANK + 8 * 5 + 5
    assert model.group_sizes == (8 * RANK, 8 * 5, 5)  # a variance for each matrix


def test_a_is_the_same_for_the_same_seed_and_name():
    body, _, targets = make("linear")
    first, again, other = (lora(body, RANK, targets, seed=seed)[0].lora_A.weight for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.pow(2).mean() == pytest.approx(1 / 7, rel=0.6)
    assert not first.requires_grad
    assert lora(body, RANK, targets, train_a=True)[0].lora_A.weight.requires_grad


def test_what_is_trained():
    body = nn.Sequential(
        nn.Embedding(9, 8), nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True), nn.Linear(8, 4)
    )
    projections = [f"1.self_attn.{name}.lora_B.weight" for name in ("query", "key", "value", "out_proj")]
    inner, head = ["1.linear1.lora_B.weight", "1.linear2.lora_B.weight"], ["2.weight", "2.bias"]
    assert trained_names(lora(body, 2)) == [*projections, *inner, *head]
    assert trained_names(lora(body, 2, ["self_attn.value"])) == [projections[2], *head]
    assert trained_names(lora(body, 2, ["linear2"], also=[])) == inner[1:]
    assert trained_names(lora(body, 2, ["0"], also=["linear1", "2.bias"])) == [
        "0.lora_B.weight", "1.linear1.weight", "1.linear1.bias", "2.bias",
    ]  # fmt: skip
    assert trained_names(bias_only(body[2])) == ["bias"]
    assert trained_names(train_only(body, ["2"])) == head
    assert trained_names(body) == [name for name, _ in body.named_parameters()]


def test_layers_without_room_are_left_alone_unless_they_are_named():
    body = nn.Sequential(nn.Linear(7, 2), nn.Conv1d(4, 4, 1, groups=2), nn.Linear(7, 6), nn.Linear(6, 5))
    assert trained_names(lora(body, 4)) == ["2.lora_B.weight", "3.weight", "3.bias"]


def test_batch_norm_keeps_the_statistics_that_it_has():
    body = nn.Sequential(nn.Linear(7, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))
    body(torch.randn(9, 7))
    model = FlatModel(lora(body, 2))
    assert model.num_statistics == 0
    assert "1.running_mean" in model.constants


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, r"^rank is 0; expected a whole number, 1 or more\.$"),
        ({"rank": 2.0}, "^rank is 2.0; expected"),
        ({"alpha": -1}, "^alpha is -1; expected a number above 0"),
        ({"seed": -1}, "^seed is -1; expected"),
        ({"targets": ["conv9"]}, r"no part named 'conv9'; expected names or endings among 0, 2, 4\.$"),
        ({"targets": ["1"]}, "^1 is a ReLU, which cannot be adapted; expected a linear layer, a convolution"),
        ({"targets": ["2"]}, "^2 is a convolution in 2 groups, .*Choose other targets"),
        ({"targets": ["0"], "rank": 9}, "^rank is 9, and 0 has a weight of rank 4 at most"),
        ({"also": ["body"]}, "no parameters named 'body'; expected names or endings among 0.weight"),
        ({"also": "4"}, r"^names are '4'; expected a list of names, such as \['4'\]"),
        ({"targets": "0"}, r"^targets are '0'; expected a list of names"),
        ({"also": ["0", "4"]}, "has no layers to adapt"),
    ],
)
def test_what_cannot_be_adapted_is_said_in_a_line(change, message):
    body = nn.Sequential(nn.Linear(7, 4), nn.ReLU(), nn.Conv1d(4, 4, 1, groups=2), nn.ReLU(), nn.Linear(4, 5))
    with pytest.raises(ConfigError, match=message) as caught:
        lora(body, **{"rank": 2} | change)
    assert "\n" not in str(caught.value)


def test_other_parts_that_cannot_be_adapted():
    with pytest.raises(ConfigError, match=r"^0 shortens its own entries"):
        lora(nn.Sequential(nn.Embedding(9, 4, max_norm=1.0), nn.Linear(4, 2)), 2, ["0"])
    with pytest.raises(ConfigError, match=r"^0 is attention with keys or values of another width"):
        lora(nn.Sequential(nn.MultiheadAttention(8, 2, kdim=4), nn.Linear(8, 2)), 2, ["0"])
    with pytest.raises(ConfigError, match=r"^Linear has no adapters; expected a module that selffl.adapters.lora"):
        merge(nn.Linear(2, 2))


# --------------------------------------------------------------------------------------------------------- attention


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("mask", ["none", "padding", "causal", "by head", "both"])
def test_attention_is_torchs(batch_first, need_weights, mask):
    torch.manual_seed(2)
    base = nn.MultiheadAttention(8, 2, batch_first=batch_first)
    adapted = moved(lora(nn.ModuleDict({"attend": base, "head": nn.Linear(8, 2)}), 2)["attend"])
    plain = adapted.merge()
    rows, length = 3, 5
    shape = (rows, length, 8) if batch_first else (length, rows, 8)
    given = [torch.randn(shape) for _ in range(3)]
    options = {"need_weights": need_weights}
    if mask in ("padding", "both"):
        options["key_padding_mask"] = torch.arange(length) >= torch.tensor([5, 3, 4])[:, None]
    if mask in ("causal", "both"):
        options["attn_mask"] = torch.ones(length, length, dtype=torch.bool).triu(1)
    if mask == "by head":
        options["attn_mask"] = torch.randn(rows * 2, length, length)
    found, weights = adapted(*given, **options)
    expected, their_weights = plain(*given, **options)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert (weights is None) is (their_weights is None)
    if weights is not None:
        torch.testing.assert_close(weights, their_weights, rtol=1e-4, atol=1e-6)
        by_head = [each(*given, **options, average_attn_weights=False)[1] for each in (adapted, plain)]
        torch.testing.assert_close(*by_head, rtol=1e-4, atol=1e-6)


def test_attention_without_a_batch_is_refused():
    adapted = lora(nn.ModuleDict({"attend": nn.MultiheadAttention(8, 2), "head": nn.Linear(8, 2)}), 2)["attend"]
    with pytest.raises(ConfigError, match="one row without a batch"):
        adapted(*[torch.randn(5, 8)] * 3)


# -------------------------------------------------------------------------------------------------------------- runs


def body_of(features=64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(features, 16), nn.ReLU(), nn.Linear(16, 10))


SETTINGS = {"rounds": 3, "participation": 0.5, "learning_rate": 0.05, "batch_size": 5, "evaluate_every": 0}


@pytest.fixture(scope="module")
def fed():
    return load("digits", num_clients=8)


def test_only_adapters_are_sent_and_the_body_stays(fed):
    body = body_of()
    run = selffl.train(lora(body, 4), fed, "fedavg", **SETTINGS)
    size = 16 * 4 + 16 * 10 + 10
    assert run._state.server.params.shape == (size,)
    model = run.personal_model(3)
    assert torch.equal(model[0].base.weight, body[0].weight)
    rows = fed.test.features[:5]
    torch.testing.assert_close(merge(model)(rows), model(rows), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["self-fl-auto", "ditto", "feddpa"])
def test_a_run_goes_on_to_the_same_bits(method, fed, tmp_path):
    whole = selffl.train(lora(body_of(), 4), fed, method, **SETTINGS)
    selffl.train(lora(body_of(), 4), fed, method, out=tmp_path / "run", **SETTINGS | {"rounds": 1})
    again = selffl.resume(tmp_path / "run", rounds=3, trusted=True)
    for client in range(8):
        ours, theirs = (run.personal_model(client).state_dict() for run in (again, whole))
        assert all(torch.equal(entry, theirs[name]) for name, entry in ours.items())


def test_fedsa_shares_a_and_keeps_b(fed):
    """FedSA-LoRA is FedPer whose head is B, and the classifier."""
    method = selffl.algorithm("fedper", head="lora_B, 2", num_local_steps=3)
    adapted = lora(body_of(), 4, train_a=True)
    run = selffl.train(adapted, fed, method, **SETTINGS)
    shared = run.global_model().state_dict()
    start = adapted.state_dict()
    assert not torch.equal(shared["0.lora_A.weight"], start["0.lora_A.weight"])
    for name in ("0.lora_B.weight", "2.weight", "2.bias"):
        assert torch.equal(shared[name], start[name])
    assert run.personal_model(0).state_dict()["0.lora_A.weight"].equal(shared["0.lora_A.weight"])


def test_each_matrix_has_a_variance(fed):
    run = selffl.train(lora(body_of(), 4), fed, "self-fl-auto", **SETTINGS)
    closing, found = run._state.server.closing, run.inter_variances()
    assert list(found) == ["0.lora_B.weight", "2.weight", "2.bias"]
    assert list(found.values()) == pytest.approx((closing.inter_variance * closing.variance_ratios).tolist())
    with pytest.raises(
        ConfigError,
        match=r"^fedavg learns no variance for each tensor; .* such as self-fl-auto\.",
    ):
        selffl.train(lora(body_of(), 4), fed, "fedavg", **SETTINGS | {"rounds": 1}).inter_variances()


def test_parameters_of_small_models_are_named_by_their_places():
    model = FlatModel(nn.Linear(3, 2))
    assert model.group_names[3:] == ("weight[1, 0]", "weight[1, 1]", "weight[1, 2]", "bias[0]", "bias[1]")
    assert len(model.group_names) == len(model.group_sizes)
