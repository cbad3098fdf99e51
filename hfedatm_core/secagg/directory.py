"""The clients of a sum: the keys each client advertises, and the directory the station compiles.

A client may prove its identity with a certificate and a signature over its keys, the session and
the step of the work that is summed. This package does not decide which certificates are valid: its
caller passes in a signer and a function that verifies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hfedatm_core.secagg.crypto import agree, agree_on_mask, digest, new_private_key
from hfedatm_core.secagg.errors import SecureAggregationError
from hfedatm_core.secagg.messages import dump, load, take_bytes, take_entries, take_number
from hfedatm_core.secagg.shamir import new_secret

KEY_BYTES = 32
KINDS = ("share_key", "mask_key", "sign_key")
_LONGEST_PROOF = 16_384


class Signer(Protocol):
    """The identity of a client."""

    @property
    def certificate(self) -> bytes:
        """The certificate that states the identity."""

    def sign(self, data: bytes) -> bytes:
        """Return a signature that goes with the certificate."""


Verify = Callable[[bytes, bytes, bytes], str]
"""``verify(certificate, signature, data)`` returns the signer's name or raises ``ValueError``."""


@dataclass(frozen=True)
class Advertisement:
    """Stage 1, client to station: public keys for shares, masks and signatures of this sum."""

    share_key: bytes
    mask_key: bytes
    sign_key: bytes
    certificate: bytes = b""
    signature: bytes = b""

    def statement(self, session: bytes, step: str, client: int) -> bytes:
        """Return the bytes that a client signs."""
        keys = {kind: getattr(self, kind) for kind in KINDS}
        about = dump(session=session, step=step, client=client, **keys)
        return b"hfedatm/secure-aggregation/keys\n" + about

    def signed(self, signer: Signer, session: bytes, step: str, client: int) -> Advertisement:
        """Return these keys with a proof of their owner's identity."""
        signature = signer.sign(self.statement(session, step, client))
        return replace(self, certificate=signer.certificate, signature=signature)

    def name(self, verify: Verify, session: bytes, step: str, client: int) -> str:
        """Return the proven name of the keys' owner, or raise `SecureAggregationError`."""
        try:
            statement = self.statement(session, step, client)
            return verify(self.certificate, self.signature, statement)
        except ValueError as error:
            raise SecureAggregationError(
                f"client {client} cannot prove that it is enrolled: {error}"
            ) from error

    def check_keys(self, client: int) -> None:
        """Refuse keys with which no peer could agree on a common key."""
        agree(new_private_key(), self.share_key, b"", client)
        agree_on_mask(new_secret(), self.mask_key, b"", client)

    def to_dict(self) -> dict[str, bytes]:
        """Return the fields."""
        return dict(self.__dict__)

    def to_bytes(self) -> bytes:
        """Serialise."""
        return dump(**self.to_dict())

    @classmethod
    def from_bytes(cls, data: object, what: str) -> Advertisement:
        """Parse and check sizes; ``what`` names the message in errors."""
        return cls.from_dict(load(data, what), what)

    @classmethod
    def from_dict(cls, fields: Any, what: str) -> Advertisement:
        """Check types and sizes."""
        if not isinstance(fields, dict):
            raise SecureAggregationError(f"{what} is not readable: expected an object")
        keys = [take_bytes(fields, kind, what, KEY_BYTES) for kind in KINDS]
        proof = [take_bytes(fields, name, what) for name in ("certificate", "signature")]
        if max(map(len, proof)) > _LONGEST_PROOF:
            raise SecureAggregationError(f"{what}: its certificate or signature is too long")
        return cls(*keys, *proof)


@dataclass(frozen=True)
class Directory:
    """Stage 2, station to clients: the clients of the sum, their keys, and the threshold."""

    session: bytes
    threshold: int
    members: Mapping[int, Advertisement]

    def __post_init__(self) -> None:
        count = len(self.members)
        for kind in KINDS:
            if len({getattr(keys, kind) for keys in self.members.values()}) != count:
                raise SecureAggregationError(f"two clients advertise the same {kind}")
        if not (2 <= self.threshold <= count < 2 * self.threshold):
            raise SecureAggregationError(
                f"threshold {self.threshold} of {count} clients is not safe: it must be at least "
                "2, at most their number and more than half of it"
            )

    @property
    def points(self) -> dict[int, int]:
        """The point of every client's Shamir shares: 1.. in the order of ids."""
        return {client: index for index, client in enumerate(sorted(self.members), start=1)}

    def check_offer(
        self, client: int, keys: Advertisement, threshold: int | None, smallest: int
    ) -> None:
        """Raise an error unless a client with these keys may take part in the sum.

        Parameters
        ----------
        client, keys
            The client's id and the keys it advertised.
        threshold
            The agreed threshold, or None if the station may choose it.
        smallest
            The client takes part only in a sum of at least this many clients.
        """
        if threshold is not None and self.threshold != threshold:
            raise SecureAggregationError(
                f"the station asks for only {self.threshold} clients; the agreed threshold "
                f"is {threshold}"
            )
        own = self.members.get(client)
        if own is None or any(getattr(own, kind) != getattr(keys, kind) for kind in KINDS):
            raise SecureAggregationError(
                f"the key directory does not hold the keys client {client} advertised"
            )
        if len(self.members) < smallest:
            raise SecureAggregationError(
                f"a sum of {len(self.members)} clients is too small: client {client} takes part in "
                f"one of at least {smallest}"
            )

    def names(self, verify: Verify | None, step: str) -> dict[int, str]:
        """Return the members' names: the proven ones or, without ``verify``, names made of ids."""
        if verify is None:
            return {client: f"client {client}" for client in self.members}
        names = {c: keys.name(verify, self.session, step, c) for c, keys in self.members.items()}
        if len(set(names.values())) != len(names):
            raise SecureAggregationError("the key directory holds one client under several ids")
        return names

    def survivors_statement(
        self, step: str, participants: list[int], survivors: list[int]
    ) -> bytes:
        """Return the statement that every survivor signs before any client reveals a share."""
        about = dump(
            directory=digest(self.to_bytes()),
            step=step,
            participants=participants,
            survivors=survivors,
        )
        return b"hfedatm/secure-aggregation/survivors\n" + about

    def to_bytes(self) -> bytes:
        """Serialise; equal directories have equal bytes."""
        members = {str(client): self.members[client].to_dict() for client in sorted(self.members)}
        return dump(session=self.session, threshold=self.threshold, members=members)

    @classmethod
    def from_bytes(cls, data: object) -> Directory:
        """Parse and check."""
        what = "the key directory"
        fields = load(data, what)
        return cls(
            take_bytes(fields, "session", what),
            take_number(fields, "threshold", what),
            {
                client: Advertisement.from_dict(entry, f"{what}: client {client}")
                for client, entry in take_entries(fields, "members", what).items()
            },
        )
