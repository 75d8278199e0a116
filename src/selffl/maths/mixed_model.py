"""How coefficients of linear models vary between clients, by restricted maximum likelihood, from sums over clients.

The coefficients of client m are the centre plus u_m, of covariance X.  Near its optimum the loss of the client's rows
is quadratic, of curvature H_m, and the coefficients that are best for them vary around the client's by T H_m^-1, T
being the unit of the loss.  With a working covariance T S, posterior modes under it, and

    g_m = minus the slope of the loss at the mode,      W_m = (S + H_m^-1)^-1 = (1 + H_m S)^-1 H_m,

whatever S is, g_m g_m' and twice what the mode makes smallest (F_m, of N_m squared errors) are in expectation

    W_m X W_m + T (W_m - W_m S W_m)      and      tr W_m X + T (N_m - tr W_m S).

Summed over clients and solved for X and T this is a step of scoring of the likelihood (Rao, 1971; Anderson, 1973), and
repeated with S = X/T it arrives where that is highest.  The centre is found beside it: it moves by A^-1 sum g_m, where
A = sum W_m, and what it has of the clients themselves is taken into account (Patterson and Thompson, 1971).
Coefficients come in blocks, one for each score of a class, or each output, and vary alike in each of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

ALIKE_CLIENTS = 0.1  # clients whose coefficients vary alike, beside those who tell how much each varies
LEAST_CHANGE = 1e-2  # times what it was that the variance in any direction is after a step, at least
MOST_CHANGE = 1e2  # and at most
HELD = 1.001  # times the least, up to which a direction is at it
LEAST_SCALE = 0.5  # of a deviation that cannot be told from none: of few clients no variance can
NUM_FACES = 4  # how often directions are looked for in which clients do not vary
LEAST_CLIENTS = 1e-6  # that tell of a covariance, at least: without any it is known badly, and still smoothly
RANK_TOLERANCE = 1e-9  # of the largest eigenvalue: what is smaller is 0
TINY = 1e-300


@dataclass(frozen=True)
class MixedSums:
    """Sums over clients; coefficients are in K blocks of q, P = K q."""

    score: Tensor  # g [..., P]
    score_products: Tensor  # g g' of each block, summed over blocks [..., q, q]
    information: Tensor  # W [..., P, P]
    information_products: Tensor  # X -> W X W, between symmetric matrices in the basis of `basis_of` [..., V, V]
    variation: Tensor  # twice what is minimised, where it is made of squared errors [...]; else 0
    num_errors: Tensor  # how many squared errors that are [...]; 0: the loss is a log-likelihood, and T is 1


class Moments(NamedTuple):
    """What cohorts say of T and of the covariance X in the basis of `basis_of`: ``matrix`` (T, X) = ``value``."""

    value: Tensor  # [..., 1 + V]
    matrix: Tensor  # [..., 1 + V, 1 + V]


class LearnedCovariance(NamedTuple):
    """What a step of scoring finds."""

    covariance: Tensor  # X/T [..., q, q]
    shift: Tensor  # how far the centre moves [..., P]
    error: Tensor  # standard error of the mean variance of a coefficient, over T [...]
    errors: Tensor  # of the variance of each, over T [..., q]
    unit: Tensor  # T [...]
    moments: Moments  # with this cohort's


def basis_of(size: int) -> Tensor:
    """Orthonormal symmetric matrices ``[V, q, q]``, V = q (q + 1)/2; those of the diagonal first."""
    found = torch.zeros(size * (size + 1) // 2, size, size, dtype=torch.float64)
    for place in range(size):
        found[place, place, place] = 1.0
    rows, columns = torch.triu_indices(size, size, offset=1)
    others = torch.arange(size, len(found))
    found[others, rows, columns] = found[others, columns, rows] = math.sqrt(0.5)
    return found


def information_of(curvature: Tensor, covariance: Tensor) -> Tensor:
    """W ``[..., P, P]`` of clients whose loss has such a ``curvature [..., P, P]``, under a ``covariance`` as large."""
    one = torch.eye(curvature.shape[-1], dtype=curvature.dtype, device=curvature.device)
    found: Tensor = torch.linalg.solve(one + curvature @ covariance, curvature)
    return (found + found.mT) / 2


def information_products_of(information: Tensor, size: int) -> Tensor:
    """X -> W X W ``[..., V, V]`` of W ``[..., P, P]`` in blocks of ``size``, summed over them; X is alike in all."""
    basis = basis_of(size).to(information)
    blocks = _blocks(information, size)
    columns = [torch.einsum("...kilm,...lmkn->...in", blocks @ each, blocks) for each in basis]
    return torch.einsum("vin,w...in->...vw", basis, torch.stack(columns))


def _blocks(matrix: Tensor, size: int) -> Tensor:
    """A matrix ``[..., P, P]`` as blocks ``[..., K, q, K, q]`` of a ``size`` q."""
    number = matrix.shape[-1] // size
    return matrix.reshape(*matrix.shape[:-2], number, size, number, size)


def roots_of(covariance: Tensor, least: float = 0.0) -> tuple[Tensor, Tensor]:
    """The symmetric square root of a covariance ``[..., q, q]``, which is at ``least`` so large, and its inverse."""
    values, axes = torch.linalg.eigh(covariance)
    values = values.maximum(RANK_TOLERANCE * values[..., -1:]).clamp(min=least)
    root: Tensor = (axes * values.sqrt().unsqueeze(-2)) @ axes.mT
    inverse: Tensor = (axes * values.rsqrt().unsqueeze(-2)) @ axes.mT
    return root, inverse


def for_blocks(matrix: Tensor, number: int) -> Tensor:
    """A matrix ``[..., q, q]`` for each of so many blocks, and nothing between them ``[..., P, P]``."""
    same = torch.eye(number, dtype=matrix.dtype, device=matrix.device)
    return torch.einsum("kl,...ij->...kilj", same, matrix).flatten(-4, -3).flatten(-2, -1)


def in_other_units(sums: MixedSums, factor: Tensor) -> MixedSums:
    """Sums of slopes and curvatures that are a ``factor [..., q, q]`` times as large, from both sides."""
    size = factor.shape[-1]
    basis, whole = basis_of(size).to(factor), for_blocks(factor, sums.score.shape[-1] // size)
    turned = torch.einsum("vij,...wij->...vw", basis, factor.unsqueeze(-3) @ basis @ factor.unsqueeze(-3))
    return replace(
        sums,
        score=(whole @ sums.score.unsqueeze(-1)).squeeze(-1),
        score_products=factor @ sums.score_products @ factor,
        information=whole @ sums.information @ whole,
        information_products=turned.mT @ sums.information_products @ turned,
    )


def learn_covariance(
    sums: MixedSums,
    covariance: Tensor,
    centre: Tensor,
    earlier: Moments,
    share: Tensor,
    sampled: Tensor,
    seen: Tensor,
    part: float = 1.0,
) -> LearnedCovariance:
    """One step from a ``covariance [..., q, q]`` by the sums of one more cohort, or a ``part`` of it.

    The ``centre [..., P]`` is that of all clients, beyond the shared model.

    Moments of ``earlier`` cohorts, NaN where there are none, weigh 1 - ``share [...]`` beside this one's.  It is a
    share ``sampled [...]`` of all clients, and ``seen [...]`` times as many have been asked so far.
    """
    size, num_params = covariance.shape[-1], sums.score.shape[-1]
    basis, contrasts = basis_of(size).to(covariance), max(num_params // size - 1, 1)
    # Classes that a line separates have their best centre at infinity: with them the shared model counts as one client
    # more.  Squared errors need no such thing.
    is_held = (sums.num_errors == 0)[..., None, None]
    hold = torch.where(is_held, for_blocks(roots_of(covariance)[1].matrix_power(2), num_params // size), 0.0)
    pull = sums.score - (hold @ centre.unsqueeze(-1)).squeeze(-1)
    spread = torch.linalg.pinv(sums.information + hold, rtol=RANK_TOLERANCE, hermitian=True)
    shift = (spread @ pull.unsqueeze(-1)).squeeze(-1)
    length = (shift * pull).sum(-1)
    # Some of many clients are away from a centre that is right, by chance; the centre moves by what is beyond that.
    unit = torch.where(sums.num_errors > 0, sums.variation / sums.num_errors.clamp(min=1.0), 1.0)
    beyond = (1.0 - (1.0 - sampled) * contrasts * size * unit / length.clamp(min=TINY)).clamp(min=0.0)

    def in_basis(matrix: Tensor) -> Tensor:
        return torch.einsum("vij,...ij->...v", basis, matrix)

    def over_blocks(matrix: Tensor) -> Tensor:
        """The sum of the blocks ``[..., q, q]`` on the diagonal of ``[..., P, P]``."""
        return _blocks(matrix, size).diagonal(dim1=-4, dim2=-2).sum(-1)

    def between(matrix: Tensor) -> Tensor:
        """Sum of W M W over clients, of a ``matrix [..., P, P]`` by its blocks: contrasts of scores share a block."""
        return (sums.information_products @ in_basis(over_blocks(matrix) / contrasts).unsqueeze(-1)).squeeze(-1)

    # What the centre is away from where it should be adds to every g_m; what it has of each client takes from it.
    away = beyond[..., None, None] * shift.unsqueeze(-1) * shift.unsqueeze(-2)
    information, working = in_basis(over_blocks(sums.information)), in_basis(covariance)
    own = information - (sums.information_products @ working.unsqueeze(-1)).squeeze(-1)
    own = own - sampled.unsqueeze(-1) * between(spread)
    errors_left = sums.num_errors - (information * working).sum(-1) - sampled * num_params
    first = torch.cat([errors_left.unsqueeze(-1), information], dim=-1)
    others = torch.cat([own.unsqueeze(-1), sums.information_products], dim=-1)
    value = torch.cat(
        [
            (sums.variation - beyond * length).unsqueeze(-1),
            in_basis(sums.score_products) - between(away),
        ],
        dim=-1,
    )
    matrix = torch.cat([first.unsqueeze(-2), others], dim=-2)
    moments = Moments(_mix(earlier.value, value, share), _mix(earlier.matrix, matrix, share))
    unit, found = _solve(moments, covariance, sums.num_errors > 0)
    precision = moments.matrix[..., 1:, 1:]
    learned = _step_towards(covariance, torch.einsum("...v,vij->...ij", found, basis), precision, part)
    return LearnedCovariance(
        _shrink_variances(learned, precision, seen),
        part * beyond.unsqueeze(-1) * shift,
        *_errors(moments.matrix, sums.num_errors - num_params, covariance, seen),
        unit,
        moments,
    )


def _mix(old: Tensor, new: Tensor, share: Tensor) -> Tensor:
    """What is known after one more cohort, which weighs ``share [...]``: that alone where nothing was known."""
    weight = share.reshape(*share.shape, *[1] * (new.ndim - share.ndim)).to(new)
    return torch.lerp(old.to(new), new, weight).where(~old.isnan(), new)


def _solve(moments: Moments, covariance: Tensor, are_squared: Tensor) -> tuple[Tensor, Tensor]:
    """T ``[...]``, 1 where errors are not squared, and X/T in the basis ``[..., V]``."""
    value, matrix = moments
    scale = _scale(covariance)
    inverse = _inverse(matrix[..., 1:, 1:], scale)
    of_value, of_unit = ((inverse @ each.unsqueeze(-1)).squeeze(-1) for each in (value[..., 1:], matrix[..., 1:, 0]))
    information = matrix[..., 0, 1:]
    unit = (value[..., 0] - (information * of_value).sum(-1)) / (matrix[..., 0, 0] - (information * of_unit).sum(-1))
    unit = torch.where(are_squared, unit.where(unit > 0, torch.nan), 1.0)
    return unit, of_value / unit.unsqueeze(-1) - of_unit


def _scale(covariance: Tensor) -> Tensor:
    """How large covariances of each pair may be ``[..., V]``, in the basis: equations in that unit are well posed."""
    deviations = covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    rows, columns = torch.triu_indices(covariance.shape[-1], covariance.shape[-1], offset=1)
    return torch.cat([deviations.square(), deviations[..., rows] * deviations[..., columns]], dim=-1)


def _inverse(precision: Tensor, scale: Tensor) -> Tensor:
    """Inverse of a precision ``[..., V, V]``, found in units of this ``scale [..., V]``: there it counts clients."""
    units = scale.unsqueeze(-1) * scale.unsqueeze(-2)
    values, axes = torch.linalg.eigh(precision * units)
    found: Tensor = (axes / values.clamp(min=LEAST_CLIENTS).unsqueeze(-2)) @ axes.mT
    return found * units


def _step_towards(before: Tensor, covariance: Tensor, precision: Tensor, part: float) -> Tensor:
    """A ``part`` of the way from ``before [..., q, q]`` to a ``covariance`` that may not be positive.

    In no direction does it become so many times larger or smaller.  Directions in which clients would vary by less are
    held at the least, and all others are found anew beside them, by the ``precision [..., V, V]``.
    """
    root, inverse = roots_of(before)
    wanted = inverse @ covariance @ inverse
    is_known = wanted.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    wanted = torch.where(is_known, wanted, 0.0)
    size, basis, found = before.shape[-1], basis_of(before.shape[-1]).to(before), wanted
    pairs = [(place, place) for place in range(size)] + list(
        zip(*torch.triu_indices(size, size, offset=1).tolist(), strict=True)
    )
    rows, columns = torch.tensor(pairs, device=before.device).unbind(-1)
    for _ in range(NUM_FACES):
        change, directions = torch.linalg.eigh(found)
        is_least = change < HELD * LEAST_CHANGE  # those that are held already stay so, whatever their last bit
        if not bool(is_least.any()):
            break
        is_held = is_least[..., rows] | is_least[..., columns]
        frame = (root @ directions).unsqueeze(-3)
        to_basis = torch.einsum("vij,...wij->...vw", basis, frame @ basis @ frame.mT)
        own = to_basis.mT @ precision @ to_basis
        turned = directions.mT @ wanted @ directions
        free = torch.einsum("vij,...ij->...v", basis, turned)
        held = torch.where(is_held & (rows == columns), LEAST_CHANGE, 0.0).to(free)
        right = (own @ (free - held).unsqueeze(-1)).squeeze(-1)
        both = is_held.unsqueeze(-1) | is_held.unsqueeze(-2)
        left = torch.where(both, torch.eye(len(basis)).to(own), own)
        inverse_of_left = _inverse(left, torch.ones_like(free))
        answer = held + (inverse_of_left @ right.masked_fill(is_held, 0.0).unsqueeze(-1)).squeeze(-1)
        found = directions @ torch.einsum("...v,vij->...ij", answer, basis) @ directions.mT
    change, directions = torch.linalg.eigh(found)
    change = change.clamp(LEAST_CHANGE, MOST_CHANGE) ** part
    found = root @ (directions * change.unsqueeze(-2)) @ directions.mT @ root
    return torch.where(is_known, (found + found.mT) / 2, torch.nan)


def _shrink_variances(covariance: Tensor, precision: Tensor, seen: Tensor) -> Tensor:
    """Variances moved, on the logarithm, towards their mean as far as clients do not tell them from it."""
    own = covariance.diagonal(dim1=-2, dim2=-1)
    largest = own.maximum(own.mean(-1, keepdim=True))  # one that is 0 is told from others by how large these are
    information = precision.diagonal(dim1=-2, dim2=-1)[..., : own.shape[-1]]
    clients = seen.unsqueeze(-1) * information * largest.square()
    mean = (clients * own).sum(-1, keepdim=True) / clients.sum(-1, keepdim=True)
    scale = (mean / own) ** (0.5 * ALIKE_CLIENTS / (ALIKE_CLIENTS + clients))
    return covariance * scale.unsqueeze(-1) * scale.unsqueeze(-2)


def _errors(matrix: Tensor, errors_left: Tensor, covariance: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Standard errors over T, of the mean variance ``[...]`` and of each ``[..., q]``; T is known by its errors."""
    information = matrix[..., 0, 1:]
    known = torch.where(errors_left > 0, 1.0 / errors_left.clamp(min=1.0), 0.0)[..., None, None]
    precision = matrix[..., 1:, 1:] - known * information.unsqueeze(-1) * information.unsqueeze(-2)
    size, scale = covariance.shape[-1], _scale(covariance)
    of_variances = 2.0 * _inverse(precision, scale)[..., :size, :size] / seen[..., None, None]
    each = of_variances.diagonal(dim1=-2, dim2=-1).clamp(min=0.0).sqrt()
    return of_variances.sum((-2, -1)).clamp(min=0.0).sqrt() / size, each


def shrink_to_none(covariance: Tensor, errors: Tensor) -> Tensor:
    """A covariance with variances v^3/(v^2 + se^2), of such ``errors``: less where they can hardly be told from none.

    Correlations stay as they are.
    """
    own = covariance.diagonal(dim1=-2, dim2=-1)
    scale = (own / (own.square() + errors.square()).sqrt()).clamp(min=LEAST_SCALE)
    return covariance * scale.unsqueeze(-1) * scale.unsqueeze(-2)
