"""Rows of arrays, tables and files, divided into parts and put behind each other client by client."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selffl.data.columns import check_arrays, cluster_of_client, column_of, number_ids
from selffl.data.labels import Label, Task, encode_label, label_of
from selffl.data.named import Features
from selffl.data.parts import SplitRows
from selffl.data.preparation import Preparation, prepare_array
from selffl.data.profile import Moments, Profile
from selffl.data.roles import MissingRule, Roles, check_table, settle_missing
from selffl.data.rows import Rows
from selffl.data.split import Integers, Split
from selffl.data.tables import Table
from selffl.errors import ConfigError, DataError


@dataclass(frozen=True)
class Packed:
    """The fields of a federation that has no source; see `selffl.Federation`."""

    clients: Sequence[Hashable]
    train: Rows
    test: Rows
    validation: Rows | None = None
    cluster: Tensor | None = None
    classes: Sequence[Any] | None = None
    preparation: Preparation | None = None


def pack_arrays(x: Any, y: Any, client: Any, split: Split, cluster: Any = None, standardise: bool = False) -> Packed:
    """Rows of arrays with one client id each; the arguments are those of `selffl.Federation.from_arrays`."""
    column = column_of(client)
    features, labels = check_arrays(x, y, column)
    if len(column) == 0:
        raise DataError("there are no rows; expected at least one.")
    ids, owner = number_ids("client", column)
    parts = split.rows_of_parts(owner, labels)
    preparation = None
    if standardise:
        if not isinstance(features, Tensor):
            raise ConfigError(
                f"standardise is True, and x is a dictionary of {', '.join(features.keys())}; expected one array. "
                "Scale the entries that need it before, or in the model by selffl.models.Standardise."
            )
        wide = features.double().numpy()
        known = labels[torch.from_numpy(parts["train"])].double().numpy()
        moments = Moments.of(known) if labels.is_floating_point() else Moments()
        label = Label("label", "values", (), moments.mean, moments.scale)
        if not labels.is_floating_point():
            label = Label("label", "classes", tuple(range(int(labels.max()) + 1)))
        preparation = prepare_array(wide[parts["train"]], label)
        features = torch.from_numpy(preparation.scale_array(wide))
    groups = None if cluster is None else cluster_of_client(cluster, owner, ids)
    inputs: dict[str, Features] = {part: features[rows] for part, rows in parts.items()}
    return _pack(ids, owner, labels, parts, inputs, cluster=groups, preparation=preparation)


def pack_table(
    table: Table,
    roles: Roles,
    split: Split,
    *,
    ids: Any = None,
    x: Features | None = None,
    label: Label | None = None,
    task: Task | None = None,
    missing: MissingRule = "refuse",
    preparation: Preparation | None = None,
) -> Packed:
    """Rows of a table; ``ids`` are their clients and ``x`` their features where these are no columns of it."""
    check_table(table, roles)
    if preparation is not None:
        _check_given(preparation, roles, task, missing)
        roles = replace(roles, features=[column.name for column in preparation.columns], exclude=None)
        label, missing = preparation.label, preparation.missing
    features = roles.features_of(table) if x is None else []
    table, num_dropped = settle_missing(table, roles, features, missing)
    label = label or label_of(table, str(roles.label), task)
    labels = torch.from_numpy(encode_label(table, label).copy())
    column = table.ids(str(roles.client)) if ids is None else np.asarray(ids, dtype=object)
    column = column if ids is None else column[table.rows_of_source()]
    names, owner = number_ids("client", column)
    parts = split.rows_of_parts(owner, labels)
    groups = None if roles.cluster is None else cluster_of_client(table.ids(str(roles.cluster)), owner, names)
    # Classes that are numbered from 0 are their own names.
    classes = None if label.classes == tuple(range(len(label.classes))) else list(label.classes)
    if x is not None:
        given: dict[str, Features] = {part: x[table.rows_of_source(rows)] for part, rows in parts.items()}
        return _pack(names, owner, labels, parts, given, cluster=groups, classes=classes)
    if preparation is None:
        whose = None if roles.client is None else str(roles.client)
        profile = Profile.of_rows(table, features, label, whose, num_dropped, parts["train"])
        preparation = Preparation.fit(profile, missing=missing)
    for name in roles.by_name.values():
        table.release(name)
    encoded = preparation.encode_parts(table, list(parts.values()), release=True)
    inputs = {part: torch.from_numpy(rows) for part, rows in zip(parts, encoded, strict=True)}
    return _pack(names, owner, labels, parts, inputs, cluster=groups, classes=classes, preparation=preparation)


def pack_parts(rows: SplitRows, split: Split) -> Packed:
    """Rows that are divided already, with a share of the training rows set aside for validation."""
    if split.validation_fraction and "validation" in rows.parts:
        raise ConfigError(
            f"validation_fraction is {split.validation_fraction}, and the rows have a validation part; expected 0."
        )
    parts: dict[str, Any] = dict(rows.parts)
    if split.validation_fraction:
        parts["train"], parts["validation"] = set_validation_aside(parts["train"], split)
    cluster = None
    if rows.cluster is not None:
        cluster = torch.from_numpy(number_ids("cluster", column_of(rows.cluster))[1])
    return Packed(rows.ids, cluster=cluster, classes=rows.classes, **parts)


def set_validation_aside(train: Rows, split: Split) -> tuple[Rows, Rows]:
    """Training rows without a share of each client's, and that share."""
    is_validation = split.is_validation(train.owner.cpu().numpy(), train.labels)
    chosen = torch.from_numpy(is_validation).to(train.offset.device)
    return train.where(~chosen), train.where(chosen)


def pack_whole(rows: SplitRows, whole: str, split: Split) -> Packed:
    """Rows that come client by client in one part of the name ``whole``, divided here."""
    part = rows.parts[whole]
    owner = part.owner.numpy()
    client = column_of(rows.ids)[owner]
    cluster = None if rows.cluster is None else column_of(rows.cluster)[owner]
    return replace(pack_arrays(part.features, part.labels, client, split, cluster), classes=rows.classes)


def _pack(
    ids: Sequence[Hashable],
    owner: Integers,
    labels: Tensor,
    parts: Mapping[str, Integers],
    features: Mapping[str, Features],
    **known: Any,
) -> Packed:
    """Put the rows of each part behind each other, client by client; ``known`` are further fields."""

    def pack(part: str) -> Rows:
        chosen = parts[part]
        offset = np.concatenate([[0], np.cumsum(np.bincount(owner[chosen], minlength=len(ids)))])
        return Rows(features[part], labels[torch.from_numpy(chosen)], torch.from_numpy(offset))

    return Packed(ids, **{part: pack(part) for part in parts} | known)


def _check_given(preparation: Preparation, roles: Roles, task: Task | None, missing: MissingRule) -> None:
    """Refuse options that a preparation has settled otherwise."""
    label = preparation.label
    if roles.label != label.name:
        raise ConfigError(
            f"label is {roles.label!r}, and the preparation's is {label.name!r}; expected the same. Pass "
            f"label={label.name!r}."
        )
    given = {"features": roles.features, "exclude": roles.exclude}
    given |= {"task": task if task != label.task else None}
    given |= {"missing": missing if missing not in ("refuse", preparation.missing) else None}
    odd = next((name for name, value in given.items() if value is not None), None)
    if odd is not None:
        raise ConfigError(f"{odd} is given, and the preparation has its own; expected one of them. Leave {odd} out.")
