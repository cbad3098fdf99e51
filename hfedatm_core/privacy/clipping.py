r"""Bound what one example, or one client, can contribute to a Gram, and by how much.

The three mechanisms and the Frobenius sensitivity of what they release:

=============  ==================================================  =====================
mechanism      released                                            sensitivity
=============  ==================================================  =====================
``example``    sum of x x^T, each example's rows clipped to c      c^2
``client``     the client's Gram, Frobenius norm clipped to C      C
``paper``      the client's Gram, spectral norm clipped to S       S * sqrt(rank)
=============  ==================================================  =====================

Examples are clipped where the rows are seen, by ``collect_grams(..., clip=c)``: the rows of one
example (tokens, patches) together to :math:`\sum_t \|x_t\|^2 \le c^2`, which bounds
:math:`\|\sum_t x_t x_t^\top\|_F` by c^2. Grams are clipped here.

*Neighbours* are data sets in which one example's (or the client's) contribution is set to zero and
the number of examples stays as it is (zero-out adjacency: the add/remove relation with a public
count). The number of examples is public here: it is the averaging weight and travels in the clear.
If one contribution is *replaced* by another, the sensitivity is sqrt(2) times larger and not twice,
because the inner product of two positive semi-definite matrices is never negative.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Mechanism = Literal["example", "client", "paper"]
Adjacency = Literal["zero-out", "replace"]


def clip_frobenius(gram: Tensor, bound: float) -> Tensor:
    r"""Scale a Gram so that :math:`\|G\|_F \le C`."""
    _check_bound(bound)
    return gram * _shrink(torch.linalg.matrix_norm(gram), bound)


def clip_spectral(gram: Tensor, bound: float, rank: int | None = None) -> Tensor:
    r"""Scale a Gram so that :math:`\|G\|_2 \le S`, keeping its ``rank`` largest eigenvalues.

    Without truncation the rank is bounded by the dimension alone. The true rank depends on the
    data, so a smaller bound has to be enforced, not observed.
    """
    _check_bound(bound)
    values, vectors = torch.linalg.eigh(gram)
    if rank is not None:
        values, vectors = values[-rank:], vectors[:, -rank:]
    values = values * _shrink(values.abs().max(), bound)
    clipped: Tensor = (vectors * values) @ vectors.T
    return clipped


def sensitivity(
    mechanism: Mechanism,
    bound: float,
    dim: int,
    *,
    rank: int | None = None,
    adjacency: Adjacency = "zero-out",
) -> float:
    """Return the largest Frobenius distance between the releases of two neighbours.

    Parameters
    ----------
    mechanism, bound
        See the table of this module.
    dim
        The Gram's dimension, which bounds the rank in mechanism ``paper``.
    rank
        A smaller rank that :func:`clip_spectral` enforces.
    adjacency
        ``zero-out`` (default) or ``replace``.
    """
    _check_bound(bound)
    if mechanism == "example":
        single = bound**2
    elif mechanism == "client":
        single = bound
    elif mechanism == "paper":
        single = bound * math.sqrt(dim if rank is None else min(rank, dim))
    else:
        raise ValueError(f"unknown mechanism {mechanism!r}: use 'example', 'client' or 'paper'")
    return single * (math.sqrt(2) if adjacency == "replace" else 1.0)


def _shrink(norm: Tensor, bound: float) -> Tensor:
    """Return min(1, bound / norm), a hair below so that rounding cannot lift the norm above."""
    if not torch.isfinite(norm).all():
        raise ValueError("cannot clip NaN or infinite values; check the model's activations")
    hair = 4 * torch.finfo(norm.dtype).eps
    tiny = torch.finfo(norm.dtype).tiny
    return torch.clamp(bound * (1 - hair) / norm.clamp_min(tiny), max=1.0)


def _check_bound(bound: float) -> None:
    if not (math.isfinite(bound) and bound > 0):
        raise ValueError(f"the clipping bound must be a positive number, got {bound}")
