"""Grams of a layer whose inputs are split or joined channels: ``G' = A G Aᵀ``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hfedatm_core.grams.gram import FactorGram, Gram, PackedGram
from hfedatm_core.resizing.along import Piece, along


def resized_gram(
    gram: Gram, pieces: Sequence[Piece], channels: tuple[int, int], patch: int
) -> Gram | None:
    """Return the Gram of the inputs ``A x``; None for a form that knows single groups only.

    Parameters
    ----------
    pieces
        The matrix ``A`` in pieces, on the axis of input channels.
    channels
        Numbers of input channels after and before.
    patch
        Positions of a convolution's kernel; each channel has so many features. One more feature,
        the constant of the bias, stays.
    """
    constant = gram.dim - channels[1] * patch
    if constant not in (0, 1):
        raise ValueError(
            f"a Gram of {gram.dim} features does not belong to {channels[1]} channels x {patch}"
        )
    size = channels[0] * patch + constant
    wide = [_features(piece, patch) for piece in pieces]
    if isinstance(gram, PackedGram):
        matrix = gram.dense().double()
        for axis in (0, 1):
            matrix = along(matrix, axis, size, wide)
        return Gram.from_dense(((matrix + matrix.T) / 2).to(gram.dtype), gram.rows)
    if isinstance(gram, FactorGram):
        factor = along(gram.factor, 1, size, wide)
        squares = [p if p.matrix is None else replace(p, matrix=p.matrix**2) for p in wide]
        rest = along(gram.remainder().clamp(min=0), 0, size, squares)
        return FactorGram(factor, factor.square().sum(0) + rest, gram.rows, gram.rank)
    return None


def _features(piece: Piece, patch: int) -> Piece:
    return replace(piece, new=_spread(piece.new, patch), old=_spread(piece.old, patch))


def _spread(places: Tensor, patch: int) -> Tensor:
    return (places[..., None] * patch + torch.arange(patch)).flatten(1)
