"""Outputs and gradients of a block of clients, each with its own parameters, and which way to them is quickest.

The ways agree to rounding:

* *closed form*: a linear layer under cross-entropy needs no autograd (several times faster on small blocks);
* *vmap*: all clients in one kernel per operation;
* *loop*: one client after the other, by ordinary autograd;
* *unfold*: vmap, convolutions as products of matrices;
* *stacked*: all clients' rows in one ordinary pass, where only adapters, linear layers and biases are trained
  (`selffl.training.stacked`); outputs, and gradients of other objectives than the loss, go by vmap then;
* *recomputed*: stacked, blocks of layers computed again instead of kept: less memory, more time.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from selffl.data.federation import Rows
from selffl.data.named import Features, map_entries
from selffl.errors import ConfigError, unknown_name
from selffl.training.flat import FlatModel
from selffl.training.graphs import GraphedGradient
from selffl.training.stacked import StackedGradient
from selffl.training.threads import do_in_threads

Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs, labels) of a minibatch -> its mean loss
# (params [n, P], features [n, B, ...], labels [n, B], keys of masks [n, 1] where there are any) -> [n, P]
Gradient = Callable[..., Tensor]
Way = Literal["vmap", "loop", "unfold", "stacked", "recomputed"]
Gradients = Literal["auto", "vmap", "loop", "unfold", "stacked", "recomputed"]

# Multiplications that the convolutions of a client's minibatch take before the loop pays on a CPU.  Time by vmap over
# time by the loop, 2 … 60 clients, medians of 9 turns on a busy two-core Xeon, torch 2.13; one thread | two threads:
#    0.1 million  1.30 … 0.14 | 1.06 … 0.12      4.9 million  1.83 … 1.25 | 1.43 … 0.86
#    0.8 million  1.23 … 0.51 | 1.10 … 0.37      5.3 million  1.85 … 1.28 | 1.52 … 0.93
#    1.2 million  1.32 … 0.51 | 1.13 … 0.28      8.5 million  1.27 … 0.92 | 1.33 … 0.90  (3 x 3 kernels, 16 channels)
#    2.4 million  1.25 … 0.93 | 1.22 … 0.58       47 million  1.26 … 1.40 | 0.85 … 0.74  (32 channels)
# and 12 million, the CIFAR CNN with B = 20: 1.87 (5 clients), 1.72 (20) | 1.41, 1.32.
LOOP_FROM = 3_000_000
# Clients from which convolutions as products pay on a GPU.  The CIFAR CNN, B = 20, on an H200, recorded as graphs,
# times as fast as a plain loop, vmap | unfold: 12.8 | 12.6 with 5 clients, 34 | 37 with 20, 56 | 57 with 100.
UNFOLD_FROM = 20
# Clients from which LSTMs go by vmap and, on a CPU, hidden units times rows of a minibatch before the loop pays.
# Time of a gradient by vmap over that by the loop, two layers, 25 steps of 100 inputs, 2, 5, 20, 77 clients, medians of
# up to 11 turns on a busy two-core Xeon, torch 2.13; one thread (processor time) | two threads (wall time, threads that
# wait asleep):
#    16 units x 10 rows  2.8, 1.4, 0.64, 0.49 | 2.1, 1.1, 0.45, 0.31
#    64 units x 10 rows  2.1, 1.3, 0.97, 0.94 | 1.8, 1.0, 0.70, 0.73
#   256 units x 10 rows  1.4, 1.3, 1.28, 1.54 | 1.2, 1.0, 0.80, 0.98
# and with one thread, 10 | 30 clients: 8 units x 10 rows 0.83 | 0.46, 64 x 2 0.75 | 0.56, 16 x 40 1.20 | 0.87,
# 32 x 40 1.15 (30 clients), 16 x 160 1.87 (30), 256 x 2 1.16 (10).  Outputs alone take 0.9 to 1.6 times these ratios.
# On an H200, 256 x 10, rounds of FedAvg, times as fast as a plain loop, vmap | loop: 0.49 | 0.80 with 2 clients,
# 1.2 | 0.84 with 5, 4.7 | 0.87 with 20, 17 | 0.89 with 77.
LSTM_CLIENTS = {"cpu": 10, "cuda": 4}
LSTM_LOOP_FROM = 1_000


def quickest_way(model: FlatModel, params: Tensor, features: Features) -> Way:
    """How to compute a block ``params [n, P]``, ``features [n, B, ...]``: a rule, so that a run can be repeated.

    A lone client by the loop (vmap takes 2 to 3 times as long: its overhead is shared with no other), and so recurrent
    layers other than plain LSTMs, which have no kernel under vmap.  LSTMs by the loop unless the clients are many
    (`LSTM_CLIENTS`) and, on a CPU, their blocks small (`LSTM_LOOP_FROM`).  By the loop whatever vmap cannot follow:
    code that is not torch's own may look at numbers to decide what to do.  Convolutions by the loop on a CPU if they
    are work enough (`LOOP_FROM`): the libraries run a grouped convolution worse than several plain ones; on a GPU as
    products, if the clients are many (`UNFOLD_FROM`).  All else by vmap, for which an MLP of 2,410 parameters takes
    0.74 of the loop's time with 5 clients and 0.08 with 100, one of 159,010 takes 0.89 and 0.73 (one thread).

    Gradients of what goes by vmap and is mostly frozen are stacked where that is right (`gradient_of`): the transformer
    of `benchmarks/adapter_cohort.py`, 16 clients, takes 0.62 of vmap's time and 0.45 of its memory (one thread).
    """
    fewest = LSTM_CLIENTS.get(params.device.type, 2) if model.lstm_width else 2
    if len(params) < fewest or len(features[0]) >= rows_for_loop(model, params[0], features[0]):
        return "loop"
    is_large = params.device.type == "cuda" and len(params) >= UNFOLD_FROM
    return "unfold" if is_large and model.is_convolutional else "vmap"


def rows_for_loop(model: FlatModel, params: Tensor, features: Features) -> float:
    """From how many rows on, such as ``features [B, ...]``, a client is computed apart; infinite if never."""
    may_fail = model.lstm_width or model.may_attend
    if model.needs_loop or (may_fail and not model.is_vectorisable(features, params)):
        return 0
    if params.device.type != "cpu":
        return math.inf
    limits = ((LOOP_FROM, model.convolution_work(features, params)), (LSTM_LOOP_FROM, model.lstm_width))
    return min((limit / work for limit, work in limits if work), default=math.inf)


def rows_at(rows: Rows, index: Tensor) -> tuple[Features, Tensor]:
    """Features ``[n, B, ...]`` and labels ``[n, B]`` of the rows numbered ``index [n, B]``."""

    def chosen(entry: Tensor) -> Tensor:
        # index_select copies row by row; entry[index] takes twice as long.
        return entry.index_select(0, index.reshape(-1)).view(*index.shape, *entry.shape[1:])

    return map_entries(chosen, rows.features), rows.labels[index]


@contextmanager
def silence_rnn_warning() -> Iterator[None]:
    """Silence cuDNN's warning, at every call, that it has to gather recurrent weights that lie in a larger vector."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
        yield


def check_gradients(gradients: Gradients) -> None:
    """Refuse an unknown way."""
    if gradients not in get_args(Gradients):
        raise unknown_name("gradients", gradients, get_args(Gradients))


def gradient_of(model: FlatModel, loss: Loss, gradients: Gradients = "auto") -> Gradient:
    """Gradients of the mean loss for a block of clients, each with its own parameters and minibatch.

    They are of a training pass.  Behind them, in the place of statistics, are those that the pass leaves.  The same for
    the same model, so that what a GPU has recorded of it serves all rounds.
    """
    known = id(loss), gradients  # the gradient holds the loss, whose number is nobody else's as long as it does
    if known in model.gradients:
        return partial(model.gradients[known], model)

    # None of these holds the model, which holds them: what a GPU has recorded is freed as soon as the model is.
    def by_vmap(model: FlatModel, params: Tensor, features: Features, labels: Tensor, *keys: Tensor) -> Tensor:
        def mean_loss(params: Tensor, features: Features, labels: Tensor, *key: Tensor) -> Any:
            outputs, left = model.train_at(params, features, *key)
            return loss(outputs, labels) if left is None else (loss(outputs, labels), left)

        slope = torch.func.grad(mean_loss, has_aux=bool(model.num_statistics))
        found = vectorise(slope, model, params, features, labels, *keys)
        gradients: Tensor = found[0] if model.num_statistics else found
        if model.num_statistics:
            gradients[:, model.num_parameters :] = found[1]
        return gradients

    def one_by_one(
        model: FlatModel, params: Tensor, features: Features, labels: Tensor, *keys: Tensor, in_threads: bool
    ) -> Tensor:
        gradients = params.new_empty(params.shape)
        twins = model.twins_of_threads(torch.get_num_threads()) if in_threads else [model]

        def write_gradient(thread: int, client: int) -> None:
            own, masks = (params[client], features[client], labels[client]), [key[client] for key in keys]
            slopes, left = slopes_of(twins[thread], loss, *own, *masks, channels_last=in_threads)
            found = [slope.reshape(-1) for slope in slopes] + ([] if left is None else [left])
            torch.cat(found, out=gradients[client])

        if in_threads and len(params) > 1:  # a lone client may have all threads
            do_in_threads(write_gradient, len(params))
        else:
            with silence_rnn_warning():
                for client in range(len(params)):
                    write_gradient(0, client)
        return gradients

    def gradient(model: FlatModel, params: Tensor, features: Features, labels: Tensor, *keys: Tensor) -> Tensor:
        if is_softmax and is_class(labels[0]) and isinstance(features, Tensor) and features.ndim == 3:
            return softmax_regression_gradient(params, features, labels)
        way = quickest_way(model, params, features) if gradients == "auto" else gradients
        if way == "loop":
            in_threads = gradients == "auto" and may_be_shared_out(model, loss, params)
            return one_by_one(model, params, features, labels, *keys, in_threads=in_threads)
        if way in ("stacked", "recomputed") or (gradients == "auto" and way == "vmap" and model.is_mostly_frozen):
            problem = stacked.problem(model, params, features, labels)
            if problem is None:
                return stacked(model, params, features, labels)
            if gradients != "auto":
                raise ConfigError(
                    f"{type(model.module).__name__} cannot take the rows of many clients in one pass ({problem}). "
                    "Train it with gradients='vmap'."
                )
        return by_vmap(model.unfolded if way == "unfold" else model.vectorised, params, features, labels, *keys)

    check_gradients(gradients)
    is_softmax = is_softmax_regression(model, loss, gradients)
    stacked = StackedGradient(loss, gradients == "recomputed")
    model.gradients[known] = GraphedGradient(gradient)
    return partial(model.gradients[known], model)


def slopes_of(
    model: FlatModel, loss: Loss, params: Tensor, features: Features, labels: Tensor, *keys: Tensor,
    channels_last: bool = False,
) -> tuple[tuple[Tensor, ...], Tensor | None]:  # fmt: skip
    """The gradient at ``params [P]`` by parameter of the module, and the statistics that the pass leaves."""
    with model.borrowed() as leaves, torch.enable_grad():
        parts = model.parts(params.detach())
        for leaf, part in zip(leaves, parts.values(), strict=False):
            is_image = channels_last and part.ndim == 4
            leaf.data = part.contiguous(memory_format=torch.channels_last) if is_image else part
        outputs, left = model.train_borrowed(parts, features, *keys)
        return torch.autograd.grad(loss(outputs, labels), leaves, materialize_grads=True), left


def is_walked_alone(model: FlatModel, loss: Loss, gradients: Gradients, params: Tensor, features: Features) -> bool:
    """Whether a lone client ``params [1, P]`` is computed by the loop on a CPU, with nothing shared between threads."""
    if gradients == "auto":
        by_loop = quickest_way(model, params, features) == "loop" and not may_be_shared_out(model, loss, params)
    else:
        by_loop = gradients == "loop"
    return by_loop and len(params) == 1 and params.device.type == "cpu" and not model.num_statistics


def may_be_shared_out(model: FlatModel, loss: Loss, params: Tensor) -> bool:
    """Whether clients ``params [n, P]`` that are computed one by one go to threads, with images channels last.

    Convolutions on a CPU, and no code but torch's and this library's: a user's may keep what it met in an attribute, or
    need images as they lie.  ``gradients="loop"`` is the loop as it was.
    """
    is_known = loss.__module__.startswith(("torch.", "selffl.")) and model.has_only_known_parts
    return params.device.type == "cpu" and model.is_convolutional and is_known


def is_softmax_regression(model: FlatModel, loss: Loss, gradients: Gradients) -> bool:
    """Whether a closed form may be used: one linear layer under cross-entropy."""
    is_plain = gradients == "auto" and model.precision == "full"
    return is_plain and loss is nn.functional.cross_entropy and _is_linear(model)


def is_class(labels: Tensor) -> bool:
    """Whether ``labels [B, ...]`` are classes, one per row; cross-entropy takes probabilities, too."""
    return labels.ndim == 1 and not labels.is_floating_point()


def outputs_of(model: FlatModel, params: Tensor, features: Features, way: Way) -> Tensor:
    """Outputs ``[n, B, ...]`` for ``features [n, B, ...]`` at ``params [n, P]``."""
    if way == "loop":
        with silence_rnn_warning():
            return torch.stack([model(own, rows) for own, rows in zip(params, features, strict=True)])
    if _is_linear(model) and isinstance(features, Tensor) and features.ndim == 3:
        weight, bias = _weight_and_bias(params, features.shape[-1])
        return torch.baddbmm(bias.unsqueeze(1), features, weight.transpose(1, 2))
    outputs: Tensor = vectorise(model.unfolded if way == "unfold" else model.vectorised, model, params, features)
    return outputs


def vectorise(function: Callable[..., Any], model: FlatModel, *arguments: Features) -> Any:
    """``function`` of all clients at once; ``model`` is the one whose name a refusal has."""
    try:
        with model.attention_at_once():
            outputs = torch.func.vmap(function, randomness="error")(*arguments)
    except RuntimeError as error:
        unmixed = ("expected scalar type",) if model.precision != "full" else ()  # layers that torch cannot mix so
        if not str(error).startswith(("vmap:", "Batching rule not implemented", *unmixed)):
            raise
        reason = str(error).splitlines()[0].split(". ")[0]
        raise ConfigError(
            f"{type(model.module).__name__} cannot be computed for many clients at once ({reason}). Train it with "
            "gradients='loop'."
        ) from error
    return outputs


def _is_linear(model: FlatModel) -> bool:
    """Whether the module is one linear layer with a bias, trained as a whole."""
    module = model.module
    return type(module) is nn.Linear and module.bias is not None and all(p.requires_grad for p in module.parameters())


def _weight_and_bias(params: Tensor, num_features: int) -> tuple[Tensor, Tensor]:
    """Weights and biases of linear layers, ``[n, classes, features]`` and ``[n, classes]``."""
    num_classes = params.shape[1] // (num_features + 1)
    return params[:, :-num_classes].view(-1, num_classes, num_features), params[:, -num_classes:]


def softmax_regression_gradient(params: Tensor, features: Tensor, labels: Tensor) -> Tensor:
    """Gradient of cross-entropy for ``nn.Linear``: (softmax(logits) - onehot(label)) x^T, mean over the minibatch."""
    error = _softmax_errors(_scores(params, features), labels)
    found = params.new_empty(params.shape)
    slopes = _weight_and_bias(found, features.shape[-1])
    torch.bmm(error, features, out=slopes[0])
    torch.sum(error, 2, out=slopes[1])
    return found


def softmax_regression_slope_changes(models: Tensor, deviations: Tensor, features: Tensor, labels: Tensor) -> Tensor:
    """As `selffl.algorithms.rowwise.RowwiseTask.compare_halves` has it, for weights and biases of ``nn.Linear``.

    Rows have scores along a direction as at a model, and from those of one model follow those of the other: neither it
    nor a gradient is written.
    """
    num_rows, num_features = labels.shape[1], features.shape[-1]
    rows = features.reshape(-1, 2 * num_rows, num_features).mT  # of both halves of each client
    weight, bias = _weight_and_bias(deviations, num_features)
    along, biases = [], (bias[0::2], bias[1::2])
    for own in (weight[0::2], weight[1::2]):
        by_half = torch.bmm(own, rows).view(len(own), -1, 2, num_rows).transpose(1, 2)  # [n / 2, 2, classes, B]
        along.append(by_half.contiguous())  # of one client, too, or its sums have another order
    difference = along[0] - along[1] + (biases[0] - biases[1])[:, None, :, None]
    toward = torch.stack([difference[:, 0].neg(), difference[:, 1]], dim=1)  # what the other model adds to scores
    scores = _scores(models, features)
    change = _softmax_errors(scores, labels) - _softmax_errors(scores + toward.view(scores.shape), labels)
    change = change.view(difference.shape)
    total, found = change.sum(-1), []
    halfway = (along[0] - along[1]) / 2, (biases[0] - biases[1]) / 2
    for of_weight, of_bias in (*zip(along, biases, strict=True), halfway):
        slopes = (of_weight * change).sum((2, 3)), (of_bias.unsqueeze(1) * total).sum(2)
        found.append(torch.stack(slopes, dim=-1))
    return torch.stack(found, dim=2).flatten(0, 1)


def _scores(params: Tensor, features: Tensor) -> Tensor:
    """Scores ``[n, classes, B]``.

    Classes before rows: softmax over the last of few classes is slow, and products of rows want them so.
    """
    weight, bias = _weight_and_bias(params, features.shape[-1])
    return torch.bmm(weight, features.transpose(1, 2)).add_(bias.unsqueeze(-1))


def _softmax_errors(scores: Tensor, labels: Tensor) -> Tensor:
    """(softmax(scores) - onehot(label)) over the number of rows ``[n, classes, B]``."""
    error = scores.softmax(1)
    error.scatter_add_(1, labels.unsqueeze(1), error.new_full((), -1.0).expand(len(error), 1, labels.shape[1]))
    return error.div_(labels.shape[1])


@contextmanager
def deterministic_cudnn() -> Iterator[None]:
    """Ask cuDNN for convolutions that sum in one order: with others the same seed gives other numbers each time."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before
