"""The interface of a matching cost, and functions that all costs share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from hfedatm_core.channels.groups import ChannelGroup, Member

Orders = Mapping[str, Tensor]
"""Group name -> the order of the station's channels found so far."""


class Cost(Protocol):
    """Measures how much a channel of the reference differs from one of the station."""

    def members(self, group: ChannelGroup) -> Sequence[Member]:
        """Return the axes of tensors by which the channels of a group can be compared."""

    def between(self, group: ChannelGroup, member: Member, orders: Orders) -> Tensor:
        """Return ``size × size`` costs ≥ 0: reference channels × station channels, unordered.

        All other groups are in the given order.
        """


def dissimilarity(products: Tensor, ours: Tensor, theirs: Tensor) -> Tensor:
    r"""Return ``1 − products_{ij} / √(ours_i theirs_j)``, a cosine between −1 and 1.

    A dead channel (energy 0) equals every dead channel and is unrelated to all others.
    """
    alive, living = ours > 0, theirs > 0
    cosine = products * torch.where(alive, ours, 1.0).rsqrt()[:, None]
    cosine = cosine * torch.where(living, theirs, 1.0).rsqrt()
    cosine = torch.where(alive[:, None] & living, cosine.clamp(-1.0, 1.0), 0.0)
    return torch.where(~alive[:, None] & ~living, 0.0, 1.0 - cosine)


def summed_blocks(matrix: Tensor, size: int, block: int) -> Tensor:
    """Sum products of corresponding positions of channels that are ``block`` positions wide."""
    if block == 1:
        return matrix
    return torch.diagonal(matrix.view(size, block, size, block), dim1=1, dim2=3).sum(-1)
