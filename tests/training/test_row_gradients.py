"""What single rows say: their gradients by torch.func, and their information by dense matrices."""

import pytest
import torch
from sample_modules import BATCH, CROSS_ENTROPY, MODULES, NUM_CLIENTS, cohort_of, random, seeded
from torch import nn

from selffl.training.blocks import gradient_of
from selffl.training.flat import FlatModel
from selffl.training.row_gradients import row_gradients_of, surplus_of

BINARY = nn.functional.binary_cross_entropy_with_logits
MSE = nn.functional.mse_loss


def scores(model, loss, params, features, labels, num_examples=None, way="auto"):
    counts = torch.full((len(params),), 30) if num_examples is None else torch.as_tensor(num_examples)
    return row_gradients_of(model, loss, gradient_of(model, loss, way))(params, features, labels, counts)


def row_gradient(module, loss, params, feature, label):
    """torch.func.grad of one row by itself."""
    shapes = {name: part.shape for name, part in module.named_parameters()}

    def value(vector):
        pieces = vector.split([shape.numel() for shape in shapes.values()])
        parts = {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}
        return loss(torch.func.functional_call(module, parts, (feature.unsqueeze(0),)), label.unsqueeze(0))

    return torch.func.grad(value)(params)


# ------------------------------------------------------------------------------------------------------ the gradients


@pytest.mark.parametrize("way", ["auto", "vmap", "loop", "unfold"])
@pytest.mark.parametrize("name", MODULES)
def test_the_gradient_of_each_row_is_that_of_torch_func(name, way):
    module, model, params, features, labels = cohort_of(name)
    found = scores(model, CROSS_ENTROPY, params, features, labels, way=way)
    assert found.gradients.shape == (NUM_CLIENTS, BATCH, params.shape[1])
    for client in range(NUM_CLIENTS):
        for row in range(BATCH):
            given = params[client], features[client, row], labels[client, row]
            expected = row_gradient(module, CROSS_ENTROPY, *given)
            torch.testing.assert_close(found.gradients[client, row], expected, rtol=1e-9, atol=1e-11)
    whole = gradient_of(model, CROSS_ENTROPY)(params, features, labels)
    torch.testing.assert_close(found.mean, whole, rtol=1e-9, atol=1e-11)
    assert (found.num_rows, found.num_examples) == (
        pytest.approx(torch.full((NUM_CLIENTS,), BATCH)),
        pytest.approx(torch.full((NUM_CLIENTS,), 30)),
    )


@pytest.mark.parametrize("name", MODULES)
def test_one_row_is_enough(name):
    module, model, params, features, labels = cohort_of(name)
    found = scores(model, CROSS_ENTROPY, params, features[:, :1], labels[:, :1])
    torch.testing.assert_close(found.gradients[:, 0], found.mean, rtol=0, atol=0)
    expected = row_gradient(module, CROSS_ENTROPY, params[2], features[2, 0], labels[2, 0])
    torch.testing.assert_close(found.mean[2], expected, rtol=1e-9, atol=1e-11)


def test_a_client_alone_has_the_scores_it_has_in_a_cohort():
    _, model, params, features, labels = cohort_of("mlp")
    together = scores(model, CROSS_ENTROPY, params, features, labels)
    alone = scores(model, CROSS_ENTROPY, params[2:3], features[2:3], labels[2:3])
    for found, expected in zip(alone, together, strict=True):
        torch.testing.assert_close(found[0], expected[2], rtol=1e-12, atol=1e-12)


def test_frozen_parameters_have_no_part_in_a_row():
    module = seeded(lambda: nn.Sequential(nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 5)), dtype=torch.float64)
    whole = FlatModel(module)
    _, _, _, features, labels = cohort_of("mlp")
    everything = scores(whole, CROSS_ENTROPY, whole.params.expand(NUM_CLIENTS, -1), features, labels)
    module[0].requires_grad_(False)
    model = FlatModel(module)
    found = scores(model, CROSS_ENTROPY, model.params.expand(NUM_CLIENTS, -1), features, labels)
    assert found.gradients.shape[-1] == 7 * 5 + 5
    torch.testing.assert_close(found.gradients, everything.gradients[..., 12 * 7 + 7 :], rtol=1e-12, atol=1e-14)


# ---------------------------------------------------------------------------------------------- classification: surplus


@pytest.mark.parametrize("loss", [CROSS_ENTROPY, nn.CrossEntropyLoss()], ids=["function", "module"])
@pytest.mark.parametrize("classes", [2, 3, 10])
def test_the_surplus_of_a_class_is_its_odds(loss, classes):
    outputs = 3.0 * random(4, 6, classes)
    labels = torch.randint(classes, (4, 6), generator=torch.Generator().manual_seed(1))
    surplus, temperature = surplus_of(loss, outputs, labels)
    p = outputs.softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(surplus, p / (1 - p), rtol=1e-9, atol=0)
    assert temperature.tolist() == [1.0] * 4


@pytest.mark.parametrize("loss", [BINARY, nn.BCEWithLogitsLoss()], ids=["function", "module"])
@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 1)])
def test_the_surplus_of_one_log_odds_is_that_of_its_label(loss, shape):
    outputs, labels = 3.0 * random(*shape), torch.arange(24).reshape(shape) % 3 % 2
    surplus, temperature = surplus_of(loss, outputs, labels.double())
    odds = torch.where(labels == 1, outputs.exp(), (-outputs).exp()).reshape(4, 6)
    torch.testing.assert_close(surplus, odds, rtol=1e-9, atol=0)
    assert temperature.tolist() == [1.0] * 4


def test_a_label_without_doubt_has_a_finite_surplus_and_no_information():
    module = seeded(lambda: nn.Linear(3, 2), dtype=torch.float64)
    model = FlatModel(module)
    features, labels = torch.ones(1, 2, 3, dtype=torch.float64), torch.zeros(1, 2, dtype=torch.int64)
    params = torch.tensor([[300.0] * 3 + [-300.0] * 3 + [0.0, 0.0]], dtype=torch.float64)
    found = scores(model, CROSS_ENTROPY, params, features, labels)
    assert found.surplus.isfinite().all()
    assert (found.gradients * found.surplus.sqrt().unsqueeze(-1)).abs().max() == 0.0


def gauss_newton(module, params, features, curvature):
    """Σ Jᵀ (∂²loss/∂outputs²) J over the rows, with J by torch.func.jacrev and the curvature of each row given."""
    shapes = {name: part.shape for name, part in module.named_parameters()}

    def outputs(vector, feature):
        pieces = vector.split([shape.numel() for shape in shapes.values()])
        parts = {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}
        return torch.func.functional_call(module, parts, (feature.unsqueeze(0),)).squeeze(0)

    total = 0.0
    for feature in features:
        jacobian = torch.func.jacrev(outputs)(params, feature)
        total = total + jacobian.T @ curvature(outputs(params, feature)) @ jacobian
    return total


@pytest.mark.parametrize("kind", ["two classes", "one log-odds"])
def test_for_two_classes_the_expected_information_is_the_gauss_newton_matrix(kind):
    width = 2 if kind == "two classes" else 1
    module = seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, width)), dtype=torch.float64)
    model = FlatModel(module)
    params, features = model.params + random(3, len(model.params)), random(3, 8, 4, seed=5)
    labels = torch.randint(2, (3, 8), generator=torch.Generator().manual_seed(2))
    if kind == "two classes":
        found = scores(model, CROSS_ENTROPY, params, features, labels)

        def curvature(outputs):
            p = outputs.softmax(0)
            return torch.diag(p) - torch.outer(p, p)
    else:
        found = scores(model, BINARY, params, features, labels.double().unsqueeze(-1))

        def curvature(outputs):
            p = outputs.sigmoid()
            return (p * (1 - p)).reshape(1, 1)

    for client in range(3):
        rows = found.gradients[client] * found.surplus[client].sqrt().unsqueeze(-1)
        expected = gauss_newton(module, params[client], features[client], curvature)
        torch.testing.assert_close(rows.T @ rows, expected, rtol=1e-9, atol=1e-12)


# -------------------------------------------------------------------------------------------- regression: temperature


@pytest.mark.parametrize("loss", [MSE, nn.MSELoss()], ids=["function", "module"])
@pytest.mark.parametrize("width", [1, 3])
def test_the_temperature_of_a_squared_error_is_twice_the_variance_of_the_residuals(loss, width):
    """Of each number, over how many numbers a row's error is the mean: the loss of a row is then T times its nats."""
    outputs, labels = random(4, 7, width), 2.0 * random(4, 7, width, seed=1)
    surplus, temperature = surplus_of(loss, outputs, labels)
    variance = (outputs - labels).numpy().reshape(4, -1).var(axis=1) + (outputs - labels).mean((1, 2)).numpy() ** 2
    torch.testing.assert_close(temperature.numpy(), 2.0 * variance / width, rtol=1e-12, atol=0)
    assert surplus.shape == (4, 7)
    assert (surplus == 1.0).all()


def test_labels_without_an_axis_of_their_own_are_as_good():
    outputs, labels = random(4, 7), random(4, 7, seed=1)
    for found, expected in zip(
        surplus_of(MSE, outputs, labels),
        surplus_of(MSE, outputs.unsqueeze(-1), labels.unsqueeze(-1)),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_information_of_many_rows_of_a_regression_is_its_hessian():
    """Σ j jᵀ tends to the Hessian of N times the loss, 2 Σ x xᵀ, where the model is true."""
    module, truth = nn.Linear(3, 1).double(), torch.tensor([[1.0, -2.0, 0.5, 3.0]], dtype=torch.float64)
    features = random(1, 4000, 3)
    x = torch.cat([features[0], torch.ones(4000, 1, dtype=torch.float64)], dim=1)
    labels = (x @ truth[0]).view(1, 4000, 1) + 0.3 * random(1, 4000, 1, seed=1)
    found = scores(FlatModel(module), MSE, truth, features, labels)
    assert found.temperature.item() == pytest.approx(2 * 0.3**2, rel=0.1)
    torch.testing.assert_close(found.gradients[0].T @ found.gradients[0], 2.0 * x.T @ x, rtol=0.1, atol=400)


def test_residuals_of_nothing_have_a_temperature_above_nothing():
    model = FlatModel(seeded(lambda: nn.Linear(3, 1), dtype=torch.float64))
    params = torch.zeros(2, 4, dtype=torch.float64)
    found = scores(model, MSE, params, random(2, 5, 3), torch.zeros(2, 5, 1, dtype=torch.float64))
    assert (found.temperature > 0).all()
    assert (found.gradients == 0).all()


@pytest.mark.parametrize("loss", [nn.functional.l1_loss, nn.functional.huber_loss, nn.L1Loss()])
def test_of_another_loss_nothing_is_known(loss):
    surplus, temperature = surplus_of(loss, random(4, 7, 2), random(4, 7, 2, seed=1))
    assert surplus.tolist() == torch.ones(4, 7).tolist()
    assert temperature.tolist() == [1.0] * 4


def test_nor_of_probabilities_for_labels():
    labels = random(4, 7, 3).softmax(-1)
    surplus, temperature = surplus_of(CROSS_ENTROPY, random(4, 7, 3, seed=1), labels)
    assert (surplus == 1.0).all()
    assert (temperature == 1.0).all()
