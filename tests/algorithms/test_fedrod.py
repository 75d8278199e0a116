"""FedRoD's two heads: what a client answers, two classes by one score, and what it refuses."""

import copy

import pytest
import torch
from torch import nn

import selffl
from selffl.engines.cohort import CohortEngine
from selffl.errors import ConfigError
from selffl.training.flat import FlatModel
from selffl.training.losses import logistic_loss
from selffl.training.model import ModelSource

BINARY, BINARY_LOSS = nn.functional.binary_cross_entropy_with_logits, logistic_loss


def rows(num_classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    client = torch.arange(60) % 3
    labels = torch.randint(num_classes, (60,), generator=generator)
    labels[client == 0] = labels[client == 0].clamp(max=num_classes - 2)  # a class that the first has not
    features = torch.randn(60, 4, generator=generator, dtype=torch.float64) + labels.unsqueeze(-1)
    return features, labels, client


def network(outputs=3):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def test_a_personal_model_is_a_module_of_its_own_kind_that_adds_both_heads():
    features, labels, client = rows()
    fed = selffl.Federation.from_arrays(features, labels, client, 0.2)
    run = selffl.train(network(), fed, "fedrod", rounds=3, participation=1.0, dtype=torch.float64)
    shared = run.global_model()
    for number, own in enumerate(fed.clients):
        model = run.personal_model(own)
        assert type(model) is nn.Sequential
        kept = run._state.memory.offset[number][-18:]
        added = nn.Linear(5, 3).double()
        with torch.no_grad():
            added.weight.copy_(kept[:15].view(3, 5))
            added.bias.copy_(kept[15:])
            seen = shared[:2](features)
            torch.testing.assert_close(model(features), shared[2](seen) + added(seen))
        assert kept.norm() > 0.1


def test_one_score_of_two_classes_is_balanced_by_their_log_odds():
    """By hand, with torch's own SGD; the first client has one class alone, so that its shared model stays."""
    features, labels, client = rows(2)
    fed = selffl.Federation.from_arrays(features, labels.double(), client, 0.0)
    source = ModelSource(fed, FlatModel(network(1)), BINARY_LOSS, 0.1, 5, seed=2)
    engine = CohortEngine(selffl.algorithm("fedrod", num_local_steps=4), source)
    state = engine.advance(engine.start(source.model.params), 1)
    models, sizes = [], fed.train.num_examples.tolist()
    for m in range(3):
        own, added = copy.deepcopy(network(1)), nn.Linear(5, 1).double()
        nn.init.zeros_(added.weight)
        nn.init.zeros_(added.bias)
        of_client = fed.train.labels[fed.train.owner == m]
        odds = (of_client.sum().log() - (1 - of_client).sum().log()).clamp(-1e4, 1e4)
        task = source.task(torch.tensor([m]), 1)
        optimiser = torch.optim.SGD([*own.parameters(), *added.parameters()], lr=0.1)
        for draw in range(4):
            x, y = (part[0] for part in task.batch(draw, torch.tensor([0])))
            seen = own[:2](x)
            score = own[2](seen)
            loss = BINARY((score + odds).squeeze(-1), y)
            loss = loss + BINARY((score.detach() + added(seen.detach())).squeeze(-1), y)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        models.append(FlatModel(own).params)
        torch.testing.assert_close(state.memory.offset[m][-6:], FlatModel(added).params, rtol=1e-10, atol=1e-12)
    shared = sum(size * model for size, model in zip(sizes, models, strict=True)) / sum(sizes)
    torch.testing.assert_close(state.server.params, shared, rtol=1e-10, atol=1e-12)
    assert torch.equal(models[0], source.model.params)


@pytest.mark.parametrize(
    ("module", "loss", "said"),
    [
        (nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)), None, r"^fedrod needs the input of the last layer, .* \(1\)"),
        (
            nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)),
            None,
            "these rows have none: .* whose bias is added to the scores",
        ),
        (network(), nn.CrossEntropyLoss(weight=torch.ones(3)), "these rows have none: expected cross-entropy"),
        (
            nn.Sequential(nn.Linear(4, 3, bias=False)),
            None,
            "these rows have none: expected .* a last layer whose bias",
        ),
    ],
)
def test_a_model_or_loss_that_it_cannot_train_is_refused_in_a_line(module, loss, said):
    features, labels, client = rows()
    fed = selffl.Federation.from_arrays(features.float(), labels, client, 0.2)
    with pytest.raises(ConfigError, match=said) as error:
        selffl.train(module.float(), fed, "fedrod", rounds=1, **({"loss": loss} if loss else {}))
    assert "\n" not in str(error.value)


def test_values_have_no_classes():
    features, labels, client = rows()
    fed = selffl.Federation.from_arrays(features, labels.double(), client, 0.2)
    with pytest.raises(ConfigError, match=r"^fedrod balances classes .* and these rows have none"):
        selffl.train(network(1), fed, "fedrod", rounds=1, dtype=torch.float64)
