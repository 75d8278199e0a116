"""selffl: personalised federated learning that reads its balance off measured uncertainty.

Self-Aware Personalized Federated Learning (NeurIPS 2022), and beyond.
"""

from selffl._version import __version__
from selffl.algorithms import algorithm
from selffl.data.federation import Federation
from selffl.errors import CheckpointError, ConfigError, DataError, DivergedError, QuorumError, RefusedError, SelfFLError
from selffl.maths.heterogeneity import estimate_inter_variance
from selffl.maths.information import LocalFit, local_fit
from selffl.maths.posterior import Posterior, posterior
from selffl.runs.export import PersonalModels
from selffl.runs.train import Run, load, resume, train
from selffl.training.metrics import Metric

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DivergedError",
    "Federation",
    "LocalFit",
    "Metric",
    "PersonalModels",
    "Posterior",
    "QuorumError",
    "RefusedError",
    "Run",
    "SelfFLError",
    "__version__",
    "algorithm",
    "estimate_inter_variance",
    "load",
    "local_fit",
    "posterior",
    "resume",
    "train",
]
