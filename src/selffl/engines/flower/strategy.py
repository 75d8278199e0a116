"""The server's side over Flower: who takes part, what each is sent, which answers count, and what becomes of them.

The rounds, cohorts and random numbers are those of the cohort engine: a client is known by its number, the position of
its id among all ids in sorted order, never by the node it sits on, whose id is random.

**Answers** are read one by one.  One that cannot be used (an error, another round, another client, a wrong shape,
numbers that no training gives) is logged with the client's id and the reason, and left out; the method gets the rest,
and exactly the clients they came from.  A client's first answer is its only one.

**Too few answers.**  A round is sent out once enough of its cohort are connected, or the time is over.  It counts if at
least ``quorum`` (a share) of its cohort has answered.  If not, the run stops with a `QuorumError`, and its checkpoint
is that of the round before: started again, the server asks for the same round, and clients that had answered answer the
same again.  With ``shortfall="skip"`` the round is over instead and leaves the global model as it was; clients that had
answered keep what they learned, as those do whose answers come too late.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from selffl.algorithms import Algorithm
from selffl.algorithms.training_options import TrainingOptions
from selffl.engines.claims import Claims
from selffl.engines.cohort import RunState, closing_share, sample_cohort
from selffl.engines.flower.answers import Alone, Bounds, EvaluationSums, check_answer
from selffl.engines.flower.messages import (
    ABOUT,
    ARRAYS,
    PROTOCOL,
    Order,
    fingerprint,
    optimiser_text,
    options_of,
    shown,
    write,
)
from selffl.engines.flower.records import lone_population, of_place, pack, pack_each, upload_template, withheld_by
from selffl.engines.flower.roster import POLL_SECONDS, Roster
from selffl.engines.flower.secure import SecureRound, read_masked, read_sum
from selffl.engines.flower.settings import Answers, Network, Records, Rounds, RunIdentity
from selffl.engines.flower.site import VIEWS, Shared
from selffl.engines.limits import PrivacyOptions, SumLimits
from selffl.engines.noise import secure_noise
from selffl.engines.rounds import GatheredUploads, RoundReport, closing_rounds_after, finish_round
from selffl.errors import DataError, QuorumError
from selffl.training.flat import FlatModel

Method = Algorithm[Any, Any, Any, Any]
Found = TypeVar("Found")
Measured = TypeVar("Measured", EvaluationSums, Alone)

QUERY_SECONDS = 60.0  # that a new node has to say who it is, at least

_log = logging.getLogger(__name__)


class SelfFLStrategy(Strategy):
    """Any of the library's methods as a Flower strategy.

    Rounds are numbered by the state, not by Flower's loop, which begins at 1 again when a run is resumed.

    Attributes:
        state: Where training stands; memories are with the clients.
        names: What the run goes by.
    """

    def __init__(
        self,
        model: FlatModel,
        algorithm: Method,
        clients: Sequence[Hashable],
        recipe: Rounds,
        network: Network,
        *,
        names: RunIdentity,
        state: RunState,
        own_metrics: Sequence[str] = (),
        save: Callable[[RunState], None] | None = None,
        records: Records | None = None,
    ) -> None:
        self.state, self.names = state, names
        self.ids = [str(client) for client in clients]
        self._algorithm, self._recipe, self._network = algorithm, recipe, network
        self._privacy, self._fingerprint, self._model = PrivacyOptions.of(recipe), fingerprint(model), model
        template, withheld = upload_template(algorithm, model), withheld_by(algorithm, model)
        self._bounds = Bounds(template, network.max_examples, tuple(own_metrics), withheld)
        self._asked, self._closing = algorithm, 0  # what a cohort does: a round, or which of the closing rounds
        self._grid: Grid | None = None  # that the last messages went by
        self._save, self._records = save, records
        self.roster = Roster(self.ids, self._fingerprint, max(network.connect_seconds, QUERY_SECONDS))
        self._sent: dict[int, Message] = {}  # by client's number
        self._cohort: Tensor | None = None  # of the round that is under way
        self._reasons: list[str] = []  # why clients were left out of it
        self._metrics = None if records is None else records.metrics
        self._secure: SecureRound | None = None  # of the round that is under way

    # ------------------------------------------------------------------------------------------------------ a round

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """One message for each client of the cohort that is connected.  A list: Flower goes through it twice."""
        self._grid = grid
        return self._order_round(grid, self.state.round_number + 1, self._recipe.participation)

    def _order_round(self, grid: Grid, number: int, participation: float) -> list[Message]:
        """Messages of a round to a cohort of so large a share of the clients."""
        self._reasons = []
        self._cohort = sample_cohort(self.names.cohort_seed, number, len(self.ids), participation)
        nodes = self._find_connected(grid, self._cohort.tolist())
        for client in self._cohort.tolist():
            if client not in nodes:
                self._reject(number, client, "it is not connected")
        if self._network.secure_sums:
            nodes = self._agree(grid, number, nodes)
        # To the whole cohort, whoever is there: a round that is asked for again asks the same of everybody.
        broadcast = self._asked.broadcast(self.state.server, self._at(self._cohort.tolist()))
        self._sent = {}
        packed = pack_each(broadcast, len(self._cohort))
        for client, arrays in zip(self._cohort.tolist(), packed, strict=True):
            if client in nodes:
                self._sent[client] = self._message(MessageType.TRAIN, number, client, nodes[client], arrays)
                for name, record in ({} if self._secure is None else self._secure.order_records(client)).items():
                    self._sent[client].content[name] = record
        return list(self._sent.values())

    def _agree(self, grid: Grid, number: int, nodes: Mapping[int, int]) -> dict[int, int]:
        """Nodes of the clients of the cohort that a secure sum has been agreed on with."""
        assert self._cohort is not None
        seconds, reject = self._network.round_seconds, partial(self._reject, number)
        self._secure = SecureRound(grid, self.names.experiment, self.ids, seconds, reject)
        self._secure.agree({client: nodes[client] for client in self._cohort.tolist() if client in nodes})
        return {client: nodes[client] for client in self._secure.book}

    def _find_connected(self, grid: Grid, cohort: Sequence[int]) -> dict[int, int]:
        """Node of each client that is there, once there are enough of the cohort or the time is over."""
        end = time.monotonic() + self._network.round_seconds
        while True:
            nodes = self.roster.locate(grid)
            left = end - time.monotonic()
            if sum(client in nodes for client in cohort) >= self._needed(len(cohort)) or left <= 0:
                return nodes
            time.sleep(min(POLL_SECONDS, left))

    def _needed(self, cohort_size: int) -> int:
        return max(math.ceil(self._network.quorum * cohort_size - 1e-9), 1)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The method's server step over the answers that count, in ascending order of clients."""
        number = self.state.round_number + 1
        gathered, spent = (self._gather if self._secure is None else self._gather_sum)(number, replies)
        assert self._cohort is not None
        needed = self._needed(len(self._cohort))
        if len(spent) < needed:
            problem = (
                f"{len(spent)} of {len(self._cohort)} clients answered in round {number}; expected {needed} or more"
            )
            if self._network.shortfall == "raise":
                why = f" ({self._reasons[0]})" if self._reasons else ""
                raise QuorumError(f"{problem}{why}. The log has every reason; lower the quorum, or wait longer.")
            _log.warning("%s; the round is skipped.", problem)
            self.state, trained = replace(self.state, round_number=number), self.state.server
            if self._is_over():
                self._conclude()
            nobody = self._at([])
            self._report(RoundReport(number, nobody, None, {}, trained, nobody))
            self._saved()
            return None, None
        report = finish_round(self._algorithm, self.state.server, number, gathered, spent, secure_noise)
        for client, reason in gathered.held_back.items():
            _log.info("round %d: client %s is held back: %s", number, self.ids[client], reason)
        self.state = RunState(
            number,
            report.server,
            None,
            self.state.num_gradients.index_add(0, report.clients, spent),
            self.state.num_rounds.index_add(0, report.clients, torch.ones_like(report.clients)),
        )
        if self._is_over():
            self._conclude()
        self._report(report)
        self._saved()
        metrics = {"round": number, "clients": len(spent), "gradient-evaluations": int(spent.sum())}
        return pack(Shared(report.server.params)), MetricRecord(metrics)  # type: ignore[arg-type]

    def _conclude(self) -> None:
        """Have some clients say what closing visits are to be like; a closing round of too few changes nothing."""
        bounds, last = self._bounds, self.state.round_number
        rounds = closing_rounds_after(
            self._algorithm, last, lone_population(self._model), self._recipe.robust, self._privacy
        )
        for closing, asked in enumerate(rounds, 1):
            if not asked.is_due(self.state.server):
                continue
            assert self._grid is not None
            self._asked, self._closing = asked, closing
            template, withheld = upload_template(asked, self._model), withheld_by(asked, self._model)
            self._bounds = replace(bounds, template=template, withheld=withheld)
            number = last + closing
            messages = self._order_round(self._grid, number, closing_share(len(self.ids)))
            replies = self._grid.send_and_receive(messages, timeout=self._network.round_seconds)
            gathered, spent = (self._gather if self._secure is None else self._gather_sum)(number, replies)
            assert self._cohort is not None
            if len(spent) >= self._needed(len(self._cohort)):
                server = finish_round(asked, self.state.server, number, gathered, spent, secure_noise).server
                self.state = replace(self.state, server=server)
            else:
                said = f"{len(spent)} of {len(self._cohort)} clients have answered in closing round {closing}"
                _log.warning("%s: too few, and it changes nothing.", said)
        self._asked, self._closing, self._bounds = self._algorithm, 0, bounds

    def _gather(self, number: int, replies: Iterable[Message]) -> tuple[GatheredUploads, Tensor]:
        """The uploads that count, and what each has cost ``[C]``, in ascending order of clients."""
        found = self._accept(number, replies, self._bounds.upload)
        rows = self._at(self.roster.rows(self._network.max_examples))
        claims = Claims(self._asked, self.state.server, rows, 0, self._limits)
        gathered = GatheredUploads(self._asked, 0, claims, self._recipe.robust, self._limits)
        for client in sorted(found):
            gathered.add(self._at([client]), found[client][0])
        for client, reason in gathered.left_out.items():
            self._reject(number, client, reason)
            del found[client]
        return gathered, self._at([found[client][1] for client in sorted(found)])

    def _gather_sum(self, number: int, replies: Iterable[Message]) -> tuple[GatheredUploads, Tensor]:
        """The sum of the uploads, and what they have cost on average, in whole gradients, as each client's cost."""
        assert self._secure is not None
        template = self._bounds.template
        masked = self._accept(number, replies, partial(read_masked, template=template, method=self._asked))
        total = self._secure.unmask_sum(masked)
        if total is None:
            self._reasons.append("too few clients have stayed for the sum to be read")
            return GatheredUploads(self._asked, 0), self._at([])
        upload, spent = read_sum(total, template, self._asked)
        clients = self._at(sorted(masked))
        each = spent // len(clients)
        costs = [each + 1] * (spent - each * len(clients)) + [each] * len(clients)
        gathered = GatheredUploads.of_sum(self._asked, clients, upload, self._limits, template)
        return gathered, self._at(costs[: len(clients)])

    @property
    def _limits(self) -> SumLimits | None:
        return None if self._privacy.clip is None else SumLimits(self._algorithm, self._privacy)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """The global model to everybody who is connected, if this round has an evaluation.

        After the last round with all that is sent to train, where the method has a closing visit.
        """
        self._sent = {}
        if not self._is_evaluated():
            return []
        number, nodes = self.state.round_number, sorted(self.roster.locate(grid).items())
        for (client, node), arrays in zip(nodes, self._where_it_stands([client for client, _ in nodes]), strict=True):
            self._sent[client] = self._message(MessageType.EVALUATE, number, client, node, arrays)
        return list(self._sent.values())

    def _where_it_stands(self, clients: Sequence[int], first: Tensor | None = None) -> list[ArrayRecord]:
        """What each of these is sent of where training stands, to evaluate; with the ``first`` model, if given."""
        params = self._algorithm.global_model(self.state.server)
        if not (self._is_over() and self._algorithm.has_closing_visit):
            return [pack(Shared(params, None, first))] * len(clients)
        sent = self._algorithm.closing_broadcast(self.state.server, self._at(clients))
        return [pack(Shared(params, of_place(sent, place), first)) for place in range(len(clients))]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """What the clients found, averaged over their rows for Flower's own log."""
        if not self._is_evaluated():
            return None
        found = self._agreeing(self._accept(self.state.round_number, replies, self._bounds.scores))
        if not found:
            _log.warning("round %d: nobody has said how it does.", self.state.round_number)
        self._report(found)
        if not found:
            return None
        rows = sum(scores.num_test for scores in found.values())
        averages = {
            f"{view}.{metric}": sum(scores.totals[f"{view}.{metric}"] for scores in found.values()) / max(rows, 1)
            for view in VIEWS
            for metric in self._metrics or ()
            if metric not in ("auc", "error", *self._bounds.own_metrics)  # which are not means over rows
        }
        return MetricRecord({"clients": len(found), **averages})  # type: ignore[arg-type]

    def evaluate(self, grid: Grid) -> None:
        """Evaluate where training stands, if that round has an evaluation."""
        if self._is_evaluated():
            messages = self.configure_evaluate(self.state.round_number, ArrayRecord(), ConfigRecord(), grid)
            replies = grid.send_and_receive(messages, timeout=self._network.round_seconds)
            self.aggregate_evaluate(self.state.round_number, replies)

    def _is_evaluated(self) -> bool:
        return self._recipe.is_evaluated(self.state.round_number)

    def _is_over(self) -> bool:
        return self.state.round_number >= self._recipe.rounds

    def train_alone(self, grid: Grid, first: Tensor) -> None:
        """Have every client that is connected train by itself, from ``first``, in the rounds that it was drawn for."""
        number, size = self.state.round_number, len(self.ids)
        share = self._recipe.participation
        cohorts = {n: sample_cohort(self.names.cohort_seed, n, size, share).tolist() for n in range(1, number + 1)}
        nodes = sorted(self.roster.locate(grid).items())
        models = self._where_it_stands([client for client, _ in nodes], first)
        self._sent = {}
        for (client, node), arrays in zip(nodes, models, strict=True):
            alone = [n for n, cohort in cohorts.items() if client in cohort]
            self._sent[client] = self._message(MessageType.EVALUATE, number, client, node, arrays, alone)
        replies = grid.send_and_receive(list(self._sent.values()), timeout=self._network.round_seconds)
        self._report(self._agreeing(self._accept(number, replies, self._bounds.alone)))

    def summary(self) -> None:
        """Say what is run."""
        _log.info(
            "%s, %d clients, experiment %s, from round %d to %d",
            self._algorithm.name,
            len(self.ids),
            self.names.experiment,
            self.state.round_number + 1,
            self._recipe.rounds,
        )

    # ------------------------------------------------------------------------------------------------------ answers

    def _accept(
        self, number: int, replies: Iterable[Message], reading: Callable[[RecordDict], Found]
    ) -> dict[int, Found]:
        """What the replies say, by client's number; those that cannot be used are logged and left out."""
        # By the message that is answered: an error that Flower writes itself has another sender than the client.
        asked = {message.metadata.message_id: client for client, message in self._sent.items()}
        found: dict[int, Found] = {}
        heard: set[int] = set()
        for reply in replies:
            client = asked.get(reply.metadata.reply_to_message_id)
            is_second = client in heard
            if client is not None:
                heard.add(client)
            if client is None:
                _log.warning(
                    "round %d: a reply of node %d is left out: it answers message %r, which is none of this round's.",
                    number, reply.metadata.src_node_id, reply.metadata.reply_to_message_id,
                )  # fmt: skip
            elif reply.has_error():
                self._reject(number, client, f"error {reply.error.code}: {shown(reply.error.reason)}")
                self.roster.forget(self._sent[client].metadata.dst_node_id)  # another client may have moved there
            elif reply.metadata.src_node_id != self._sent[client].metadata.dst_node_id:
                self._reject(number, client, f"node {reply.metadata.src_node_id} answers in its place")
            elif is_second:
                self._reject(number, client, "it has answered before; the first answer counts")
            else:
                try:
                    check_answer(reply.content, self.names.experiment, number, self.ids[client])
                    found[client] = reading(reply.content)
                except DataError as error:
                    self._reject(number, client, str(error))
        for client in sorted(self._sent.keys() - heard):
            self._reject(number, client, f"no answer within {self._network.round_seconds:g} seconds")
        return found

    def _agreeing(self, found: dict[int, Measured]) -> dict[int, Measured]:
        """Answers of clients that measure as the run does, which is as most did when it was first evaluated.

        What is measured follows from a client's labels, and a few may all have labels of another kind.
        """
        if self._metrics is None and found:
            counted = Counter(scores.metrics for scores in found.values())
            self._metrics = max(sorted(counted), key=lambda metrics: counted[metrics])
        for client, scores in list(found.items()):
            if scores.metrics != self._metrics:
                expected = ", ".join(self._metrics or ())
                self._reject(
                    self.state.round_number, client, f"it measures {', '.join(scores.metrics)}; expected {expected}"
                )
                del found[client]
        return found

    # ------------------------------------------------------------------------------------------------------- pieces

    def _message(
        self, kind: str, number: int, client: int, node: int, arrays: ArrayRecord, alone: Sequence[int] | None = None
    ) -> Message:
        order = Order(
            protocol=PROTOCOL,
            experiment=self.names.experiment,
            run=self.names.run,
            round_number=number,
            is_over=self._is_over(),
            closing=self._closing,
            client=self.ids[client],
            number=client,
            seed=self._recipe.seed,
            learning_rate=float(self._recipe.learning_rate),
            batch_size=self._recipe.batch_size,
            optimiser=optimiser_text(self._recipe.optimiser),
            training=json.dumps(TrainingOptions.of(self._recipe).to_json()),
            privacy=json.dumps(self._privacy.to_json()),
            alone="" if alone is None else json.dumps(list(alone)),
            algorithm=self._algorithm.name,
            options=options_of(self._algorithm),
            fingerprint=self._fingerprint,
        )
        content = RecordDict({ABOUT: write(order), ARRAYS: arrays})
        # Nobody waits for an answer any longer than that: it need not be kept for one who comes later.
        return Message(content, node, kind, ttl=self._network.round_seconds, group_id=str(number))

    def _at(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.state.num_gradients.device)

    def _reject(self, number: int, client: int, reason: str) -> None:
        self._reasons.append(f"client {self.ids[client]}: {reason}")
        _log.warning("round %d: client %s is left out: %s", number, self.ids[client], reason)

    def _report(self, report: RoundReport | Answers) -> None:
        if self._records is not None:
            self._records.take(self.state, report)

    def _saved(self) -> None:
        if self._save is not None:
            self._save(self.state)
