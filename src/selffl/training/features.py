"""Features of a module: what its last layer is given, for a block of clients, and gradients of objectives of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from selffl.algorithms.features import FeatureRows, Objective
from selffl.algorithms.layers import Head
from selffl.data.named import Features
from selffl.errors import ConfigError
from selffl.training.blocks import Gradients, Loss, Way, quickest_way, silence_rnn_warning, vectorise
from selffl.training.flat import FlatModel

HEAD_TOLERANCE = 1e-3  # that outputs are those of the last layer is seen on weights moved by 1 to 2


def features_of(model: FlatModel, params: Tensor, rows: Features, way: Way) -> Tensor:
    """Features ``[n, B, D]`` of ``rows [n, B, ...]`` at ``params [n, P]``, as the module answers: in eval() mode."""

    def of_client(model: FlatModel, params: Tensor, rows: Features) -> Tensor:
        with model.catch_inputs() as caught:
            model(params, rows)
        return caught[0]

    check_head(model, rows[0])
    if way == "loop":
        with silence_rnn_warning():
            return torch.stack([of_client(model, own, these) for own, these in zip(params, rows, strict=True)])
    twin = model.unfolded if way == "unfold" else model.vectorised
    found: Tensor = vectorise(lambda *given: of_client(twin, *given), model, params, rows)
    return found


def objective_gradient(
    model: FlatModel, loss: Loss, gradients: Gradients, objective: Objective, params: Tensor, num_extra: int,
    rows: Sequence[Any], constants: Sequence[Tensor],
) -> Tensor:  # fmt: skip
    """Gradient ``[n, E + P]`` of an objective of a training pass; ``rows`` are features, labels, and keys of masks.

    Behind it, in the place of statistics, are those that the pass leaves.
    """
    features, labels, *keys = rows
    check_head(model, features[0])

    def value(
        model: FlatModel, own: Tensor, features: Features, labels: Tensor, *more: Tensor
    ) -> tuple[Tensor, Tensor]:
        key, constants = more[: len(keys)], more[len(keys) :]
        own_model = own[num_extra:]
        with model.catch_inputs() as caught:
            scores, left = model.train_at(own_model, features, *key)
        seen = FeatureRows(own_model, caught[0].to(scores), scores, labels, loss)  # in half precision under autocast
        return objective(seen, own[:num_extra], *constants), own_model[:0] if left is None else left

    given = (features, labels, *keys, *constants)
    way = quickest_way(model, params[:, num_extra:], features) if gradients == "auto" else gradients
    if way == "loop":
        slopes, left = [], []
        with torch.enable_grad(), silence_rnn_warning():
            for client, own in enumerate(params.detach()):
                leaf = own.clone().requires_grad_()
                number, statistics = value(model, leaf, *(each[client] for each in given))
                slopes.append(torch.autograd.grad(number, leaf)[0])
                left.append(statistics.detach())
        found = torch.stack(slopes), torch.stack(left)
    else:
        twin = model.unfolded if way == "unfold" else model.vectorised
        slope = torch.func.grad(lambda *one: value(twin, *one), has_aux=True)
        found = vectorise(slope, model, params, *given)
    if model.num_statistics:
        found[0][:, -model.num_statistics :] = found[1]
    return found[0]


def check_head(model: FlatModel, rows: Features) -> Head:
    """The head of a module, or one line that says why it has no features; ``rows [B, ...]`` are tried."""
    kind, name = type(model.module).__name__, model.last_layer[0] or "itself"
    if model.head is None:
        raise ConfigError(
            f"the last layer of {kind} ({name}) is {type(model.last_layer[1]).__name__}; expected an nn.Linear that is "
            "trained as a whole, whose input are the features. End the model with one, or use another method."
        )
    if not model.ends_in_head(rows, HEAD_TOLERANCE):
        raise ConfigError(
            f"the outputs of {kind} are not those of its last layer ({name}) for one vector of features a row; "
            "expected a model that ends with that nn.Linear, used once, with weights of its own. Leave out what comes "
            "after it, or use another method."
        )
    return model.head
