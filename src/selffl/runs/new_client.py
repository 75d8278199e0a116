"""New clients: a personal model for a client that never took part, from the current global model and its own rows.

A new client makes visits, one after the other, to a server that stays as it is: what it would be sent, what it would do
with it, and what it would keep are the method's own (``broadcast``, ``adapt``, ``personal``); nothing is sent back.
The visits end when its model no longer moves, or after as many as the method says.  A method with a learned sigma_0^2
arrives at the posterior mode under it, which needs nothing of the new client but its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selffl.algorithms.records import map_tensors
from selffl.data.federation import Federation, Rows
from selffl.data.named import NamedFeatures, entries_of, row_shape
from selffl.data.preparation import encode_classes
from selffl.data.tables import Table
from selffl.engines.cohort import RunState
from selffl.errors import DataError, DivergedError
from selffl.runs.predict import is_table, read_rows
from selffl.runs.session import Session, single_thread
from selffl.state.memory import MemoryStore
from selffl.training.blocks import deterministic_cudnn
from selffl.training.evaluation import check_rows
from selffl.training.model import ModelTask

MAX_VISITS = 50  # of a method whose visits go on until a model no longer moves
TOLERANCE = 3e-4  # a model that moves less in a visit, relative to its way from the global one, no longer moves
MAX_FULL_BATCH_ROWS = 500  # up to so many are met in every step, so that no minibatch noise is left
NAME = "new"  # what messages call it


def rows_of_new_client(session: Session, rows: Any) -> Rows:
    """A new client's rows as the model takes them, once they are seen to be of the kind that the run was trained on."""
    known = session.federation.train
    features, labels = _features_and_labels(session, rows)
    found = Rows.single_client(features, labels)
    if len(found.labels) == 0:
        return found
    if row_shape(found.features) != row_shape(known.features):
        raise DataError(
            f"a row of the new client has shape {row_shape(found.features)}; expected {row_shape(known.features)}, as "
            "of the clients that were trained on."
        )
    of_type = entries_of(known.features)
    entries = {name: _as(entry, of_type[name]) for name, entry in entries_of(found.features).items()}
    features = entries[""] if isinstance(found.features, Tensor) else NamedFeatures(entries)
    found = Rows(features, _as(found.labels, known.labels), found.offset)
    if found.labels.is_floating_point() and not known.labels.is_floating_point():
        odd = found.labels[found.labels != found.labels.round()].flatten()
        raise DataError(
            f"the label {float(odd[0]):g} of the new client is no class; expected whole numbers, one per row."
        )
    if found.labels.shape[1:] != known.labels.shape[1:]:
        raise DataError(
            f"a label of the new client has shape {tuple(found.labels.shape[1:])}; expected "
            f"{tuple(known.labels.shape[1:])}, as of the clients that were trained on."
        )
    found = Rows(found.features, session.label_scale.scale_labels(found.labels), found.offset)
    found = found.to(session.recipe.device, session.model.dtype)
    check_rows(session.model, session.source.loss, found, [NAME])
    return found


def _features_and_labels(session: Session, rows: Any) -> tuple[Any, Any]:
    """A new client's inputs, and its labels as the federation has them."""
    federation, preparation = session.federation, session.federation.preparation
    if isinstance(rows, Federation):
        if rows.num_clients != 1:
            raise DataError(f"the federation has {rows.num_clients} clients; expected the new client alone.")
        if rows.preparation is not None and rows.preparation != preparation:
            raise DataError(
                "the new client's federation has a preparation of its own; expected that of the run. Pass "
                "preparation=run.preparation where it is made, or the frame or file itself."
            )
        labels: Any = rows.train.labels
        if rows.classes is not None:  # it numbers those that it holds, the run those of everybody
            labels = np.array(list(rows.classes), dtype=object)[labels.cpu().numpy()]
        features = rows.train.features
        if preparation is not None and rows.preparation is None:
            features = session.inputs_of(features)
        return features, _number_classes(labels, federation.classes)
    if is_table(rows):
        features = session.inputs_of(rows)  # which refuses a run without names of columns
        assert preparation is not None
        table = read_rows(rows, preparation)
        _check_one_client(table, preparation.client)
        return features, torch.from_numpy(preparation.encode_label(table).copy())
    try:
        features, labels = rows
    except (TypeError, ValueError):
        raise DataError(
            f"rows are a {type(rows).__name__}; expected a pair (features, labels), a frame, the path of a file, or a "
            "federation of one client."
        ) from None
    if preparation is not None and len(features):
        features = session.inputs_of(features)
    return features, _number_classes(labels, federation.classes)


def _check_one_client(table: Table, name: str | None) -> None:
    """Refuse the rows of several clients, which would be taken for one new client's."""
    if name is None or name not in table.columns:
        return
    clients = table.words(name).unique().drop_null().to_pylist()
    if len(clients) > 1:
        raise DataError(
            f"{table.place} holds rows of {len(clients):,} clients in the column {name!r}, such as {clients[0]!r} and "
            f"{clients[1]!r}; expected the new client's alone. Serve them one by one, each with its own rows."
        )


def _number_classes(labels: Any, classes: Sequence[Any] | None) -> Any:
    """Classes as the user writes them as their numbers; where classes have names, numbers are taken as they are."""
    if classes is None:
        return labels
    column = np.asarray(labels.cpu() if isinstance(labels, Tensor) else labels)
    has_names = any(isinstance(name, str) for name in classes)
    if has_names and column.dtype.kind in "biuf":
        return labels
    return encode_classes(column, classes) if column.ndim == 1 else labels


def _as(values: Tensor, known: Tensor) -> Tensor:
    """Values in the type of those that are known, where that loses nothing."""
    is_float = values.is_floating_point()
    if is_float == known.is_floating_point():
        return values
    return values if is_float and not bool((values == values.round()).all()) else values.to(known.dtype)


@deterministic_cudnn()
def make_new_client_models(session: Session, state: RunState, rows: Rows) -> Tensor:
    """Personal models ``[C, P]`` of C new clients with ``rows``, each by itself; the global one for who has none.

    Nothing of the run is changed.
    """
    shared = session.method.global_model(state.server)
    found = shared.expand(len(rows.num_examples), -1).clone()
    sent = _message(session, state)
    most = session.engine.chunk_size or len(found)
    with single_thread(session):
        for size in set(rows.num_examples.tolist()) - {0}:
            alike = (rows.num_examples == size).nonzero().flatten()
            for some in alike.split(most):
                found[some] = _visit_until_settled(session, state, sent, rows.subset(some))
    if not found.norm(dim=-1).isfinite().all():
        raise DivergedError(
            f"the new client's model by {session.method.name} is not finite; expected finite numbers. Scale its rows "
            "as those that were trained on, or train with a lower learning rate or penalty."
        )
    return found


def _message(session: Session, state: RunState) -> Any:
    """What the server sends to a client of whom it knows what it knew of everybody before the first round."""
    population = session.source.population
    number, cluster = population.num_clients, population.cluster
    # Clusters decide how far one that has a variance trusts itself, which a new client has not: any will do.
    wider = replace(
        population,
        num_clients=number + 1,
        cluster=None if cluster is None else torch.cat([cluster, cluster.new_zeros(1)]),
    )
    fresh = session.method.start(state.server.params, wider)
    longer, axis = {}, state.server.params.ndim - 1  # that of the clients
    for name in session.method.per_client:
        known = getattr(state.server, name)
        longer[name] = torch.cat([known, getattr(fresh, name).narrow(axis, number, 1).to(known)], axis)
    server = replace(state.server, **longer)
    return session.method.closing_broadcast(server, torch.tensor([number], device=state.num_gradients.device))


def _visit_until_settled(session: Session, state: RunState, sent: Any, rows: Rows) -> Tensor:
    """Models ``[C, P]`` of new clients with as many rows each, after their visits."""
    method, source = session.keeping(session.method), session.source
    shared = session.method.global_model(state.server)
    count, size = len(rows.num_examples), int(rows.num_examples[0])
    # The server is at rest: every visit is to the same round.
    options = replace(source.options.at_home(), learning_rate_schedule="constant")
    rate = source.options.rate(source.learning_rate, state.round_number + 1)
    is_settling = method.newcomer_visits is None
    most = max(MAX_FULL_BATCH_ROWS, source.batch_size) if is_settling else source.batch_size
    store = MemoryStore(method.newcomer(shared.expand(count, -1)), ())
    found = shared.expand(count, -1).clone()
    moving = torch.arange(count, device=shared.device)
    for visit in range(1, (method.newcomer_visits or MAX_VISITS) + 1):
        task = ModelTask(
            source.model, source.loss, rows, moving, rate, min(size, most), source.seed,
            state.round_number + visit, source.gradients, keys=torch.full_like(moving, source.federation.num_clients),
            optimiser=source.optimiser, options=options,
        )  # fmt: skip
        to_each = map_tensors(lambda part, shape=task.shape: part.expand(shape + part.shape[1:]), sent)
        kept = method.adapt(to_each, store.read(moving), task)
        store.write(moving, kept)
        before, after = found[moving], method.personal(shared, kept, task)
        found[moving] = after
        has_moved = (after - before).norm(dim=-1) > TOLERANCE * (after - shared).norm(dim=-1)
        moving = moving[has_moved] if is_settling else moving
        if not len(moving):
            break
    return found
