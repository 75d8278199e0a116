"""selffl: personalised federated learning that reads its balance off measured uncertainty.

Self-Aware Personalized Federated Learning (NeurIPS 2022), and beyond.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from selffl._version import __version__

if TYPE_CHECKING:
    from selffl.algorithms import algorithm
    from selffl.data.federation import Federation
    from selffl.data.preparation import Preparation
    from selffl.data.profile import Profile
    from selffl.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        DivergedError,
        QuorumError,
        RankError,
        RefusedError,
        SelfFLError,
    )
    from selffl.estimator import SelfFLClassifier, SelfFLRegressor
    from selffl.maths.heterogeneity import estimate_inter_variance
    from selffl.maths.information import LocalFit, local_fit
    from selffl.maths.meta_analysis import LeaveOneOut, MetaAnalysis, meta_analysis
    from selffl.maths.posterior import Posterior, posterior
    from selffl.runs.export import PersonalModels
    from selffl.runs.reopen import load, resume
    from selffl.runs.run import Run
    from selffl.runs.train import train
    from selffl.runs.tune import Tuning, tune
    from selffl.training.answers import PreparedModel
    from selffl.training.metrics import Metric
else:
    # Taken on first use: help, completion and a typing error on the command line should not wait for torch.
    _HOME = {
        "selffl.algorithms": ("algorithm",),
        "selffl.data.federation": ("Federation",),
        "selffl.data.preparation": ("Preparation",),
        "selffl.data.profile": ("Profile",),
        "selffl.errors": (
            "CheckpointError",
            "ConfigError",
            "DataError",
            "DivergedError",
            "QuorumError",
            "RankError",
            "RefusedError",
            "SelfFLError",
        ),
        "selffl.estimator": ("SelfFLClassifier", "SelfFLRegressor"),
        "selffl.maths.heterogeneity": ("estimate_inter_variance",),
        "selffl.maths.information": ("LocalFit", "local_fit"),
        "selffl.maths.meta_analysis": ("LeaveOneOut", "MetaAnalysis", "meta_analysis"),
        "selffl.maths.posterior": ("Posterior", "posterior"),
        "selffl.runs.export": ("PersonalModels",),
        "selffl.runs.reopen": ("load", "resume"),
        "selffl.runs.run": ("Run",),
        "selffl.runs.train": ("train",),
        "selffl.runs.tune": ("Tuning", "tune"),
        "selffl.training.answers": ("PreparedModel",),
        "selffl.training.metrics": ("Metric",),
    }

    def __getattr__(name):
        from importlib import import_module
        from importlib.util import find_spec

        for home, names in _HOME.items():
            if name in names:
                globals()[name] = found = getattr(import_module(home), name)
                return found
        if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
            return import_module(f"{__name__}.{name}")  # selffl.data, selffl.models, … without a second import
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return __all__


__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DivergedError",
    "Federation",
    "LeaveOneOut",
    "LocalFit",
    "MetaAnalysis",
    "Metric",
    "PersonalModels",
    "Posterior",
    "Preparation",
    "PreparedModel",
    "Profile",
    "QuorumError",
    "RankError",
    "RefusedError",
    "Run",
    "SelfFLClassifier",
    "SelfFLError",
    "SelfFLRegressor",
    "Tuning",
    "__version__",
    "algorithm",
    "estimate_inter_variance",
    "load",
    "local_fit",
    "meta_analysis",
    "posterior",
    "resume",
    "train",
    "tune",
]
