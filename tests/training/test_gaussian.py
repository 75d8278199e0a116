"""The two-level Gaussian federation: what is drawn, and the gradient of Eq. (4)."""

import pytest
import torch
from scipy import stats

from selffl.errors import ConfigError
from selffl.training.gaussian import GaussianFederation, GaussianTask


def draw(seeds, num_clients=20, **options):
    settings = {
        "num_examples": (10, 20),
        "global_mean": 1.6,
        "inter_variance": 0.3,
        "row_variance": 0.1,
        "learning_rate": 1e-4,
    }
    return GaussianFederation.draw(seeds=torch.as_tensor(seeds), num_clients=num_clients, **(settings | options))


# -------------------------------------------------------------------------------------------------------------- noise


def test_noise_is_normal_and_keyed_by_seed_round_client_and_minibatch():
    source, clients, like = draw([3, 4]), torch.arange(20).expand(2, -1), torch.zeros(40, 50, dtype=torch.float64)
    noise = source.task(clients, 1).noise(0, torch.arange(40), like)
    assert stats.kstest(noise.flatten().numpy(), "norm").pvalue > 1e-3
    others = [
        source.task(clients, 2).noise(0, torch.arange(40), like),
        source.task(clients, 1).noise(1, torch.arange(40), like),
        draw([5, 6]).task(clients, 1).noise(0, torch.arange(40), like),
        noise.roll(1, 0),
        noise.roll(1, 1),
    ]
    for other in others:
        assert abs(stats.pearsonr(noise.flatten().numpy(), other.flatten().numpy()).statistic) < 0.08
    alone = draw(4).task(torch.tensor([7]), 1).noise(0, torch.tensor([0]), like[:1])
    assert torch.equal(alone[0], noise[27])


# ------------------------------------------------------------------------------------------------------------ drawing


def test_the_draw_has_the_moments_of_the_model():
    source = draw(range(500))
    assert source.shape == (500,)
    personal = (source.personal_params - 1.6).flatten() / 0.3**0.5
    noise = (source.local_estimate - source.personal_params).squeeze(-1) / source.intra_variance.sqrt()
    for standard in (personal, noise.flatten()):
        assert stats.kstest(standard.numpy(), "norm").pvalue > 1e-3
        assert standard.mean().abs() < 4 / 100  # 10,000 draws
        assert (standard.var() - 1).abs() < 4 * 2**0.5 / 100
    assert abs(stats.pearsonr(personal.numpy(), noise.flatten().numpy()).statistic) < 0.04
    # nor do repeats or neighbours move together
    block = personal.reshape(500, 20)
    assert torch.corrcoef(block.T).fill_diagonal_(0).abs().max() < 0.25


def test_the_numbers_of_examples_are_uniform_on_the_closed_range():
    source = draw(range(500))
    counts = torch.bincount(source.num_examples.flatten(), minlength=21)
    assert counts[:10].sum() == 0
    assert len(counts) == 21
    assert stats.chisquare(counts[10:].numpy()).pvalue > 1e-3
    assert draw(0, num_examples=(7, 7)).num_examples.unique().tolist() == [7]


def test_the_variance_of_a_client_is_that_of_a_row_over_its_rows():
    source = draw([3, 4])
    torch.testing.assert_close(source.intra_variance, 0.1 / source.num_examples.to(torch.float64), rtol=1e-15, atol=0)
    assert source.inter_variance.tolist() == [0.3, 0.3]
    assert source.global_params.tolist() == [[1.6], [1.6]]


def test_the_draw_is_keyed_by_seed_and_client():
    batch, alone = draw([8, 9, 10]), draw(9)
    assert alone.shape == ()
    assert torch.equal(batch.local_estimate[1], alone.local_estimate)
    assert torch.equal(batch.num_examples[1], alone.num_examples)
    assert torch.equal(draw(9, num_clients=50).local_estimate[:20], alone.local_estimate)
    assert not torch.equal(batch.local_estimate[0], batch.local_estimate[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shapes_and_dtypes(dtype):
    source = draw([1, 2, 3], num_clients=5, dtype=dtype)
    shapes = {
        "global_params": (3, 1),
        "personal_params": (3, 5, 1),
        "local_estimate": (3, 5, 1),
        "intra_variance": (3, 5),
        "inter_variance": (3,),
    }
    for name, shape in shapes.items():
        tensor = getattr(source, name)
        assert tensor.shape == shape, name
        assert tensor.dtype == dtype, name
    assert source.num_examples.shape == (3, 5)
    assert draw(1).local_estimate.dtype == torch.float64
    assert not draw(1).resample


def test_the_population_states_everything():
    source = draw([1, 2], num_clients=5)
    assert source.population.num_clients == 5
    assert source.population.intra_variance is source.intra_variance
    assert source.population.inter_variance is source.inter_variance


def test_rows_are_drawn_around_the_estimates_which_stay_what_they_are():
    source, without = draw([3, 4], num_clients=200, with_rows=True), draw([3, 4], num_clients=200)
    assert without.data is None
    assert source.data.shape == (2, 200, 20, 1)
    for name in ("personal_params", "local_estimate", "intra_variance", "num_examples"):
        assert torch.equal(getattr(source, name), getattr(without, name)), name
    noise = []
    for repeat in range(2):
        for client, count in enumerate(source.num_examples[repeat].tolist()):
            rows = source.data[repeat, client, :count, 0]
            assert rows.mean().item() == pytest.approx(source.local_estimate[repeat, client].item(), abs=1e-12)
            noise.append((rows - rows.mean()) / (0.1 * (1 - 1 / count)) ** 0.5)  # the mean is taken out of N rows
    assert stats.kstest(torch.cat(noise).numpy(), "norm").pvalue > 1e-3
    assert (torch.cat(noise).var() - 1).abs() < 4 * (2 / len(torch.cat(noise))) ** 0.5


def test_rows_are_keyed_by_seed_and_client():
    batch, alone = draw([8, 9], with_rows=True), draw(9, with_rows=True)
    assert torch.equal(batch.data[1], alone.data)
    assert torch.equal(draw(9, num_clients=50, with_rows=True).data[:20], alone.data)
    assert draw(9, with_rows=True, dtype=torch.float32).data.dtype == torch.float32


# -------------------------------------------------------------------------------------------------------------- tasks


def test_halves_of_rows_have_the_losses_of_their_own_rows():
    """The sum over the rows of a half of (θ − x)²/(2 N σ_m²), as its share of the terms times its mean loss."""
    source, clients = draw([3, 4], with_rows=True), torch.tensor([[5, 0, 7], [2, 1, 19]])
    halves = source.task(clients, 1).halves()
    slots = torch.arange(12)
    params = torch.linspace(1.0, 2.0, 12, dtype=torch.float64).unsqueeze(-1)
    found = halves.gradient(params, halves.batch(0, slots), slots) * halves.num_terms.reshape(-1, 1)
    for slot in slots.tolist():
        repeat, client, half = slot // 6, clients.flatten()[slot // 2].item(), slot % 2
        count, variance = source.num_examples[repeat, client].item(), source.intra_variance[repeat, client].item()
        rows = source.data[repeat, client, :count]
        rows = rows[(count + 1) // 2 :] if half else rows[: (count + 1) // 2]
        own = params[slot].clone().requires_grad_()
        (expected,) = torch.autograd.grad(((own - rows) ** 2).sum() / (2 * count * variance), own)
        torch.testing.assert_close(found[slot], expected, rtol=1e-10, atol=1e-10)
    assert halves.num_gradients.tolist() == [2] * 6
    torch.testing.assert_close(halves.num_terms.sum(-1), torch.ones(2, 3, dtype=torch.float64))


def test_without_rows_halves_are_two_independent_estimates_whose_mean_is_the_estimate():
    source = draw(list(range(3000)))
    clients = torch.arange(2).expand(3000, 2)
    halves = source.task(clients, 1).halves()
    first, second = halves.batch(0, torch.arange(12000))[0].reshape(3000, 2, 2).unbind(-1)
    estimate = source.local_estimate[:, :2, 0]
    torch.testing.assert_close((first + second) / 2, estimate, rtol=1e-12, atol=1e-14)
    scale = source.intra_variance[:, :2].sqrt()
    errors = [(part - source.personal_params[:, :2, 0]) / scale for part in (first, second)]
    for error in errors:  # twice the variance of the whole
        assert error.var().item() == pytest.approx(2.0, abs=0.15)
    assert (errors[0] * errors[1]).mean().item() == pytest.approx(0.0, abs=0.1)
    again = source.task(clients, 9).halves().batch(0, torch.arange(12000))[0]
    assert torch.equal(again.reshape(3000, 2, 2)[..., 0], first)  # in every round


def test_a_task_of_one_estimate_has_no_halves():
    one = torch.ones(1, dtype=torch.float64)
    with pytest.raises(ConfigError, match="two halves"):
        GaussianTask(one.unsqueeze(-1), one, torch.tensor([7]), 0.1, torch.tensor([3])).halves()


def test_the_gradient_is_that_of_equation_4():
    generator = torch.Generator().manual_seed(2)
    estimate = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    variance = torch.rand(4, generator=generator, dtype=torch.float64) + 0.1
    task = GaussianTask(estimate, variance, torch.ones(4), 0.1, torch.arange(4))
    rows = torch.tensor([2, 0])
    params = torch.randn(2, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    loss = ((params - estimate[rows]) ** 2 / (2 * variance[rows].unsqueeze(-1))).sum()
    (expected,) = torch.autograd.grad(loss, params)
    found = task.gradient(params.detach(), task.batch(0, rows), rows)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
    assert task.num_gradients.tolist() == [1, 0, 1, 0]
    assert task.batch_size == 1
    assert task.shape == (4,)


def test_a_batch_follows_the_rows_and_not_the_draw():
    estimate = torch.arange(4.0).unsqueeze(-1)
    task = GaussianTask(estimate, torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.ones(4), 0.1, torch.arange(4))
    rows, others = torch.tensor([1, 3]), torch.tensor([0, 2])
    assert task.batch(0, rows)[0].flatten().tolist() == [1.0, 3.0]
    assert task.batch(1, others)[0].flatten().tolist() == [0.0, 2.0]
    assert task.batch(0, others)[1].flatten().tolist() == [1.0, 3.0]
    assert task.batch(7, rows)[0].flatten().tolist() == [1.0, 3.0]
    assert task.batch(7, rows)[1].flatten().tolist() == [2.0, 4.0]


def batch_of(source, clients, round_number):
    """The estimates and variances a cohort sees."""
    rows = torch.arange(clients.numel())
    estimate, variance = source.task(clients, round_number).batch(0, rows)
    return estimate.reshape(*clients.shape, -1), variance.reshape(clients.shape)


def test_a_task_is_that_of_its_cohort():
    source = draw([1, 2], num_clients=6)
    clients = torch.tensor([[4, 0, 2], [1, 5, 3]])
    task = source.task(clients, 1)
    estimate, variance = batch_of(source, clients, 1)
    for r in range(2):
        assert torch.equal(estimate[r], source.local_estimate[r, clients[r]])
        assert torch.equal(variance[r], source.intra_variance[r, clients[r]])
        assert torch.equal(task.num_examples[r], source.num_examples[r, clients[r]])
    assert task.learning_rate == 1e-4
    assert task.shape == (2, 3)
    assert task.num_gradients.tolist() == [0] * 6


def test_a_learning_rate_for_each_client():
    rates = torch.rand(2, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    source = draw([1, 2], num_clients=6, learning_rate=rates)
    clients = torch.tensor([[4, 0], [1, 5]])
    assert source.task(clients, 1).learning_rate.tolist() == [rates[0, [4, 0]].tolist(), rates[1, [1, 5]].tolist()]


def test_without_resampling_every_round_sees_the_same_data():
    source, clients = draw(3), torch.arange(20)
    assert torch.equal(batch_of(source, clients, 1)[0], batch_of(source, clients, 2)[0])


def test_resampling_is_keyed_by_round_and_client_and_not_by_the_cohort():
    source, clients = draw(3, resample=True), torch.arange(20)
    first, second = batch_of(source, clients, 1)[0], batch_of(source, clients, 2)[0]
    assert (first != second).all()
    assert torch.equal(first, batch_of(source, clients, 1)[0])
    some = torch.tensor([17, 2, 5])
    assert torch.equal(batch_of(source, some, 1)[0], first[some])
    others = draw(4, resample=True)
    noise = first - source.local_estimate
    assert (noise != batch_of(others, clients, 1)[0] - others.local_estimate).all()
    batch = draw([2, 3], resample=True)
    assert torch.equal(batch_of(batch, clients.expand(2, -1), 1)[0][1], first)


def test_resampling_is_a_parametric_bootstrap():
    source, clients = draw(range(50), resample=True), torch.arange(20).expand(50, -1)
    noise = []
    for number in range(1, 11):
        estimate, variance = batch_of(source, clients, number)
        noise.append((estimate - source.local_estimate).squeeze(-1) / variance.sqrt())
        assert torch.equal(variance, source.intra_variance)
    standard = torch.stack(noise).flatten()  # 10,000 draws
    assert stats.kstest(standard.numpy(), "norm").pvalue > 1e-3
    assert (standard.var() - 1).abs() < 4 * 2**0.5 / 100
    rounds = torch.stack(noise).flatten(1)
    assert torch.corrcoef(rounds).fill_diagonal_(0).abs().max() < 0.15


def test_coordinates_are_resampled_independently():
    one = draw(3)
    wide = GaussianFederation(
        global_params=one.global_params.expand(3),
        personal_params=one.personal_params.expand(20, 3),
        local_estimate=one.local_estimate.expand(20, 3),
        intra_variance=one.intra_variance,
        inter_variance=one.inter_variance,
        num_examples=one.num_examples,
        seeds=one.seeds,
        learning_rate=1e-4,
        resample=True,
    )
    estimate, _ = batch_of(wide, torch.arange(20), 1)
    assert (estimate[:, 0] != estimate[:, 1]).all()
    assert (estimate[:, 1] != estimate[:, 2]).all()


def test_resampling_keeps_the_dtype():
    source = draw(3, resample=True, dtype=torch.float32)
    assert batch_of(source, torch.arange(20), 1)[0].dtype == torch.float32
