"""A run over Flower with the records of `selffl.train`: the same files, made of what the clients report.

Beside the uploads, the server learns of each client how many rows there are and a sum over the test rows for each
metric; no row and no answer to a row leaves a client.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import Tensor, nn

from selffl.algorithms.norms import check_batch_norm
from selffl.algorithms.population import Population
from selffl.engines.cohort import RunState
from selffl.engines.flower.answers import Alone, EvaluationSums
from selffl.engines.flower.client import algorithm_of
from selffl.engines.flower.secure import check_secure_sums
from selffl.engines.flower.server import Server, number_ids
from selffl.engines.flower.settings import Answers, Network
from selffl.engines.flower.site import VIEWS
from selffl.engines.rounds import RoundReport
from selffl.errors import CheckpointError, ConfigError, check_known
from selffl.runs import folder as files
from selffl.runs.evaluation import Evaluation
from selffl.runs.folder import Records, Row, RunFolder
from selffl.runs.gain import gain_columns
from selffl.runs.methods import Method, check_room, method_facts, named_method
from selffl.runs.recipe import FLOWER_SETTINGS, REMOTE, Recipe
from selffl.runs.records import Evaluated, Recorder, Report, TrainedAlone, forget_closing_scores
from selffl.state.checkpoint import load_tensors, save_tensors
from selffl.training.flat import FlatModel
from selffl.training.metrics import Measure, Metric, own_metrics
from selffl.training.row_gradients import check_rows_apart


@dataclass(frozen=True)
class ReportedEvaluation(Evaluation):
    """An evaluation made of the clients' own sums instead of their rows."""

    totals: Mapping[str, Tensor]  # "personal.accuracy": of each client [M], a sum over its rows, or the value itself

    def of_clients(self, metric: str, view: str) -> Tensor:
        """Scores of each client ``[M]``; NaN where nothing is known."""
        is_value = metric == "auc" or metric in self.own_metrics
        return self.totals[f"{view}.{metric}"] if is_value else super().of_clients(metric, view)

    def _totals(self, metric: str, view: str) -> Tensor:
        return self.totals[f"{view}.{metric}"]


def make_evaluation(
    scores: Mapping[int, EvaluationSums], num_clients: int, own: Mapping[str, Metric] | None = None
) -> ReportedEvaluation:
    """The evaluation of those clients that have answered; the others count as clients without rows."""
    known = own or {}
    metrics = tuple(metric for metric in next(iter(scores.values())).metrics if metric not in known)
    rows, num_train = torch.zeros(2, num_clients, dtype=torch.int64)
    totals = {
        f"{view}.{metric}": torch.full((num_clients,), 0.0 if metric in metrics and metric != "auc" else torch.nan)
        for view in VIEWS
        for metric in (*metrics, *known)
    }
    totals = {name: total.double() for name, total in totals.items()}
    for client, found in scores.items():
        rows[client], num_train[client] = found.num_test, found.num_train
        for name, value in found.totals.items():
            totals[name][client] = value
    return ReportedEvaluation(
        measure=Measure(metrics, lambda outputs, labels: (outputs,)),  # rows were measured where they are
        labels=torch.zeros(0),
        offset=torch.cat([torch.zeros(1, dtype=torch.int64), rows.cumsum(0)]),
        numbers=dict.fromkeys(VIEWS, torch.zeros(0)),
        by_size=num_train.argsort(descending=True, stable=True),
        own_metrics=known,
        totals=totals,
    )


class RemoteRecorder(Recorder):
    """Records of a run whose clients say themselves how they do; where the run is, the server's checkpoint says.

    A round is written when it ends, before its evaluation: the checkpoint counts on it.
    """

    def __init__(
        self,
        path: Path,
        recipe: Recipe,
        method: Method,
        clients: Sequence[Hashable],
        own: Mapping[str, Metric],
        state: RunState,
    ) -> None:
        records = Records()
        self.metrics: tuple[str, ...] | None = None
        if (path / files.CONFIG).is_file():
            records, self.metrics = _earlier_records(path, recipe, method, clients, state.round_number)
            forget_closing_scores(records, files.read_config(path), recipe, method)
        elif state.round_number:
            raise CheckpointError(
                f"{path} holds a checkpoint of round {state.round_number} and no {files.CONFIG}; expected both. "
                "Put it back, or start another run in another folder."
            )
        last: Row = records.history[-1] if records.history else {}
        path.mkdir(parents=True, exist_ok=True)
        self._folder, self._own = RunFolder(path), own
        recipe = recipe if self.metrics is None else replace(recipe, metrics=self.metrics)
        super().__init__(recipe, method, clients, records, [self._folder], last.get("seconds") or 0.0)
        is_over = state.round_number == recipe.rounds and records.summary.get("status") == "finished"
        self.first = _first_model(path, state) if recipe.gain and not is_over else None
        self._joined: ReportedEvaluation | None = None  # the last evaluation, which training alone is compared with

    def has_scores(self, round_number: int) -> bool:
        """Whether that round's evaluation is in the records; before clients train alone, also in memory."""
        if round_number == self.recipe.rounds and self.first is not None:
            return self._joined is not None
        name = f"weighted_{self.recipe.metrics[0]}"
        return any(row["round"] == round_number and row.get(name) is not None for row in self.records.history)

    def take(self, state: RunState, report: Report | Answers) -> None:
        """Add a report to the records; clients' answers are turned into one first."""
        if not isinstance(report, Mapping):
            super().take(state, report)
            return
        scores = {client: found for client, found in report.items() if isinstance(found, EvaluationSums)}
        alone = {client: found for client, found in report.items() if isinstance(found, Alone)}
        if scores:
            self._joined = found = make_evaluation(scores, len(self._clients), self._own)
            self.metrics = found.metrics
            self.recipe = replace(self.recipe, metrics=self.metrics)
            heard = [scores.get(client) for client in range(len(self._clients))]
            num_train = torch.tensor([0 if own is None else own.num_train for own in heard])
            super().take(state, Evaluated(found, num_train))
        elif alone and self._joined is not None:
            super().take(state, _compare_alone(self._joined, alone))
            self.first = None
        else:
            self._update(state)
        # The history last: it says that the round is evaluated, and a run that goes on believes it.  Anew: the last row
        # has changed, and the first evaluation says what is measured.
        self._folder.started(self.recipe, self.records)

    def _add_round(self, state: RunState, report: RoundReport) -> None:
        self._note_round(state, report)
        self._publish()


def _earlier_records(
    path: Path, recipe: Recipe, method: Method, clients: Sequence[Hashable], round_number: int
) -> tuple[Records, tuple[str, ...] | None]:
    """The records of the rounds until the checkpoint, all of which have to be there, and what they measure."""
    earlier = files.read_config(path)
    if earlier.device != recipe.device:
        raise ConfigError(f"{path} holds a run that is not over Flower; give another folder.")
    records = files.read_records(path, clients).up_to(round_number)
    files.check_complete(path, records, round_number, method, clients)
    is_evaluated = any(row.get(f"weighted_{earlier.metrics[0]}") is not None for row in records.history)
    return records, earlier.metrics if is_evaluated else None


def _first_model(path: Path, state: RunState) -> Tensor:
    """The model that a run began with, which is kept for clients to train alone from."""
    place = path / files.START
    if state.round_number == 0:
        save_tensors(place, {"params": state.server.params}, {})
    elif not place.is_file():
        raise ConfigError(f"gain=True, and the run in {path} was begun without it; expected gain from the first round.")
    return load_tensors(place)[0]["params"].to(state.server.params)


def _compare_alone(joined: ReportedEvaluation, answers: Mapping[int, Alone]) -> TrainedAlone:
    """What clients gain by joining, from what they say they have alone; those that are silent have empty cells."""
    unknown = torch.full_like(joined.num_rows, torch.nan, dtype=torch.float64)
    totals = {f"personal.{metric}": unknown.clone() for metric in joined.metrics}
    won, lost = torch.zeros_like(joined.num_rows), torch.zeros_like(joined.num_rows)
    for client, found in answers.items():
        if found.num_test != joined.num_rows[client]:  # of other rows than its last evaluation
            continue
        won[client], lost[client] = found.num_won, found.num_lost
        for metric in joined.metrics:
            totals[f"personal.{metric}"][client] = found.totals[f"alone.{metric}"]
    is_lost = totals[f"personal.{joined.metrics[0]}"].isnan()
    counts = {"num_won": won, "num_lost": lost}
    return TrainedAlone(gain_columns(joined, replace(joined, totals=totals), is_lost, counts))


def server_app(
    model: nn.Module,
    algorithm: str | Method,
    clients: Sequence[Hashable],
    *,
    out: str | Path | None = None,
    metrics: Mapping[str, Any] | None = None,
    quorum: float = 0.5,
    shortfall: Literal["raise", "skip"] = "raise",
    round_seconds: float = 3600.0,
    connect_seconds: float = 60.0,
    max_examples: int = 10**9,
    secure_sums: bool = False,
    experiment: str | None = None,
    population: Population | None = None,
    dtype: torch.dtype = torch.float32,
    data: str = "remote",
    **settings: Any,
) -> ServerApp:
    """The app that the server runs.

    ``out``, ``experiment``, ``algorithm`` (a name), every setting and whatever stands between ``quorum`` and
    ``secure_sums`` may also be given in the app's run configuration, with a dash for each underscore (``flwr run .
    --run-config "rounds=20"``), which then counts.  A run whose ``out`` holds a checkpoint of the same run goes on from
    there: Flower does not resume a run, so it is submitted again (`selffl flower resume`).

    Args:
        model: The module, with the first values of its parameters.
        algorithm: A name, or a method with options; the clients have to have the same.
        clients: The ids of all clients, whether they take part today or not; their sorted order numbers them.
        out: Folder, on the server, for the records that `selffl.train` writes and a checkpoint after every round; none:
            nothing is written.
        metrics: More to measure, as in `selffl.train`: the clients have to be given the same, by the same names.
        quorum: Share of a round's cohort that has to answer for the round to count.
        shortfall: What happens if fewer do: ``raise`` ends the run with a `QuorumError`, ``skip`` goes on to the next
            round with the global model as it was.
        round_seconds: How long enough of a round's clients are waited for, and again their answers.
        connect_seconds: How long all clients are waited for before the first round.
        max_examples: The most rows that a client may claim to have; many methods weigh clients by that.
        secure_sums: Whether the server is to learn only the sum of a round's uploads: clients mask what they send, and
            masks cancel.  For methods whose uploads add, without ``robust``; three clients or more in a round.
        experiment: Name under which clients keep their memories; none: a new one, kept in the checkpoint.
        population: What is known of the clients beforehand (clusters, variances), in the order of their sorted ids.
        dtype: Of the parameters; the clients have to have the same.
        data: What the records call the clients' rows, which the server does not see.
        settings: Those of `selffl.train` that the table of settings has for Flower, from ``rounds`` to
            ``row_noise_multiplier``, by the same names and with the same defaults.  What local training remembers or
            keeps (``keep_optimiser``, ``batch_norm="kept"``) lies at the clients' own sites, and noise comes from the
            operating system's generator.  ``batch_norm`` has to be given to the clients as well, and ``gain`` needs
            ``out``.
    """
    for name in settings:
        check_known("keyword of server_app", name, inspect.signature(server_app).parameters)
    given = {name: value for name, value in locals().items() if name in KINDS} | settings
    given["out"] = None if out is None else str(out)
    ids, own = number_ids(clients), own_metrics(metrics)
    module = copy.deepcopy(model).to(dtype)

    def server_of(run_config: Mapping[str, Any]) -> tuple[Server, Recipe]:
        name, method = named_method(algorithm_of(run_config, algorithm))
        chosen = override(given, run_config)
        recipe = Recipe(
            **{setting: chosen[setting] for setting in FLOWER_SETTINGS if setting in chosen},
            **method_facts(name, method),
            device=REMOTE,
            dtype=dtype,
            chunk_size=1,
            checkpoint_every=1,
            data=data,
            own_metrics={own_name: bool(metric.higher_is_better) for own_name, metric in own.items()},
        )
        network = Network(**{setting.name: chosen[setting.name] for setting in fields(Network)})
        place = None if chosen["out"] is None else Path(chosen["out"])
        check_room(recipe, method)
        if network.secure_sums:
            check_secure_sums(method, recipe.robust)
        batch_norm = recipe.batch_norm or method.batch_norm
        flat = FlatModel(module, batch_norm)
        check_batch_norm(batch_norm, method, num_statistics=flat.num_statistics, num_kept=len(flat.kept_layers))
        check_rows_apart(flat, recipe.row_clip)
        if recipe.gain and place is None:
            raise ConfigError("gain is True without out; expected a folder, in which the gains are recorded.")
        server = Server(flat, method, ids, recipe, network, place, chosen["experiment"], population, tuple(own))
        return server, recipe

    server_of({})  # what is wrong here should be said before anybody connects
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        server, recipe = server_of(context.run_config)
        path = server.out
        if path is None:
            server.run(grid)
        else:
            server.run(grid, lambda state: RemoteRecorder(path, recipe, server.algorithm, ids, own, state))

    return app


def _kind(annotation: str) -> type[Any]:
    """What a value of a run configuration has to be: a whole number, a number, true or false, or text."""
    return {"int": int, "float": float, "bool": bool}.get(annotation.split(" ")[0], str)


SETTINGS = [each for each in fields(Recipe) if each.name in FLOWER_SETTINGS]
_TYPES = {each.name: str(each.type) for each in (*SETTINGS, *fields(Network))}
_TYPES |= dict.fromkeys(("experiment", "out"), "str | None")
# Keys of an app's run configuration, with an underscore for each dash, and what their values are.
KINDS = {name: _kind(annotation) for name, annotation in _TYPES.items()}
MAY_BE_EMPTY = [name for name, annotation in _TYPES.items() if "None" in annotation]


def _name_settings(signature: inspect.Signature) -> inspect.Signature:
    """A signature with the recipe's settings in place of ``**settings``, as editors and readers are shown it."""
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    named = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
        for each in SETTINGS
    ]
    return signature.replace(parameters=[*own, *named])


server_app.__signature__ = _name_settings(inspect.signature(server_app))  # type: ignore[attr-defined]


def override(given: Mapping[str, Any], run_config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with those of a run configuration in their place, whose names have dashes."""
    found = dict(given)
    for name, kind in KINDS.items():
        key = name.replace("_", "-")
        if key not in run_config:
            continue
        value: Any = run_config[key]
        if value == "" and name in MAY_BE_EMPTY:  # Flower takes no key that an app does not declare
            continue
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise ConfigError(f"{key} is {value!r} in the run configuration; expected {kind.__name__}.")
        found[name] = kind(value)
    return found
