"""FedPAC: prototypes and the pull towards them, the heads that clients are sent, and what is refused."""

import pytest
import torch
from federations import network_federation, run, starting_point
from torch import nn

import selffl
from selffl import budget
from selffl.algorithms import FedPAC, FedRep
from selffl.data.federation import Federation, Rows
from selffl.errors import ConfigError
from selffl.training.flat import FlatModel
from selffl.training.model import ModelSource

STEPS = {"num_local_steps": 4, "head_steps": 3}


def network(*more, outputs=3):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), *more, nn.Tanh(), nn.Linear(5, outputs)).double()


def rows(num_classes=3, counts=(9, 30, 16, 3)):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(num_classes, (sum(counts),), generator=generator)
    features = torch.randn(sum(counts), 4, generator=generator, dtype=torch.float64) + labels.unsqueeze(-1)
    return Rows(features, labels, torch.tensor([0, *counts]).cumsum(0))


def task_of(module, own, loss=nn.functional.cross_entropy):
    federation = Federation(range(len(own.num_examples)), own, own)
    source = ModelSource(federation, FlatModel(module, batch_norm="batch"), loss, 0.1, 4)
    return source.task(torch.arange(len(own.num_examples)), 1)


# ------------------------------------------------------------------------------------------------- features by class


@pytest.mark.parametrize("numbers", [1 << 21, 700])
@pytest.mark.parametrize("kind", ["plain", "two classes by one score", "normalised by each client's rows"])
def test_moments_are_those_of_each_clients_rows_in_one_pass(kind, numbers, monkeypatch):
    """Clients have models of their own, and one has fewer rows than the others have classes."""
    monkeypatch.setitem(budget.BUDGETS, "cpu", budget.Budget(evaluated_numbers=numbers))
    more = [nn.BatchNorm1d(5)] if "normalised" in kind else []
    outputs, classes = (1, 2) if "one score" in kind else (3, 3)
    module, own = network(*more, outputs=outputs), rows(classes)
    loss = nn.functional.cross_entropy
    if outputs == 1:
        own = Rows(own.features, own.labels.double().unsqueeze(-1), own.offset)
        loss = nn.functional.binary_cross_entropy_with_logits
    task = task_of(module, own, loss)
    params = FlatModel(module).params[: task._model.num_parameters]
    models = params + 0.1 * torch.arange(4).unsqueeze(-1)
    found = task.class_moments(models)
    for client in range(4):
        low, high = own.offset[client : client + 2].tolist()
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(models[client], module.parameters())
            z = module[:-1](own.features[low:high])
        labels = own.labels[low:high].reshape(-1).long()
        for k in range(classes):
            mine = z[labels == k]
            assert found.counts[client, k] == len(mine)
            mean = mine.mean(0) if len(mine) else torch.zeros(5, dtype=torch.float64)
            square = mine.square().sum(1).mean() if len(mine) else torch.zeros((), dtype=torch.float64)
            torch.testing.assert_close(found.means[client, k], mean, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(found.squares[client, k], square, rtol=1e-10, atol=1e-12)


# -------------------------------------------------------------------------------------------------- what it comes to


def test_a_lone_client_without_a_pull_trains_as_by_fedrep():
    source = network_federation(1)
    pac, rep = (
        run(method(**STEPS, **more), source, 5) for method, more in ((FedPAC, {"alignment": 0.0}), (FedRep, {}))
    )
    torch.testing.assert_close(pac[2], rep[2], rtol=1e-10, atol=0)


def test_the_pull_draws_features_of_a_class_together():
    source, spread = network_federation(6), []
    for alignment in (0.0, 5.0, 50.0):
        _, state, personal = run(FedPAC(alignment=alignment, **STEPS), source, 8)
        moments = source.task(torch.arange(6), 1).class_moments(personal)
        gaps = (moments.means - state.server.prototypes).square().sum(-1) * (moments.counts > 0)
        spread.append(gaps.sum().item())
    assert spread[1] < 0.9 * spread[0]
    assert spread[2] < 0.9 * spread[1]


def test_without_a_prototype_there_is_no_pull():
    """In the first round nobody has one."""
    source = network_federation(4)
    weak, strong = (run(FedPAC(alignment=alignment, **STEPS), source, 1)[2] for alignment in (0.0, 50.0))
    assert torch.equal(weak, strong)


def test_each_client_is_sent_the_head_that_was_combined_for_it():
    """Who took part has a head of its own, mixed of the cohort's; who did not is sent the average."""
    source = network_federation(6)
    method = FedPAC(**STEPS)
    server = method.start(starting_point(source), source.population)
    clients = torch.tensor([4, 0, 3])
    memory = method.newcomer(server.params.expand(3, -1))
    upload, _ = method.client_round(method.broadcast(server, clients), memory, source.task(clients, 1))
    after = method.server_round(server, clients, upload)
    head = source.population.head
    sent = method.broadcast(after, torch.arange(6)).params
    assert torch.equal(sent[:, : head.start], after.params[: head.start].expand(6, -1))
    for client in (1, 2, 5):
        assert torch.equal(sent[client], after.params)
    trained = upload.params[:, head.start : head.stop]
    for client in (4, 0, 3):
        own = sent[client, head.start : head.stop]
        weights = torch.linalg.lstsq(trained.T, own.unsqueeze(-1)).solution.flatten()
        torch.testing.assert_close(trained.T @ weights, own)
        assert weights.sum().item() == pytest.approx(1.0)
        assert (weights > -1e-9).all()
        assert 0.01 < weights.max() < 0.999  # a mixture, not somebody's own
    assert len({tuple(sent[client].tolist()) for client in (4, 0, 3)}) == 3


def test_prototypes_are_means_over_rows_and_stay_where_nobody_has_the_class():
    source = network_federation(6)
    method = FedPAC(**STEPS)
    server = method.start(starting_point(source), source.population)
    for cohort in ([0, 1, 2, 3, 4, 5], [1]):
        clients = torch.tensor(cohort)
        memory = method.newcomer(server.params.expand(len(cohort), -1))
        upload, _ = method.client_round(method.broadcast(server, clients), memory, source.task(clients, 1))
        before, server = server, method.server_round(server, clients, upload)
        counts = upload.class_counts
        for k in range(3):
            if counts[:, k].sum() == 0:
                assert torch.equal(server.prototypes[k], before.prototypes[k])
                continue
            mean = sum(n * c for n, c in zip(counts[:, k], upload.prototypes[:, k], strict=True)) / counts[:, k].sum()
            torch.testing.assert_close(server.prototypes[k], mean)
    assert (counts.sum(0) == 0).any()


# ------------------------------------------------------------------------------------------------------------- refused


def test_models_without_body_head_or_classes_are_refused_in_one_line():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 4, generator=generator), torch.arange(40) % 3
    fed = selffl.Federation.from_arrays(x, y, torch.arange(40) % 4, 0.2)
    values = selffl.Federation.from_arrays(x, x[:, 0] + 0.5, torch.arange(40) % 4, 0.2)
    cases = [
        (nn.Linear(4, 3), fed, "^fedpac shares a body and combines heads, but the model has one layer; expected two"),
        (nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)), fed, "^fedpac needs the input of the last layer, and"),
        (
            network(outputs=1),
            values,
            "^fedpac has a prototype for each class, and these rows have none: expected",
        ),
        (
            network(nn.BatchNorm1d(5)),
            fed,
            "BatchNorm with running statistics, and fedpac cannot carry them: prototypes",
        ),
    ]
    for module, federation, message in cases:
        with pytest.raises(ConfigError, match=message) as caught:
            selffl.train(module, federation, "fedpac", rounds=1)
        assert "\n" not in str(caught.value)
    run = selffl.train(network(nn.BatchNorm1d(5)), fed, "fedpac", rounds=2, participation=1.0, batch_norm="batch")
    assert run.summary["status"] == "finished"
