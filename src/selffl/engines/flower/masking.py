"""Masks that cancel in a sum: what a single client sends looks like random numbers, and only the sum can be read.

The protocol of Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning (CCS 2017),
against a server that follows it and is curious.  Numbers are whole multiples of 2^-32 modulo 2^64.  In each session

1. every client has two key pairs (X25519), one to encrypt, one to agree on masks, and a seed of its own;
2. it gives every other client a share of its masking key and one of its seed, encrypted, by way of the server: any
   ``threshold`` shares make the secret, fewer say nothing (Shamir);
3. it adds to what it sends the mask of its seed and, for each other client, one that both can make: one of them adds
   it, the other takes it off;
4. of a client whose answer came, the others give their shares of its seed; of one whose did not, those of its masking
   key.  Never both: then nothing would be hidden.

A client's secrets of a session follow from one file at its site, so that each message can meet another process.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

from selffl.errors import DivergedError, RefusedError

Ring = npt.NDArray[np.uint64]

FRACTION_BITS = 32  # after the point: a number is off by half of 2^-32 at most
RING_BITS = 64
LEAST_CLIENTS = 3  # below which the sum tells one client what the other has sent
PRIME = 2**521 - 1  # of the field that shares are made in
SHARE_BYTES = 66  # of a number below it
KEY_BYTES = 32
NONCE_BYTES = 12


class PublicKeys(NamedTuple):
    """What everybody may know of one client in a session."""

    encryption: bytes
    masking: bytes


class Shares(NamedTuple):
    """What another client keeps for one: shares of its seed and of its masking key."""

    seed: int
    masking: int


def least_threshold(num_clients: int) -> int:
    """More than half: two groups of clients, told different stories, cannot both make a secret."""
    return num_clients // 2 + 1


def to_ring(values: Tensor, num_clients: int) -> Ring:
    """Numbers ``[n]`` as multiples of 2^-32 modulo 2^64; refused if the sum over clients could be too large."""
    most = 2.0 ** (RING_BITS - 1 - FRACTION_BITS) / num_clients
    largest = float(values.abs().max()) if values.numel() else 0.0
    if not largest < most:  # NaN, too
        raise DivergedError(
            f"a number to be summed in secret is {largest:g}; expected less than {most:g}, for the sum of "
            f"{num_clients} clients to fit. Lower the learning rate, or bound what is sent (clip, max_weight)."
        )
    scaled = (values.double() * 2.0**FRACTION_BITS).round().to(torch.int64)
    return scaled.cpu().numpy().view(np.uint64)


def from_ring(total: Ring) -> Tensor:
    """The numbers that a sum stands for, float64 ``[n]``."""
    return torch.from_numpy(total.view(np.int64).copy()).double() / 2.0**FRACTION_BITS


def derive(secret: bytes, purpose: str) -> bytes:
    """A key for one purpose alone."""
    return HKDF(SHA256(), KEY_BYTES, None, f"selffl secure sum: {purpose}".encode()).derive(secret)


def stretch(seed: bytes, length: int) -> Ring:
    """As many random words as are needed, the same for the same seed: the key stream of ChaCha20."""
    stream = Cipher(ChaCha20(seed, bytes(16)), None).encryptor().update(bytes(8 * length))
    return np.frombuffer(stream, dtype="<u8").astype(np.uint64)


def split(secret: bytes, threshold: int, points: Sequence[int]) -> dict[int, int]:
    """Shares of a secret, one for each point above 0, of which any ``threshold`` make it again."""
    factors = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {point: sum(factor * pow(point, k, PRIME) for k, factor in enumerate(factors)) % PRIME for point in points}


def join(shares: Mapping[int, int], threshold: int) -> bytes:
    """The secret of as many shares, by their points."""
    if len(shares) < threshold:
        raise RefusedError(f"{len(shares)} shares of a secret have come; expected {threshold}.")
    used = sorted(shares)[:threshold]
    total = 0
    for point in used:
        above, below = 1, 1
        for other in used:
            if other != point:
                above, below = above * -other % PRIME, below * (point - other) % PRIME
        total += shares[point] * above * pow(below, -1, PRIME)
    found = total % PRIME
    if found >= 1 << 8 * KEY_BYTES:
        raise RefusedError("shares do not fit together; expected those of one secret.")
    return found.to_bytes(KEY_BYTES, "big")


def pair_mask(private: bytes, public: bytes, session: str, one: int, other: int, length: int) -> Ring:
    """What client ``one`` adds for ``other``: the same as that takes off."""
    agreed = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    low, high = sorted((one, other))
    mask = stretch(derive(agreed, f"mask of {low} and {high} in {session}"), length)
    return mask if one < other else np.zeros_like(mask) - mask


@dataclass(frozen=True)
class Member:
    """One client in one session.

    Attributes:
        secret: Of the client, 32 bytes, which never leave its site.
        session: Told by the server: another one for every time that a round is asked for.
        number: Of the client, in the federation.
    """

    secret: bytes
    session: str
    number: int

    @property
    def seed(self) -> bytes:
        """Seed of the client's own mask."""
        return self._derived("seed")

    @property
    def public_keys(self) -> PublicKeys:
        """The member's public keys, for everybody."""
        keys = (X25519PrivateKey.from_private_bytes(self._derived(name)) for name in PublicKeys._fields)
        return PublicKeys(*(key.public_key().public_bytes_raw() for key in keys))

    def give_shares(self, book: Mapping[int, PublicKeys], threshold: int) -> dict[int, bytes]:
        """Shares of both secrets, each encrypted for the client that is to keep it."""
        self._check(book, threshold)
        points = [number + 1 for number in book]
        of_seed, of_key = (split(secret, threshold, points) for secret in (self.seed, self._derived("masking")))
        found = {}
        for other in book:
            plain = b"".join(part[other + 1].to_bytes(SHARE_BYTES, "big") for part in (of_seed, of_key))
            nonce = secrets.token_bytes(NONCE_BYTES)
            cipher, about = self._cipher(book[other]), self._about(self.number, other)
            found[other] = nonce + cipher.encrypt(nonce, plain, about)
        return found

    def mask(self, book: Mapping[int, PublicKeys], threshold: int, length: int) -> Ring:
        """What is added to this client's numbers."""
        self._check(book, threshold)
        total, private = stretch(self.seed, length), self._derived("masking")
        for other, keys in book.items():
            if other != self.number:
                total = total + pair_mask(private, keys.masking, self.session, self.number, other, length)
        return total

    def reveal(
        self, book: Mapping[int, PublicKeys], threshold: int, kept: Mapping[int, bytes], answered: Sequence[int]
    ) -> dict[int, int]:
        """A share for each client: of its seed if its answer came, of its masking key if not."""
        self._check(book, threshold)
        came = set(answered)
        if not came <= book.keys() or len(came) < threshold or kept.keys() != book.keys():
            raise RefusedError(
                f"the server has answers of {len(came)} clients of {len(book)}; expected {threshold} or more of them."
            )
        found = {}
        for other, sealed in kept.items():
            cipher, about = self._cipher(book[other]), self._about(other, self.number)
            try:
                plain = cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], about)
            except InvalidTag:
                raise RefusedError(f"the share of client number {other} cannot be read; expected its own.") from None
            shares = Shares(*(int.from_bytes(part, "big") for part in (plain[:SHARE_BYTES], plain[SHARE_BYTES:])))
            found[other] = shares.seed if other in came else shares.masking
        return found

    def _check(self, book: Mapping[int, PublicKeys], threshold: int) -> None:
        """Refuse a session in which a secret could be made by too few, or this client's keys are not its own."""
        if len(book) < LEAST_CLIENTS or threshold < least_threshold(len(book)) or threshold > len(book):
            raise RefusedError(
                f"{len(book)} clients are to be summed, {threshold} of them can make a secret; expected "
                f"{LEAST_CLIENTS} clients or more, and more than half of them."
            )
        if book.get(self.number) != self.public_keys:
            raise RefusedError("the server has other keys of this client than its own; expected those that it sent.")

    def _derived(self, purpose: str) -> bytes:
        return derive(self.secret, f"{purpose} of {self.number} in {self.session}")

    def _cipher(self, keys: PublicKeys) -> ChaCha20Poly1305:
        private = X25519PrivateKey.from_private_bytes(self._derived("encryption"))
        agreed = private.exchange(X25519PublicKey.from_public_bytes(keys.encryption))
        return ChaCha20Poly1305(derive(agreed, f"shares in {self.session}"))

    def _about(self, sender: int, receiver: int) -> bytes:
        return f"{self.session} {sender} {receiver}".encode()


def unmask(
    masked: Mapping[int, Ring],
    book: Mapping[int, PublicKeys],
    session: str,
    threshold: int,
    revealed: Mapping[int, Mapping[int, int]],
) -> Ring:
    """The sum of what clients have sent, once the others have ``revealed`` shares, by who did and whose they are."""
    total = np.zeros_like(next(iter(masked.values())))
    for part in masked.values():
        total = total + part
    for owner in book:
        secret = join({keeper + 1: shares[owner] for keeper, shares in revealed.items()}, threshold)
        if owner in masked:
            total = total - stretch(secret, len(total))
            continue
        public = X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()
        if public != book[owner].masking:
            raise RefusedError(f"shares of client number {owner} do not make its key; expected those that it gave.")
        for other in masked:  # each has added its mask for the client that is missing
            total = total - pair_mask(secret, book[other].masking, session, other, owner, len(total))
    return total
