"""Secure sums over Flower: server and client of `selffl.engines.flower.masking`, four exchanges in a round.

Keys and shares go before a round's order to train, shares of those who answered and of those who did not after it.  Who
drops out is left out: until it has given shares as if it had not been there, and after that by way of its shares.  The
server learns the sum of the answers that came, or nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from selffl.algorithms.contract import Algorithm
from selffl.algorithms.records import map_tensors, tensors_of
from selffl.engines.flower.masking import (
    KEY_BYTES,
    LEAST_CLIENTS,
    NONCE_BYTES,
    SHARE_BYTES,
    Member,
    PublicKeys,
    Ring,
    from_ring,
    least_threshold,
    to_ring,
    unmask,
)
from selffl.engines.flower.messages import ABOUT, PROTOCOL, arrays_of, find_record, read, shown, write
from selffl.errors import ConfigError, DataError, RefusedError
from selffl.state.files import write_json

Found = TypeVar("Found")

KEYS, SHARES, REVEAL = "query.keys", "query.shares", "query.reveal"  # messages
SESSION, BOOK, SEALED, ANSWERED, REVEALED, MASKED = "session", "book", "sealed", "answered", "revealed", "masked"
SEALED_BYTES = NONCE_BYTES + 2 * SHARE_BYTES + 16  # with the tag that proves it


@dataclass(frozen=True)
class Session:
    """What every message of a session says, and every client holds against what it knows."""

    protocol: int
    experiment: str
    client: str
    number: int
    session: str
    threshold: int


def check_secure_sums(method: Algorithm[Any, Any, Any, Any], robust: str) -> None:
    """Refuse a method or a defence that needs single clients."""
    why = None
    if not method.is_federated:
        why = f"clients of {method.name} send nothing"
    elif not method.uploads_add:
        why = f"the server of {method.name} needs single clients, not sums"
    elif robust != "none":
        why = f"robust is {robust!r}, which needs single clients, not sums"
    if why is not None:
        raise ConfigError(f"secure_sums is True, and {why}. Expected False, or a method whose uploads add, undefended.")


# --------------------------------------------------------------------------------------------------------- what is sent


def summed_fields(method: Algorithm[Any, Any, Any, Any], upload: Any) -> dict[str, Tensor]:
    """Fields of an upload that are summed: not what may be unknown, which is merely recorded."""
    return {name: each for name, each in tensors_of(upload).items() if name not in method.may_be_unknown}


def _write_book(book: Mapping[int, PublicKeys]) -> ConfigRecord:
    encryption, masking = ([keys[part] for keys in book.values()] for part in (0, 1))
    return ConfigRecord({"numbers": list(book), "encryption": encryption, "masking": masking})


def _read_book(content: RecordDict) -> dict[int, PublicKeys]:
    record = find_record(content.config_records, BOOK)
    parts = [_read_bytes(record, name, KEY_BYTES) for name in ("encryption", "masking")]
    return {number: PublicKeys(parts[0][number], parts[1][number]) for number in parts[0]}


def _write_bytes(parts: Mapping[int, bytes]) -> ConfigRecord:
    return ConfigRecord({"numbers": list(parts), "bytes": list(parts.values())})


def _read_bytes(record: ConfigRecord, name: str, length: int) -> dict[int, bytes]:
    """Bytes of that length by clients' numbers."""
    numbers, found = record.get("numbers"), record.get(name)
    if not isinstance(numbers, list) or not isinstance(found, list) or len(numbers) != len(found):
        raise DataError(f"{name} are {shown(found)}; expected bytes for each client.")
    if len(set(numbers)) != len(numbers) or not all(type(number) is int and number >= 0 for number in numbers):
        raise DataError(f"the clients of {name} are {shown(numbers)}; expected each once.")
    if not all(isinstance(each, bytes) and len(each) == length for each in found):
        raise DataError(f"{name} are {shown(found)}; expected {length} bytes each.")
    return dict(zip(numbers, found, strict=True))  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------------- the server


class SecureRound:
    """One round's secure sum, as the server leads it.

    Attributes:
        book: Public keys of the clients that take part, by number: all of them have given shares.
    """

    def __init__(
        self,
        grid: Grid,
        experiment: str,
        ids: Sequence[str],
        seconds: float,
        reject: Callable[[int, str], None],
    ) -> None:
        self._grid, self._experiment, self._ids, self._seconds, self._reject = grid, experiment, ids, seconds, reject
        self.book: dict[int, PublicKeys] = {}
        self._nodes: Mapping[int, int] = {}
        self._session, self._threshold = secrets.token_hex(16), 0
        self._kept: dict[int, dict[int, bytes]] = {}  # for each client, what others have sealed for it

    def agree(self, nodes: Mapping[int, int]) -> None:
        """Keys and shares of the clients on these nodes, by number; ``book`` is empty where too few have them."""
        self._nodes = nodes
        keys = self._exchange(KEYS, nodes, lambda _: {}, lambda content: _read_book(content))
        book = {client: found[client] for client, found in keys.items() if found.keys() == {client}}
        self._threshold = least_threshold(len(book))
        if len(book) < LEAST_CLIENTS:
            return
        everybody = {BOOK: _write_book(book)}

        def sealed_for_all(content: RecordDict) -> dict[int, bytes]:
            found = _read_bytes(find_record(content.config_records, SEALED), "bytes", SEALED_BYTES)
            if found.keys() != book.keys():
                raise DataError(f"shares are for {shown(sorted(found))}; expected one for each of {len(book)} clients.")
            return found

        given = self._exchange(SHARES, book, lambda _: everybody, sealed_for_all)
        if len(given) >= max(self._threshold, LEAST_CLIENTS):
            self.book = {client: book[client] for client in given}
            self._kept = {receiver: {sender: given[sender][receiver] for sender in given} for receiver in given}

    def order_records(self, client: int) -> dict[str, ConfigRecord]:
        """What goes with a client's order to train."""
        return {SESSION: write(self._about(client)), BOOK: _write_book(self.book)}

    def unmask_sum(self, masked: Mapping[int, Ring]) -> Ring | None:
        """The sum of these clients' answers; none where too few help to read it."""
        if len(masked) < max(self._threshold, LEAST_CLIENTS):
            return None
        came = ConfigRecord({"numbers": sorted(masked)})

        def content_for(client: int) -> dict[str, ConfigRecord]:
            sealed = _write_bytes(self._kept[client])
            return {BOOK: _write_book(self.book), SEALED: sealed, ANSWERED: came}

        def shares_of_all(content: RecordDict) -> dict[int, int]:
            found = _read_bytes(find_record(content.config_records, REVEALED), "bytes", SHARE_BYTES)
            if found.keys() != self.book.keys():
                raise DataError(f"shares are of {shown(sorted(found))}; expected of {len(self.book)} clients.")
            return {number: int.from_bytes(share, "big") for number, share in found.items()}

        revealed = self._exchange(REVEAL, masked, content_for, shares_of_all)
        if len(revealed) < self._threshold:
            return None
        return unmask(masked, self.book, self._session, self._threshold, revealed)

    def _about(self, client: int) -> Session:
        return Session(PROTOCOL, self._experiment, self._ids[client], client, self._session, self._threshold)

    def _exchange(
        self,
        kind: str,
        clients: Mapping[int, Any],
        content_for: Callable[[int], Mapping[str, ConfigRecord]],
        reading: Callable[[RecordDict], Found],
    ) -> dict[int, Found]:
        """What each of these clients answers to a message; those that cannot be used are left out by name."""
        sent = {}
        for client in sorted(clients):
            content = RecordDict({ABOUT: write(self._about(client)), **content_for(client)})
            sent[client] = Message(content, self._nodes[client], kind, ttl=self._seconds)
        replies = list(self._grid.send_and_receive(list(sent.values()), timeout=self._seconds))
        asked = {message.metadata.message_id: client for client, message in sent.items()}
        found: dict[int, Found] = {}
        for reply in replies:
            client = asked.pop(reply.metadata.reply_to_message_id, -1)
            if client < 0:
                continue
            try:
                if reply.has_error():
                    raise DataError(f"error {reply.error.code}: {shown(reply.error.reason)}")
                if reply.metadata.src_node_id != self._nodes[client]:
                    raise DataError(f"node {reply.metadata.src_node_id} answers in its place")
                found[client] = reading(reply.content)
            except DataError as error:
                self._reject(client, f"no secure sum with it ({kind}): {error}")
        for client in asked.values():
            self._reject(client, f"no secure sum with it ({kind}): no answer within {self._seconds:g} seconds")
        return dict(sorted(found.items()))


def read_masked(content: RecordDict, template: Any, method: Algorithm[Any, Any, Any, Any]) -> Ring:
    """A client's masked numbers, of which all that can be seen is how many they are."""
    arrays, length = arrays_of(content), _length(method, template)
    if set(arrays) != {MASKED} or arrays[MASKED].dtype != "uint64" or tuple(arrays[MASKED].shape) != (length,):
        raise DataError(f"the masked answer is {shown(list(arrays))}; expected {length} words under {MASKED!r}.")
    return np.asarray(arrays[MASKED].numpy(), dtype=np.uint64)


def read_sum(total: Ring, template: Any, method: Algorithm[Any, Any, Any, Any]) -> tuple[Any, int]:
    """The uploads' sum in the form of ``template [1, ...]`` without its client axis, and the gradients spent in all."""
    numbers, start, found = from_ring(total), 0, []
    for name, tensor in tensors_of(template).items():
        if name in method.may_be_unknown:
            found.append(torch.full(tensor.shape[1:], torch.nan, dtype=torch.float64))
        else:
            stop = start + tensor.numel()
            found.append(numbers[start:stop].reshape(tensor.shape[1:]))
            start = stop
    parts = iter(found)
    return map_tensors(lambda _: next(parts), template), round(float(numbers[-1]))


def _length(method: Algorithm[Any, Any, Any, Any], template: Any) -> int:
    return sum(each.numel() for each in summed_fields(method, template).values()) + 1  # with the gradients spent


# ---------------------------------------------------------------------------------------------------------- the client


@dataclass(frozen=True)
class SecureSite:
    """What a client does in a session.

    Attributes:
        client: Its id, as text.
        stem: Where its files of the experiment lie: their paths begin so.
    """

    client: str
    stem: Path

    def keys(self, content: RecordDict) -> RecordDict:
        """The client's public keys."""
        about, member = self._member(content)
        return self._reply(BOOK, _write_book({about.number: member.public_keys}))

    def shares(self, content: RecordDict) -> RecordDict:
        """Shares of its secrets, sealed for each client."""
        about, member = self._member(content)
        return self._reply(SEALED, _write_bytes(member.give_shares(_read_book(content), about.threshold)))

    def reveal(self, content: RecordDict) -> RecordDict:
        """The shares that the sum needs, for one list of who has answered and no other."""
        about, member = self._member(content)
        answered = find_record(content.config_records, ANSWERED).get("numbers")
        if not isinstance(answered, list):
            raise DataError(f"those who answered are {shown(answered)}; expected their numbers.")
        sealed = _read_bytes(find_record(content.config_records, SEALED), "bytes", SEALED_BYTES)
        shares = member.reveal(_read_book(content), about.threshold, sealed, answered)  # type: ignore[arg-type]
        self._promise(about.session, sorted(answered))  # type: ignore[type-var]
        parts = {number: share.to_bytes(SHARE_BYTES, "big") for number, share in shares.items()}
        return self._reply(REVEALED, _write_bytes(parts))

    def mask_answer(
        self, content: RecordDict, method: Algorithm[Any, Any, Any, Any], upload: Any, num_gradients: int
    ) -> ArrayRecord:
        """What it has to send, masked."""
        about, member = self._member(content)
        book, fields = _read_book(content), summed_fields(method, upload)
        numbers = torch.cat([*(each.flatten().double() for each in fields.values()), torch.tensor([num_gradients])])
        hidden = to_ring(numbers, len(book)) + member.mask(book, about.threshold, len(numbers))
        return ArrayRecord({MASKED: Array(hidden)})

    def _member(self, content: RecordDict) -> tuple[Session, Member]:
        records = content.config_records
        about = read(Session, RecordDict({ABOUT: records.get(SESSION) or find_record(records, ABOUT)}))
        if (about.protocol, about.client) != (PROTOCOL, self.client):
            raise RefusedError(
                f"a secure sum is for client {about.client!r}, protocol {about.protocol}; expected {self.client!r} "
                f"and {PROTOCOL}."
            )
        return about, Member(self._secret(), about.session, about.number)

    def _secret(self) -> bytes:
        """The secret of this client in this experiment, made once: 32 bytes that only its user may read."""
        path = self.stem.with_name(f"{self.stem.name}-secret")
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            made = path.with_name(f"{path.name}-{secrets.token_hex(8)}")
            with os.fdopen(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(KEY_BYTES))
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(made, path)  # all of it or nothing, and the first counts
            except FileExistsError:
                pass
            finally:
                made.unlink()
        return path.read_bytes()

    def _promise(self, session: str, answered: list[int]) -> None:
        """Refuse to help twice in one session with two lists: of both, one client's secrets might be made."""
        path = self.stem.with_name(f"{self.stem.name}-session.json")
        told = {"session": session, "answered": hashlib.sha256(json.dumps(answered).encode()).hexdigest()}
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            if before["session"] == session and before != told:
                raise RefusedError(
                    "the server asks twice who has answered, and the lists differ; expected one list for each session."
                )
        write_json(path, told)

    def _reply(self, name: str, record: ConfigRecord) -> RecordDict:
        return RecordDict({name: record})
