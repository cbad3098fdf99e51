"""Bound the norm of a client's Gram."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def clip_frobenius(gram: Tensor, bound: float) -> Tensor:
    r"""Scale a Gram so that :math:`\|G\|_F \le C`."""
    check_bound(bound)
    return gram * _shrink(torch.linalg.matrix_norm(gram), bound)


def clip_spectral(gram: Tensor, bound: float, rank: int | None = None) -> Tensor:
    r"""Scale a Gram so that :math:`\|G\|_2 \le S`, keeping its ``rank`` largest eigenvalues.

    Without truncation the rank is bounded by the dimension alone. The true rank depends on the
    data, so a smaller bound has to be enforced, not observed.
    """
    check_bound(bound)
    values, vectors = torch.linalg.eigh(gram)
    if rank is not None:
        values, vectors = values[-rank:], vectors[:, -rank:]
    values = values * _shrink(values.abs().max(), bound)
    clipped: Tensor = (vectors * values) @ vectors.T
    return clipped


def _shrink(norm: Tensor, bound: float) -> Tensor:
    """Return min(1, bound / norm), slightly less so that rounding cannot exceed the bound."""
    if not torch.isfinite(norm).all():
        raise ValueError("cannot clip NaN or infinite values; check the model's activations")
    hair = 4 * torch.finfo(norm.dtype).eps
    tiny = torch.finfo(norm.dtype).tiny
    return torch.clamp(bound * (1 - hair) / norm.clamp_min(tiny), max=1.0)


def check_bound(bound: float) -> None:
    """Refuse a bound that is not a positive number."""
    if not (math.isfinite(bound) and bound > 0):
        raise ValueError(f"the clipping bound must be a positive number, got {bound}")
