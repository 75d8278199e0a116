"""The one gradient loop: a block of clients equals a loop over them, and nobody pays for the others."""

import pytest
import torch

from selffl.algorithms import LocalTask
from selffl.algorithms.solver import descend, descend_to_convergence, per_slot, rate_of, windows

SEED = 3
PARAMS = 4


class RecordingTask(LocalTask):
    """Quadratic loss around a target that changes with the draw; every question that is asked is written down."""

    def __init__(self, shape, learning_rate=0.1, noise=1.0, examples=1, batch_size=None):
        size = torch.Size(shape)
        super().__init__(size, torch.as_tensor(examples).expand(size), learning_rate, batch_size)
        generator = torch.Generator().manual_seed(SEED)
        self.target = torch.randn(size.numel(), PARAMS, generator=generator, dtype=torch.float64)
        self.noise, self.asked = noise, []

    def batch(self, draw, rows):
        self.asked.append((draw, rows.tolist()))
        return self.target[rows] + self.noise * torch.sin(draw + rows.unsqueeze(-1) * 0.7)

    def batch_gradient(self, params, batch):
        return 2.0 * (params - batch)

    def target_of(self, row, draw):
        return self.batch(draw, torch.tensor([row]))[0]


def start_of(shape):
    return torch.randn(*shape, PARAMS, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def loop(task, model, row, steps, rate, penalty=0.0, anchor=None, first_draw=0):
    """One client, one step after the other."""
    for draw in range(first_draw, first_draw + steps):
        slope = 2.0 * (model - task.target_of(row, draw))
        if anchor is not None:
            slope = slope + penalty * (model - anchor)
        model = model - rate * slope
    return model


@pytest.mark.parametrize("first_draw", [0, 17])
@pytest.mark.parametrize(
    ("shape", "steps"),
    [
        ((5,), 6),
        ((5,), [3, 7, 1, 7, 2]),
        ((4,), [2, 2, 2, 2]),
        ((1,), [9]),
        ((3,), [0, 4, 1]),
        ((2, 3), [[3, 1, 5], [5, 2, 8]]),
        ((2, 3), [[4], [6]]),
    ],
)
def test_clients_with_different_steps_equal_a_loop(shape, steps, first_draw):
    task, oracle, start = RecordingTask(shape), RecordingTask(shape), start_of(shape)
    counts = steps if isinstance(steps, int) else torch.tensor(steps)
    found = descend(task, start, counts, first_draw=first_draw)
    assert found.shape == start.shape
    each = torch.as_tensor(counts).expand(shape).flatten().tolist()
    flat = start.flatten(0, -2)
    for row, (count, model) in enumerate(zip(each, flat, strict=True)):
        expected = loop(oracle, model, row, count, 0.1, first_draw=first_draw)
        torch.testing.assert_close(found.flatten(0, -2)[row], expected, rtol=1e-13, atol=1e-15)
    assert task.num_gradients.tolist() == each


def test_a_client_that_is_done_is_not_asked_again():
    task = RecordingTask((4,))
    descend(task, start_of((4,)), torch.tensor([2, 4, 2, 1]), first_draw=10)
    asked = [(draw, sorted(rows)) for draw, rows in task.asked]
    assert asked == [(10, [0, 1, 2, 3]), (11, [0, 1, 2]), (12, [1]), (13, [1])]


def test_a_learning_rate_for_each_client():
    rates = torch.tensor([[0.1, 0.02, 0.3], [0.05, 0.2, 0.01]], dtype=torch.float64)
    task, start = RecordingTask((2, 3), learning_rate=rates), start_of((2, 3))
    steps = torch.tensor([[2, 3, 1], [4, 2, 2]])
    found = descend(task, start, steps)
    for row in range(6):
        place = (row // 3, row % 3)
        expected = loop(RecordingTask((2, 3)), start[place], row, int(steps[place]), float(rates[place]))
        torch.testing.assert_close(found[place], expected, rtol=1e-13, atol=1e-15)


def test_a_given_learning_rate_goes_before_the_tasks():
    start = start_of((3,))
    found = descend(RecordingTask((3,), learning_rate=torch.tensor([0.1, 0.2, 0.3])), start, 3, learning_rate=0.25)
    assert torch.equal(found, descend(RecordingTask((3,), learning_rate=0.25), start, 3))


def test_the_rate_of_some_rows():
    rates = torch.tensor([0.1, 0.2, 0.3])
    task = RecordingTask((3,), learning_rate=rates)
    assert rate_of(task, torch.tensor([2, 0])).tolist() == rates[[2, 0]].unsqueeze(-1).tolist()
    assert rate_of(task, torch.tensor([2, 0]), 0.7) == 0.7
    assert rate_of(RecordingTask((3,), learning_rate=0.4), torch.tensor([1])) == 0.4
    assert per_slot(0.4, task) == 0.4
    assert per_slot(torch.tensor(0.5), task).tolist() == [[0.5]] * 3


@pytest.mark.parametrize("is_shared", [False, True])
def test_the_anchor_pulls(is_shared):
    start, shape = start_of((4,)), (4,)
    anchor = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    anchors = anchor if is_shared else anchor * torch.arange(1.0, 5.0, dtype=torch.float64).unsqueeze(-1)
    steps = torch.tensor([5, 1, 3, 3])
    found = descend(RecordingTask(shape), start, steps, penalty=0.8, anchor=anchors)
    for row in range(4):
        own = anchors.expand(4, -1)[row]
        expected = loop(RecordingTask(shape), start[row], row, int(steps[row]), 0.1, penalty=0.8, anchor=own)
        torch.testing.assert_close(found[row], expected, rtol=1e-13, atol=1e-15)
    without = descend(RecordingTask(shape), start, steps, anchor=anchors)
    torch.testing.assert_close(without, descend(RecordingTask(shape), start, steps), rtol=1e-14, atol=0)


@pytest.mark.parametrize("is_shared", [False, True])
def test_what_is_frozen_stays(is_shared):
    start, shape, steps = start_of((4,)), (4,), torch.tensor([5, 1, 3, 3])
    frozen = torch.tensor([True, False, False, True])
    each = frozen.expand(4, -1) if is_shared else torch.stack([frozen.roll(k) for k in range(4)])
    found = descend(RecordingTask(shape), start, steps, frozen=frozen if is_shared else each)
    assert torch.equal(found[each], start[each])
    for row in range(4):  # the loss is a sum over coordinates: the others move as if nothing were frozen
        expected = loop(RecordingTask(shape), start[row], row, int(steps[row]), 0.1)
        torch.testing.assert_close(found[row, ~each[row]], expected[~each[row]], rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("solve", ["descend", "to convergence"])
def test_the_start_is_left_alone(solve):
    start, task = start_of((3,)), RecordingTask((3,), noise=0.0)
    kept = start.clone()
    if solve == "descend":
        descend(task, start, torch.tensor([1, 2, 3]))
    else:
        descend_to_convergence(task, start, tolerance=1e-3, max_steps=40)
    assert torch.equal(start, kept)


def loop_to_convergence(task, model, row, rate, tolerance, max_steps, first_draw=0):
    """One client's model, and how many steps it took; the criterion is looked at at every tenth and at the last."""
    for step in range(1, max_steps + 1):
        before, model = model, loop(task, model, row, 1, rate, first_draw=first_draw + step - 1)
        if (step % 10 == 0 or step == max_steps) and (model - before).norm() <= tolerance * (1 + before.norm()):
            return model, step
    return model, max_steps


@pytest.mark.parametrize("first_draw", [0, 5])
@pytest.mark.parametrize(("tolerance", "max_steps"), [(1e-3, 200), (1e-6, 200), (1e-3, 25), (1e-12, 7), (0.5, 200)])
def test_convergence_is_judged_client_by_client(tolerance, max_steps, first_draw):
    rates = torch.tensor([[0.3, 0.1, 0.05], [0.02, 0.2, 0.15]], dtype=torch.float64)
    task, start = RecordingTask((2, 3), learning_rate=rates, noise=0.0), start_of((2, 3)) * 3
    found = descend_to_convergence(task, start, tolerance=tolerance, max_steps=max_steps, first_draw=first_draw)
    counts = []
    for row in range(6):
        place = (row // 3, row % 3)
        oracle = RecordingTask((2, 3), noise=0.0)
        model, count = loop_to_convergence(
            oracle, start[place], row, float(rates[place]), tolerance, max_steps, first_draw
        )
        torch.testing.assert_close(found[place], model, rtol=1e-12, atol=1e-14)
        counts.append(count)
    assert task.num_gradients.tolist() == counts
    if (tolerance, max_steps) == (1e-3, 200):
        assert len(set(counts)) > 2


def test_a_client_that_has_converged_is_not_asked_again():
    task = RecordingTask((2,), learning_rate=torch.tensor([0.4, 0.01], dtype=torch.float64), noise=0.0)
    descend_to_convergence(task, start_of((2,)) * 3, tolerance=1e-3, max_steps=33, first_draw=100)
    assert [draw for draw, _ in task.asked] == list(range(100, 133))
    assert all(sorted(rows) == [0, 1] for _, rows in task.asked[:10])
    assert all(rows == [1] for _, rows in task.asked[10:])


def test_convergence_is_relative_to_the_model_before_the_step():
    """Around 0 every step of rate 0.1 takes 0.2 of the model away: 0.2 of it before, 0.25 of it after."""
    counts = {}
    for tolerance in (0.19, 0.22):
        task = RecordingTask((1,), noise=0.0)
        task.target = torch.zeros_like(task.target)
        descend_to_convergence(
            task, torch.full((1, PARAMS), 1e6, dtype=torch.float64), tolerance=tolerance, max_steps=25
        )
        counts[tolerance] = task.num_gradients.tolist()
    assert counts == {0.19: [25], 0.22: [10]}


def test_all_converged_at_once_stops_there():
    task = RecordingTask((2,), learning_rate=0.45, noise=0.0)
    found = descend_to_convergence(task, task.target.clone(), tolerance=1e-6, max_steps=500)
    assert task.num_gradients.tolist() == [10, 10]
    assert torch.equal(found, task.target)


def test_noise_that_never_settles_stops_at_the_limit():
    task = RecordingTask((2,), noise=1.0)
    descend_to_convergence(task, start_of((2,)), tolerance=1e-9, max_steps=42)
    assert task.num_gradients.tolist() == [42, 42]


def test_progress_is_measured_over_whole_epochs_of_ten_steps_or_more():
    counts = torch.tensor([3, 10, 11, 50, 51, 205])
    task = RecordingTask((6,), examples=counts, batch_size=5)
    assert [window.tolist() for window in windows(task)] == [[10, 10, 12, 10, 11, 41]] * 2
    full = RecordingTask((6,), examples=counts)
    assert [window.tolist() for window in windows(full)] == [[1] * 6, [10] * 6]
    assert (full.is_full_batch, full.batch_size, task.is_full_batch, task.batch_size) == (True, 1, False, 5)


@pytest.mark.parametrize(("tolerance", "max_steps"), [(0.03, 200), (3e-3, 200), (3e-3, 45), (1e-12, 60), (10.0, 200)])
def test_convergence_on_minibatches_is_judged_client_by_client(tolerance, max_steps):
    counts = torch.tensor([[20, 33, 61], [7, 20, 90]])
    rates = torch.tensor([[0.2, 0.1, 0.05], [0.02, 0.2, 0.15]], dtype=torch.float64)
    task = RecordingTask((2, 3), learning_rate=rates, noise=0.2, examples=counts, batch_size=5)
    start = start_of((2, 3)) * 3
    found = descend_to_convergence(task, start, tolerance=tolerance, max_steps=max_steps, first_draw=3)
    taken = []
    for row in range(6):
        place = (row // 3, row % 3)
        oracle, window = RecordingTask((2, 3), noise=0.2), [12, 14, 13, 10, 12, 18][row]
        models = [start[place]]
        while len(models) <= max_steps:
            models.append(loop(oracle, models[-1], row, 1, float(rates[place]), first_draw=2 + len(models)))
            if (len(models) - 1) % window == 0:
                moved = (models[-1] - models[-1 - window]).norm()
                if moved <= tolerance * window * (1 + models[-1 - window].norm()):
                    break
        torch.testing.assert_close(found[place], models[-1], rtol=1e-12, atol=1e-14)
        taken.append(len(models) - 1)
    assert task.num_gradients.tolist() == taken
    if (tolerance, max_steps) == (3e-3, 200):
        assert len(set(taken)) > 2


class ShuffledTask(RecordingTask):
    """Each epoch of five minibatches holds the same five targets, which lie apart."""

    def batch(self, draw, rows):
        self.asked.append((draw, rows.tolist()))
        return self.target[rows] + self.noise * (draw * 2 % 5 - 2.0)


def test_noise_that_cancels_over_an_epoch_does_not_hide_convergence():
    """Single steps never get shorter than 0.05 here, whatever the tolerance; ten of them do."""
    task = ShuffledTask((3,), learning_rate=0.02, examples=25, batch_size=5)
    found = descend_to_convergence(task, start_of((3,)) * 3, tolerance=1e-5, max_steps=2000)
    assert max(task.num_gradients.tolist()) < 400
    assert (found - task.target).abs().max() < 0.1
    steps = [descend(ShuffledTask((3,), 0.02, examples=25, batch_size=5), found, 1, first_draw=k) for k in range(5)]
    assert max((after - found).norm(dim=-1).min() for after in steps) > 0.05
