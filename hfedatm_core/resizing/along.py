"""Multiply the channels on one axis of a tensor by a matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """A stretch of an axis that a matrix acts on, channel by channel.

    Attributes
    ----------
    matrix
        New × old channels; None leaves them as they are.
    new, old
        Positions of the channels on the new and on the old axis, ``channels × block``.
    """

    matrix: Tensor | None
    new: Tensor
    old: Tensor


def along(tensor: Tensor, axis: int, size: int, pieces: Sequence[Piece]) -> Tensor:
    """Return the tensor with ``size`` positions on one axis.

    Positions outside of all pieces keep their order; there are as many of them before as after.
    """
    if all(piece.matrix is None for piece in pieces):
        return tensor
    moved = tensor.movedim(axis, 0)
    result = moved.new_zeros(size, *moved.shape[1:])
    ours, theirs = torch.ones(size, dtype=torch.bool), torch.ones(len(moved), dtype=torch.bool)
    for piece in pieces:
        new, old = piece.new.flatten(), piece.old.flatten()
        ours[new], theirs[old] = False, False
        part = moved[old]
        if piece.matrix is not None:
            flat = part.reshape(piece.matrix.shape[1], -1)
            part = (piece.matrix.to(flat.dtype) @ flat).reshape(len(new), *moved.shape[1:])
        result[new] = part
    result[ours] = moved[theirs]
    return result.movedim(0, axis).contiguous()
