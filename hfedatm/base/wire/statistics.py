"""Read BatchNorm statistics: what `read_update` checks, and that no variance is negative."""

from __future__ import annotations

from flwr.app import Message

from hfedatm.base.records import BadReply
from hfedatm.base.wire.expected import Expected
from hfedatm.base.wire.replies import NodeUpdate, read_update

_ROUNDING = 1e-9
"""Error of a variance that is the difference of two means, relative to the larger of them."""


def read_statistics(message: Message, expected: Expected) -> NodeUpdate:
    """Read a reply whose tensors are moments ``[E z, E z²]`` of the inputs of a BatchNorm."""
    update = read_update(message, expected)
    for name, (mean, second) in update.state.items():
        if bool((second - mean.square() < -_ROUNDING * (second.abs() + mean.square())).any()):
            raise BadReply(f"statistics: {name} has a negative variance")
    return update
