"""The methods, one file each, all through the contract of `selffl.algorithms.contract`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

from selffl.algorithms.apfl import APFL
from selffl.algorithms.contract import Algorithm
from selffl.algorithms.ditto import Ditto
from selffl.algorithms.fedala import FedALA
from selffl.algorithms.fedavg import FedAvg
from selffl.algorithms.fedbabu import FedBABU
from selffl.algorithms.fedbn import FedBN
from selffl.algorithms.feddbe import FedDBE
from selffl.algorithms.feddpa import FedDPA
from selffl.algorithms.fedpac import FedPAC
from selffl.algorithms.fedper import FedPer
from selffl.algorithms.fedprox import FedProx
from selffl.algorithms.fedrep import FedRep
from selffl.algorithms.fedrod import FedRoD
from selffl.algorithms.layers import Layer
from selffl.algorithms.local import Local
from selffl.algorithms.local_task import LocalTask
from selffl.algorithms.optimisers import OPTIMISERS, SGD, Adam, Momentum, Optimiser
from selffl.algorithms.perfedavg import PerFedAvg
from selffl.algorithms.pfedbayes import PFedBayes
from selffl.algorithms.pfedme import PFedMe
from selffl.algorithms.population import Population
from selffl.algorithms.scaffold import Scaffold
from selffl.algorithms.self_fl import SelfFL
from selffl.algorithms.self_fl_augmented import SelfFLAugmented
from selffl.algorithms.self_fl_auto import SelfFLAuto
from selffl.algorithms.self_fl_cluster import SelfFLCluster
from selffl.algorithms.self_fl_sums import SelfFLSums
from selffl.errors import check_known

ALGORITHMS: dict[str, Callable[..., Algorithm[Any, Any, Any, Any]]] = {
    "self-fl-auto": SelfFLAuto,
    "self-fl": SelfFL,
    "self-fl-exact": partial(SelfFL, form="exact"),
    "self-fl-augmented": SelfFLAugmented,
    "self-fl-cluster": SelfFLCluster,
    "self-fl-sums": SelfFLSums,
    "apfl": APFL,
    "ditto": Ditto,
    "ditto-equal": partial(Ditto, weighting="equal"),
    "fedala": FedALA,
    "fedavg": FedAvg,
    "fedavg-equal": partial(FedAvg, weighting="equal"),
    "fedbabu": FedBABU,
    "fedbn": FedBN,
    "feddbe": FedDBE,
    "feddpa": FedDPA,
    "fedpac": FedPAC,
    "fedper": FedPer,
    "fedprox": FedProx,
    "fedrep": FedRep,
    "fedrod": FedRoD,
    "local": Local,
    "perfedavg": PerFedAvg,
    "pfedbayes": PFedBayes,
    "pfedme": PFedMe,
    "scaffold": Scaffold,
}

DEFAULT_ALGORITHM = SelfFLAuto.name  # where nobody names one
STUDY_METHODS = (DEFAULT_ALGORITHM, "self-fl-exact", Ditto.name, FedAvg.name, Local.name)  # that a new study compares
STUDY_OPTION = (Ditto.name, "penalty", 0.1)  # of a method, as a new study shows how to set one
WELL_KNOWN = (FedAvg.name, Ditto.name)  # which messages name first, where they suggest another method


def algorithm(name: str, **options: Any) -> Algorithm[Any, Any, Any, Any]:
    """The method of that name, with options by keyword.

    Examples:
        >>> import selffl
        >>> selffl.algorithm("ditto", penalty=0.1)
        Ditto(num_local_steps=20, num_local_epochs=None, penalty=0.1, weighting='examples')
    """
    check_known("algorithm", name, ALGORITHMS)
    known = [field.name for field in fields(ALGORITHMS[name]())]  # type: ignore[arg-type]
    for option in options:
        check_known(f"option of {name}", option, known)
    return ALGORITHMS[name](**options)


def is_registered(name: str, method: Algorithm[Any, Any, Any, Any]) -> bool:
    """Whether the registry makes methods of that kind under that name."""
    return name in ALGORITHMS and type(ALGORITHMS[name]()) is type(method)


def registered_name(method: Algorithm[Any, Any, Any, Any]) -> str:
    """The name that the registry has for a method, the most particular one that fits; else the method's own."""
    presets = {
        name: make.keywords if isinstance(make, partial) else {}
        for name, make in ALGORITHMS.items()
        if is_registered(name, method)
    }
    fitting = [name for name, preset in presets.items() if preset.items() <= vars(method).items()]
    return max(fitting, key=lambda name: len(presets[name]), default=method.name)


def traits_recorded(name: str) -> dict[str, bool]:
    """What a run records of its method beside its name, for those who read the run without the method."""
    method = ALGORITHMS.get(name, FedAvg)()
    return {"has_global_model": method.has_global_model, "is_federated": method.is_federated}


__all__ = [
    "ALGORITHMS",
    "APFL",
    "DEFAULT_ALGORITHM",
    "OPTIMISERS",
    "SGD",
    "Adam",
    "Algorithm",
    "Ditto",
    "FedALA",
    "FedAvg",
    "FedBABU",
    "FedBN",
    "FedDBE",
    "FedDPA",
    "FedPAC",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedRoD",
    "Layer",
    "Local",
    "LocalTask",
    "Momentum",
    "Optimiser",
    "PFedBayes",
    "PFedMe",
    "PerFedAvg",
    "Population",
    "Scaffold",
    "SelfFL",
    "SelfFLAugmented",
    "SelfFLAuto",
    "SelfFLCluster",
    "SelfFLSums",
    "algorithm",
]
