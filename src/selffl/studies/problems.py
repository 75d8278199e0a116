"""What is trained on what: the paper's problems, and one that ships with the package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from selffl.algorithms import ALGORITHMS, DEFAULT_ALGORITHM, Algorithm, algorithm
from selffl.algorithms.norms import BatchNorm
from selffl.data import DATA_SETS, load
from selffl.data.federation import Federation
from selffl.engines.defence import Robust
from selffl.errors import ConfigError, DataError, check_known
from selffl.runs.methods import Method
from selffl.runs.recipe import STUDY_SETTINGS
from selffl.runs.run import Run
from selffl.runs.search import Setting
from selffl.runs.train import train
from selffl.runs.tune import VALIDATION_SHARE, Tuning, tune_runs
from selffl.studies.result import read_toml

METHODS = ("self-fl", "self-fl-exact", "ditto", "pfedme", "perfedavg", "fedavg", "local")
NUM_SEEDS = 5
OF_COMPARISONS = ("algorithm", "algorithms", "num_seeds")  # what no number of a run depends on


@dataclass(frozen=True)
class WarmUp:
    """What is trained first, from scratch, for every method to start from: one shared model, by FedAvg."""

    rounds: int  # how many
    is_pooled: bool = False  # whether on all training rows as one client's, which is ordinary training
    num_local_steps: int = 20  # steps a round, unless the problem counts epochs
    learning_rate: float | None = None  # η; none: the problem's


@dataclass(frozen=True)
class Problem:
    """A data set, a model, and how long and how fast it is trained."""

    name: str  # as the command line knows it
    title: str  # as a reader knows it
    data: str  # name of the data set
    model: str  # one of `selffl.models.MODELS`
    rounds: int = 200  # how many
    participation: float = 0.1  # C
    learning_rate: float = 0.03  # η
    learning_rate_schedule: str = "constant"  # by which factor η changes from round to round
    batch_size: int = 10  # B
    optimiser: str = "sgd"  # of the clients' local steps
    keep_optimiser: bool = False  # whether they go on in a client's next round where they were
    weight_decay: float = 0.0  # λ, of each gradient
    max_gradient_norm: float | None = None  # the most that a gradient may measure
    augmentation: str = "none"  # what becomes of an image each time it is trained on
    batch_norm: BatchNorm | None = None  # what becomes of BatchNorm, as in `selffl.train`
    robust: Robust = "none"  # the defence against hostile clients, as in `selffl.train`
    clip: float | None = None  # the most that a client may move a model by, as in `selffl.train`
    max_weight: float | None = None  # the most that it may weigh beside that
    noise_multiplier: float = 0.0  # of the noise on sums
    row_clip: float | None = None  # the most that a row's gradient may measure, as in `selffl.train`
    row_noise_multiplier: float = 0.0  # of the noise on gradients
    num_local_steps: int = 20  # L of the methods that have one, and Self-FL's steps while it knows no variance (D3)
    max_local_steps: int = 40  # ℓ_max of Self-FL
    data_options: Mapping[str, Any] = field(default_factory=dict)  # of its loader, besides the seed
    num_local_epochs: int | None = None  # passes over each client's rows instead of either number of steps (D15)
    model_options: Mapping[str, Any] = field(default_factory=dict)  # of the model
    warm_up: WarmUp | None = None  # what every method starts from, where that is not a fresh model
    algorithm: str = DEFAULT_ALGORITHM  # the method that is trained where nobody names one
    algorithms: tuple[str, ...] = (DEFAULT_ALGORITHM, *METHODS)  # the methods that are compared where nobody names any
    num_seeds: int = NUM_SEEDS  # repeats of a comparison where nobody says how many

    keeps_rows: ClassVar[bool] = True  # whether runs get a copy of rows that have no name to be loaded by

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of `selffl.train` that a study has, by name."""
        return {name: getattr(self, name) for name in STUDY_SETTINGS}

    def shorten(self, share: int, model_options: Mapping[str, Any] | None = None) -> Self:
        """The problem for a quick look: one in ``share`` of all rounds, also of the warm start, maybe another model."""
        warm = self.warm_up
        return replace(
            self,
            rounds=max(self.rounds // share, 1),
            warm_up=warm and replace(warm, rounds=max(warm.rounds // share, 1)),
            model_options={**self.model_options, **(model_options or {})},
        )

    def federation(self, seed: int, validation_fraction: float = 0.0) -> Federation:
        """The clients of one seed."""
        return _load(self.data, seed, validation_fraction, tuple(sorted(self.data_options.items())))

    def module(self, federation: Federation, seed: int) -> nn.Module | str:
        """What is trained: a module, or the name of one that `selffl.train` builds."""
        del federation, seed
        return self.model

    def own_parts(self, seed: int) -> dict[str, Any]:
        """What `selffl.resume` has to be given of a run of this problem: nothing, where everything has a name."""
        del seed
        return {}

    def content(self, seed: int, validation_fraction: float = 0.0) -> dict[str, Any]:
        """What the numbers of a run depend on; with the method, the seed and the code, all of it."""
        del seed, validation_fraction
        return {key: value for key, value in asdict(self).items() if key not in OF_COMPARISONS}

    def _training(self) -> dict[str, Any]:
        """What every run of `selffl.train` is given."""
        return self.settings | {"model_options": self.model_options, "keep_rows": self.keeps_rows}

    def method(self, name: str, **options: Any) -> Algorithm[Any, Any, Any, Any]:
        """A method with the problem's numbers of steps, unless the options say otherwise."""
        check_known("algorithm", name, ALGORITHMS)
        method = ALGORITHMS[name]()
        known = {f.name for f in fields(method)}  # type: ignore[arg-type]
        steps = {
            "num_local_steps": self.num_local_steps,
            "initial_steps": self.num_local_steps,
            "max_local_steps": self.max_local_steps,
            # A number of steps that is asked for takes the place of the problem's epochs.
            "num_local_epochs": None if options.keys() & set(method.steps_options) else self.num_local_epochs,
        }
        return algorithm(name, **{key: value for key, value in steps.items() if key in known} | options)

    def run(
        self, name: str, options: Mapping[str, Any], seed: int, validation_fraction: float = 0.0, **training: Any
    ) -> Run:
        """Train one method; ``training`` goes to `selffl.train`."""
        if self.warm_up is not None and training.get("start") is None:
            training["start"] = self.train_warm_up(seed, validation_fraction, device=training.get("device", "cpu"))
        return self._train(self.method(name, **options), seed, validation_fraction, **training)

    def _train(self, method: Method, seed: int, validation_fraction: float, **training: Any) -> Run:
        federation = self.federation(seed, validation_fraction)
        return train(self.module(federation, seed), federation, method, seed=seed, **self._training() | training)

    def tune(
        self,
        name: str,
        options: Mapping[str, Any],
        seed: int,
        grid: Mapping[str, Sequence[Any]] | None = None,
        validation_fraction: float = VALIDATION_SHARE,
        device: str = "cpu",
        **more: Any,
    ) -> Tuning:
        """Tune one method; ``more`` goes to `selffl.runs.tune.tune_runs`."""
        starts: dict[float, Run] = {}

        def run(method: Method, settings: Setting, *, is_trial: bool, **training: Any) -> Run:
            share = validation_fraction if is_trial else 0.0
            if self.warm_up is not None:
                if share not in starts:  # which no setting changes
                    starts[share] = self.train_warm_up(seed, share, device=device)
                training["start"] = starts[share]
            return replace(self, **settings)._train(method, seed, share, device=device, **training)

        aside = self.federation(seed, validation_fraction)
        return tune_runs(name, lambda changed: self.method(name, **{**options, **changed}), run, aside, grid, **more)

    def scores(self, run: Run, fine_tune: Sequence[int] = ()) -> dict[str, Tensor]:
        """What is kept of a run where its arm keeps scores: a number for every row evaluated, by view."""
        return run.evaluate(fine_tune=fine_tune, class_frequencies=run.config.class_frequencies).numbers

    def train_warm_up(self, seed: int, validation_fraction: float = 0.0, **training: Any) -> Run:
        """The run that every method of that seed starts from."""
        warm = self.warm_up
        if warm is None:
            raise ConfigError(f"{self.name} has no warm start; expected a problem with one.")
        federation = self.federation(seed, validation_fraction)
        settings = self._training() | {
            "rounds": warm.rounds,
            "participation": 1.0 if warm.is_pooled else self.participation,
            "learning_rate": warm.learning_rate or self.learning_rate,
            "evaluate_every": warm.rounds,
        }
        method = self.method("fedavg", num_local_steps=warm.num_local_steps, num_local_epochs=self.num_local_epochs)
        whole = federation.pool() if warm.is_pooled else federation
        return train(self.module(whole, seed), whole, method, seed=seed, **settings | training)

    @property
    def setting(self) -> str:
        """One sentence."""
        steps = (
            f"L = {self.num_local_steps}, ℓ_max = {self.max_local_steps}"
            if self.num_local_epochs is None
            else f"{self.num_local_epochs} local epochs"
        )
        options = "".join(f", {key} {value}" for key, value in self.model_options.items())
        warm = self.warm_up
        first = ""
        if warm is not None:
            rows = f"{warm.rounds * warm.num_local_steps:,} steps on all rows pooled" if warm.is_pooled else ""
            first = f"; from a model trained for {rows or f'{warm.rounds} rounds of FedAvg'}"
        return (
            f"{self.title}; model {self.model}{options}, {self.rounds} rounds, C = {self.participation:g}, "
            f"η = {self.learning_rate:g}, B = {self.batch_size}, {steps}{first}"
        )


@lru_cache(maxsize=2)  # runs of one seed follow each other
def _load(name: str, seed: int, validation_fraction: float, options: tuple[tuple[str, Any], ...]) -> Federation:
    return load(name, seed=seed, validation_fraction=validation_fraction, **dict(options))


def _read_problem(content: Mapping[str, Any]) -> Problem:
    """A problem as problems.toml has it."""
    warm_up = WarmUp(**content["warm_up"]) if "warm_up" in content else None
    return Problem(**{**content, "warm_up": warm_up})


DIGITS, MNIST, LETTERS, CIFAR10, SENTIMENT, WAKEWORD = map(_read_problem, read_toml("problems.toml").values())
EMNIST = replace(LETTERS, title="EMNIST, letters a–j over 200 clients with five each", data="emnist")
SENT140 = replace(SENTIMENT, title="Sentiment140 as FedProx splits it, tweets over their authors", data="sent140")


def femnist() -> Problem:
    """The problem on EMNIST where its files are found, else on the stand-in; damaged files are an error later."""
    return EMNIST if _is_there("emnist") else LETTERS


def sent140() -> Problem:
    """The problem on Sentiment140 where its files are found, else on the stand-in."""
    return SENT140 if _is_there("sent140") else SENTIMENT


def _is_there(name: str) -> bool:
    try:
        for file in DATA_SETS[name].files():
            file.find()
    except DataError:
        return False
    return True


PROBLEMS: Mapping[str, Callable[[], Problem]] = {
    "digits": lambda: DIGITS,
    "mnist": lambda: MNIST,
    "femnist": femnist,
    "cifar10": lambda: CIFAR10,
    "sent140": sent140,
    "wakeword": lambda: WAKEWORD,
}
