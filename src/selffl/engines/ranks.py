"""The processes of one run, as torchrun starts them: rank 0 gives orders, and the others answer each of them.

Nobody talks to anybody but rank 0, so that it knows who is missing.  Bytes go by gloo; tensors of ranks with a GPU each
by NCCL.  A rank that ends leaves a word in the store that all of them have met by: one that leaves none was lost.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from selffl.engines.messages import pack, unpack
from selffl.errors import ConfigError, RankError, SelfFLError, one_line

TIMEOUT = "SELFFL_RANK_TIMEOUT"  # of the environment: seconds
TIMEOUT_SECONDS = 1800.0  # that a rank waits for another, unless somebody says otherwise
MOST_SECONDS = 1e8  # that can be waited for
GRACE_SECONDS = 5.0  # that a rank which ends waits for others to hear of it
PROBE_SECONDS = 0.3  # after which a rank whose connection stays open is there
PROBE_TAG = 1  # of a message that nobody sends
STOPPED = "stopped"  # the word of a rank that was told to end, or ends for the sake of another
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # of the environment

Found = TypeVar("Found")


class FirstRankLostError(RankError):
    """Rank 0 was lost, which has to be said by another."""


@dataclass(frozen=True)
class Stop:
    """The last order: training is over, with a result for everybody or an error."""

    result: Any = None
    error: SelfFLError | None = None


@dataclass(frozen=True)
class Failure:
    """What an order came to that could not be followed."""

    error: SelfFLError


@dataclass
class Ranks:
    """The processes of a run as one of them sees it.

    Attributes:
        number: Of this process, its rank.
        size: How many there are.
        timeout: Seconds that one waits for another.
    """

    number: int = 0
    size: int = 1
    timeout: float = TIMEOUT_SECONDS
    _group: Any = None
    _tensors: Any = None  # the group that tensors on a GPU go by; none: with all else
    _device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _fault: SelfFLError | None = None  # of another rank, once it is found
    _turn: int = 0  # how often training was begun: what is left of an earlier one is not for this

    @property
    def others(self) -> range:
        """All but rank 0."""
        return range(1, self.size)

    def own_shards(self, number: int) -> range:
        """Which of so many shards are this rank's; neighbours, so that all ranks' together are in order."""
        return range(number * self.number // self.size, number * (self.number + 1) // self.size)

    def use_device(self, device: str) -> None:
        """Give each rank of a machine its own GPU, if training is to be there; to be called before anything is."""
        chosen = torch.device(device)
        if self.size == 1 or chosen.type != "cuda":
            return
        local, here = (int(os.environ.get(name, 0)) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        if chosen.index is not None:
            raise ConfigError(
                f"device is {device!r}, and there are {self.size} ranks; expected 'cuda', of which each rank takes the "
                "GPU of its own number."
            )
        torch.cuda.set_device(local % torch.cuda.device_count())
        self._device = torch.device("cuda", torch.cuda.current_device())
        if self._tensors is None and 0 < here <= torch.cuda.device_count():  # NCCL has no two ranks on one GPU
            self._tensors = dist.new_group(backend="nccl", timeout=timedelta(seconds=self.timeout))

    # ---------------------------------------------------------------------------------------------- orders and answers

    def ask(self, order: Any, own: Callable[[], Found]) -> list[Found]:
        """On rank 0: what each rank makes of an order, by rank; ``own`` is what this one does meanwhile."""
        sending, failed = self._send_all(order), None
        found: list[Any] = []
        try:
            found.append(own())
        except Exception as error:  # raised once the others have answered: they wait for nothing then
            failed = error
        found += [self._receive(rank) for rank in self.others]
        self._finish(sending)
        if failed is not None:
            raise failed
        for rank, each in enumerate(found):
            if isinstance(each, Failure):
                raise _failed(rank, each.error) if type(each.error) is RankError else each.error
        return found

    def ask_one(self, rank: int, order: Any) -> Any:
        """On rank 0: what one other rank makes of an order."""
        self._finish([(rank, self._send(rank, pack((self._turn, order), self._place)))])
        found = self._receive(rank)
        if isinstance(found, Failure):
            raise _failed(rank, found.error)
        return found

    def share(self, value: Callable[[], Found]) -> Found:
        """On every rank: what rank 0 makes it."""
        if self.size == 1:
            return value()
        if self.number:
            found: Found = self.await_order()
            return found
        made = value()
        self._finish(self._send_all(made))
        return made

    def await_order(self) -> Any:
        """On another rank: what rank 0 says next; the last order of one that has failed is raised."""
        while True:
            turn, order = self._receive(0)
            if turn < self._turn:
                continue  # of training that this rank has given up already
            if isinstance(order, Stop) and order.error is not None:
                raise order.error
            return order

    def answer(self, work: Callable[[], Any]) -> None:
        """On another rank: send rank 0 what an order comes to, or why it cannot be followed."""
        self._finish([(0, self._send(0, pack(_tried(work), self._place)))])

    def dismiss(self, result: Any) -> None:
        """On rank 0: tell the others that training is over, and what came of it."""
        if self.size > 1:
            self._finish(self._send_all(Stop(result)))

    # --------------------------------------------------------------------------------------------------------- messages

    @property
    def _place(self) -> torch.device:
        """Where the tensors of a message lie."""
        return torch.device("cpu") if self._tensors is None else self._device

    def _send_all(self, order: Any) -> list[tuple[int, list[Any]]]:
        packed = pack((self._turn, order), self._place)
        return [(rank, self._send(rank, packed)) for rank in self.others]

    def _send(self, rank: int, packed: tuple[Tensor, Tensor]) -> list[Any]:
        """Begin to send; what is returned has to be waited for, and holds what is on its way."""
        structure, content = packed
        sizes = torch.tensor([len(structure), len(content)])
        found: list[Any] = [sizes, structure, content]
        try:
            found += [dist.isend(sizes, rank, self._group), dist.isend(structure, rank, self._group)]
            if len(content):
                found.append(dist.isend(content, rank, self._tensors or self._group))
        except RuntimeError as error:
            self._lose(rank, error)
        return found

    def _finish(self, sending: list[tuple[int, list[Any]]]) -> None:
        for rank, (_, _, _, *works) in sending:
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                self._lose(rank, error)

    def _receive(self, rank: int) -> Any:
        sizes = torch.zeros(2, dtype=torch.int64)
        try:
            dist.recv(sizes, rank, self._group)
            structure = torch.zeros(int(sizes[0]), dtype=torch.uint8)
            content = torch.zeros(int(sizes[1]), dtype=torch.uint8, device=self._place)
            dist.recv(structure, rank, self._group)
            if len(content):
                dist.recv(content, rank, self._tensors or self._group)
        except RuntimeError as error:
            self._lose(rank, error)
        return unpack(structure, content, self._device)

    # ------------------------------------------------------------------------------------------------- who is not there

    def _lose(self, rank: int, error: RuntimeError) -> NoReturn:
        """Say why a rank cannot be talked to."""
        raise self.fault(rank, is_late="imed out" in str(error)) or self._lost(rank) from None

    def fault(self, suspect: int | None = None, *, is_late: bool = False) -> SelfFLError | None:
        """Which rank has failed or is lost, if one has; ``suspect`` is one that was found to be silent.

        Looked for once, for to look changes what there is to see; torchrun's signal to end does not interrupt it.
        """
        with _handling({signal.SIGTERM: signal.SIG_IGN, signal.SIGINT: signal.SIG_IGN}):
            self._fault = self._fault or self._find_fault(suspect, is_late)
        return self._fault

    def _find_fault(self, suspect: int | None, is_late: bool) -> SelfFLError | None:
        peers = self.others if self.number == 0 else range(1)
        # Asked before words are read: who ends in order leaves its word first.
        gone = [rank for rank in peers if rank != suspect and self._is_gone(rank)]
        words = {rank: word for rank in peers if (word := self._word(rank)) is not None}
        for rank, word in words.items():
            if word != STOPPED:
                return _failed(rank, RankError(word))
        if is_late and suspect is not None and suspect not in words:
            kind = RankError if suspect else FirstRankLostError
            return kind(
                f"rank {suspect} has not answered for {self.timeout:g} s; expected an answer within that time. {GO_ON} "
                f"If rounds take longer, allow for more (--rank-timeout, {TIMEOUT})."
            )
        # One that was told to end because another is lost is not the one to look for.
        lost = [rank for rank in (suspect, *gone) if rank is not None and rank not in words]
        return self._lost(lost[0]) if lost else None

    def _lost(self, rank: int) -> RankError:
        kind = RankError if rank else FirstRankLostError
        return kind(
            f"rank {rank} of {self.size} was lost: it ended without a word; expected all ranks to stay until the last "
            f"round. {GO_ON}"
        )

    def _is_gone(self, rank: int) -> bool:
        """Whether the connection to a rank is closed; where it is not, asking may have closed it."""
        try:
            probe = dist.irecv(torch.zeros(1), rank, self._group, tag=PROBE_TAG)
            if probe is not None:
                probe.wait(timedelta(seconds=PROBE_SECONDS))
        except RuntimeError as error:
            return "imed out" not in str(error)
        return False

    def _word(self, rank: int) -> str | None:
        """What a rank has left as its last word."""
        with suppress(RuntimeError):
            store = dist.distributed_c10d._get_default_store()
            return store.get(self._key(rank)).decode() if store.check([self._key(rank)]) else None
        return None

    def _key(self, rank: int) -> str:
        return f"selffl/{self._turn}/{rank}"

    def leave(self, error: BaseException) -> BaseException:
        """Tell the others that this rank ends with an error; what is to be raised, if it was for another's."""
        if isinstance(error, KeyboardInterrupt) and self.number == 0:
            error = self.fault() or error
        # Who finds rank 0 gone may have been cut off while that looked for the one that is lost.
        is_stop = isinstance(error, KeyboardInterrupt | FirstRankLostError)
        with suppress(RuntimeError):
            store = dist.distributed_c10d._get_default_store()
            word = " ".join(str(error).split()) if isinstance(error, SelfFLError) else one_line(error)
            store.set(self._key(self.number), STOPPED if is_stop else word)
        if self.number == 0:
            told = error if isinstance(error, SelfFLError) else RankError(f"rank 0 has ended: {one_line(error)}.")
            packed = pack((self._turn, Stop(error=told)), self._place)
            for rank in self.others:
                with suppress(SelfFLError, RuntimeError):
                    for work in self._send(rank, packed)[3:]:
                        work.wait(timedelta(seconds=GRACE_SECONDS))
        return error


GO_ON = "Go on from the last checkpoint by --resume (selffl.resume), with any number of ranks."


def _tried(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except SelfFLError as error:
        return Failure(error)
    except Exception as error:
        return Failure(RankError(f"{type(error).__name__}: {one_line(error)}"))


def _failed(rank: int, error: SelfFLError) -> RankError:
    return RankError(f"rank {rank} has failed: {str(error).rstrip('.')}.")


def num_ranks() -> int:
    """How many processes the environment says there are."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"WORLD_SIZE is {text!r} in the environment; expected a number of processes, or none.")
    return int(text)


@cache
def _meet() -> Ranks:
    """Meet the other processes, once; a group that exists already is taken as it is."""
    timeout = _timeout()
    limit = timedelta(seconds=timeout)
    if dist.is_initialized():
        return Ranks(dist.get_rank(), dist.get_world_size(), timeout, dist.new_group(backend="gloo", timeout=limit))
    missing = [name for name in NEEDED if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {num_ranks()} in the environment, and {missing[0]} is not there; expected all of "
            f"{', '.join(NEEDED)}, as torchrun sets them. Start with torchrun, or unset WORLD_SIZE."
        )
    try:
        dist.init_process_group("gloo", timeout=limit)
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"the {num_ranks()} ranks have not met at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} "
            f"({one_line(error)}); expected all of them there. Start them together, by torchrun."
        ) from None
    return Ranks(dist.get_rank(), dist.get_world_size(), timeout, dist.group.WORLD)


def _timeout() -> float:
    """Seconds that one rank waits for another, as the environment says."""
    text = os.environ.get(TIMEOUT, "")
    with suppress(ValueError):
        if not text or 0 < float(text) < MOST_SECONDS:
            return float(text or TIMEOUT_SECONDS)
    raise ConfigError(f"the rank timeout ({TIMEOUT}) is {text!r}; expected seconds above 0, such as 600.")


@contextmanager
def joined() -> Iterator[Ranks]:
    """The ranks while they train together; where this one fails, the others hear of it."""
    if num_ranks() == 1:
        yield Ranks()
        return
    ranks = _meet()
    ranks._turn, ranks._fault = ranks._turn + 1, None
    with _ends_in_order():
        try:
            yield ranks
        except BaseException as error:
            told = ranks.leave(error)
            if told is error:
                raise
            raise told from None


@contextmanager
def _handling(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    """Other handlers of signals, which the main thread alone can have."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {each: signal.signal(each, handler) for each, handler in handlers.items()} if is_main else {}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _ends_in_order() -> AbstractContextManager[None]:
    """SIGTERM, by which torchrun ends the ranks once one has failed, as an interruption: there is a word to be left."""
    is_free = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return _handling({signal.SIGTERM: signal.default_int_handler} if is_free else {})
