"""What clients and station send each other, as bytes.

Every message is JSON with bytes in hexadecimal: small, readable, and nothing in it can run code.
The masked vector travels as a plain array. The sender is not part of a message: it is known from
the authenticated transport.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hfedatm_core.secagg.errors import SecureAggregationError

KEY_BYTES = 32


def dump(**fields: Any) -> bytes:
    """Return fields as JSON; bytes become hexadecimal, also inside a mapping keyed by client."""
    return json.dumps({name: _plain(value) for name, value in fields.items()}).encode()


def load(data: bytes, what: str) -> dict[str, Any]:
    """Return the fields of a JSON message, or an error that says what was unreadable."""
    try:
        fields = json.loads(data)
    except (ValueError, UnicodeDecodeError) as error:
        raise SecureAggregationError(f"{what} is not readable: {error}") from error
    if not isinstance(fields, dict):
        raise SecureAggregationError(f"{what} is not readable: expected an object")
    return fields


def take_bytes(fields: Mapping[str, Any], name: str, what: str, size: int | None = None) -> bytes:
    """Return a bytes field of the given size."""
    return _bytes(fields.get(name), f"{what}: field {name!r}", size)


def take_map(
    fields: Mapping[str, Any], name: str, what: str, size: int | None = None
) -> dict[int, bytes]:
    """Return a field that maps clients to bytes of the given size."""
    entries = fields.get(name)
    if not isinstance(entries, dict):
        raise SecureAggregationError(f"{what}: field {name!r} is missing")
    try:
        keyed = {int(client): value for client, value in entries.items()}
    except ValueError as error:
        raise SecureAggregationError(
            f"{what}: field {name!r} has a key that is no client"
        ) from error
    if len(keyed) != len(entries):
        raise SecureAggregationError(f"{what}: field {name!r} names a client twice")
    return {
        client: _bytes(value, f"{what}: field {name!r} for client {client}", size)
        for client, value in keyed.items()
    }


def _bytes(value: object, what: str, size: int | None) -> bytes:
    try:
        raw = bytes.fromhex(value)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise SecureAggregationError(f"{what} is missing or not hexadecimal") from error
    if size is not None and len(raw) != size:
        raise SecureAggregationError(f"{what} has {len(raw)} bytes, expected {size}")
    return raw


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    return value


@dataclass(frozen=True)
class Advertisement:
    """Stage 1, client to station: the public keys for shares and for masks."""

    share_key: bytes
    mask_key: bytes

    def to_bytes(self) -> bytes:
        """Serialise."""
        return dump(share_key=self.share_key, mask_key=self.mask_key)

    @classmethod
    def from_bytes(cls, data: bytes, what: str) -> Advertisement:
        """Parse and check sizes; ``what`` names the message in errors."""
        fields = load(data, what)
        return cls(
            take_bytes(fields, "share_key", what, KEY_BYTES),
            take_bytes(fields, "mask_key", what, KEY_BYTES),
        )


@dataclass(frozen=True)
class Directory:
    """Stage 2, station to clients: who takes part, with which keys, and the threshold."""

    session: bytes
    threshold: int
    share_keys: dict[int, bytes]
    mask_keys: dict[int, bytes]

    def __post_init__(self) -> None:
        count = len(self.share_keys)
        if self.share_keys.keys() != self.mask_keys.keys():
            raise SecureAggregationError("the key directory is incomplete")
        for kind, keys in (("share", self.share_keys), ("mask", self.mask_keys)):
            if len(set(keys.values())) != count:
                raise SecureAggregationError(f"two clients advertise the same {kind} key")
        if not (2 <= self.threshold <= count < 2 * self.threshold):
            raise SecureAggregationError(
                f"threshold {self.threshold} of {count} clients is not safe: it must be at least "
                "2, at most their number and more than half of it"
            )

    @property
    def points(self) -> dict[int, int]:
        """The point of every client's Shamir shares: 1.. in the order of ids."""
        return {client: index for index, client in enumerate(sorted(self.share_keys), start=1)}

    def to_bytes(self) -> bytes:
        """Serialise."""
        return dump(
            session=self.session,
            threshold=self.threshold,
            share_keys=self.share_keys,
            mask_keys=self.mask_keys,
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Directory:
        """Parse and check."""
        what = "the key directory"
        fields = load(data, what)
        if not isinstance(fields.get("threshold"), int):
            raise SecureAggregationError(f"{what}: field 'threshold' is missing")
        return cls(
            take_bytes(fields, "session", what),
            fields["threshold"],
            take_map(fields, "share_keys", what, KEY_BYTES),
            take_map(fields, "mask_keys", what, KEY_BYTES),
        )
