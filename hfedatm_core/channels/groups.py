"""Channel groups as plain data: which stretches of tensor axes are permuted together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["filter", "vector", "input"]
Kind = Literal["conv", "linear"]


@dataclass(frozen=True)
class Member:
    """One stretch of a tensor axis that lives in a channel space.

    Channel ``c`` of the group sits at the positions ``offset + c * block + [0, block)``:
    ``block`` is H·W for the input of a Linear behind a flatten, ``offset`` is the place in a
    concatenation.

    Attributes
    ----------
    tensor
        Key in the ``state_dict``.
    axis
        The axis of that tensor.
    role
        ``"filter"``: the weight rows that produce the channels (these are matched);
        ``"vector"``: a bias or a norm layer's vector; ``"input"``: the inputs of a consumer.
    """

    tensor: str
    axis: int
    offset: int
    block: int
    role: Role


@dataclass(frozen=True)
class ChannelGroup:
    """One channel space: all its axes are permuted together.

    Attributes
    ----------
    name
        Dotted name of the first module that writes these channels.
    size
        Number of channels.
    kind
        ``"conv"`` if a convolution writes any of them, ``"linear"`` for hidden units of fully
        connected layers.
    """

    name: str
    size: int
    kind: Kind
    members: tuple[Member, ...]

    @property
    def producers(self) -> tuple[Member, ...]:
        """The filters that write this group's channels."""
        return tuple(member for member in self.members if member.role == "filter")
