"""Steps of softmax regression on clients of few rows: the same models from products of rows with each other.

A gradient of softmax regression is a sum of rows, each times an error.  So whatever steps make of a model, by adding up
and multiplying by numbers, is a sum of what they began with and of rows, each times a few numbers, and the scores of
rows follow from the products of rows with each other.  After plain steps, for one,

    W = W_0 - A^T X,      scores = X W_0^T - (X X^T) A.

The steps are taken, as they are written (`selffl.algorithms.local_task.Walk`), in the space of scores and in that of
the multiples of which models are sums.  The rows are read three times in a visit, instead of twice in every step, and
models are written once.  A later walk of the same visit, on these rows or on halves of them, has their products
already: only the rows that its steps meet are looked up then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selffl.algorithms.local_task import StepPart, Walk
from selffl.training.threads import do_in_threads

# Multiplications by rows over those of plain steps, up to which rows are quicker.  Time of a round of FedAvg by rows
# over that by steps, 50 clients, 20 steps of batch 10, 10 classes, medians of 5 turns on a busy two-core Xeon, torch
# 2.13, one thread, processor time; in brackets the multiplications, N rows a client:
#   784 features  N = 10 0.31 (0.08), 30 0.54 (0.39), 50 0.55 (0.91), 80 0.76 (2.1), 100 0.94 (3.1), 130 1.17 (5.0)
#    64 features  N = 10 0.83 (0.15), 30 0.87 (0.61), 50 0.99 (1.3), 80 1.06 (2.6), 100 1.18 (3.8)
MOST_WORK = 2.0
NUMBERS_AT_ONCE = 1 << 23  # features of clients whose steps are taken side by side
CLIENTS_A_TURN = 12  # whose rows a thread multiplies before it looks for more
FILLED_BITS = 3  # scores of a client's rows are filled up to a number of so many bits and zeros
STEPS_AT_ONCE = 200  # of a visit: scores begin anew after so many, and what is kept of each step stays small


class KnownProducts:
    """Products of clients' rows with each other that one walk of a visit has taken, for later ones."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._places: dict[int, tuple[int, int]] = {}  # where a client's begin, and how many are in a row
        self._end = 0

    def __contains__(self, client: int) -> bool:
        return client in self._places

    def add(self, clients: Sequence[int], products: Tensor) -> None:
        """Keep ``products [m, N, N]`` of all rows of ``clients``, as they lie."""
        width = products.shape[-1]
        for place, client in enumerate(clients):
            self._places[client] = self._end + place * width**2, width
        self._blocks.append(products.view(-1))
        self._end += products.numel()

    def look_up(self, clients: Sequence[int], places: Tensor) -> Tensor:
        """Products between rows of m ``clients``, at ``places [m, N]`` among their own: ``[m, N, N]``."""
        self._blocks = [torch.cat(self._blocks)] if len(self._blocks) > 1 else self._blocks
        begin, width = torch.tensor([self._places[client] for client in clients]).unbind(-1)
        index = (begin.unsqueeze(-1) + width.unsqueeze(-1) * places).unsqueeze(-1) + places.unsqueeze(-2)
        return self._blocks[0].index_select(0, index.view(-1)).view(index.shape)


@dataclass(frozen=True)
class OwnRows:
    """The rows of clients in a visit, and which of them each step is on."""

    features: Tensor  # of all rows [R, F]
    labels: Tensor  # [R]
    begin: Tensor  # of each client's rows [n]: place p of a client is row p, or row order[p]
    size: Tensor  # [n]
    order: Tensor | None
    places: Tensor  # of the steps' minibatches [n, S, B], counted from a client's own first
    num_parts: int  # of a client's rows that are walked each for itself
    first_row: Tensor  # of a client with all its parts [n / parts]
    known: KnownProducts  # likewise

    def are_looked_up(self, clients: Tensor, num_steps: Tensor) -> Tensor:
        """Whether products are known of ``clients [m]`` that walk on other rows than all theirs as they lie ``[m]``."""
        are_known = torch.tensor([client // self.num_parts in self.known for client in clients.tolist()])
        return are_known & ((self.size[clients] > num_steps * self.places.shape[-1]) | (self.order is not None))

    def filled_size(self, clients: Tensor, num_steps: Tensor, *, looks_up: bool) -> Tensor:
        """How many rows each of ``clients [m]`` walks with, filled up, if it takes so many steps ``[m]``."""
        size = self.size[clients]
        if looks_up:
            size = size.minimum(num_steps * self.places.shape[-1])
        unit = 2 ** (torch.frexp(size.double()).exponent.long() - FILLED_BITS).clamp(min=0)
        return (size + unit - 1) // unit * unit

    def look_up(self, clients: Tensor, num_steps: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows ``[m, most, F]`` of ``clients [m]`` that are looked up, which of them steps are on, and products.

        They are all of a client's own or, if these are fewer, those that its steps ``[m]`` meet, as they are met; the
        last again and again, where ``most`` is more.  Steps are on ``[m, S, B]`` of them; products are those with each
        other ``[m, most, most]``.
        """
        met = self.places[clients, : int(num_steps.max())]
        sequence, size = met.flatten(1), self.size[clients, None]
        number, last = num_steps.unsqueeze(-1) * met.shape[-1], sequence.shape[1] - 1
        takes_all, place = size <= number, torch.arange(most)
        in_order = sequence.gather(1, place.minimum(number - 1).clamp(max=last))
        places = self.begin[clients, None] + torch.where(takes_all, place.minimum(size - 1), in_order)
        numbers = places if self.order is None else self.order[places]
        owners = clients // self.num_parts
        products = self.known.look_up(owners.tolist(), numbers - self.first_row[owners, None])
        which = torch.where(takes_all, sequence, torch.arange(last + 1).minimum(number - 1)).view(met.shape)
        features = self.features.index_select(0, numbers.view(-1)).view(*numbers.shape, -1)
        return features, which, products

    def features_of(self, clients: Tensor) -> list[Tensor]:
        """Features of each client's rows ``[N_m, F]``: as they lie, unless they have an order of their own."""
        spans = list(zip(self.begin[clients].tolist(), self.size[clients].tolist(), strict=True))
        if self.order is None:
            return [self.features[start : start + size] for start, size in spans]
        index = torch.cat([self.order[start : start + size] for start, size in spans])
        return list(torch.split(self.features.index_select(0, index), [size for _, size in spans]))

    def labels_of(self, clients: Tensor) -> Tensor:
        """Labels ``[m, S, B]`` of the rows of each step."""
        places = self.begin[clients, None, None] + self.places[clients]
        return self.labels[places if self.order is None else self.order[places]]


def have_few_rows(size: Tensor, num_steps: Tensor, batch_size: int, num_features: int, num_classes: int) -> Tensor:
    """Which clients of ``size [n]`` rows and ``num_steps [n]`` train faster by products of rows ``[n]``.

    By their own rows alone, so that it does not depend on who trains beside them.
    """
    met = num_steps.clamp(max=STEPS_AT_ONCE) * batch_size
    by_rows = size * (size + 2 * num_classes) * num_features + met * size * num_classes
    return by_rows <= MOST_WORK * 2 * met * num_classes * num_features


def walk_by_rows(walk: Walk, rows: OwnRows, clients: Tensor, first: int, wanted: dict[int, Tensor]) -> None:
    """Write into ``wanted [n, P]``, by number of the state, what becomes of some ``clients`` of them.

    They take their part of the steps that begin with number ``first``.  Side by side are clients of one filled size:
    what is computed of a client does not depend on who is beside it.
    """
    clients = clients[walk.num_steps[clients].argsort(descending=True, stable=True)]
    are_looked_up = rows.are_looked_up(clients, walk.num_steps[clients])
    for looks_up in sorted(set(are_looked_up.tolist())):
        alike = clients[are_looked_up == looks_up]
        sizes = rows.filled_size(alike, walk.num_steps[alike], looks_up=looks_up)
        for size in sorted(set(sizes.tolist())):
            same = alike[sizes == size]
            number = max(NUMBERS_AT_ONCE // (size * rows.features.shape[1]), 1)
            for start in range(0, len(same), number):
                _walk(walk, rows, same[start : start + number], first, size, wanted, looks_up=looks_up)


def _walk(
    walk: Walk, rows: OwnRows, clients: Tensor, first: int, most: int, wanted: dict[int, Tensor], *, looks_up: bool
) -> None:
    """Take the steps of ``clients [m]`` of up to ``most`` rows, those with the most steps in front.

    Rows of all of them are looked up, or nobody's.
    """
    bases = list({id(state): state for state in walk.states if state is not None}.values())
    begin = [next((place for place, base in enumerate(bases) if base is state), None) for state in walk.states]
    owners = clients.tolist()
    number, batch_size, width = len(clients), rows.places.shape[-1], rows.features.shape[1]
    num_classes, make = bases[0].shape[1] // (width + 1), rows.features.new_zeros
    weights = [base[:, : num_classes * width].view(-1, num_classes, width) for base in bases]
    left = walk.num_steps[clients]
    last = int(left[0])
    at_work = (left > torch.arange(last).unsqueeze(-1)).sum(-1).tolist()  # clients in each step
    own: LyingRows | GatheredRows
    if looks_up:
        features, met, known = rows.look_up(clients, left, most)
        own = GatheredRows(features, clients, known)
    else:
        own, met = LyingRows(rows.features_of(clients), owners, most), rows.places[clients, :last]
    met = met.transpose(0, 1)  # [S, m, B]
    met = (met + most * torch.arange(number).unsqueeze(-1)).reshape(last, -1)
    labels = rows.labels_of(clients)[:, :last].transpose(0, 1).unsqueeze(-1)
    of_class = make(last, number, batch_size, num_classes).scatter_(3, labels, 1.0 / batch_size)

    # The same of all states: scores of rows; multiples of which their weights are sums, bases first; and biases.
    products, of_bases = own.multiply(weights)
    if not looks_up and rows.order is None and most**2 <= bases[0].shape[1]:  # no more room than a model takes
        rows.known.add(owners, products)
    scores, multiples, biases = [], [], []
    for place in begin:
        scores.append(
            make(number, most * num_classes) if place is None else of_bases[place].transpose(1, 2).reshape(number, -1)
        )
        multiples.append(make(number, len(bases) + last))
        biases.append(make(number, num_classes) if place is None else bases[place][clients, -num_classes:])
        if place is not None:
            multiples[-1][:, place] = 1.0
    bias_group = None if walk.group_sizes is None else len(walk.group_sizes) - 1
    is_step = torch.eye(len(bases) + last, dtype=of_class.dtype)[len(bases) :]
    errors, slope = torch.zeros_like(of_class), make(number, most, num_classes)
    slots = clients
    for step, here in enumerate(at_work):
        slots = slots if here == len(slots) else clients[:here]
        index, error = met[step, : here * batch_size], errors[step, :here]
        torch.index_select(scores[0].view(-1, num_classes), 0, index, out=error.view(-1, num_classes))
        # torch's softmax over few classes takes five times as long.
        error.add_(biases[0][:here].unsqueeze(1))
        error.sub_(error.amax(-1, keepdim=True)).exp_()
        error.div_(error.sum(-1, keepdim=True).mul_(batch_size)).sub_(of_class[step, :here])
        if step + 1 < last:
            beside = products.view(-1, most).index_select(0, index).view(here, batch_size, most)
            torch.bmm(beside.transpose(1, 2), error, out=slope[:here])
        parts = [
            StepPart(tuple(state[:here] for state in scores), slope[:here].flatten(1), 0),
            StepPart(tuple(state[:here] for state in multiples), is_step[step], 0),
            StepPart(tuple(state[:here] for state in biases), error.sum(1), bias_group),
        ]
        walk.advance(first + step, slots, parts)
    for which, out in wanted.items():
        times = multiples[which]
        taken = (errors * times[:, len(bases) :].t()[..., None, None]).view(-1, num_classes)
        taken = make(number * most, num_classes).index_add_(0, met.reshape(-1), taken).view(number, most, -1)
        sums = out[:, : num_classes * width].view(-1, num_classes, width)
        own.write_sums(sums, weights, times[:, : len(bases)], taken)
        out[clients, -num_classes:] = biases[which]


class LyingRows:
    """Rows of clients ``[N_m, F]`` each, where they lie: what is made of them goes client by client.

    Libraries multiply such matrices as fast one by one, and nothing is copied.
    """

    def __init__(self, features: Sequence[Tensor], owners: Sequence[int], most: int) -> None:
        self._features, self._owners, self._most = features, owners, most

    def multiply(self, weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Products with each other, and with their owners' of each of ``weights [n, K, F]``, filled up.

        ``[m, most, most]``, and ``[m, K, most]`` for each.
        """
        make, number = weights[0].new_zeros, len(self._features)
        products = make(number, self._most, self._most)
        scores = [make(number, each.shape[1], self._most) for each in weights]

        def multiply_own(place: int) -> None:
            own, owner = self._features[place], self._owners[place]
            size, across = len(own), own.t()
            torch.mm(own, across, out=products[place, :size, :size])
            for each, score in zip(weights, scores, strict=True):
                torch.mm(each[owner], across, out=score[place, :, :size])

        _do_for_clients(multiply_own, number)
        return products, scores

    def write_sums(self, out: Tensor, weights: Sequence[Tensor], times: Tensor, taken: Tensor) -> None:
        """Write their owners' part of ``out [n, K, F]``.

        That is ``weights`` ``times [m, …]`` so much, and rows times ``taken [m, most, K]``.
        """
        factors = times.tolist()

        def add(place: int) -> None:
            own, owner = self._features[place], self._owners[place]
            found, (of_first, *of_others) = out[owner], factors[place]
            torch.addmm(weights[0][owner], taken[place, : len(own)].t(), own, beta=of_first, out=found)
            for each, factor in zip(weights[1:], of_others, strict=True):
                found.add_(each[owner], alpha=factor)

        _do_for_clients(add, len(factors))


class GatheredRows:
    """Rows of clients in one block ``[m, most, F]`` whose products are known: several clients at once save calls."""

    def __init__(self, features: Tensor, clients: Tensor, products: Tensor) -> None:
        self._features, self._clients, self._products = features, clients, products
        self._numbers = clients.tolist()

    def multiply(self, weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Products with each other, which are known, and with weights, as `LyingRows.multiply` says."""
        number, most = self._features.shape[:2]
        scores = [each.new_empty(number, each.shape[1], most) for each in weights]

        def multiply_some(part: slice) -> None:
            across, owners = self._features[part].mT, self._owners(part)
            for each, score in zip(weights, scores, strict=True):
                torch.bmm(each[owners], across, out=score[part])

        _do_for_turns(multiply_some, number)
        return self._products, scores

    def write_sums(self, out: Tensor, weights: Sequence[Tensor], times: Tensor, taken: Tensor) -> None:
        """Write their owners' part of ``out [n, K, F]``, as `LyingRows.write_sums` says."""

        def add(part: slice) -> None:
            owners, factors = self._owners(part), times[part].t()[..., None, None]
            found = torch.bmm(taken[part].mT, self._features[part])
            for each, factor in zip(weights[1:], factors[1:], strict=True):
                found.addcmul_(each[owners], factor)
            if isinstance(owners, slice):
                torch.addcmul(found, weights[0][owners], factors[0], out=out[owners])
            else:
                out[owners] = found.addcmul_(weights[0][owners], factors[0])

        _do_for_turns(add, len(taken))

    def _owners(self, part: slice) -> slice | Tensor:
        """Clients whose rows they are: nothing has to be copied where they follow each other."""
        first, last = self._numbers[part][0], self._numbers[part][-1]
        follow = self._numbers[part] == list(range(first, last + 1))
        return slice(first, last + 1) if follow else self._clients[part]


def _do_for_clients(work: Callable[[int], None], number: int) -> None:
    """Call ``work(place)`` for each client, by as many threads as there are, several clients at a time."""

    def work_on_some(part: slice) -> None:
        for place in range(part.start, part.stop):
            work(place)

    _do_for_turns(work_on_some, number)


def _do_for_turns(work: Callable[[slice], None], number: int) -> None:
    """Call ``work(places)`` for several clients at a time, by as many threads as there are."""

    def take_turn(_: int, turn: int) -> None:
        work(slice(turn * CLIENTS_A_TURN, min((turn + 1) * CLIENTS_A_TURN, number)))

    do_in_threads(take_turn, (number + CLIENTS_A_TURN - 1) // CLIENTS_A_TURN)
