"""How a node answers: with its handler's content, or with the error that kept it from answering."""

from __future__ import annotations

import functools
from collections.abc import Callable

from flwr.app import Context, Message, RecordDict

from hfedatm.records import reply_with_failure

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
