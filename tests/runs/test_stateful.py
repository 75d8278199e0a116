"""A run that is stopped, extended, broken off, opened and left by clients, against a slow and obvious model of it.

Hypothesis chooses what happens, in which order.  The model is DITTO on softmax regressions in NumPy, one client after
the other, all rows in every step: it has no folder, no checkpoint, no cohort axis and nothing to go on from.
"""

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

import selffl
from selffl.algorithms import Ditto
from selffl.data.federation import Rows
from selffl.engines.cohort import sample_cohort

SIZES = (3, 6, 4, 12, 2, 6)  # training rows of each client: each divides a minibatch, which so is all of them, alike
RATE, STEPS, PENALTY, SHARE, SEED, NUM_CLASSES = 0.2, 3, 0.7, 0.5, 11, 3
MOST_ROUNDS = 25
SILENT = set()  # (round, client): whose answer is lost, so that it counts for nothing, though it has trained


class Unreliable(Ditto):
    """DITTO whose clients at times send what nobody can use."""

    def client_round(self, broadcast, memory, task):
        upload, memory = super().client_round(broadcast, memory, task)
        is_lost = torch.tensor([(task._round, client) in SILENT for client in task.clients.tolist()])
        return replace(upload, change=upload.change.masked_fill(is_lost[:, None], torch.nan)), memory


METHOD = Unreliable(num_local_steps=STEPS, penalty=PENALTY)


class Plain:
    """What the run should be: the shared model, and one of each client that has trained."""

    def __init__(self, weights, rows):
        self.first, self.rows = weights, rows

    def gradient(self, weights, client):
        features, labels = self.rows[client]
        scores = features @ weights[:, :-1].T + weights[:, -1]
        chances = np.exp(scores - scores.max(1, keepdims=True))
        chances /= chances.sum(1, keepdims=True)
        error = (chances - np.eye(NUM_CLASSES)[labels]) / len(labels)
        return np.column_stack([error.T @ features, error.sum(0)])

    def after(self, num_rounds):
        """From the beginning, every time: the shared model, those of the clients, and in how many rounds each was."""
        shared, own, visits = self.first, {}, dict.fromkeys(range(len(SIZES)), 0)
        for number in range(1, num_rounds + 1):
            answers = {}
            for client in sample_cohort(SEED, number, len(SIZES), SHARE).tolist():
                local, personal = shared, own.get(client, shared)
                for _ in range(STEPS):
                    local = local - RATE * self.gradient(local, client)
                    pull = PENALTY * (personal - shared)
                    personal = personal - RATE * (self.gradient(personal, client) + pull)
                own[client] = personal
                visits[client] += 1
                if (number, client) not in SILENT:
                    answers[client] = local
            total = sum(SIZES[client] for client in answers)
            shared = sum(SIZES[client] / total * local for client, local in answers.items())
        return shared, own, visits


def flat(module):
    """Weights and biases of a linear layer, ``[classes, features + 1]``."""
    return np.column_stack([module.weight.detach().numpy(), module.bias.detach().numpy()])


class RunsAndTheirModel(RuleBasedStateMachine):
    """Everything that may happen to a run's folder."""

    @initialize(seed=st.integers(0, 9), on_disk=st.booleans())
    def begin(self, seed, on_disk):
        SILENT.clear()
        self.folder = Path(tempfile.mkdtemp())
        rng = np.random.default_rng(seed)
        clients = np.repeat(np.arange(len(SIZES)), SIZES)
        features, labels = rng.normal(size=(len(clients), 2)), rng.integers(0, NUM_CLASSES, len(clients))
        labels[: len(SIZES) * NUM_CLASSES : len(SIZES)] = range(NUM_CLASSES)  # none is missing
        offset = torch.tensor([0, *SIZES]).cumsum(0)
        every = Rows(torch.tensor(features), torch.tensor(labels), offset)
        self.federation = selffl.Federation(list(range(len(SIZES))), every, every)
        torch.manual_seed(seed)
        self.module = nn.Linear(2, NUM_CLASSES).double()
        rows = {m: (features[clients == m], labels[clients == m]) for m in range(len(SIZES))}
        self.plain = Plain(flat(self.module), rows)
        self.run = selffl.train(
            self.module, self.federation, METHOD, rounds=1, participation=SHARE, learning_rate=RATE,
            batch_size=max(SIZES), seed=SEED, dtype="float64", out=self.path, checkpoint_every=2,
            client_memory="disk" if on_disk else "memory", evaluate_every=1,
        )  # fmt: skip
        self.asked_for = 1

    @property
    def path(self):
        return self.folder / "run"

    def go_on(self, rounds, on_round=None):
        self.run = selffl.resume(
            self.path, model=self.module, algorithm=METHOD, federation=self.federation, rounds=rounds, on_round=on_round
        )
        self.asked_for = rounds

    @precondition(lambda self: self.asked_for < MOST_ROUNDS)
    @rule(more=st.integers(1, 4))
    def extend(self, more):
        self.go_on(self.asked_for + more)

    @precondition(lambda self: self.asked_for < MOST_ROUNDS)
    @rule(ahead=st.integers(1, 4), place=st.integers(0, int(SHARE * len(SIZES)) - 1))
    def lose_an_answer(self, ahead, place):
        """Of a round to come, in which the others still answer."""
        number = self.asked_for + ahead
        if not any(silent == number for silent, _ in SILENT):
            SILENT.add((number, int(sample_cohort(SEED, number, len(SIZES), SHARE)[place])))

    @precondition(lambda self: self.asked_for < MOST_ROUNDS)
    @rule(more=st.integers(2, 5), after=st.integers(0, 3))
    def interrupt_and_resume(self, more, after):
        """The user's callback fails after some rounds; what was asked for is done at the second attempt."""
        rounds, left = self.asked_for + more, [min(after, more - 1)]

        def fail(row):
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("enough")

        try:
            self.go_on(rounds, fail)
        except RuntimeError:
            self.go_on(rounds)
        else:
            raise AssertionError("it was not interrupted")

    @precondition(lambda self: self.asked_for < MOST_ROUNDS)
    @rule(more=st.integers(1, 3), which=st.integers(0, 12))
    def fail_to_write_and_resume(self, more, which):
        """The disk is full when the so-manieth file is to take the place of another."""
        rounds, left, real = self.asked_for + more, [which], os.replace

        def full(source, target):
            left[0] -= 1
            if left[0] == -1:
                raise OSError(28, "No space left on device")
            real(source, target)

        with mock.patch("os.replace", full):
            try:
                self.go_on(rounds)
            except (OSError, selffl.errors.SelfFLError):
                assert left[0] < 0
        self.go_on(rounds)

    @rule()
    def move(self):
        """The folder is renamed."""
        other = Path(tempfile.mkdtemp())
        shutil.move(self.path, other / "run")
        shutil.rmtree(self.folder)
        self.folder = other

    @rule()
    def load(self):
        self.run = selffl.load(self.path, model=self.module, algorithm=METHOD, federation=self.federation)

    @rule(size=st.integers(1, 6), seed=st.integers(0, 9))
    def welcome(self, size, seed):
        """A new client's model is where DITTO's pull and its rows balance, and nobody else's changes."""
        rng = np.random.default_rng(seed)
        features, labels = rng.normal(size=(size, 2)), rng.integers(0, NUM_CLASSES, size)
        found = flat(self.run.welcome((features, labels)))
        shared = self.plain.after(self.asked_for)[0]
        balanced, new = shared, Plain(shared, {0: (features, labels)})
        for _ in range(3000):
            balanced = balanced - RATE * (new.gradient(balanced, 0) + PENALTY * (balanced - shared))
        np.testing.assert_allclose(found, balanced, atol=5e-3)

    @invariant()
    def the_run_is_the_plain_one(self):
        shared, own, visits = self.plain.after(self.asked_for)
        np.testing.assert_allclose(flat(self.run.global_model()), shared, rtol=1e-9, atol=1e-12)
        right = 0
        for client in range(len(SIZES)):
            expected = own.get(client, shared)
            np.testing.assert_allclose(flat(self.run.personal_model(client)), expected, rtol=1e-9, atol=1e-12)
            features, labels = self.plain.rows[client]
            scores = features @ expected[:, :-1].T + expected[:, -1]
            right += int((scores.argmax(1) == labels).sum())
        assert abs(self.run.summary["weighted_accuracy"] - right / sum(SIZES)) < 1e-9
        assert [row["round"] for row in self.run.history] == list(range(1, self.asked_for + 1))
        assert [row["rounds"] for row in self.run.clients] == [visits[m] for m in range(len(SIZES))]

    def teardown(self):
        shutil.rmtree(self.folder, ignore_errors=True)


TestRunsAndTheirModel = pytest.mark.slow(RunsAndTheirModel.TestCase)
TestRunsAndTheirModel.settings = settings(
    max_examples=int(os.environ.get("SELFFL_EXAMPLES", "6")),
    stateful_step_count=8,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
