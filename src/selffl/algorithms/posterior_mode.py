"""Posterior modes of linear models with few coefficients, by Newton's method on all rows of each client.

A linear model of q features, a constant among them, has q coefficients for each of its K scores or outputs: P = K q.
Coefficients of different scores are independent and vary alike, those of one score have any covariance.  Here they lie
score by score, whatever their order in the model.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from selffl.algorithms.features import FeatureTask, LossDerivatives
from selffl.algorithms.layers import Head
from selffl.algorithms.population import Population
from selffl.maths.mixed_model import for_blocks

MOST_COEFFICIENTS = 16  # of a score
MOST_STEPS = 30
MOST_TRIES = 12  # to shorten a step that leads upwards
SHORTER = 0.25  # times as long as it was
NEAR = 1e-10  # of a mode, for its value beside the number of rows
SLACK = 1e-9  # likewise, by which rounding may raise a value


class Mode(NamedTuple):
    """Where the posterior of each client is highest; coefficients are score by score."""

    deviation: Tensor  # from the prior mean [..., clients, P]
    score: Tensor  # minus the slope of its loss there [..., clients, P]
    curvature: Tensor  # of its loss there [..., clients, P, P]
    value: Tensor  # of the loss, and half of what the prior adds [..., clients]
    num_errors: Tensor  # squared errors that the loss is the sum of [..., clients]; 0 of other losses


def score_order(head: Head) -> list[int]:
    """The place in the model of each coefficient, score by score, its constant last."""
    weights, width = head.num_outputs * head.num_features, head.num_features
    return [
        place
        for score in range(head.num_outputs)
        for place in [*range(score * width, (score + 1) * width), *[weights + score] * head.has_bias]
    ]


def find_order(population: Population) -> list[int]:
    """The `score_order` of a model that is one linear layer with few coefficients; empty of any other."""
    head, sizes = population.head, population.group_sizes
    is_whole = head is not None and [(0, head.stop)] == [(layer.start, layer.stop) for layer in population.layers]
    if not is_whole or set(sizes) != {1}:
        return []
    assert head is not None
    is_small = head.num_features + head.has_bias <= MOST_COEFFICIENTS
    return score_order(head) if is_small else []


def find_modes(task: FeatureTask, anchor: Tensor, covariance: Tensor, order: Tensor) -> Mode:
    """Modes of clients whose prior has the mean ``anchor [..., C, P]``, as the model has it.

    Its ``covariance [..., C, q, q]`` is in the unit of the loss.  With d the deviation from the mean and u what the
    covariance makes it of, steps are in u, so that nothing is divided by a variance that may be 0.
    """
    num_scores = anchor.shape[-1] // covariance.shape[-1]
    whole = for_blocks(covariance.double(), num_scores)
    begin = anchor.double()

    def look(steepness: Tensor) -> tuple[Tensor, LossDerivatives]:
        deviation = (whole @ steepness.unsqueeze(-1)).squeeze(-1)
        found = task.derivatives(begin.index_add(-1, order, deviation))
        gradient, curvature = found.gradient[..., order], found.curvature[..., order, :][..., order]
        held = (deviation * steepness).sum(-1) / 2
        return deviation, found._replace(loss=found.loss + held, gradient=gradient, curvature=_positive(curvature))

    here = torch.zeros_like(begin)
    deviation, found = look(here)
    one = torch.eye(here.shape[-1], dtype=here.dtype, device=here.device)
    for _ in range(MOST_STEPS):
        bend = found.curvature
        pull = (bend @ deviation.unsqueeze(-1)).squeeze(-1) - found.gradient
        there = torch.linalg.solve(one + bend @ whole, pull)
        step = there - here
        along = (whole @ step.unsqueeze(-1)).squeeze(-1)
        gain = (step * along).sum(-1) + (along * (bend @ along.unsqueeze(-1)).squeeze(-1)).sum(-1)
        scale = found.loss.abs() + 1.0
        is_done = ~(gain > NEAR * scale)
        if bool(is_done.all()):
            break
        share = torch.where(is_done, 0.0, 1.0)
        for _ in range(MOST_TRIES):
            trial = here + share.unsqueeze(-1) * step
            further, at_trial = look(trial)
            is_worse = ~(at_trial.loss <= found.loss + SLACK * scale) & ~is_done
            if not bool(is_worse.any()):
                break
            share = torch.where(is_worse, SHORTER * share, share)
        else:
            trial = torch.where(is_worse.unsqueeze(-1), here, trial)
            further, at_trial = look(trial)
        here, deviation, found = trial, further, at_trial
    return Mode(deviation, -found.gradient, found.curvature, found.loss, found.num_errors)


def in_model_order(values: Tensor, order: Tensor) -> Tensor:
    """Numbers of coefficients ``[..., P]``, score by score, in the order of the model."""
    return torch.zeros_like(values).index_add(-1, order, values)


def _positive(curvature: Tensor) -> Tensor:
    """A curvature ``[..., P, P]`` without the directions in which a loss that is not convex bends downwards."""
    values, axes = torch.linalg.eigh(curvature)
    found: Tensor = (axes * values.clamp(min=0.0).unsqueeze(-2)) @ axes.mT
    return found
