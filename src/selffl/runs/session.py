"""A run in memory: its recipe, and the live objects that it computes with."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from selffl.algorithms.kept_optimisers import keeping_optimisers
from selffl.algorithms.local import training_alone
from selffl.algorithms.norms import check_batch_norm
from selffl.algorithms.optimisers import optimiser_of
from selffl.algorithms.records import map_tensors, tensors_of
from selffl.algorithms.training_options import TrainingOptions
from selffl.budget import budget_of
from selffl.data.federation import Federation, Rows
from selffl.data.named import Features, row_shape
from selffl.engines.cohort import CohortEngine, RunState
from selffl.engines.limits import NOT_PRIVATE, PrivacyOptions
from selffl.engines.rounds import RoundReport
from selffl.engines.serial import serial_engine
from selffl.engines.shards import Shards
from selffl.errors import ConfigError, DataError
from selffl.randomness import smallest_uniforms
from selffl.runs.evaluation import Evaluation, EvaluationOrder, ShardEvaluations, Views, class_shifts_of
from selffl.runs.gain import gain_columns
from selffl.runs.methods import Method, check_room
from selffl.runs.predict import as_known, inputs_of_rows
from selffl.runs.recipe import Recipe
from selffl.runs.records import Evaluated, Report, TrainedAlone
from selffl.state.disk import DiskMemory, bytes_of_client
from selffl.state.memory import whole_memory
from selffl.training.answers import LabelScale, present_model
from selffl.training.blocks import Gradients, Loss, deterministic_cudnn
from selffl.training.evaluation import check_numbers, check_rows, loss_for, numbers_of_rows
from selffl.training.flat import FlatModel
from selffl.training.layout import check_parameters
from selffl.training.losses import name_of
from selffl.training.metrics import Measure, Metric, by_loss
from selffl.training.model import ModelSource
from selffl.training.neighbours import check_neighbours

_log = logging.getLogger(__name__)

EVALUATED_ON_DEMAND = 1000  # clients that are evaluated where rows are made for it, and nobody says how many
SMALL_MODEL_PARAMETERS = 1 << 17  # up to which one thread trains a model best


@dataclass(frozen=True)
class Session:
    """A recipe with everything that it takes to follow it.

    Attributes:
        recipe: What is asked for, with the facts that follow from the parts.
        method: The method.
        module: A copy of the module as it was given.
        federation: The rows as they were given.
        metrics: The user's own, by name.
        measure: What is made of each row that is evaluated, in the user's units.
        label_scale: How labels are scaled for training.
        source: The rows and the flat model on their device, as tasks.
        engine: What trains.
        evaluated: The rows that the run is evaluated on, on their device.
        chosen: Positions of the clients that are evaluated, ``[K]``; none: all.
        first: The model that training begins with, ``[P]``.
    """

    recipe: Recipe
    method: Method
    module: nn.Module
    federation: Federation
    metrics: Mapping[str, Metric]
    measure: Measure
    label_scale: LabelScale
    source: ModelSource
    engine: CohortEngine
    evaluated: Rows
    chosen: Tensor | None
    first: Tensor

    @classmethod
    def open(
        cls,
        recipe: Recipe,
        method: Method,
        module: nn.Module,
        loss: Loss | None,
        federation: Federation,
        metrics: Mapping[str, Metric],
        first: Callable[[FlatModel], Tensor] | None = None,
    ) -> Self:
        """A session of these parts, once they are seen to fit each other.

        ``first`` gives the model that training begins with, where that is not the module's own.
        """
        check_parameters(module)
        check_room(recipe, method)
        optimiser, options = optimiser_of(recipe.optimiser), TrainingOptions.of(recipe)
        device, dtype = torch.device(recipe.device), getattr(torch, str(recipe.dtype))
        batch_norm = recipe.batch_norm or method.batch_norm
        model = FlatModel(copy.deepcopy(module).to(device, dtype), batch_norm, recipe.precision)
        check_batch_norm(batch_norm, method, num_statistics=model.num_statistics, num_kept=len(model.kept_layers))
        if loss is None:
            loss = loss_for(model, federation.train.sample, federation.preparation)
            recipe = replace(recipe, loss=name_of(loss))
        label_scale = LabelScale.of(federation.preparation, loss)
        rows = label_scale.scale_rows(federation).to(device, dtype)
        measure = label_scale.in_user_units(_measure(model, loss, rows))
        gradients: Gradients = "loop" if recipe.engine == "serial" else recipe.gradients
        source = ModelSource(
            rows, model, loss, recipe.learning_rate, recipe.batch_size, recipe.seed, gradients, optimiser, options
        )
        usual = budget_of(device).clients_in_training(model.params.nbytes, optimiser.num_states)
        kept = keeping_optimisers(method, optimiser, keep=options.keep_optimiser)
        if recipe.client_memory is None:
            recipe = replace(recipe, client_memory=_place_of_memory(kept, model.params, rows.num_clients, recipe.gain))
        engine = CohortEngine(
            kept,
            source,
            recipe.participation,
            recipe.seed,
            recipe.chunk_size or usual,
            rows.clients,
            recipe.robust,
            PrivacyOptions.of(recipe),
            Shards(min(recipe.shards or 1, rows.num_clients)),
        )
        if recipe.engine == "serial":
            engine = serial_engine(engine, rows.clients)
        evaluated: Rows | None = getattr(rows, recipe.evaluate_on)
        if evaluated is None or (recipe.evaluate_validation and rows.validation is None):
            raise ConfigError("the federation has no validation rows; make it with a validation_fraction above 0.")
        if recipe.gain and not evaluated.num_rows:
            raise DataError(f"gain=True, and no client has {recipe.evaluate_on} rows; expected some to measure by.")
        if recipe.class_frequencies:
            if rows.train.is_on_demand:
                raise ConfigError(
                    "class_frequencies is True, and rows are there when a client is asked for alone; expected rows in "
                    "memory, of which everybody's classes are counted. Leave class_frequencies out."
                )
            class_shifts_of(source)  # refuse a model or rows that have none
        if recipe.neighbours is not None:
            check_neighbours(model, loss, rows.train.sample, recipe.neighbours)
        recipe, chosen = _chosen_clients(recipe, rows)
        session = cls(
            recipe=replace(recipe, metrics=(*measure.metrics, *metrics)),
            method=method,
            module=copy.deepcopy(module),  # whatever the user does with it later
            federation=federation,
            metrics=dict(metrics),
            measure=measure,
            label_scale=label_scale,
            source=source,
            engine=engine,
            evaluated=evaluated,
            chosen=chosen,
            first=model.params if first is None else first(model),
        )
        session._try_metrics()
        return session

    @property
    def model(self) -> FlatModel:
        """The module, flat, on its device."""
        return self.source.model

    @property
    def evaluated_ids(self) -> list[Hashable]:
        """The clients that are evaluated."""
        ids = self.federation.clients
        return list(ids) if self.chosen is None else [ids[position] for position in self.chosen.tolist()]

    def keeping(self, method: Method) -> Method:
        """The method, with clients that keep their optimisers where the run has them do so."""
        return keeping_optimisers(method, self.source.optimiser, keep=self.source.options.keep_optimiser)

    def with_fingerprint(self) -> Self:
        """The session with its rows' fingerprint in the recipe, by which a folder knows them again."""
        return replace(self, recipe=replace(self.recipe, fingerprint=self.federation.fingerprint()))

    def start(self, memory_dir: Path | None = None) -> RunState:
        """Where training begins; memories on disk lie in ``memory_dir``, or in a temporary folder."""
        if self.recipe.client_memory != "disk":
            return self.engine.start(self.first)
        return self.engine.start(self.first, partial(DiskMemory.begin, path=memory_dir))

    def is_over(self, state: RunState) -> bool:
        """Whether the last round has been."""
        return state.round_number >= self.recipe.rounds

    def personal(self, state: RunState, position: int) -> Tensor:
        """The model ``[P]`` of the client in that place: by itself, so that it has the same bits whoever asks."""
        where = torch.tensor([position], device=state.num_gradients.device)
        with single_thread(self), deterministic_cudnn():  # a closing visit is training
            return self.engine.personal(state, where, is_over=self.is_over(state))[0]

    def personal_models(self, state: RunState) -> Tensor:
        """Personal models of all clients ``[M, P]``, made side by side: `personal` to rounding, and sooner."""
        with single_thread(self), deterministic_cudnn():
            return self.engine.personal(state, is_over=self.is_over(state))

    def reports(self, state: RunState) -> Iterator[tuple[RunState, Report]]:
        """Train from ``state`` to the last round: a report of each round and evaluation, with the state they leave.

        The state is consumed, and so is each that comes with a report when the next is asked for: memories are written
        into.
        """
        while state.round_number < self.recipe.rounds:
            ended: list[RoundReport] = []
            state = self.engine.advance(state, 1, ended.append, consume=True)
            if self.is_over(state):
                state = self.engine.conclude(state)
            yield state, ended[0]
            if self.recipe.is_evaluated(state.round_number):
                yield state, self.evaluate_round(state)
        if self.recipe.gain:
            joined = self.evaluate(state)
            state = replace(state, memory=whole_memory(state.memory))  # other processes forget what they have of it
            yield state, TrainedAlone(gain_columns(joined, *self.train_alone()))

    def evaluate_round(self, state: RunState) -> Evaluated:
        """All that a run records after a round that is evaluated."""
        # Fine-tuning costs as much as training: once, at the end.
        is_over = self.is_over(state)
        names = ("fine_tune", "class_frequencies", "neighbours") if is_over else ()
        return Evaluated(
            self.evaluate(state, **{name: getattr(self.recipe, name) for name in names}, keep_answers=is_over),
            self.federation.train.num_examples,
            {part: self.evaluate(state, part) for part in self.recipe.noted_beside},
            self.federation.cluster,
            self.chosen,
            self.federation.classes,
        )

    def evaluate(
        self,
        state: RunState,
        part: str | None = None,
        fine_tune: Sequence[int] = (),
        class_frequencies: bool = False,
        neighbours: int | None = None,
        keep_answers: bool = False,
    ) -> Evaluation:
        """All clients, or those chosen, on the rows that the run is evaluated on, or on another part of them."""
        tested, is_over = part or self.recipe.evaluate_on, self.is_over(state)
        views = Views(tested, tuple(fine_tune), class_frequencies, neighbours, is_over, keep_answers)
        work = self.shard_evaluations(state, views)
        order = EvaluationOrder(views, state.round_number, state.server)
        return work.join(self.engine.shards.map(order, work.measure_shard))

    def shard_evaluations(self, state: RunState, views: Views) -> ShardEvaluations:
        """An evaluation, to be done shard by shard."""
        rows = self.evaluated if views.part == self.recipe.evaluate_on else self.source.federation.parts[views.part]
        chosen = rows if self.chosen is None else rows.subset(self.chosen.to(rows.offset.device))
        return ShardEvaluations(
            self.engine,
            self.source,
            state,
            chosen,
            self.measure,
            views,
            self.metrics,
            self.label_scale,
            self.chosen,
        )

    def alone(self) -> Self:
        """The session in which every client trains by itself; the same first model, cohorts, minibatches, optimiser."""
        method = self.keeping(training_alone(self.method))
        source = replace(self.source, options=self.source.options.at_home())
        engine = replace(self.engine, algorithm=method, source=source, robust="none", privacy=NOT_PRIVATE)
        return replace(self, source=source, engine=engine)

    def train_alone(self) -> tuple[Evaluation, Tensor]:
        """All clients on the same rows after as many rounds by themselves, and whose models were lost ``[M]``.

        Nothing of it counts as work of the run.
        """
        alone = self.alone()
        state = alone.engine.shards.spread(alone.start(), self.first, is_alone=True)
        state = alone.engine.advance(state, self.recipe.rounds, consume=True)
        memory = whole_memory(state.memory)
        found = tensors_of(memory).values()
        lost = ~torch.stack([each.isfinite().reshape(len(each), -1).all(1) for each in found]).all(0)
        kept = map_tensors(lambda tensor: tensor.masked_fill(lost.view(-1, *[1] * (tensor.ndim - 1)), 0), memory)
        lost = lost.cpu()
        # Here, whoever has trained: others have the models that were lost as they are.
        alone = replace(alone, engine=replace(alone.engine, shards=Shards(alone.engine.shards.number)))
        return alone.evaluate(replace(state, memory=kept)), lost if self.chosen is None else lost[self.chosen]

    def present(self, params: Tensor) -> nn.Module:
        """A model as the user gets it: in the units of the table that the rows came from, if they did."""
        return present_model(self.model.load(params), self.federation.preparation, self.label_scale)

    def inputs_of(self, rows: Any) -> Features:
        """A user's rows, in the user's units, as the model takes them."""
        known = self.source.federation.train.sample.features
        found = inputs_of_rows(rows, self.federation.preparation, row_shape(known))
        inputs = as_known(found, known)
        check_numbers(self.model, found if isinstance(found, Tensor) else inputs)
        return inputs

    def _try_metrics(self) -> None:
        """Compute the user's own metrics once, of the first client that has rows: better now than after training."""
        has_rows = self.evaluated.num_examples.nonzero()
        if not self.metrics or not len(has_rows):
            return
        first = int(has_rows[0])

        def measured(_: int, outputs: Tensor, labels: Tensor) -> None:
            for name, metric in self.metrics.items():
                metric.of_client(name, self.federation.clients[first], outputs, labels)

        own = self.evaluated.subset(torch.tensor([first], device=self.evaluated.offset.device))
        numbers_of_rows(self.model, self.model.params, own, self.measure, on_client=self.label_scale.for_user(measured))


def _measure(model: FlatModel, loss: Loss, rows: Federation) -> Measure:
    """What is made of each row: the same for all parts of the federation, or else the loss."""
    parts = [part.sample for part in (rows.train, rows.test, rows.validation) if part is not None and part.num_rows]
    measures = [check_rows(model, loss, part, rows.clients) for part in parts]
    return measures[0] if all(found == measures[0] for found in measures) else by_loss(loss)


def _chosen_clients(recipe: Recipe, rows: Federation) -> tuple[Recipe, Tensor | None]:
    """Who is evaluated, by lot, where not all are: the recipe that says how many, and their positions ``[K]``."""
    if recipe.evaluate_clients is None and rows.train.is_on_demand:
        recipe = replace(recipe, evaluate_clients=min(rows.num_clients, EVALUATED_ON_DEMAND))
    number = recipe.evaluate_clients
    if number is None or (number >= rows.num_clients and not rows.train.is_on_demand):
        return recipe, None
    if number >= rows.num_clients:
        return recipe, torch.arange(rows.num_clients)
    return recipe, smallest_uniforms(number, rows.num_clients, recipe.seed, "evaluated")


def _place_of_memory(method: Method, params: Tensor, num_clients: int, gain: bool) -> Literal["memory", "disk"]:
    """Where what clients keep lies, if nobody has said: in memory, unless that is too much, which is said."""
    size = num_clients * bytes_of_client(method.newcomer(params.unsqueeze(0)))
    most = budget_of(params.device).client_memory_bytes
    if size <= most or gain:
        return "memory"
    _log.warning(
        "%d clients may come to keep %.0f GB, which lies on disk; client_memory='memory' keeps it in memory.",
        num_clients,
        size / 1e9,
    )
    return "disk"


@contextmanager
def single_thread(session: Session) -> Iterator[None]:
    """One thread while a small model trains on a CPU, unless the user has said how many.

    Threads that share out a few thousand numbers wait for each other: no faster on a machine that is otherwise idle,
    and several times slower on one that is not.
    """
    before = torch.get_num_threads()
    is_small = session.model.params.numel() <= SMALL_MODEL_PARAMETERS and session.recipe.device == "cpu"
    if is_small and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
