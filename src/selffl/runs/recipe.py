"""A run as a value: every setting of `selffl.train`, and the facts that are recorded beside them.

The names of the settings are read for completion, which should not wait for torch: what checks them is imported where
it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

    from selffl.algorithms.norms import BatchNorm
    from selffl.algorithms.optimisers import Optimiser
    from selffl.engines.defence import Robust
    from selffl.training.blocks import Gradients
    from selffl.training.flat import Precision

MAX_BATCH_SIZE = (1 << 31) - 1  # rows
REMOTE = "remote"  # the device of a run whose clients compute at their own sites
WITH_SERIAL = ("auto", "loop")  # gradients that the serial engine can be asked for
LEAST_VALUES = {
    "evaluate_every": 0,
    "evaluate_clients": 1,
    "checkpoint_every": 0,
    "chunk_size": 1,
    "neighbours": 1,
    "shards": 1,
}
NUM_EVALUATIONS = 20  # of a run, where nobody has said how many rounds lie between them


# Where a setting can be given beside `selffl.train`: in a study file and by ``--set``, and to a server over Flower.
HERE = {"study": False, "flower": False}
FLOWER = {"study": False, "flower": True}
EVERYWHERE = {"study": True, "flower": True}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a run was asked to do, checked, and what is recorded of the parts that it was made of.

    Settings are keywords of `selffl.train`, which says what each means, by the same names and with the same defaults.
    Facts follow from the model, the rows, the method and the functions that were given with them.

    Attributes:
        algorithm: Name of the method.
        options: Of the method, by name.
        has_own_method: Whether the method is one that is not in the registry.
        has_global_model: Whether the method trains a model that is of use to anybody.
        is_federated: Whether clients learn from each other at all.
        recorded: Fields of uploads that the method has written down, client by client.
        data: What the rows are called.
        source: The call that loads the rows again, if they have a name.
        fingerprint: Of the rows; taken when the run is written.
        model: The call that builds the model again, if it has a name.
        loss: By its name in `selffl.training.losses`; none: one of the user's own.
        metrics: Those that follow from the task, and the user's own.
        own_metrics: The user's own: whether higher is better.
        is_warm: Whether training began with weights that were given (``start``).
    """

    rounds: int = field(default=200, metadata=EVERYWHERE)
    participation: float = field(default=0.1, metadata=EVERYWHERE)
    learning_rate: float = field(default=0.03, metadata=EVERYWHERE)
    learning_rate_schedule: str = field(default="constant", metadata=EVERYWHERE)
    batch_size: int = field(default=10, metadata=EVERYWHERE)
    seed: int = field(default=0, metadata=FLOWER)
    device: str = field(default="cpu", metadata=HERE)
    evaluate_every: int | None = field(default=None, metadata=FLOWER)
    evaluate_clients: int | None = field(default=None, metadata=HERE)
    evaluate_on: Literal["test", "validation"] = field(default="test", metadata=HERE)
    evaluate_train: bool = field(default=False, metadata=HERE)
    evaluate_validation: bool = field(default=False, metadata=HERE)
    fine_tune: Sequence[int] = field(default=(), metadata=HERE)
    class_frequencies: bool = field(default=False, metadata=HERE)
    neighbours: int | None = field(default=None, metadata=HERE)
    checkpoint_every: int | None = field(default=None, metadata=HERE)
    chunk_size: int | None = field(default=None, metadata=HERE)
    client_memory: Literal["memory", "disk"] | None = field(default=None, metadata=HERE)
    gradients: Gradients = field(default="auto", metadata=HERE)
    dtype: str | torch.dtype = field(default="float32", metadata=HERE)
    precision: Precision = field(default="full", metadata=HERE)
    optimiser: str | Optimiser = field(default="sgd", metadata=EVERYWHERE)
    keep_optimiser: bool = field(default=False, metadata=EVERYWHERE)
    weight_decay: float = field(default=0.0, metadata=EVERYWHERE)
    max_gradient_norm: float | None = field(default=None, metadata=EVERYWHERE)
    augmentation: str = field(default="none", metadata=EVERYWHERE)
    batch_norm: BatchNorm | None = field(default=None, metadata=EVERYWHERE)
    gain: bool = field(default=False, metadata=FLOWER)
    robust: Robust = field(default="none", metadata=EVERYWHERE)
    clip: float | None = field(default=None, metadata=EVERYWHERE)
    max_weight: float | None = field(default=None, metadata=EVERYWHERE)
    noise_multiplier: float = field(default=0.0, metadata=EVERYWHERE)
    row_clip: float | None = field(default=None, metadata=EVERYWHERE)
    row_noise_multiplier: float = field(default=0.0, metadata=EVERYWHERE)
    engine: Literal["cohort", "serial"] = field(default="cohort", metadata=HERE)
    shards: int | None = field(default=None, metadata=HERE)

    # Facts, beside the settings.
    algorithm: str
    options: dict[str, Any]
    has_own_method: bool = False
    has_global_model: bool = True
    is_federated: bool = True
    recorded: tuple[str, ...] = ()
    data: str = "arrays"
    source: dict[str, Any] | None = None
    fingerprint: str = ""
    model: dict[str, Any] | None = None
    loss: str | None = None
    metrics: tuple[str, ...] = ("accuracy",)
    own_metrics: dict[str, bool] = field(default_factory=dict)
    is_warm: bool = False

    def __post_init__(self) -> None:
        for name, value in check_settings(self.settings()).items():
            object.__setattr__(self, name, value)

    def settings(self) -> dict[str, Any]:
        """The settings by name, without the facts."""
        return {name: getattr(self, name) for name in SETTINGS}

    def to_json(self) -> dict[str, Any]:
        """The recipe as config.json holds it."""
        from selffl.algorithms.optimisers import optimiser_of

        chosen = optimiser_of(self.optimiser)
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return found | {"optimiser": {"name": chosen.name, **vars(chosen)}}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Recipe:
        """The recipe that `to_json` wrote, of this version or of an earlier one."""
        from selffl.algorithms import traits_recorded
        from selffl.algorithms.optimisers import optimiser_of

        # Runs of earlier versions do not say what their method is like.
        found = traits_recorded(content["algorithm"]) | dict(content)
        found |= _settings_of_options(found["options"])
        found |= {name: tuple(found[name]) for name in ("fine_tune", "metrics", "recorded") if name in found}
        for name, kinds in KINDS.items():
            if name in found and not isinstance(found[name], kinds):
                raise TypeError(f"{name} is {found[name]!r}")
        if found.get("source") is not None and not isinstance(found["source"].get("name"), str):
            raise TypeError(f"source is {found['source']!r}")
        if not found.get("metrics", True):
            raise TypeError(f"metrics are {found['metrics']!r}")
        for name in ("metrics", "recorded"):
            if not all(isinstance(each, str) for each in found.get(name, ())):
                raise TypeError(f"{name} are {found[name]!r}")
        return cls(**found | {"optimiser": optimiser_of(**found.get("optimiser", {"name": "sgd"}))})

    @property
    def noted_beside(self) -> tuple[str, ...]:
        """Parts of the rows whose scores are noted beside those that the run is evaluated on, at the same rounds."""
        asked = {"train": self.evaluate_train, "validation": self.evaluate_validation}
        return tuple(part for part, is_asked in asked.items() if is_asked)

    def is_evaluated(self, round_number: int) -> bool:
        """Whether a round is followed by an evaluation; the last one always is."""
        return self._is_due(self.evaluate_every, round_number)

    def is_checkpointed(self, round_number: int) -> bool:
        """Whether a round is followed by a checkpoint."""
        return bool(self.checkpoint_every) and self._is_due(self.checkpoint_every, round_number)

    def _is_due(self, every: int | None, round_number: int) -> bool:
        return round_number == self.rounds or (bool(every) and round_number % every == 0)  # type: ignore[operator]


KINDS: dict[str, Any] = {  # of facts, as JSON has them
    **dict.fromkeys(("algorithm", "data", "fingerprint"), str),
    **dict.fromkeys(("source", "model"), dict | None),
    **dict.fromkeys(("options", "own_metrics"), dict),
    **dict.fromkeys(("has_own_method", "has_global_model", "is_federated", "is_warm"), bool),
    "loss": str | None,
}
_OF_SETTINGS = {each.name: each for each in fields(Recipe) if each.metadata}
SETTINGS = tuple(_OF_SETTINGS)  # keywords of `selffl.train`
STUDY_SETTINGS = tuple(name for name, each in _OF_SETTINGS.items() if each.metadata["study"])  # keys of study.toml
FLOWER_SETTINGS = tuple(name for name, each in _OF_SETTINGS.items() if each.metadata["flower"])  # of a server


def check_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as a recipe holds them, those left out by their defaults; one that cannot work is refused."""
    import torch

    from selffl.algorithms.norms import check_policy
    from selffl.algorithms.optimisers import optimiser_of
    from selffl.algorithms.options import check_bool, check_choice, check_integer, check_number
    from selffl.algorithms.training_options import TRAINING_OPTIONS, TrainingOptions
    from selffl.data.split import check_seed
    from selffl.engines.defence import check_robust
    from selffl.engines.limits import PRIVACY_OPTIONS, PrivacyOptions
    from selffl.errors import ConfigError
    from selffl.training.blocks import check_gradients

    found: dict[str, Any] = {name: each.default for name, each in _OF_SETTINGS.items()} | dict(given)
    check_integer("rounds", found["rounds"], 1)
    check_number("participation", found["participation"], above=0.0, at_most=1.0)
    check_integer("batch_size", found["batch_size"], 1, at_most=MAX_BATCH_SIZE)
    check_seed(found["seed"])
    found["dtype"], smallest, largest = _floating_point(found["dtype"])
    check_choice("precision", found["precision"], ("full", "bfloat16"))
    if found["precision"] != "full" and found["dtype"] != "float32":
        raise ConfigError(
            f"precision is {found['precision']!r}, and dtype {found['dtype']!r}; expected dtype 'float32' beside it, "
            "for parameters stay in that."
        )
    check_number("learning_rate", found["learning_rate"], above=0.0, at_most=largest)
    found["learning_rate"] = float(found["learning_rate"])
    if not isinstance(found["device"], str | torch.device):
        raise ConfigError(f"device is {found['device']!r}; expected 'cpu', 'cuda' or another of torch's.")
    found["device"] = str(found["device"])
    check_choice("evaluate_on", found["evaluate_on"], ("test", "validation"))
    check_choice("engine", found["engine"], ("cohort", "serial"))
    for name in ("evaluate_train", "evaluate_validation", "class_frequencies", "gain"):
        check_bool(name, found[name])
    for name, least in LEAST_VALUES.items():
        if found[name] is not None:
            check_integer(name, found[name], least)
    if found["client_memory"] is not None:
        check_choice("client_memory", found["client_memory"], ("memory", "disk"))
    if found["client_memory"] == "disk" and found["gain"] is True:
        raise ConfigError(
            "client_memory is 'disk', and gain is True; expected one of them, for clients that train alone are kept in "
            "memory. Leave gain out, or give client_memory='memory'."
        )
    check_policy(found["batch_norm"])
    check_robust(found["robust"])
    found |= PrivacyOptions(**{name: found[name] for name in PRIVACY_OPTIONS}).to_json()
    check_gradients(found["gradients"])
    if found["engine"] == "serial" and (found["chunk_size"] not in (None, 1) or found["gradients"] not in WITH_SERIAL):
        raise ConfigError(
            f"engine is 'serial', chunk_size {found['chunk_size']!r} and gradients {found['gradients']!r}; expected "
            "neither beside it, for it trains one client at a time by the plain loop."
        )
    if isinstance(found["fine_tune"], str) or not isinstance(found["fine_tune"], Sequence):
        raise ConfigError(f"fine_tune is {found['fine_tune']!r}; expected a list of numbers of steps, such as (20,).")
    for steps in found["fine_tune"]:
        check_integer("fine_tune", steps, 1)
    found["fine_tune"] = tuple(sorted(set(found["fine_tune"])))
    found["optimiser"] = optimiser_of(found["optimiser"])
    if found["keep_optimiser"] is True and not found["optimiser"].num_states:
        raise ConfigError(
            f"keep_optimiser is True, and {found['optimiser'].name!r} remembers nothing of earlier steps; expected "
            "optimiser 'momentum' or 'adam' beside it."
        )
    options = TrainingOptions(**{name: found[name] for name in TRAINING_OPTIONS})
    found |= options.to_json() | {"rounds": found["rounds"]}
    if options.rate(found["learning_rate"], found["rounds"]) < smallest <= found["learning_rate"]:
        raise ConfigError(
            f"learning_rate_schedule is {found['learning_rate_schedule']!r}, which leaves nothing of the learning "
            f"rate in round {found['rounds']}; expected one that falls more slowly."
        )
    if found["evaluate_every"] is None:
        found["evaluate_every"] = max(found["rounds"] // NUM_EVALUATIONS, 1)
    if found["checkpoint_every"] is None:
        found["checkpoint_every"] = found["evaluate_every"] or found["rounds"]
    return found


def _settings_of_options(options: Any) -> dict[str, Any]:
    """Settings that earlier versions had as options of a method, and the options that are left."""
    from selffl.engines.limits import PRIVACY_OPTIONS

    if not isinstance(options, Mapping):
        return {}
    moved = {name: options[name] for name in PRIVACY_OPTIONS if name in options}
    return moved and {**moved, "options": {name: options[name] for name in options if name not in moved}}


def _floating_point(given: Any) -> tuple[str, float, float]:
    """The name of a type of torch's, and the smallest and the largest number that it holds."""
    import torch

    from selffl.errors import ConfigError

    found = getattr(torch, given, None) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(f"dtype is {given!r}; expected a floating-point type of torch's, such as torch.float32.")
    return str(found).removeprefix("torch."), torch.finfo(found).tiny, torch.finfo(found).max
