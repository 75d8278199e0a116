"""A model's answers mixed with those of the nearest of each client's own training rows: kNN-Per, for many clients.

Near is what is near among features, the input of the model's last layer.  How much the neighbours count is decided for
each client by its training rows, each of them left out when its own neighbours are looked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selffl.algorithms.layers import Head
from selffl.algorithms.options import check_integer
from selffl.budget import budget_of
from selffl.data.federation import Rows
from selffl.data.named import row_size
from selffl.errors import ConfigError
from selffl.maths.neighbours import likeliest_share, neighbour_shares, squared_distances
from selffl.training.blocks import Loss
from selffl.training.classes import class_targets, has_classes
from selffl.training.evaluation import blocks_of_clients
from selffl.training.features import check_head, features_of
from selffl.training.flat import FlatModel

MIN_ROWS_ASKED = 256  # of each client of a block, whose distances to all of its training rows are held at once


def check_neighbours(model: FlatModel, loss: Loss, train: Rows, num_neighbours: int) -> Head:
    """The last layer of a model that has features, for rows of classes; anything else is refused."""
    check_integer("neighbours", num_neighbours, 1)
    if not has_classes(model, loss, train.features, train.labels):
        raise ConfigError(
            f"neighbours is {num_neighbours}, and rows have no classes to take from their neighbours, as far as "
            "labels, loss and outputs tell; expected labels that are classes, the cross-entropy or logistic loss "
            "without weights, and a model that ends in an nn.Linear with a bias. Leave neighbours out, or change these."
        )
    return check_head(model, train.features)


def outputs_with_neighbours(
    model: FlatModel, head: Head, params: Tensor, train: Rows, rows: Rows, num_neighbours: int
) -> Tensor:
    """What clients answer to ``rows``, as the model's outputs would say it ``[rows, K]``: logarithms of probabilities.

    Of a single output it is the log-odds.  ``params [P]`` is the model of all; ``train`` and ``rows`` are of the same
    clients.  Who has no training row is answered by the model alone.
    """
    known, asked = (_features_of_rows(model, params, each) for each in (train, rows))
    params = params.to(known.dtype)
    outputs = head.scores(params, asked)
    targets = class_targets(model, train.labels).to(known.dtype)
    most = budget_of(params.device).evaluated_numbers
    sizes, order = train.num_examples.sort(descending=True, stable=True)
    for low, high in blocks_of_clients(sizes.tolist(), len(sizes), max(most // MIN_ROWS_ASKED, 1)):
        clients = order[low:high]
        index, is_there = _places(train, clients)
        own, of_class = known[index], targets[index] * is_there.unsqueeze(-1)
        # Distances are the same from any origin, and lose the fewest digits from the middle of the rows.
        middle = (own * is_there.unsqueeze(-1)).sum(1, keepdim=True) / is_there.sum(1).view(-1, 1, 1)
        own = own - middle
        step = max(most // is_there.numel(), 1)

        left_out = []
        for start in range(0, own.shape[1], step):
            these = own[:, start : start + step]
            apart = squared_distances(these, own).masked_fill_(~is_there.unsqueeze(1), torch.inf)
            apart.diagonal(start, dim1=1, dim2=2).fill_(torch.inf)  # nobody is its own neighbour
            left_out.append(neighbour_shares(apart, of_class, num_neighbours, head.num_features))
        by_model = _probabilities(head.scores(params, known[index].flatten(0, 1)).reshape(*index.shape, -1))
        share = likeliest_share(torch.cat(left_out, dim=1), by_model, of_class).to(known.dtype).view(-1, 1, 1)

        index, is_asked = _places(rows, clients)
        for start in range(0, index.shape[1], step):
            part = index[:, start : start + step]
            apart = squared_distances(asked[part] - middle, own).masked_fill_(~is_there.unsqueeze(1), torch.inf)
            by_rows = neighbour_shares(apart, of_class, num_neighbours, head.num_features)
            mixed = torch.lerp(_probabilities(outputs[part]), by_rows, share)
            chosen = is_asked[:, start : start + step]
            outputs[part[chosen]] = _as_outputs(mixed[chosen], outputs.shape[-1])
    return outputs


def _features_of_rows(model: FlatModel, params: Tensor, rows: Rows) -> Tensor:
    """Features ``[rows, D]`` by one model, in single precision or better.

    Where rows are normalised by those beside them, each client's all at once.
    """
    if model.mixes_rows:
        cuts = rows.num_examples[rows.num_examples > 0].tolist()
    else:
        cuts = [budget_of(params.device).rows_evaluated(row_size(rows.features))] * len(rows.features)
    found, start = [params.new_zeros(0, model.head.num_features if model.head else 0)], 0
    with torch.no_grad():
        for size in cuts:
            if start < len(rows.features):
                found.append(features_of(model, params[None], rows.features[start : start + size][None], "loop")[0])
            start += size
    features = torch.cat(found)
    return features.to(torch.promote_types(features.dtype, torch.float32))


def _places(rows: Rows, clients: Tensor) -> tuple[Tensor, Tensor]:
    """Row numbers of some clients side by side ``[C, n]``, and which of them are there: who has fewer is filled up."""
    size = rows.num_examples[clients].unsqueeze(-1)
    place = torch.arange(int(size.max()), device=size.device)
    last = max(len(rows.labels) - 1, 0)
    return (rows.offset[clients].unsqueeze(-1) + place).clamp(max=last), place < size


def _probabilities(outputs: Tensor) -> Tensor:
    """Probabilities of classes ``[..., K]``; a single output is the log-odds of the second of two."""
    return (outputs if outputs.shape[-1] > 1 else torch.cat([torch.zeros_like(outputs), outputs], dim=-1)).softmax(-1)


def _as_outputs(probabilities: Tensor, num_outputs: int) -> Tensor:
    """Outputs whose probabilities these are; those too small for the type are the smallest that it has."""
    logs = probabilities.clamp(min=torch.finfo(probabilities.dtype).tiny).log()
    return logs if num_outputs > 1 else logs[..., 1:] - logs[..., :1]
