"""The station's side of secure aggregation: pass messages on, add up, take the masks off."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from hfedatm_core.secagg import shamir
from hfedatm_core.secagg.crypto import agree, apply_mask, commitment, pair_sign, public_key
from hfedatm_core.secagg.errors import SecureAggregationError
from hfedatm_core.secagg.fixed_point import FixedPoint, Ring
from hfedatm_core.secagg.messages import (
    Advertisement,
    Directory,
    dump,
    load,
    take_bytes,
    take_map,
)

_COMMITMENT_BYTES = 32


def default_threshold(clients: int) -> int:
    """Return two thirds of the clients: a third may drop out, nearly a third may collude."""
    return max(2, -(-2 * clients // 3))


class Aggregator:
    """One sum over clients.

    Call :meth:`advertised` for every client, then :meth:`directory`; :meth:`shared`, then
    :meth:`inbox`; :meth:`masked`, then :meth:`survivors`; :meth:`revealed`, then :meth:`result`. A
    client that misses a stage is out of the later ones. Only the running sum is kept in memory, not
    the vectors.

    Parameters
    ----------
    session
        Names the sum, the same for all clients.
    size
        Length of the vectors.
    threshold
        How many clients must stay to the end; by default two thirds of those that advertised.
    fixed_point
        Number format, the same for all clients.
    """

    def __init__(
        self,
        session: bytes,
        size: int,
        *,
        threshold: int | None = None,
        fixed_point: FixedPoint | None = None,
    ) -> None:
        self.session = session
        self.fixed_point = fixed_point or FixedPoint()
        self._threshold = threshold
        self._total: Ring = np.zeros(size, dtype=self.fixed_point.dtype)
        self._advertised: dict[int, Advertisement] = {}
        self._directory: Directory | None = None
        self._commitments: dict[int, bytes] = {}
        self._sealed: dict[int, dict[int, bytes]] = {}
        self._delivered: set[int] = set()
        self._closed: set[str] = set()
        self._seed_shares: dict[int, dict[int, bytes]] = {}
        self._key_shares: dict[int, dict[int, bytes]] = {}

    def advertised(self, client: int, message: bytes) -> None:
        """Take a client's public keys."""
        self._refuse_late(client, "advertise")
        _refuse_twice(client, self._advertised, "advertised")
        what = f"the advertisement of client {client}"
        self._advertised[client] = Advertisement.from_bytes(message, what)

    def directory(self) -> bytes:
        """Return the message to all clients that ends stage 1."""
        if self._directory is None:
            threshold = self._threshold or default_threshold(len(self._advertised))
            _require(self._advertised, threshold, "advertised keys")
            self._directory = Directory(
                self.session,
                threshold,
                {client: keys.share_key for client, keys in self._advertised.items()},
                {client: keys.mask_key for client, keys in self._advertised.items()},
            )
            self._closed.add("advertise")
        return self._directory.to_bytes()

    def shared(self, client: int, message: bytes) -> None:
        """Take a client's encrypted shares."""
        points = self._known_directory().points
        self._refuse_late(client, "share")
        _refuse_stranger(client, points, "advertise")
        _refuse_twice(client, self._sealed, "shared")
        what = f"the shares of client {client}"
        fields = load(message, what)
        sealed = take_map(fields, "sealed", what)
        if sealed.keys() != points.keys() - {client}:
            raise SecureAggregationError(f"{what} are not for exactly the other clients")
        self._commitments[client] = take_bytes(fields, "commitment", what, _COMMITMENT_BYTES)
        self._sealed[client] = sealed

    def inbox(self, client: int) -> bytes:
        """Return the message to one client that ends stage 2: its peers' shares for it."""
        _refuse_stranger(client, self._sealed, "share")
        _require(self._sealed, self._known_directory().threshold, "shared")
        self._closed.add("share")
        return dump(
            sealed={peer: box[client] for peer, box in self._sealed.items() if peer != client}
        )

    def masked(self, client: int, vector: npt.NDArray[np.unsignedinteger]) -> None:
        """Add a client's masked vector to the running sum."""
        self._refuse_late(client, "mask")
        _refuse_stranger(client, self._sealed, "share")
        _refuse_twice(client, self._delivered, "delivered its vector")
        if vector.shape != self._total.shape or vector.dtype != self._total.dtype:
            raise SecureAggregationError(
                f"the vector of client {client} is {vector.dtype}{list(vector.shape)}, expected "
                f"{self._total.dtype}{list(self._total.shape)}"
            )
        self._total += vector
        self._delivered.add(client)

    def survivors(self) -> list[int]:
        """Return the clients that delivered: the message to each of them that ends stage 3."""
        _require(self._delivered, self._known_directory().threshold, "delivered their vectors")
        self._closed.add("mask")
        return sorted(self._delivered)

    def revealed(self, client: int, message: bytes) -> None:
        """Take a client's shares for the unmasking."""
        _refuse_stranger(client, self._delivered, "deliver its vector")
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
        """Return the sum of the survivors' vectors. Leaves the running sum as it is."""
        directory = self._known_directory()
        _require(self._seed_shares, directory.threshold, "revealed their shares")
        total = self._total.copy()
        for client in sorted(self._delivered):
            seed = self._recover(client, self._seed_shares)
            if seed is None or commitment(seed, self.session, client) != self._commitments[client]:
                raise self._false_share(client)
            apply_mask(total, seed, -1)
        for client in sorted(self._dropped()):
            private = self._recover(client, self._key_shares)
            if private is None or public_key(private) != directory.mask_keys[client]:
                raise self._false_share(client)
            for peer in self._delivered:
                public = directory.mask_keys[peer]
                key = agree(private, public, "mask", self.session, peer)
                apply_mask(total, key, -pair_sign(peer, client))
        return self.fixed_point.decode(total)

    def _answers(self) -> list[int]:
        """Return the clients whose shares are used: the first ``threshold`` that answered."""
        return sorted(self._seed_shares)[: self._known_directory().threshold]

    def _recover(self, owner: int, shares: dict[int, dict[int, bytes]]) -> bytes | None:
        points = self._known_directory().points
        try:
            return shamir.combine({points[c]: shares[c][owner] for c in self._answers()})
        except ValueError:
            return None

    def _false_share(self, owner: int) -> SecureAggregationError:
        return SecureAggregationError(
            f"the shares of client {owner}'s secret do not give it back: client {owner} or one of "
            f"the clients {self._answers()} sent a false share"
        )

    def _refuse_late(self, client: int, stage: str) -> None:
        if stage in self._closed:
            raise SecureAggregationError(f"client {client} came after stage {stage!r} had ended")

    def _dropped(self) -> set[int]:
        return self._sealed.keys() - self._delivered

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
