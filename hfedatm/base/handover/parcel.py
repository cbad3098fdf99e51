"""A message's content as one value.

Flower moves every array of a message in separate requests, from process to process, and a SuperLink
spends tens of milliseconds on each. A deployed tier therefore sends one value that holds the whole
content, a parcel, and a node answers a parcel with a parcel. An array takes three requests, a byte
string one; only arrays are cut into pieces.
"""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

from hfedatm.base.answering import failure, reply_with_failure
from hfedatm.base.handover import recordfile

_KEY = "parcel"
# A larger message needs many requests in any case, and a copy of it takes much memory.
MAX_BYTES = 128 * 2**20
# A larger byte string would be one large request; Flower's own pieces have 5 MiB.
MAX_STRING = 2 * 2**20


class BadParcel(ValueError):
    """A parcel cannot be opened."""


def wrap(content: RecordDict) -> RecordDict:
    """Return content that carries ``content`` as one value; large content stays as it is."""
    if recordfile.content_bytes(content) > MAX_BYTES:
        return content
    data = recordfile.to_bytes(content)
    if len(data) <= MAX_STRING:
        return RecordDict({_KEY: ConfigRecord({_KEY: data})})
    return RecordDict({_KEY: ArrayRecord({_KEY: Array("uint8", (len(data),), _KEY, data)})})


def is_wrapped(content: RecordDict) -> bool:
    """Return whether ``content`` is a parcel."""
    return list(content) == [_KEY]


def unwrap(content: RecordDict) -> RecordDict:
    """Return the content of a parcel."""
    try:
        held = content[_KEY][_KEY]
        return recordfile.from_bytes(held.data if isinstance(held, Array) else held)  # type: ignore[arg-type]
    except Exception as error:  # a hostile or broken node may send anything
        raise BadParcel(f"the message cannot be read: {error}") from error


def opened(reply: Message) -> Message:
    """Return a reply with its content unwrapped; an unreadable reply becomes a failure."""
    if reply.has_error() or not is_wrapped(reply.content):
        return reply
    try:
        reply.content = unwrap(reply.content)
    except BadParcel as error:
        reply.content = failure(error)
    return reply


def by_parcel(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Unwrap a message that is a parcel, and wrap its reply (a Flower mod)."""
    if not is_wrapped(message.content):
        return call_next(message, context)
    try:
        message.content = unwrap(message.content)
    except BadParcel as error:
        return reply_with_failure(message, error)
    reply = call_next(message, context)
    try:
        if not reply.has_error():
            reply.content = wrap(reply.content)
    except ValueError as error:
        return reply_with_failure(message, error)
    return reply
