"""The station's side of secure aggregation: forward messages, add up vectors, remove the masks."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from hfedatm_core.secagg import shamir
from hfedatm_core.secagg.complaints import blame
from hfedatm_core.secagg.crypto import (
    SIGNATURE_BYTES,
    agree_on_mask,
    apply_mask,
    is_signed,
    pair_sign,
    sealed_bytes,
    self_mask,
)
from hfedatm_core.secagg.dealing import BOTH_BYTES, read_commitments
from hfedatm_core.secagg.directory import KINDS, Advertisement, Directory, Verify
from hfedatm_core.secagg.edwards import POINT_BYTES
from hfedatm_core.secagg.errors import SecureAggregationError
from hfedatm_core.secagg.fixed_point import FixedPoint, Ring
from hfedatm_core.secagg.messages import dump, load, take_bytes, take_clients, take_map


def default_threshold(clients: int) -> int:
    """Return two thirds of the clients: a third may drop out, nearly a third may collude."""
    return max(2, -(-2 * clients // 3))


class Aggregator:
    """One sum over clients.

    Call :meth:`advertised` for every client, then :meth:`directory`; :meth:`shared`, then
    :meth:`inbox`; :meth:`checked`, then :meth:`participants`; :meth:`masked`, then
    :meth:`survivors`; :meth:`signed`, then :meth:`signatures`; :meth:`revealed`, then
    :meth:`result`. A client that misses a stage is excluded from later stages. A message of a
    client is either accepted or refused with an error about that client alone. Only the running
    sum is kept in memory, not the vectors.

    Parameters
    ----------
    session, step
        Identify the sum and the work that is summed; the same for all clients.
    size
        Length of the vectors.
    threshold
        How many clients must stay to the end; by default two thirds of those that advertised.
    fixed_point
        Number format, the same for all clients.
    verify
        Checks proofs of identity. A client without a valid proof is refused, because its peers
        would refuse the whole sum.
    """

    def __init__(
        self,
        session: bytes,
        size: int,
        *,
        step: str = "",
        threshold: int | None = None,
        fixed_point: FixedPoint | None = None,
        verify: Verify | None = None,
    ) -> None:
        self.session, self.step = session, step
        self.fixed_point = fixed_point or FixedPoint()
        self.refused: dict[int, str] = {}
        """The clients that were caught lying, each with the reason."""
        self._threshold, self._verify = threshold, verify
        self._total: Ring = np.zeros(size, dtype=self.fixed_point.dtype)
        self._advertised: dict[int, Advertisement] = {}
        self._names: set[str] = set()
        self._directory: Directory | None = None
        self._commitments: dict[int, bytes] = {}
        self._sealed: dict[int, dict[int, bytes]] = {}
        self._false: dict[int, list[int]] = {}
        self._participants: list[int] | None = None
        self._delivered: set[int] = set()
        self._survivors: list[int] | None = None
        self._signatures: dict[int, bytes] = {}
        self._seed_shares: dict[int, dict[int, bytes]] = {}
        self._key_shares: dict[int, dict[int, bytes]] = {}
        self._closed: set[str] = set()

    def advertised(self, client: int, message: object) -> None:
        """Accept a client's public keys."""
        self._refuse_late(client, "advertise")
        _refuse_twice(client, self._advertised, "advertised")
        keys = Advertisement.from_bytes(message, f"the advertisement of client {client}")
        keys.check_keys(client)
        for kind in KINDS:
            if any(getattr(keys, kind) == getattr(k, kind) for k in self._advertised.values()):
                raise SecureAggregationError(f"client {client} advertises the {kind} of another")
        if self._verify is not None:
            name = keys.name(self._verify, self.session, self.step, client)
            if name in self._names:
                raise SecureAggregationError(f"client {client} is {name}, which is here already")
            self._names.add(name)
        self._advertised[client] = keys

    def directory(self) -> bytes:
        """Return the message to all clients that ends stage 1."""
        if self._directory is None:
            threshold = self._threshold or default_threshold(len(self._advertised))
            _require(self._advertised, threshold, "advertised keys")
            self._directory = Directory(self.session, threshold, dict(self._advertised))
            self._closed.add("advertise")
        return self._directory.to_bytes()

    def shared(self, client: int, message: object) -> None:
        """Accept a client's encrypted shares."""
        directory = self._known_directory()
        self._refuse_late(client, "share")
        _refuse_stranger(client, directory.members, "advertise")
        _refuse_twice(client, self._sealed, "shared")
        what = f"the shares of client {client}"
        fields = load(message, what)
        sealed = take_map(fields, "sealed", what, sealed_bytes(BOTH_BYTES))
        if sealed.keys() != directory.members.keys() - {client}:
            raise SecureAggregationError(f"{what} are not for exactly the other clients")
        size = 2 * directory.threshold * POINT_BYTES
        commitments = take_bytes(fields, "commitments", what, size)
        read_commitments(commitments, directory, client)
        self._commitments[client] = commitments
        self._sealed[client] = sealed

    def inbox(self, client: int) -> bytes:
        """Return the message to one client that ends stage 2: the shares its peers made for it."""
        _refuse_stranger(client, self._sealed, "share")
        _require(self._sealed, self._known_directory().threshold, "shared")
        self._closed.add("share")
        peers = [peer for peer in self._sealed if peer != client]
        return dump(
            sealed={peer: self._sealed[peer][client] for peer in peers},
            commitments={peer: self._commitments[peer] for peer in peers},
        )

    def checked(self, client: int, message: object) -> None:
        """Accept a client's list of the peers whose shares it found to be false."""
        self._refuse_late(client, "check")
        _refuse_stranger(client, self._sealed, "share")
        _refuse_twice(client, self._false, "checked")
        what = f"the complaints of client {client}"
        false = take_clients(load(message, what), "false", what)
        if not set(false) <= self._sealed.keys() - {client}:
            raise SecureAggregationError(f"{what} are about clients that sent it nothing")
        self._false[client] = false

    def participants(self) -> list[int]:
        """Return the clients that may send a masked vector: the message that ends stage 3."""
        if self._participants is None:
            self.refused = blame(self._false)
            stay = sorted(self._false.keys() - self.refused.keys())
            _require(stay, self._known_directory().threshold, "hold sound shares")
            self._closed.add("check")
            self._participants = stay
        return self._participants

    def masked(self, client: int, vector: npt.NDArray[np.unsignedinteger]) -> None:
        """Add a client's masked vector to the running sum."""
        self._refuse_late(client, "mask")
        _refuse_stranger(client, self._participants or (), "come through the stage before")
        _refuse_twice(client, self._delivered, "delivered its vector")
        if vector.shape != self._total.shape or vector.dtype != self._total.dtype:
            raise SecureAggregationError(
                f"the vector of client {client} is {vector.dtype}{list(vector.shape)}, expected "
                f"{self._total.dtype}{list(self._total.shape)}"
            )
        self._total += vector
        self._delivered.add(client)

    def survivors(self) -> list[int]:
        """Return the clients that delivered a vector: the message to them that ends stage 4."""
        if self._survivors is None:
            _require(self._delivered, self._known_directory().threshold, "delivered their vectors")
            self._closed.add("mask")
            self._survivors = sorted(self._delivered)
        return self._survivors

    def signed(self, client: int, message: object) -> None:
        """Accept a client's signature under the list of survivors."""
        directory, survivors = self._known_directory(), self.survivors()
        _refuse_stranger(client, survivors, "deliver its vector")
        _refuse_twice(client, self._signatures, "signed")
        what = f"the signature of client {client}"
        signature = take_bytes(load(message, what), "signature", what, SIGNATURE_BYTES)
        statement = directory.survivors_statement(self.step, self.participants(), survivors)
        if not is_signed(directory.members[client].sign_key, signature, statement):
            raise SecureAggregationError(f"{what} is not under the list of survivors")
        self._signatures[client] = signature

    def signatures(self) -> bytes:
        """Return the message to the survivors that ends stage 5."""
        _require(self._signatures, self._known_directory().threshold, "signed the list")
        return dump(signatures=self._signatures)

    def revealed(self, client: int, message: object) -> None:
        """Accept a client's shares for the unmasking."""
        _refuse_stranger(client, self.survivors(), "deliver its vector")
        _refuse_twice(client, self._seed_shares, "revealed")
        what = f"the reveal of client {client}"
        fields = load(message, what)
        seeds = take_map(fields, "seeds", what, shamir.SHARE_BYTES)
        keys = take_map(fields, "keys", what, shamir.SHARE_BYTES)
        if seeds.keys() != self._delivered or keys.keys() != self._dropped():
            raise SecureAggregationError(f"{what} is not about exactly the clients asked for")
        self._seed_shares[client] = seeds
        self._key_shares[client] = keys

    def result(self) -> npt.NDArray[np.float64]:
        """Return the sum of the survivors' vectors. The running sum is not changed.

        If a client returned a false share, its shares are ignored; its vector stays in the sum.
        """
        total = self._total.copy()
        for client in sorted(self._delivered):
            seed = self._recover(client, self._seed_shares, 1)
            apply_mask(total, self_mask(seed, self.session), -1)
        members = self._known_directory().members
        for client in sorted(self._dropped()):
            secret = self._recover(client, self._key_shares, 0)
            for peer in self._delivered:
                key = agree_on_mask(secret, members[peer].mask_key, self.session, peer)
                apply_mask(total, key, -pair_sign(peer, client))
        return self.fixed_point.decode(total)

    def _recover(self, owner: int, shares: dict[int, dict[int, bytes]], which: int) -> bytes:
        """Return a client's secret; if the shares do not yield it, exclude the false shares."""
        directory = self._known_directory()
        points, bound = directory.points, self._commitments[owner]
        commitments = read_commitments(bound, directory, owner)[which]
        for checked in (False, True):
            answers = [client for client in sorted(shares) if client not in self.refused]
            if checked:
                for client in answers:
                    if not commitments.allow(shares[client][owner], points[client]):
                        self.refused[client] = f"it returned a false share of client {owner}"
                answers = [client for client in answers if client not in self.refused]
            _require(answers, directory.threshold, "revealed sound shares")
            chosen = answers[: directory.threshold]
            secret = shamir.combine({points[c]: shares[c][owner] for c in chosen})
            if commitments.are_of(secret):
                return secret
        raise SecureAggregationError(f"the shares of client {owner}'s secret do not give it back")

    def _refuse_late(self, client: int, stage: str) -> None:
        if stage in self._closed:
            raise SecureAggregationError(f"client {client} came after stage {stage!r} had ended")

    def _dropped(self) -> set[int]:
        return set(self._participants or ()) - self._delivered

    def _known_directory(self) -> Directory:
        if self._directory is None:
            raise SecureAggregationError("the key directory has not been made yet")
        return self._directory


def _refuse_twice(client: int, known: Iterable[int], done: str) -> None:
    if client in known:
        raise SecureAggregationError(f"client {client} has {done} twice")


def _refuse_stranger(client: int, known: Iterable[int], missed: str) -> None:
    if client not in known:
        raise SecureAggregationError(f"client {client} did not {missed} and cannot take part now")


def _require(clients: Iterable[int], threshold: int, done: str) -> None:
    count = len(list(clients))
    if count < threshold:
        raise SecureAggregationError(
            f"only {count} clients {done}, the threshold is {threshold}: no sum can be recovered"
        )
