"""Channel groups as plain data: which stretches of tensor axes are permuted together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Role = Literal["filter", "vector", "input"]
Kind = Literal["conv", "linear"]
OUTPUT = "its channels are the network's output"


@dataclass(frozen=True)
class Member:
    """One stretch of a tensor axis that lives in a channel space.

    Channel ``c`` of the group sits at the positions ``offset + c * block + [0, block)``:
    ``block`` is H·W for the input of a Linear behind a flatten, ``offset`` is the place in a
    concatenation. If channels do not lie one behind the other (behind a channel shuffle, or
    channels of all groups of a grouped convolution), ``places`` lists the ``block`` positions of
    each channel; :meth:`positions` covers both cases.

    Attributes
    ----------
    tensor
        Key in the ``state_dict``.
    axis
        The axis of that tensor.
    role
        ``"filter"``: the weight rows that produce the channels (these are matched);
        ``"vector"``: a bias, a norm layer's vector or a table (of positions, of words);
        ``"input"``: the inputs of a consumer.
    places
        Positions of all channels if they do not follow the formula; ``None`` if they do.
    """

    tensor: str
    axis: int
    offset: int
    block: int
    role: Role
    places: tuple[int, ...] | None = None

    def positions(self, size: int) -> Tensor:
        """Return the positions of the group's ``size`` channels, ``(size, block)``."""
        if self.places is not None:
            return torch.tensor(self.places).reshape(size, self.block)
        return self.offset + torch.arange(size * self.block).reshape(size, self.block)


@dataclass(frozen=True)
class ChannelGroup:
    """One channel space: all its axes are permuted together.

    Attributes
    ----------
    name
        Dotted name of the first module that writes these channels. A module whose channels fall
        into several groups adds a number: ``conv`` are the groups of a grouped convolution as
        wholes, ``conv#2`` the channels within each of them. An axis may carry several groups then,
        whose permutations are applied one after the other.
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
