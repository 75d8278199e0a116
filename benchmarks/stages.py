"""Seconds by stage of what a process does: named functions are timed, each without those that it calls."""

from __future__ import annotations

import functools
import importlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class Stages:
    """A clock that is charged to one stage at a time: the innermost of the named functions that is running."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._clock, self._running, self._since = clock, ["rest"], clock()

    def clear(self) -> None:
        """Begin anew with what comes after this."""
        self._charge()
        self.seconds.clear()

    def read(self) -> dict[str, float]:
        """The seconds of each stage so far."""
        self._charge()
        return dict(self.seconds)

    @contextmanager
    def charged(self, stage: str) -> Iterator[None]:
        """Charge the stage until the end of the block."""
        self._charge()
        self._running.append(stage)
        try:
            yield
        finally:
            self._charge()
            self._running.pop()

    def _charge(self) -> None:
        now = self._clock()
        self.seconds[self._running[-1]] += now - self._since
        self._since = now

    @contextmanager
    def watching(self, functions: Mapping[str, str]) -> Iterator[None]:
        """Time functions by their place, such as ``package.module:Class.method``, and the stage each belongs to."""
        before: list[tuple[Any, str, Any]] = []
        for place, stage in functions.items():
            module, _, names = place.partition(":")
            *owners, name = names.split(".")
            owner: Any = functools.reduce(getattr, owners, importlib.import_module(module))
            before.append((owner, name, getattr(owner, name)))
            setattr(owner, name, self._timed(getattr(owner, name), stage))
        try:
            yield
        finally:
            for owner, name, function in reversed(before):
                setattr(owner, name, function)

    def _timed(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **named: Any) -> Any:
            with self.charged(stage):
                return function(*args, **named)

        return timed
