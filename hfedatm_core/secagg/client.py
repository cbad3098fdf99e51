"""The client's side of secure aggregation: six stages, between which the state is kept as bytes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy.typing as npt

from hfedatm_core.secagg import shamir
from hfedatm_core.secagg.crypto import (
    SIGNATURE_BYTES,
    agree,
    agree_on_mask,
    apply_mask,
    is_signed,
    new_private_key,
    new_signing_key,
    pair_sign,
    public_key,
    seal,
    sealed_bytes,
    self_mask,
    sign,
    signing_public_key,
    unseal,
)
from hfedatm_core.secagg.dealing import BOTH_BYTES, shares_fit
from hfedatm_core.secagg.directory import KEY_BYTES, Advertisement, Directory, Signer, Verify
from hfedatm_core.secagg.edwards import POINT_BYTES
from hfedatm_core.secagg.errors import SecureAggregationError
from hfedatm_core.secagg.fixed_point import FixedPoint, Ring
from hfedatm_core.secagg.messages import (
    dump,
    load,
    take_bytes,
    take_clients,
    take_entries,
    take_map,
    take_number,
)

STAGES = ("advertise", "share", "check", "mask", "sign", "reveal", "finished")


class SecureClient:
    """One client in one session (one sum). Make a new one for every session.

    Parameters
    ----------
    client
        The id under which the station and the peers know this client.
    session
        Identifies the sum; the same for all clients, and a new random value for every sum.
    step
        The work that is summed: for example run, round and kind.
    threshold
        How many clients must stay to the end. The client refuses a station that offers another
        number. By default the station decides.
    smallest_cohort
        The client takes part only in a sum of at least this many clients.
    """

    def __init__(
        self,
        client: int,
        session: bytes,
        *,
        step: str = "",
        threshold: int | None = None,
        smallest_cohort: int = 2,
    ) -> None:
        self.client, self.session, self.step = client, session, step
        self.threshold, self.smallest_cohort = threshold, smallest_cohort
        self.stage = STAGES[0]
        self.names: dict[int, str] = {}
        """Names of the clients of the sum, once the directory is known."""
        self.participants: list[int] = []
        self.survivors: list[int] = []
        self._share_key = new_private_key()
        self._sign_key = new_signing_key()
        self._mask_key = shamir.new_secret()
        self._seed = shamir.new_secret()
        self._directory: Directory | None = None
        self._held: dict[int, bytes] = {}

    def advertise(self, signer: Signer | None = None) -> bytes:
        """Return the public keys (stage 1), signed if ``signer`` is given."""
        self._enter("advertise")
        keys = self._public_keys()
        if signer is not None:
            keys = keys.signed(signer, self.session, self.step, self.client)
        return keys.to_bytes()

    def share(self, directory: bytes, verify: Verify | None = None) -> bytes:
        """Return one encrypted share for every peer, given the key directory (stage 2).

        With ``verify`` every client in the directory must have proved its identity.
        """
        self.expect("share")
        checked = Directory.from_bytes(directory)
        if checked.session != self.session:
            raise SecureAggregationError("the key directory belongs to another session")
        checked.check_offer(self.client, self._public_keys(), self.threshold, self.smallest_cohort)
        names = checked.names(verify, self.step)
        self._enter("share")
        self._directory, self.names = checked, names
        points = checked.points
        key_shares, key = shamir.split(self._mask_key, checked.threshold, len(points))
        seed_shares, seed = shamir.split(self._seed, checked.threshold, len(points))
        sealed = {}
        for peer, point in points.items():
            both = key_shares[point - 1] + seed_shares[point - 1]
            if peer == self.client:
                self._held[peer] = both
            else:
                sealed[peer] = seal(self._channel(peer), both, self._context(self.client, peer))
        return dump(commitments=key + seed, sealed=sealed)

    def check(self, inbox: bytes) -> bytes:
        """Return the list of peers whose shares are false, given the peers' shares (stage 3)."""
        self.expect("check")
        directory = self._known_directory()
        what = f"the inbox of client {self.client}"
        fields = load(inbox, what)
        received = take_map(fields, "sealed", what, sealed_bytes(BOTH_BYTES))
        size = 2 * directory.threshold * POINT_BYTES
        commitments = take_map(fields, "commitments", what, size)
        peers = directory.members.keys() - {self.client}
        if received.keys() != commitments.keys() or not received.keys() <= peers:
            raise SecureAggregationError(f"{what} does not hold the shares of its peers")
        self._require(len(received) + 1, "shared")
        own = directory.points[self.client]
        held, false = dict(self._held), []
        for peer, sealed in received.items():
            both = unseal(self._channel(peer), sealed, self._context(peer, self.client))
            if both is not None and shares_fit(both, own, commitments[peer], directory, peer):
                held[peer] = both
            else:
                false.append(peer)
        self._enter("check")
        self._held = held
        return dump(false=sorted(false))

    def mask(
        self,
        participants: Iterable[int],
        vector: npt.ArrayLike,
        fixed_point: FixedPoint | None = None,
    ) -> Ring:
        """Return the masked vector, given the clients with whose vectors it is summed (stage 4).

        The station adds up the vectors as they are: for a weighted mean, pass the weight times the
        values, followed by the weight.
        """
        self.expect("mask")
        directory, chosen = self._known_directory(), sorted(set(participants))
        if self.client not in chosen or not set(chosen) <= self._held.keys():
            raise SecureAggregationError(
                f"the participants {chosen} do not fit: client {self.client} has sound shares of "
                f"{sorted(self._held)}"
            )
        self._require(len(chosen), "take part")
        encoded = (fixed_point or FixedPoint()).encode(vector, len(directory.members))
        keys = {
            peer: agree_on_mask(self._mask_key, keys.mask_key, self.session, peer)
            for peer, keys in directory.members.items()
            if peer in chosen and peer != self.client
        }
        self._enter("mask")
        self.participants = chosen
        self._held = {peer: self._held[peer] for peer in chosen}
        apply_mask(encoded, self_mask(self._seed, self.session), 1)
        # Erase the secrets: from here on only the peers' shares can recover the masks.
        self._share_key = self._mask_key = self._seed = bytes(shamir.SECRET_BYTES)
        for peer, key in keys.items():
            apply_mask(encoded, key, pair_sign(self.client, peer))
        return encoded

    def sign(self, survivors: Iterable[int]) -> bytes:
        """Return a signature under the list of clients whose vectors are in the sum (stage 5)."""
        self.expect("sign")
        listed = sorted(set(survivors))
        if self.client not in listed or not set(listed) <= set(self.participants):
            raise SecureAggregationError(
                f"the list of survivors {listed} does not fit: client {self.client} is to be "
                f"summed with {self.participants}"
            )
        self._require(len(listed), "delivered")
        self._enter("sign")
        self.survivors = listed
        return dump(signature=sign(self._sign_key, self._statement()))

    def reveal(self, signatures: bytes) -> bytes:
        """Return shares of the survivors' seeds and of the dropped clients' keys (stage 6).

        The client answers only a station that shows the signatures of ``threshold`` survivors under
        the very list this client signed, and only once: both kinds of shares of one client would
        unmask its vector.
        """
        self.expect("reveal")
        directory = self._known_directory()
        what = f"the signatures for client {self.client}"
        found = take_map(load(signatures, what), "signatures", what, SIGNATURE_BYTES)
        statement = self._statement()
        good = [
            peer
            for peer in self.survivors
            if peer in found and is_signed(directory.members[peer].sign_key, found[peer], statement)
        ]
        if len(good) < directory.threshold:
            raise SecureAggregationError(
                f"only {len(good)} clients signed the list of survivors that client {self.client} "
                f"was given, {directory.threshold} are needed: not revealing"
            )
        self._enter("reveal")
        cut = shamir.SHARE_BYTES
        dropped = sorted(set(self.participants) - set(self.survivors))
        answer = dump(
            seeds={peer: self._held[peer][cut:] for peer in self.survivors},
            keys={peer: self._held[peer][:cut] for peer in dropped},
        )
        self._held = {}
        return answer

    def to_bytes(self) -> bytes:
        """Return the state, for another process to continue. It holds secrets: keep it local."""
        return dump(
            client=self.client,
            session=self.session,
            step=self.step,
            threshold=self.threshold or 0,
            smallest_cohort=self.smallest_cohort,
            stage=self.stage,
            names={str(client): name for client, name in self.names.items()},
            participants=self.participants,
            survivors=self.survivors,
            share_key=self._share_key,
            sign_key=self._sign_key,
            mask_key=self._mask_key,
            seed=self._seed,
            directory=self._directory.to_bytes() if self._directory else b"",
            held=self._held,
        )

    @classmethod
    def from_bytes(cls, state: bytes) -> SecureClient:
        """Restore a client from the state that :meth:`to_bytes` returned."""
        what = "the saved state of secure aggregation"
        fields = load(state, what)
        if fields.get("stage") not in STAGES:
            raise SecureAggregationError(f"{what} is not readable: no stage in it")
        self = cls(
            take_number(fields, "client", what),
            take_bytes(fields, "session", what),
            step=str(fields.get("step")),
            threshold=take_number(fields, "threshold", what) or None,
            smallest_cohort=take_number(fields, "smallest_cohort", what),
        )
        self.stage = fields["stage"]
        self.names = take_entries(fields, "names", what)
        self.participants = take_clients(fields, "participants", what)
        self.survivors = take_clients(fields, "survivors", what)
        self._share_key = take_bytes(fields, "share_key", what, KEY_BYTES)
        self._sign_key = take_bytes(fields, "sign_key", what, KEY_BYTES)
        self._mask_key = take_bytes(fields, "mask_key", what, shamir.SECRET_BYTES)
        self._seed = take_bytes(fields, "seed", what, shamir.SECRET_BYTES)
        directory = take_bytes(fields, "directory", what)
        self._directory = Directory.from_bytes(directory) if directory else None
        self._held = take_map(fields, "held", what, BOTH_BYTES)
        return self

    def _enter(self, stage: str) -> None:
        """Mark a stage as answered; the stages come in order and each only once."""
        self.expect(stage)
        self.stage = STAGES[STAGES.index(stage) + 1]

    def expect(self, stage: str) -> None:
        """Raise an error unless ``stage`` is the stage to be answered next."""
        if self.stage != stage:
            raise SecureAggregationError(
                f"client {self.client} is at stage {self.stage!r}, not {stage!r}"
            )

    def _public_keys(self) -> Advertisement:
        return Advertisement(
            public_key(self._share_key),
            shamir.public(self._mask_key),
            signing_public_key(self._sign_key),
        )

    def _require(self, count: int, done: str) -> None:
        """Refuse a sum that has become smaller than the threshold or than this client allows."""
        needed = max(self._known_directory().threshold, self.smallest_cohort)
        if count < needed:
            raise SecureAggregationError(f"only {count} clients {done}, {needed} are needed")

    def _statement(self) -> bytes:
        directory = self._known_directory()
        return directory.survivors_statement(self.step, self.participants, self.survivors)

    def _known_directory(self) -> Directory:
        assert self._directory is not None, "the stage that brings it comes first"
        return self._directory

    def _channel(self, peer: int) -> bytes:
        public = self._known_directory().members[peer].share_key
        return agree(self._share_key, public, self.session, peer)

    def _context(self, sender: int, recipient: int) -> bytes:
        return f"{sender}>{recipient}/".encode() + self.session
