"""PerFedAvg's meta-gradients against autograd, on a loss that is not quadratic."""

import pytest
import torch
from federations import sent_models

from selffl.algorithms import LocalTask, PerFedAvg

CLIENTS, ROWS, PARAMS = 3, 40, 4
RATE = 0.3  # α = β: large, so that the curvature matters


def logistic_loss(params, features, labels):
    """Mean logistic loss of one client's rows."""
    return torch.nn.functional.softplus(-labels * (features @ params)).mean()


class LogisticTask(LocalTask):
    """Full-batch logistic regression of every client, with the draws that were asked for."""

    def __init__(self, features, labels, learning_rate=RATE):
        super().__init__(torch.Size([len(labels)]), torch.full((len(labels),), labels.shape[1]), learning_rate)
        self.features, self.labels, self.draws = features, labels, []

    def batch(self, draw, rows):
        self.draws.append(draw)
        return self.features[rows], self.labels[rows]

    def batch_gradient(self, params, batch):
        return torch.func.vmap(torch.func.grad(logistic_loss))(params, *batch)


@pytest.fixture
def task():
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(CLIENTS, ROWS, PARAMS, generator=generator, dtype=torch.float64)
    truth = torch.randn(CLIENTS, PARAMS, generator=generator, dtype=torch.float64)
    noise = torch.randn(CLIENTS, ROWS, generator=generator, dtype=torch.float64)
    labels = torch.sign(torch.einsum("crp,cp->cr", features, truth) + noise)
    return LogisticTask(features, labels)


@pytest.fixture
def params():
    return torch.randn(CLIENTS, PARAMS, generator=torch.Generator().manual_seed(6), dtype=torch.float64)


def meta_gradient_by_autograd(task, params, client, alpha):
    """d/dw of f(w − α∇f(w)), differentiated through the inner step."""
    features, labels = task.features[client], task.labels[client]
    model = params[client].clone().requires_grad_()
    (inner,) = torch.autograd.grad(logistic_loss(model, features, labels), model, create_graph=True)
    (outer,) = torch.autograd.grad(logistic_loss(model - alpha * inner, features, labels), model)
    return outer


@pytest.mark.parametrize("alpha", [None, 0.8])
def test_the_hessian_free_meta_gradient_is_autograds(task, params, alpha):
    method = PerFedAvg(order="hessian-free", inner_learning_rate=alpha)
    found = method.meta_gradient(params, task, torch.arange(CLIENTS), 0)
    expected = torch.stack([meta_gradient_by_autograd(task, params, m, alpha or RATE) for m in range(CLIENTS)])
    # a central difference with δ = 1e-3 errs by δ²/6 · |third derivative|
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)
    coarse = PerFedAvg(order="hessian-free", inner_learning_rate=alpha, difference=0.3)
    error = (coarse.meta_gradient(params, task, torch.arange(CLIENTS), 0) - expected).abs().max()
    assert (found - expected).abs().max() < error / 100


def test_the_first_order_meta_gradient_is_not(task, params):
    found = PerFedAvg(order="first").meta_gradient(params, task, torch.arange(CLIENTS), 0)
    expected = torch.stack([meta_gradient_by_autograd(task, params, m, RATE) for m in range(CLIENTS)])
    assert (found - expected).norm() > 0.02 * expected.norm()
    for m in range(CLIENTS):
        features, labels = task.features[m], task.labels[m]
        gradient = torch.func.grad(logistic_loss)
        adapted = params[m] - RATE * gradient(params[m], features, labels)
        torch.testing.assert_close(found[m], gradient(adapted, features, labels), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("order", "per_step"), [("first", 2), ("hessian-free", 3)])
def test_every_part_of_every_step_has_its_own_minibatch(task, order, per_step):
    method = PerFedAvg(num_local_steps=4, order=order)
    broadcast = method.broadcast(method.start(torch.zeros(PARAMS, dtype=torch.float64), None), torch.arange(CLIENTS))
    method.client_round(broadcast, method.newcomer(broadcast.params), task)
    assert task.draws == list(range(4 * per_step))


def test_the_client_steps_along_the_meta_gradient(task, params):
    method = PerFedAvg(num_local_steps=2, order="hessian-free")
    start = params[0]
    broadcast = method.broadcast(method.start(start, None), torch.arange(CLIENTS))
    upload, _ = method.client_round(broadcast, method.newcomer(broadcast.params), task)
    models = start.expand(CLIENTS, -1)
    for _ in range(2):
        slopes = torch.stack([meta_gradient_by_autograd(task, models, m, RATE) for m in range(CLIENTS)])
        models = models - RATE * slopes
    torch.testing.assert_close(sent_models(start, upload), models, rtol=0, atol=1e-7)


@pytest.mark.parametrize(("steps", "alpha"), [(0, None), (1, None), (3, None), (2, 0.05)])
def test_the_personal_model_is_the_global_one_adapted_on_training_rows(task, params, steps, alpha):
    method = PerFedAvg(adaptation_steps=steps, inner_learning_rate=alpha)
    personal = method.personal(params[0], method.newcomer(params), task)
    for m in range(CLIENTS):
        model = params[0]
        for _ in range(steps):
            slope = torch.func.grad(logistic_loss)(model, task.features[m], task.labels[m])
            model = model - (alpha or RATE) * slope
        torch.testing.assert_close(personal[m], model, rtol=1e-13, atol=0)
