"""One client of a federation as a Flower app: what its node is asked, and what it answers by (`ClientSite`).

An error leaves a client by its kind alone, unless its text is known to hold no data: the client's own log has the rest.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from selffl.algorithms import DEFAULT_ALGORITHM
from selffl.algorithms import algorithm as method_of
from selffl.algorithms.norms import BatchNorm, check_batch_norm, check_policy
from selffl.algorithms.options import check_bool
from selffl.data.preparation import Preparation
from selffl.engines.flower.memory import ClientMemory
from selffl.engines.flower.messages import ABOUT, ARRAYS, METRICS, Order, arrays_of, read, write
from selffl.engines.flower.records import check_dtype
from selffl.engines.flower.secure import Session
from selffl.engines.flower.site import ClientSite, Data, Method
from selffl.errors import ConfigError, DivergedError, RefusedError
from selffl.state.checkpoint import load_tensors
from selffl.training.answers import LabelScale, present_model
from selffl.training.blocks import Gradients, Loss, check_gradients, deterministic_cudnn
from selffl.training.flat import FlatModel
from selffl.training.layout import check_parameters
from selffl.training.metrics import own_metrics

_log = logging.getLogger(__name__)


def client_of(context: Context) -> Hashable:
    """The id of the client on a node: ``client-id`` of its node configuration, or else ``partition-id``."""
    for name in ("client-id", "partition-id"):
        if name in context.node_config:
            client: Hashable = context.node_config[name]
            return client
    raise RefusedError(
        "the node has neither client-id nor partition-id; expected one of them in its configuration. Start the node "
        "with --node-config 'client-id=\"…\"'."
    )


def memory_of(context: Context) -> Path:
    """Where a node keeps memories: its ``memory-dir``, or else ``$SELFFL_MEMORY``, or else ``~/.selffl/memory``."""
    stated = context.node_config.get("memory-dir") or os.environ.get("SELFFL_MEMORY")
    return Path(str(stated)) if stated else Path.home() / ".selffl" / "memory"


def algorithm_of(run_config: Mapping[str, Any], given: str | Method) -> str | Method:
    """The method: the one that the run configuration names, or else the app's own."""
    name = run_config.get("algorithm", given)
    if name is not given and not isinstance(name, str):
        raise ConfigError(f"algorithm is {name!r} in the run configuration; expected the name of a method.")
    return name


def personal_model(model: nn.Module, memory_dir: str | Path, experiment: str, client: Hashable) -> nn.Module:
    """A client's own model, as of its last evaluation, read where it lies: on the client's own disk.

    Where its rows came from a table, it takes rows, and answers, in the table's own units (`selffl.PreparedModel`).
    """
    tensors, about = load_tensors(ClientMemory(Path(memory_dir), experiment, str(client), None).model_path)
    flat = FlatModel(copy.deepcopy(model), about.get("batch_norm", "averaged"))
    module = flat.load(flat.flatten(tensors).to(next(iter(tensors.values())).dtype))
    known = about.get("preparation")
    preparation = None if known is None else Preparation.from_dict(known)
    return present_model(module, preparation, LabelScale(**about.get("label_scale", {})))


def client_app(
    model: nn.Module,
    load_data: Callable[[Any], Data],
    algorithm: str | Method = DEFAULT_ALGORITHM,
    *,
    memory_dir: str | Path | None = None,
    loss: Loss | None = None,
    identify: Callable[[Context], Hashable] = client_of,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    gradients: Gradients = "auto",
    metrics: Mapping[str, Any] | None = None,
    batch_norm: BatchNorm | None = None,
    secure_sums: bool = False,
) -> ClientApp:
    """The app that a client runs.

    Args:
        model: the module; its trained values are the server's to send.
        load_data: the rows of a client by its id, as ``(x_train, y_train, x_test, y_test)``, each as
            `Federation.from_arrays` takes it, or as a `Federation` of that one client; called for every
            message, since Flower may start a process for each.
        algorithm: a name, or a method with options; the server has to have the same. A name in the run configuration
            (``algorithm``) takes its place.
        memory_dir: a folder that outlives the process: there the client's memory is kept. None: ``memory-dir`` of the
            node's configuration, or else ``$SELFFL_MEMORY``, or else ``~/.selffl/memory``.
        loss: ``loss(outputs, labels)``, the mean over a minibatch; none: it follows from the client's labels and the
            model's outputs, as in `selffl.train`.
        identify: the client's id, from Flower's context of the node.
        device: where it is computed.
        dtype: of parameters and features; the server has to have the same.
        gradients: as in `selffl.train`.
        metrics: more to measure, by name, as in `selffl.train`; the server has to know them by the same names. A client
            sends one number for each.
        batch_norm: as in `selffl.train`; the server has to have the same. ``batch-norm`` in the run configuration takes
            its place.
        secure_sums: whether the client refuses to answer a round without a secure sum. With one where the server makes
            it, it takes part anyway.
    """
    check_bool("secure_sums", secure_sums)
    check_gradients(gradients)
    measured = own_metrics(metrics)
    check_dtype(dtype)
    check_parameters(model)
    check_policy(batch_norm)

    @functools.cache
    def flat_of(policy: BatchNorm) -> FlatModel:
        return FlatModel(copy.deepcopy(model).to(torch.device(device), dtype), policy)

    def model_for(chosen: Method, asked: Any) -> FlatModel:
        check_policy(asked)
        policy = asked or chosen.batch_norm
        flat = flat_of(policy)
        check_batch_norm(policy, chosen, num_statistics=flat.num_statistics, num_kept=len(flat.kept_layers))
        return flat

    # A name that there is not, or a module that cannot be trained, should be said at once.
    flat_of(batch_norm or (method_of(algorithm) if isinstance(algorithm, str) else algorithm).batch_norm)

    def site_of(context: Context) -> ClientSite:
        method = algorithm_of(context.run_config, algorithm)
        place = memory_of(context) if memory_dir is None else Path(memory_dir)
        chosen = method_of(method) if isinstance(method, str) else method
        flat = model_for(chosen, context.run_config.get("batch-norm") or batch_norm)
        return ClientSite(flat, chosen, load_data, place, loss, gradients, measured, secure_sums)

    app = ClientApp()

    @app.query()
    @hide_error_details
    def query(message: Message, context: Context) -> Message:
        introduction = site_of(context).introduction(identify(context))
        return Message(RecordDict({ABOUT: write(introduction)}), reply_to=message)

    @app.train()
    @hide_error_details
    def train(message: Message, context: Context) -> Message:
        order = read(Order, message.content)
        answer, arrays = site_of(context).train(identify(context), order, message.content)
        return Message(RecordDict({ABOUT: write(answer), ARRAYS: arrays}), reply_to=message)

    for action in ("keys", "shares", "reveal"):

        @app.query(action)
        @hide_error_details
        def take_part(message: Message, context: Context, action: str = action) -> Message:
            experiment = read(Session, message.content).experiment
            site = site_of(context).secure_site(identify(context), experiment)
            return Message(getattr(site, action)(message.content), reply_to=message)

    @app.evaluate()
    @hide_error_details
    def evaluate(message: Message, context: Context) -> Message:
        order = read(Order, message.content)
        site = site_of(context)
        evaluated = site.train_alone if order.alone else site.evaluate
        answer, found = evaluated(identify(context), order, arrays_of(message.content))
        return Message(RecordDict({ABOUT: write(answer), METRICS: found}), reply_to=message)

    return app


def hide_error_details(handler: Callable[[Message, Context], Message]) -> Callable[[Message, Context], Message]:
    """The handler with errors that tell their kind alone: Flower sends the server their text, and it may hold rows."""

    @functools.wraps(handler)
    def handled(message: Message, context: Context) -> Message:
        try:
            with deterministic_cudnn():
                return handler(message, context)
        except (RefusedError, DivergedError):  # of our own words
            raise
        except Exception as error:
            _log.exception("this message could not be answered; the server is told the kind of error alone.")
            raise RuntimeError(f"{type(error).__name__}; the client's own log has the reason") from None

    return handled
