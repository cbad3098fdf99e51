"""The client's side of secure aggregation: four stages, state in bytes between them."""

from __future__ import annotations

import os
from collections.abc import Iterable

import numpy.typing as npt

from hfedatm_core.secagg import shamir
from hfedatm_core.secagg.crypto import (
    agree,
    apply_mask,
    commitment,
    new_private_key,
    pair_sign,
    public_key,
    seal,
    unseal,
)
from hfedatm_core.secagg.errors import SecureAggregationError
from hfedatm_core.secagg.fixed_point import FixedPoint, Ring
from hfedatm_core.secagg.messages import (
    KEY_BYTES,
    Advertisement,
    Directory,
    dump,
    load,
    take_bytes,
    take_map,
)

_STAGES = ("advertise", "share", "mask", "reveal", "finished")


class SecureClient:
    """One client in one session (one sum). Make a new one for every session.

    Parameters
    ----------
    client
        The id under which the station and the peers know this client.
    session
        Names the sum, the same for all: for example run, round and station.
    """

    def __init__(self, client: int, session: bytes) -> None:
        self.client = client
        self.session = session
        self.stage = _STAGES[0]
        self._share_key = new_private_key()
        self._mask_key = new_private_key()
        self._seed = os.urandom(shamir.SECRET_BYTES)
        self._directory: Directory | None = None
        self._held: dict[int, bytes] = {}

    def advertise(self) -> bytes:
        """Return the public keys (stage 1)."""
        self._enter("advertise")
        return Advertisement(public_key(self._share_key), public_key(self._mask_key)).to_bytes()

    def share(self, directory: bytes) -> bytes:
        """Return one encrypted share for every peer, given the key directory (stage 2)."""
        checked = self._check_directory(Directory.from_bytes(directory))
        self._enter("share")
        self._directory = checked
        points = checked.points
        key_shares = shamir.split(self._mask_key, checked.threshold, len(points))
        seed_shares = shamir.split(self._seed, checked.threshold, len(points))
        sealed = {}
        for peer, point in points.items():
            both = key_shares[point - 1] + seed_shares[point - 1]
            if peer == self.client:
                self._held[peer] = both
            else:
                sealed[peer] = seal(self._channel(peer), both, self._context(self.client, peer))
        return dump(commitment=commitment(self._seed, self.session, self.client), sealed=sealed)

    def mask(
        self, inbox: bytes, vector: npt.ArrayLike, fixed_point: FixedPoint | None = None
    ) -> Ring:
        """Return the masked vector, given the shares the peers sent to this client (stage 3).

        The vector is what the station shall sum: for a weighted mean, the weight times the values,
        followed by the weight.
        """
        directory = self._known_directory()
        what = f"the inbox of client {self.client}"
        received = take_map(load(inbox, what), "sealed", what)
        strangers = sorted(
            received.keys() - directory.points.keys() | received.keys() & {self.client}
        )
        if strangers:
            raise SecureAggregationError(f"{what} holds shares of unexpected clients {strangers}")
        if len(received) + 1 < directory.threshold:
            raise SecureAggregationError(
                f"only {len(received) + 1} clients shared, {directory.threshold} are needed"
            )
        held = dict(self._held)
        for peer, sealed in received.items():
            both = unseal(self._channel(peer), sealed, self._context(peer, self.client), peer)
            if len(both) != 2 * shamir.SHARE_BYTES:
                raise SecureAggregationError(f"the share from client {peer} has a wrong length")
            held[peer] = both
        encoded = (fixed_point or FixedPoint()).encode(vector, len(directory.points))
        self._enter("mask")
        self._held = held
        apply_mask(encoded, self._seed, 1)
        for peer in received:
            public = directory.mask_keys[peer]
            key = agree(self._mask_key, public, "mask", self.session, peer)
            apply_mask(encoded, key, pair_sign(self.client, peer))
        return encoded

    def reveal(self, survivors: Iterable[int]) -> bytes:
        """Return shares of the survivors' seeds and of the dropped clients' keys (stage 4).

        Answered once only: both kinds of shares of one client would unmask its vector.
        """
        delivered = set(survivors)
        threshold = self._known_directory().threshold
        if self.client not in delivered or not delivered <= self._held.keys():
            raise SecureAggregationError(
                f"the list of survivors {sorted(delivered)} does not fit: client {self.client} "
                f"shared with {sorted(self._held)}"
            )
        if len(delivered) < threshold:
            raise SecureAggregationError(
                f"only {len(delivered)} clients delivered, {threshold} are needed: not revealing"
            )
        self._enter("reveal")
        cut = shamir.SHARE_BYTES
        return dump(
            seeds={peer: self._held[peer][cut:] for peer in sorted(delivered)},
            keys={peer: self._held[peer][:cut] for peer in sorted(self._held.keys() - delivered)},
        )

    def to_bytes(self) -> bytes:
        """Return the state to go on with in another process. It holds secrets: keep it local."""
        return dump(
            client=self.client,
            session=self.session,
            stage=self.stage,
            share_key=self._share_key,
            mask_key=self._mask_key,
            seed=self._seed,
            directory=self._directory.to_bytes() if self._directory else b"",
            held=self._held,
        )

    @classmethod
    def from_bytes(cls, state: bytes) -> SecureClient:
        """Restore the state of :meth:`to_bytes`."""
        what = "the saved state of secure aggregation"
        fields = load(state, what)
        if not isinstance(fields.get("client"), int) or fields.get("stage") not in _STAGES:
            raise SecureAggregationError(f"{what} is not readable: no client or stage in it")
        self = cls(fields["client"], take_bytes(fields, "session", what))
        self.stage = fields["stage"]
        self._share_key = take_bytes(fields, "share_key", what, KEY_BYTES)
        self._mask_key = take_bytes(fields, "mask_key", what, KEY_BYTES)
        self._seed = take_bytes(fields, "seed", what, shamir.SECRET_BYTES)
        directory = take_bytes(fields, "directory", what)
        self._directory = Directory.from_bytes(directory) if directory else None
        self._held = take_map(fields, "held", what, 2 * shamir.SHARE_BYTES)
        return self

    def _enter(self, stage: str) -> None:
        """Pass through a stage, in order and once."""
        if self.stage != stage:
            raise SecureAggregationError(
                f"client {self.client} is at stage {self.stage!r}, not {stage!r}"
            )
        self.stage = _STAGES[_STAGES.index(stage) + 1]

    def _check_directory(self, directory: Directory) -> Directory:
        if directory.session != self.session:
            raise SecureAggregationError("the key directory belongs to another session")
        own = (directory.share_keys.get(self.client), directory.mask_keys.get(self.client))
        if own != (public_key(self._share_key), public_key(self._mask_key)):
            raise SecureAggregationError(
                f"the key directory does not hold the keys client {self.client} advertised"
            )
        return directory

    def _known_directory(self) -> Directory:
        if self._directory is None:
            raise SecureAggregationError(f"client {self.client} has not seen the key directory yet")
        return self._directory

    def _channel(self, peer: int) -> bytes:
        public = self._known_directory().share_keys[peer]
        return agree(self._share_key, public, "share", self.session, peer)

    def _context(self, sender: int, recipient: int) -> bytes:
        return f"{sender}>{recipient}/".encode() + self.session
