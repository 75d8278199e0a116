"""A trained federation: its records and its models, and how it is written."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy.typing as npt
from torch import Tensor, nn

from selffl.algorithms.options import check_choice
from selffl.algorithms.suggestions import suggest
from selffl.data.federation import Federation
from selffl.data.named import row_shape
from selffl.data.preparation import Preparation
from selffl.engines.cohort import RunState
from selffl.errors import ConfigError, check_known
from selffl.models.layers import describe_layers
from selffl.runs import folder as files
from selffl.runs.best_round import best_round
from selffl.runs.confidence import Confidence
from selffl.runs.evaluation import Evaluation, leading_metric
from selffl.runs.export import Precision, client_about, describe_answers, position_of, save_state_dict, write_personal
from selffl.runs.folder import Checkpoints, Records, Row, RunFolder
from selffl.runs.gain import gain_rows
from selffl.runs.new_client import make_new_client_models, rows_of_new_client
from selffl.runs.observers import Observer
from selffl.runs.personal import PersonalModelCache
from selffl.runs.predict import Predictor
from selffl.runs.recipe import Recipe
from selffl.runs.records import Recorder, partition_rows
from selffl.runs.session import Session, single_thread
from selffl.state.checkpoint import save_tensors
from selffl.state.files import write_csv
from selffl.training.blocks import deterministic_cudnn
from selffl.training.metrics import HIGHER_IS_BETTER


@dataclass
class Run:
    """A trained federation: its records, and a model for everybody.

    Attributes:
        history: One row per round, as dictionaries (``pandas.DataFrame(run.history)`` makes a table).
        clients: One row per client.
        summary: The run in one row.
        participation: One row per client and round it took part in, for methods that choose their steps.
        answers: Where answers are classes, one row per client, class, answer of its personal model at the end, and
            tenth of how sure that was: how many test rows (``num_test``), and how sure on average (``confidence``).
    """

    history: list[Row]
    clients: list[Row]
    summary: Row
    participation: list[Row]
    answers: list[Row]
    _session: Session
    _state: RunState

    @property
    def config(self) -> Recipe:
        """What was asked for, and what is recorded of the parts."""
        return self._session.recipe

    @property
    def federation(self) -> Federation:
        """The rows it was trained on."""
        return self._session.federation

    def _records(self) -> Records:
        """All tables of the run."""
        return Records(self.history, self.participation, self.clients, self.summary, self.answers)

    @property
    def _global_params(self) -> Tensor:
        return self._session.method.global_model(self._state.server)

    def global_model(self) -> nn.Module:
        """The shared model."""
        return self._session.present(self._global_params)

    def personal_model(self, client: Hashable) -> nn.Module:
        """The model of one client, by its id.

        Of a run on a table (`Federation.from_csv`, `from_frame`) it takes rows, and answers, in the table's own units:
        `selffl.PreparedModel`, whose ``module`` is the model as it was trained.
        """
        position = position_of(client, list(self.federation.clients))
        return self._session.present(self._personal[position])

    @property
    def preparation(self) -> Preparation | None:
        """How the rows of a table became numbers, and what its units and classes are; none of runs on arrays."""
        return self.federation.preparation

    def predict(self, rows: Any, client: npt.ArrayLike | None = None) -> Any:
        """Answers to new rows, each by its own client's model, in the user's classes and units.

        Rows of clients that were not there, or of nobody in particular, are answered by the global model.

        Args:
            rows: a frame with the columns that were trained on (the label need not be there), the path of a CSV or
                Parquet file, or features as `Federation.from_arrays` takes them, an array or a dictionary.
            client: the name of the column of clients, by default the one that was trained on; of an array, one id for
                each row.

        Returns:
            A row for each row, in a frame of the same library, or a Table of pyarrow: the client, the ``prediction``,
            ``probability_…`` of each class, and ``model``, whether it was ``personal`` or ``global``.

        Examples:
            >>> import pyarrow, selffl
            >>> table = pyarrow.table({"site": list("abab") * 9, "age": range(36), "ill": ["no", "yes"] * 18})
            >>> fed = selffl.Federation.from_frame(table, client="site", label="ill")
            >>> run = selffl.train("softmax", fed, rounds=5, participation=1.0)
            >>> run.predict(table.slice(0, 2))["prediction"].to_pylist()
            ['no', 'yes']
        """
        return self._predictor().predict(rows, client)

    def _predictor(self) -> Predictor:
        session = self._session

        params, personal = self._global_params, self._personal

        def model_of(position: int | None) -> nn.Module:
            return session.model.load(params if position is None else personal[position])

        return Predictor(
            self.federation.clients,
            model_of,
            self.preparation,
            session.label_scale,
            self.classes,
            row_shape(self.federation.train.sample.features),
            params.dtype,
            params.device,
        )

    @property
    def classes(self) -> Sequence[Any] | None:
        """The classes as the user names them, in the order of a model's outputs; none where answers are numbers."""
        if self.federation.num_classes is None:
            return None
        return self.federation.classes or range(self.federation.num_classes)

    def inter_variances(self) -> dict[str, float]:
        """How far clients differ in each tensor of the model, as ``self-fl-auto`` has learned it: σ₀² by name.

        A tensor whose variance is near 0 is shared in all but name; one with a large variance is the clients' own.  In
        models of at most 32 parameters each has a variance, and is named by its place, as in ``weight[0, 1]``.

        Examples:
            >>> import selffl
            >>> from selffl.data import load
            >>> run = selffl.train("softmax", load("digits", num_clients=12, seed=0), rounds=2, participation=0.5)
            >>> list(run.inter_variances())
            ['weight', 'bias']
        """
        found = self._session.method.group_variances(self._state.server)
        if found is None:
            raise ConfigError(
                f"{self.config.algorithm} learns no variance for each tensor; expected a run of a method that does, "
                f"such as {suggest(lambda method: method.has_group_variances)}."
            )
        return dict(zip(self._session.model.group_names, found.tolist(), strict=True))

    def welcome(self, rows: Any) -> nn.Module:
        """A personal model for a client that never took part, from the global model and its own rows, at once.

        Of ``self-fl-auto`` it is the posterior mode under the spread between clients that the run has learned: one or
        two rows hardly move the global model, many are hardly held.  Of other methods it is what the new client would
        keep after visits to the server as it is, until its model no longer moves (`selffl.runs.new_client` has
        tolerance and bound); of those that take a client's variance from its earlier rounds (``self-fl`` and its kin),
        after one.  Methods without personal models give the global one.  Nothing in the run is changed, and nothing of
        the new client is kept.

        Args:
            rows: of a run on a table, a frame or the path of a file with the same columns and the label.  Or
                (features, labels) in the user's own units and classes, one row or many.  Or a federation of one client,
                whose training rows are taken.  Without any row the model is the global one.

        Examples:
            >>> import selffl
            >>> from selffl.data import load
            >>> fed = load("digits", num_clients=12, seed=0)
            >>> run = selffl.train("softmax", fed.subset(range(11)), "self-fl-auto", rounds=2, participation=0.5)
            >>> newcomer = fed.subset([11])
            >>> run.welcome((newcomer.train.features, newcomer.train.labels))
            Linear(in_features=64, out_features=10, bias=True)
        """
        own = rows_of_new_client(self._session, rows)
        if len(own.labels) == 0:
            return self.global_model()
        return self._session.present(make_new_client_models(self._session, self._state, own)[0])

    def export(
        self,
        path: str | Path,
        clients: Sequence[Hashable] | None = None,
        *,
        precision: Precision = "exact",
        full: bool = False,
    ) -> None:
        """Write personal models into one safetensors file: the global model, and of each client what differs from it.

        `selffl.PersonalModels` reads it, without unpickling anything.

        Args:
            path: the file.
            clients: whose models; none: everybody's.
            precision: ``exact`` keeps every bit.  ``float16`` and ``bfloat16`` halve what a client's float32 parameters
                take: differences to the global model are rounded to 11 or 8 significant bits, which no parameter feels
                by more than 2⁻¹¹ or 2⁻⁸ of the largest difference in its tensor (and the rounding of its own type); the
                largest error, as measured, is in the file.
            full: write the whole model of one client as a plain state_dict instead, for
                ``module.load_state_dict(safetensors.torch.load_file(path))`` where there is no selffl; a name that ends
                in ``.pt`` gives a file for ``torch.load``.
        """
        if isinstance(clients, str) or not isinstance(clients, Iterable | None):
            raise ConfigError(f"clients is {clients!r}; expected a list of ids, such as [{clients!r}].")
        ids = list(self.federation.clients)
        places = list(dict.fromkeys(position_of(client, ids) for client in (ids if clients is None else clients)))
        chosen = [ids[place] for place in places]
        about = {"algorithm": self.config.algorithm, "data": self.config.data, "round": self._state.round_number}
        about |= self.describe_answers()
        if full:
            if len(chosen) != 1 or precision != "exact":
                raise ConfigError(
                    f"full=True is given for {len(chosen)} clients in precision {precision!r}; expected one client, "
                    "exact. Name it in clients, or leave out full."
                )
            module = self._session.model.load(self._personal[places[0]])
            about |= {"client": chosen[0], "module": str(module)}
            save_state_dict(Path(path), module.state_dict(), about)
            return
        known = {row["client"]: client_about(row) for row in self.clients}
        variance = self._session.method.inter_variance(self._state.server)
        write_personal(
            Path(path),
            self._session.model.load(self._global_params),
            (self._session.model.parts(self._personal[place]) for place in places),
            chosen,
            about
            | {
                "seed": self.config.seed,
                "inter_variance": None if variance is None else float(variance),
                "module": type(self._session.module).__name__,
                "model": self.config.model,
                "layers": describe_layers(self._session.model.module),
                "shape": row_shape(self.federation.train.sample.features),
                "rows": [known.get(client, {}) for client in chosen],
            },
            precision,
        )

    def describe_answers(self) -> dict[str, str]:
        """What a file of a model says of its inputs and answers, as JSON by name."""
        return describe_answers(self.preparation, self._session.label_scale, self.classes)

    def evaluate(
        self, *, fine_tune: Sequence[int] = (), class_frequencies: bool = False, neighbours: int | None = None
    ) -> Evaluation:
        """The final models on the rows that the run was evaluated on: what each row comes to, by view.

        ``run.evaluate().numbers["personal"]`` is, row by row of ``run.federation.test``, whether the answer is right;
        for two classes the log-odds of class 1, for values the squared error (`selffl.training.metrics`).  Where
        answers are classes, ``log_losses`` has the log loss of each row.
        """
        return self._session.evaluate(
            self._state, fine_tune=fine_tune, class_frequencies=class_frequencies, neighbours=neighbours
        )

    def best_round(self, by: Literal["test", "validation"] = "validation", metric: str | None = None) -> Row:
        """The evaluated round with the best score of the personal models: its row of the history.

        ``chosen_on`` in it says what chose the round: ``validation rows``, or ``test rows``, as published tables often
        do.  A best round by test rows is too good, for the rows that judge it have chosen it.  The run keeps the models
        of its last round alone.  There self-fl-auto has made its closing visit, before that it has not.  Where
        validation scores are noted, `clients` has the best round of each client by its own validation rows, too:
        ``best_round``, and its scores then as ``in_best_round_accuracy`` and so on.

        Args:
            by: ``validation`` takes the scores that ``evaluate_validation=True`` notes, ``test`` those on test rows.
            metric: What is compared; none: what the run is told by first.

        Examples:
            >>> import selffl
            >>> from selffl.data import load
            >>> fed = load("digits", num_clients=12, seed=0, validation_fraction=0.2)
            >>> run = selffl.train("softmax", fed, "fedavg", rounds=4, evaluate_validation=True)
            >>> run.best_round()["chosen_on"], run.best_round("test")["chosen_on"]
            ('validation rows', 'test rows')
        """
        check_choice("by", by, ("test", "validation"))
        name = metric or leading_metric(self.history) or self.config.metrics[0]
        check_known("metric", name, self.config.metrics)
        is_noted = by == "validation" and self.config.evaluate_validation
        if by != self.config.evaluate_on and not is_noted:
            raise ConfigError(
                f"the run was evaluated on {self.config.evaluate_on} rows alone; expected {by} rows to choose a round. "
                + ("Train with evaluate_validation=True." if by == "validation" else "Train with evaluate_on='test'.")
            )
        own = self.config.own_metrics.get(name)
        return best_round(
            self.history,
            f"validation_{name}" if is_noted else f"weighted_{name}",
            "test rows" if by == "test" else "validation rows",
            higher_is_better=HIGHER_IS_BETTER[name] if own is None else own,
        )

    def gains(self) -> list[Row]:
        """Who loses by joining, worst first, and why; of a run with ``gain=True``.

        One row for each client that has held-out rows: ``client``, ``num_train``, ``num_test``, ``predicted_gain`` (the
        factor by which the method expected its variance to shrink, where it says so), ``alone`` and ``personal``
        (the first metric), ``realised_gain`` (positive where joining helped), ``is_within_chance`` (an exact sign
        test of the rows that one model has right and the other wrong, 5 % level; none where rows are not right or
        wrong) and ``why``, a reason that the run's own numbers support.
        """
        if not self.config.gain:
            raise ConfigError(
                "the run was trained without gain=True, so that nobody's model is known without joining; train it "
                "again with gain=True (selffl run --gain)."
            )
        if self.summary.get("status") != "finished":
            raise ConfigError("the run has not ended, and its clients train alone at the end; resume it first.")
        return gain_rows(self.clients, self.config.metrics[0], has_global=self.config.has_global_model)

    def probabilities(
        self, client: Hashable, features: npt.ArrayLike | None = None, *, moderated: bool = True
    ) -> Tensor:
        """What a client's personal model gives every class, ``[rows, classes]``.

        Args:
            client: its id.
            features: rows as they were trained on; none: those of the client that the run is evaluated on.
            moderated: whether what the posterior leaves open is allowed for, and what rows left out say of it
                (`selffl.runs.confidence`): for ``self-fl-auto``, which learns how much clients differ.  The likeliest
                class is the same.  Asked for the first time it takes a pass over the rows of up to 100 clients.
        """
        position, sure = position_of(client, list(self.federation.clients)), self._confidence
        rows = sure.held_out(position).features if features is None else sure.given(features)
        return sure.logits(position, rows, moderated).softmax(-1)

    def calibration(self) -> list[Row]:
        """Whether probabilities are what they say, on all held-out rows: one row per kind of model.

        The personal models as they are, moderated (where the method knows), and the global model.  Columns:
        ``accuracy`` and mean ``confidence``, which should be the same; ``calibration_error`` over 15 bins of equal
        width and ``even_calibration_error`` over 15 bins of equally many rows; ``log_loss`` in nats; ``brier_score``.
        """
        return self._confidence.table()

    @cached_property
    def _confidence(self) -> Confidence:
        return Confidence(self._personal)

    @cached_property
    def _personal(self) -> PersonalModelCache:
        return PersonalModelCache(self._session, self._state)

    def __repr__(self) -> str:
        """What it is and how it did, in a line."""
        names = ("algorithm", "data", "rounds", f"weighted_{self.config.metrics[0]}", "status")
        shown = {name: self.summary.get(name) for name in names}
        return f"Run({', '.join(f'{key}={value!r}' for key, value in shown.items())})"

    def save(self, path: str | Path) -> None:
        """Write the run into a folder of its own; `selffl.load` reads it."""
        target = Path(path)
        refuse_if_taken(target)
        self._session = self._session.with_fingerprint()
        records = self._records()
        folder = create_run_folder(target, self._session, self._state, self.summary.get("seconds", 0.0))
        if records.summary:
            folder.add_evaluation(records)
        folder.started(self.config, records)


def train_and_record(
    session: Session,
    state: RunState,
    records: Records,
    folder: RunFolder | None,
    seconds: float,
    observers: Sequence[Observer],
) -> Run:
    """The run, trained from ``state`` to its last round; ``seconds`` were spent on it before."""
    own = [] if folder is None else [folder, Checkpoints(folder, session.recipe, seconds)]
    recorder = Recorder(
        session.recipe, session.method, session.federation.clients, records, [*own, *observers], seconds
    )  # fmt: skip
    last = state
    with single_thread(session), deterministic_cudnn(), recorder:
        for last, report in session.reports(state):
            recorder.take(last, report)
    return make_run(session, last, records)


def make_run(session: Session, state: RunState, records: Records) -> Run:
    """Assemble the run that a user gets."""
    tables = records.history, records.clients, records.summary, records.participation, records.answers
    return Run(*tables, session, state)


def create_run_folder(
    path: Path, session: Session, state: RunState, seconds: float = 0.0, *, keep_rows: bool = True
) -> RunFolder:
    """A new folder with everything that `resume` needs but the configuration, which makes it a run and comes last."""
    recipe, folder = session.recipe, RunFolder(path)
    path.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Any] = {}
    if recipe.model is None and not files.save_layers(path, session.module):
        parts["module"] = session.module
    if recipe.loss is None:
        parts["loss"] = session.source.loss
    if recipe.has_own_method:
        parts["method"] = session.method
    if session.metrics:
        parts["metrics"] = session.metrics
    if parts:
        files.save_module(path, parts)
    write_facts(path, session)
    if recipe.source is None and keep_rows and not session.federation.train.is_on_demand:
        session.federation.save(path / files.FEDERATION)
    if recipe.gain:
        save_tensors(path / files.START, {"params": session.first}, {})
    if recipe.checkpoint_every or state.round_number:
        folder.add_checkpoint(state, seconds)
    return folder


def write_facts(path: Path, session: Session) -> None:
    """What a folder says of its rows: who holds which classes, and how a table became numbers."""
    # Whole numbers that nothing classifies are counts, say, of which there may be as many as rows.
    is_classified = not {"accuracy", "auc"}.isdisjoint(session.measure.metrics)
    if held := partition_rows(session.federation) if is_classified else []:
        write_csv(path / files.PARTITION, held)
    if session.federation.preparation is not None:
        session.federation.preparation.save(path / files.PREPARATION)


def refuse_if_taken(path: Path) -> None:
    """Refuse a path that is a file, and a folder that holds a run."""
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file; expected a folder for the run.")
    if (path / files.CONFIG).exists():
        raise ConfigError(f"{path} already holds a run; resume it, or give another folder.")
