"""Which methods need more than rows and a model of one layer, and which learn variances: found by asking each."""

from dataclasses import replace

import torch

from selffl.algorithms import ALGORITHMS, Layer, Population
from selffl.algorithms.layers import ClassBias, Head
from selffl.errors import ConfigError

CLUSTER = torch.zeros(3, dtype=torch.int64)
ONE_LINEAR = Population(
    3, cluster=CLUSTER, layers=(Layer("", 0, 9),), class_bias=ClassBias(6, 9, 0), head=Head(0, 3, 2, True)
)
NOT_LINEAR = Population(3, cluster=CLUSTER, layers=(Layer("body", 0, 5), Layer("head", 5, 9)))


def refusing(population):
    """The names of methods that do not start with such a population."""
    found = set()
    for name, make in ALGORITHMS.items():
        try:
            make().start(torch.zeros(9), population)
        except ConfigError:
            found.add(name)
    return found


NEEDS_LAYERS = refusing(ONE_LINEAR)  # a body and a head
NEEDS_HEAD = refusing(NOT_LINEAR)  # a last layer that is linear, whose input are the features
NEEDS_CLUSTERS = refusing(replace(ONE_LINEAR, cluster=None)) - NEEDS_LAYERS  # of clients
NEEDS_BATCH_NORM = {name for name, make in ALGORITHMS.items() if make().batch_norm == "kept"}  # to keep
LEARNS_VARIANCES = {name for name, make in ALGORITHMS.items() if make().has_inter_variance}


def _kind_of(name):
    """What decides which states and models a method has."""
    method = ALGORITHMS[name]()
    return method.personalises, method.uploads_add, method.has_closing_visit, name in NEEDS_LAYERS, name in NEEDS_HEAD


# The first method of each kind, for what the common exam puts every method through without files and modules.
ONE_OF_A_KIND = list({_kind_of(name): name for name in reversed(ALGORITHMS)}.values())
