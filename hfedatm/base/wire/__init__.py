"""Bytes in, typed and bounded values out: all that a node says passes through here.

`checked` turns replies into values. Whatever goes wrong on the way, of whatever class, is the
failure of that one node, with a reason of one line. Who adds up values never sees a message, so
a reply is counted whole or not at all.
"""

from hfedatm.base.wire.expected import Expected
from hfedatm.base.wire.replies import (
    NodeIdentity,
    NodeUpdate,
    Scores,
    checked,
    open_reply,
    read_identity,
    read_scores,
    read_update,
    reason_of,
)

__all__ = [
    "Expected",
    "NodeIdentity",
    "NodeUpdate",
    "Scores",
    "checked",
    "open_reply",
    "read_identity",
    "read_scores",
    "read_update",
    "reason_of",
]
