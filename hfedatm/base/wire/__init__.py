"""Turn the bytes of a reply into typed and bounded values; every reply of a node passes here.

`checked` turns replies into values. An error of any class on the way is the failure of that one
node, with a reason of one line. The code that sums values never sees a message, so a reply is
counted whole or not at all.
"""

from hfedatm.base.wire.answers import read_answers
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
from hfedatm.base.wire.statistics import read_statistics

__all__ = [
    "Expected",
    "NodeIdentity",
    "NodeUpdate",
    "Scores",
    "checked",
    "open_reply",
    "read_answers",
    "read_identity",
    "read_scores",
    "read_statistics",
    "read_update",
    "reason_of",
]
