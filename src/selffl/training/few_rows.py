"""Plain steps of softmax regression on clients of few rows: the same models from products of rows with each other.

A gradient of softmax regression is a sum of rows, each times an error.  So a model after any number of steps is where
it began, less rows times a few numbers each, and the scores of rows follow from the products of rows with each other:

    W = W_0 - A^T X,      scores = X W_0^T - (X X^T) A.

The rows are read three times in a visit, instead of twice in every step, and models are written once.  With a penalty
the model is drawn towards its anchor in every step, which is the same with W_0 between the first model and the anchor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selffl.algorithms.local_task import Walk

# Multiplications by rows over those of plain steps, up to which rows are quicker.  Time of a round of FedAvg by rows
# over that by steps, 50 clients, 20 steps of batch 10, 10 classes, medians of 5 turns on a busy two-core Xeon, torch
# 2.13, one thread, processor time; in brackets the multiplications, N rows a client:
#   784 features  N = 10 0.31 (0.08), 30 0.54 (0.39), 50 0.55 (0.91), 80 0.76 (2.1), 100 0.94 (3.1), 130 1.17 (5.0)
#    64 features  N = 10 0.83 (0.15), 30 0.87 (0.61), 50 0.99 (1.3), 80 1.06 (2.6), 100 1.18 (3.8)
MOST_WORK = 2.0
NUMBERS_AT_ONCE = 1 << 21  # features of clients that are computed side by side
ROWS_FILLED_TO = 16  # a client's rows are filled up to a multiple of so many
STEPS_AT_ONCE = 200  # of a visit: scores begin anew after so many, and what is kept of each step stays small


@dataclass(frozen=True)
class OwnRows:
    """The rows of clients in a visit, and which of them each step is on."""

    features: Tensor  # of all rows [R, F]
    labels: Tensor  # [R]
    begin: Tensor  # of each client's rows [n]: place p of a client is row p, or row order[p]
    size: Tensor  # [n]
    order: Tensor | None
    places: Tensor  # of the steps' minibatches [n, S, B], counted from a client's own first

    @property
    def filled_size(self) -> Tensor:
        """Rows of each client ``[n]``, filled up."""
        return (self.size + ROWS_FILLED_TO - 1) // ROWS_FILLED_TO * ROWS_FILLED_TO

    def of(self, clients: Tensor) -> tuple[Tensor, Tensor]:
        """Features ``[m, N, F]`` and labels ``[m N]``, of clients of one `filled_size`; the last row is repeated."""
        filled = torch.arange(int(self.filled_size[clients[0]]))
        own = torch.minimum(filled, self.size[clients].unsqueeze(-1) - 1)
        places = (self.begin[clients].unsqueeze(-1) + own).reshape(-1)
        index = places if self.order is None else self.order[places]
        features = self.features.index_select(0, index).view(*own.shape, -1)
        return features, self.labels.index_select(0, index)


def have_few_rows(size: Tensor, num_steps: Tensor, batch_size: int, num_features: int, num_classes: int) -> Tensor:
    """Which clients of ``size [n]`` rows and ``num_steps [n]`` train faster by products of rows ``[n]``.

    By their own rows alone, so that it does not depend on who trains beside them.
    """
    met = num_steps.clamp(max=STEPS_AT_ONCE) * batch_size
    by_rows = size * (size + 2 * num_classes) * num_features + met * size * num_classes
    return by_rows <= MOST_WORK * 2 * met * num_classes * num_features


def walk_by_rows(params: Tensor, rows: OwnRows, clients: Tensor, walk: Walk) -> None:
    """Write into ``params [n, P]``, for some ``clients`` of them, what ``nn.Linear`` is after its steps.

    Side by side are clients of one filled size: what is computed of a client does not depend on who is beside it.
    """
    sizes = rows.filled_size[clients]
    for size in sorted(set(sizes.tolist())):
        number = max(NUMBERS_AT_ONCE // (size * rows.features.shape[1]), 1)
        same = clients[sizes == size]
        for start in range(0, len(same), number):
            some = same[start : start + number]
            params[some] = _walk(params[some], rows, some, walk)


def _walk(params: Tensor, rows: OwnRows, clients: Tensor, walk: Walk) -> Tensor:
    """The models of ``clients [m]`` after their steps, from ``params [m, P]``, which is written into."""
    features, labels = rows.of(clients)
    (number, most, width), batch_size = features.shape, rows.places.shape[-1]
    num_classes, steps = params.shape[1] // (width + 1), walk.num_steps[clients, None, None]
    first, last = int(steps.min()), int(steps.max())
    rate = walk.rate[clients].unsqueeze(-1) if isinstance(walk.rate, Tensor) else walk.rate
    scores = _scores(params, features, num_classes)
    # The share of the way from the anchor that a step leaves, and what a step adds to scores, of those at the anchor.
    kept, drawn = torch.as_tensor(1.0 - rate * walk.penalty, dtype=params.dtype), None
    if walk.anchor is not None and walk.penalty:
        drawn = _scores(walk.anchor[clients], features, num_classes).mul_(1.0 - kept)
        params = walk.anchor[clients].lerp_(params, kept.pow(steps).reshape(-1, 1))
    products = torch.bmm(features, features.transpose(1, 2)).add_(1.0)  # the bias is the weight of a feature of 1
    met = rows.places[clients, :last] + (most * torch.arange(number))[:, None, None]
    met = met.transpose(0, 1).reshape(last, -1)  # rows of each step's minibatches [S, m B]
    of_class = features.new_zeros(*met.shape, num_classes).scatter_(2, labels[met].unsqueeze(-1), 1.0)
    errors = features.new_empty(last, number, batch_size, num_classes)
    for step, (index, found) in enumerate(zip(met, errors, strict=True)):
        probability = scores.view(-1, num_classes).index_select(0, index).softmax(1)
        torch.mul(probability.sub_(of_class[step]).view_as(found), rate / batch_size, out=found)
        if step >= first:
            found.mul_(step < steps)  # who is done stays where it is; its scores are not looked at any more
        if step + 1 < last:
            if drawn is not None:
                scores.mul_(kept).add_(drawn)
            beside = products.view(-1, most).index_select(0, index).view(number, batch_size, most)
            scores.baddbmm_(beside.transpose(1, 2), found, alpha=-1.0)
    if drawn is not None:
        errors *= kept.pow((steps - 1 - torch.arange(last)[:, None, None, None]).clamp(min=0))
    taken = features.new_zeros(number * most, num_classes)
    taken = taken.index_add_(0, met.reshape(-1), errors.view(-1, num_classes)).view(number, most, num_classes)
    params[:, :-num_classes] -= torch.bmm(taken.transpose(1, 2), features).flatten(1)
    params[:, -num_classes:] -= taken.sum(1)
    return params


def _scores(params: Tensor, features: Tensor, num_classes: int) -> Tensor:
    """Scores of ``features [m, N, F]`` at ``params [m, P]``: ``[m, N, K]``."""
    weight, bias = params[:, :-num_classes], params[:, -num_classes:]
    weight = weight.view(len(params), num_classes, -1)
    return torch.baddbmm(bias.unsqueeze(1), features, weight.transpose(1, 2))
