"""Names that a shell completes, written down once more: completion should not wait for torch.

A test holds them against the registries they repeat.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import typer

from selffl.runs.recipe import STUDY_SETTINGS

PROBLEMS = ("digits", "mnist", "femnist", "cifar10", "sent140", "wakeword")
DATA_SETS = (
    *("digits", "mnist", "letters", "emnist", "cifar10", "sentiment", "sent140", "wakeword", "synthetic"),
    *("exam", "mathachieve", "scotssec", "radon", "sleepstudy", "contraception", "immunisation"),
)
STUDIES = (
    *("limits", "convergence", "synthetic-homogeneous", "synthetic-heterogeneous", "augmented-synthetic"),
    *("mnist", "femnist", "femnist-ablation", "cifar10", "augmented-images", "mnist-sparse"),
    *("step-histogram", "step-trajectory", "sent140-warmstart", "sent140"),
    *("wakeword-global", "wakeword-personal", "augmented-wakeword", "wakeword-clusters", "wakeword-participation"),
    *("sums", "sums-noise"),
    *("auto-digits", "auto-mnist", "auto-femnist", "auto-cifar10", "auto-sent140", "auto-wakeword"),
    *("newcomers", "multilevel"),
)

_STEPS = ("num_local_steps", "num_local_epochs")
_SELF_FL = (
    *("form", "variances", "variance_scale", "others", "smoothing", "initial_steps", "max_local_steps"),
    *("num_local_epochs", "adaptive_start", "adaptive_steps", "uncertainty_weights"),
)
ALGORITHMS: Mapping[str, tuple[str, ...]] = {  # with the options of each
    "self-fl-auto": _STEPS,
    "self-fl": _SELF_FL,
    "self-fl-exact": _SELF_FL,
    "self-fl-augmented": (*_SELF_FL, "tolerance", "max_convergence_steps"),
    "self-fl-cluster": (*_SELF_FL, "clusters", "num_clusters"),
    "self-fl-sums": (*_SELF_FL, "clip", "max_weight", "noise_multiplier"),
    "apfl": (*_STEPS, "mixing", "adaptive"),
    "ditto": (*_STEPS, "penalty", "weighting"),
    "ditto-equal": (*_STEPS, "penalty", "weighting"),
    "fedavg": (*_STEPS, "weighting"),
    "fedavg-equal": (*_STEPS, "weighting"),
    "fedper": (*_STEPS, "head", "weighting"),
    "fedprox": (*_STEPS, "weighting", "penalty"),
    "fedrep": (*_STEPS, "head", "weighting", "head_steps"),
    "local": _STEPS,
    "perfedavg": (*_STEPS, "order", "inner_learning_rate", "adaptation_steps", "difference"),
    "pfedme": (*_STEPS, "num_inner_steps", "penalty", "mixing", "personal_learning_rate"),
}
DEFAULT_ALGORITHM = "self-fl-auto"
DEVICES = ("cpu", "cuda")
TRACKERS = ("tensorboard", "mlflow", "wandb")


def _starting(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def algorithm(incomplete: str) -> list[str]:
    """A method."""
    return _starting(ALGORITHMS, incomplete)


def algorithms(incomplete: str) -> list[str]:
    """The last of several methods with commas between them; one that is there already is not offered again."""
    before, comma, last = incomplete.rpartition(",")
    taken = before.split(",")
    return [f"{before}{comma}{name}" for name in _starting(ALGORITHMS, last) if name not in taken]


def study(incomplete: str) -> list[str]:
    """What can be trained: a problem of the paper's, or a study of the user's own that lies here."""
    own = [path.parent.name for path in sorted(Path().glob("*/study.toml"))]
    return _starting([*PROBLEMS, *own], incomplete)


def paper_study(incomplete: str) -> list[str]:
    """A study of the paper."""
    return _starting(STUDIES, incomplete)


def data_set(incomplete: str) -> list[str]:
    """A data set."""
    return _starting(DATA_SETS, incomplete)


def tracker(incomplete: str) -> list[str]:
    """A tracker."""
    return _starting(TRACKERS, incomplete)


def device(incomplete: str) -> list[str]:
    """A device."""
    return _starting(DEVICES, incomplete)


def setting(ctx: typer.Context, incomplete: str) -> list[str]:
    """A key of --set, for the method that is named before it; the value is the user's."""
    chosen = ctx.params.get("algorithm") or DEFAULT_ALGORITHM
    return [f"{key}=" for key in _starting((*ALGORITHMS.get(chosen, ()), *STUDY_SETTINGS), incomplete)]
