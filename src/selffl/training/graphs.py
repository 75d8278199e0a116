"""The kernels of a gradient as one CUDA graph: a GPU waits for small kernels to be launched, not for their arithmetic.

A graph is the launches of one call, recorded.  It is replayed on tensors of the same shapes, copied to where the
recorded ones lay, and computes what the call would.  What a function does in Python happens once, when it is recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from selffl.training.flat import FlatModel

CALLS_BEFORE = 8  # with the same shapes, before they are recorded: recording takes as long as some calls
MOST_GRAPHS = 16  # of one function; each has memory of its own for what it is given
MOST_BYTES = 1 << 28  # of what a function is given: with more the arithmetic takes longer than the launches
_log = logging.getLogger(__name__)


class Graph:
    """One call of a function, recorded."""

    def __init__(self, function: Callable[..., Tensor], arguments: tuple[Any, ...], pool: Any) -> None:
        self._given = _pytree.tree_map(torch.clone, arguments)
        self._written = _pytree.tree_leaves(self._given)
        device = _pytree.tree_leaves(arguments)[0].device
        here = torch.cuda.current_stream(device)
        aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()  # what earlier calls have left is of no use to another stream
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            function(*self._given)  # what libraries set up at a first call on a stream is no part of the graph
        here.wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._found = function(*self._given)

    def __call__(self, arguments: list[Tensor]) -> Tensor:
        """What the function would return, in memory of its own."""
        torch._foreach_copy_(self._written, arguments)
        self._graph.replay()
        return self._found.clone()


class GraphedGradient:
    """A gradient whose launches are recorded for the shapes that come often, on a GPU; elsewhere as it is.

    Not recorded: whatever cannot be, and modules whose own attributes change when they are called, such as a count of
    calls, for these would stand still.

    It is of one model, which holds it, and is given that model at each call: were it to hold the model, the memory of
    graphs would be free again only when Python next searches for cycles, which may be many runs later.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function  # of the model and the arguments
        self._calls: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, Graph] = {}
        self._pool: Any = None
        self._is_off = False

    def __call__(self, model: FlatModel, *arguments: Any) -> Tensor:
        """The gradient."""
        tensors = _pytree.tree_leaves(arguments)
        if self._is_off or tensors[0].device.type != "cuda" or sum(each.nbytes for each in tensors) > MOST_BYTES:
            return self.function(model, *arguments)
        shapes = tuple((each.shape, each.dtype) for each in tensors)
        graph = self._graphs.get(shapes)
        if graph is None:
            calls = self._calls[shapes] = self._calls.get(shapes, 0) + 1
            if calls <= CALLS_BEFORE or len(self._graphs) == MOST_GRAPHS:
                return self.function(model, *arguments)
            return self._record(shapes, model, arguments)
        return graph(tensors)

    def _record(self, shapes: Hashable, model: FlatModel, arguments: tuple[Any, ...]) -> Tensor:
        """The gradient, recorded on the way if that is possible."""
        before = python_state(model.training_modules)
        found = self.function(model, *arguments)
        if python_state(model.training_modules) != before:
            self._is_off = True
            return found
        try:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            self._graphs[shapes] = Graph(partial(self.function, model), arguments, self._pool)
        except Exception as error:  # the user's code, and whatever of torch's looks at numbers on the way
            torch.cuda.synchronize(arguments[0].device)
            self._is_off = True
            _log.info("%s is computed call by call: %s", type(model.module).__name__, str(error).splitlines()[0])
        return found


def python_state(modules: Iterable[nn.Module]) -> list[str]:
    """What modules and their parts hold beside tensors and each other, as text."""
    known = vars(nn.Module()).keys() - {"training"}
    kinds = (int, float, str, list, tuple, dict, set, type(None))
    return [
        f"{name}.{key} = {value!r}"
        for module in modules
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if key not in known and isinstance(value, kinds)
    ]
