"""How a node answers: with its handler's content, or with the error that kept it from answering."""

from __future__ import annotations

import functools
from collections.abc import Callable

from flwr.app import ConfigRecord, Context, Message, RecordDict

from hfedatm.base.errors import explain
from hfedatm.base.tracebacks import raise_if_debugging, to_send

Handler = Callable[[Message, Context], RecordDict]


def answering(handler: Handler) -> Callable[[Message, Context], Message]:
    """Make a Flower handler of a function that returns content and may raise."""

    @functools.wraps(handler)
    def handle(message: Message, context: Context) -> Message:
        try:
            return Message(handler(message, context), reply_to=message)
        except Exception as error:
            return reply_with_failure(message, error)

    return handle


def reply_with_failure(message: Message, error: BaseException) -> Message:
    """Answer with the error itself, so that the person who started the run sees it."""
    raise_if_debugging(error)
    return Message(failure(error), reply_to=message)


def failure(error: BaseException) -> RecordDict:
    """Return the content of a reply that carries only the reason for a failure."""
    reason, trace = explain(error)[:4000], to_send(error)
    return RecordDict({"failure": ConfigRecord({"reason": reason, "traceback": trace})})
