"""The messages between clients and station, as bytes.

Every message is JSON with bytes in hexadecimal: small, readable, and unable to run code. The masked
vector travels as a plain array. A message does not name its sender, who is known from the
authenticated transport. Reading any message either returns values of the expected types and sizes
or raises one :class:`SecureAggregationError`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hfedatm_core.secagg.errors import SecureAggregationError

_LARGEST_ID = 2**64
LONGEST = 64 * 2**20
"""Most bytes of a message other than the masked vector: enough shares for thousands of clients."""


def dump(**fields: Any) -> bytes:
    """Return fields as JSON; bytes become hexadecimal, also inside a mapping keyed by client."""
    return json.dumps({name: _plain(value) for name, value in fields.items()}).encode()


def load(data: object, what: str) -> dict[str, Any]:
    """Return the fields of a JSON message; ``what`` names the message in an error."""
    if not isinstance(data, bytes) or len(data) > LONGEST:
        raise SecureAggregationError(f"{what} is not readable: expected at most {LONGEST} bytes")
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SecureAggregationError(f"{what} is not readable: {error}") from error
    if not isinstance(fields, dict):
        raise SecureAggregationError(f"{what} is not readable: expected an object")
    return fields


def take_bytes(fields: Mapping[str, Any], name: str, what: str, size: int | None = None) -> bytes:
    """Return a bytes field of the given size."""
    return _bytes(fields.get(name), f"{what}: field {name!r}", size)


def take_number(fields: Mapping[str, Any], name: str, what: str) -> int:
    """Return a field that is a client's id or a number of clients."""
    value = fields.get(name)
    if type(value) is not int or not 0 <= value < _LARGEST_ID:
        raise SecureAggregationError(f"{what}: field {name!r} is missing or not a client's number")
    return value


def take_clients(fields: Mapping[str, Any], name: str, what: str) -> list[int]:
    """Return a field that lists clients, in ascending order; a repeated client is an error."""
    value = fields.get(name)
    if not isinstance(value, list) or not all(
        type(v) is int and 0 <= v < _LARGEST_ID for v in value
    ):
        raise SecureAggregationError(f"{what}: field {name!r} is missing or not a list of clients")
    if len(set(value)) != len(value):
        raise SecureAggregationError(f"{what}: field {name!r} names a client twice")
    return sorted(value)


def take_entries(fields: Mapping[str, Any], name: str, what: str) -> dict[int, Any]:
    """Return a field that maps clients to something."""
    entries = fields.get(name)
    if not isinstance(entries, dict):
        raise SecureAggregationError(f"{what}: field {name!r} is missing")
    keyed: dict[int, Any] = {}
    for key, value in entries.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 20 and int(key) < _LARGEST_ID):
            raise SecureAggregationError(f"{what}: field {name!r} has a key that is not a client")
        if int(key) in keyed:
            raise SecureAggregationError(f"{what}: field {name!r} names a client twice")
        keyed[int(key)] = value
    return keyed


def take_map(
    fields: Mapping[str, Any], name: str, what: str, size: int | None = None
) -> dict[int, bytes]:
    """Return a field that maps clients to bytes of the given size."""
    return {
        client: _bytes(value, f"{what}: field {name!r} for client {client}", size)
        for client, value in take_entries(fields, name, what).items()
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
