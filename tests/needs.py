"""Which methods need more than a model of one layer, and which learn variances: found by asking each of them."""

import torch

from selffl.algorithms import ALGORITHMS, Layer, Population
from selffl.algorithms.contract import Algorithm
from selffl.algorithms.layers import ClassBias, Head
from selffl.errors import ConfigError

CLUSTER = torch.zeros(3, dtype=torch.int64)
ONE_LINEAR = Population(
    3, cluster=CLUSTER, layers=(Layer("", 0, 9),), class_bias=ClassBias(6, 9, 0), head=Head(0, 3, 2, True)
)
NOT_LINEAR = Population(3, cluster=CLUSTER, layers=(Layer("body", 0, 5), Layer("head", 5, 9)))


def refusing(population):
    """The names of methods that do not start on such a model."""
    found = set()
    for name, make in ALGORITHMS.items():
        try:
            make().start(torch.zeros(9), population)
        except ConfigError:
            found.add(name)
    return found


NEEDS_LAYERS = refusing(ONE_LINEAR)  # a body and a head
NEEDS_HEAD = refusing(NOT_LINEAR)  # a last layer that is linear, whose input are the features
NEEDS_BATCH_NORM = {name for name, make in ALGORITHMS.items() if make().batch_norm == "kept"}  # to keep
LEARNS_VARIANCES = {
    name for name, make in ALGORITHMS.items() if type(make()).inter_variance is not Algorithm.inter_variance
}
