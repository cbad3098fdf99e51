"""Symmetric matrices as packed upper triangles, and stacks of rows compressed to a low rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from scipy.linalg import get_lapack_funcs
from torch import Tensor


def triangle_dim(size: int) -> int:
    """Return the ``d`` for which a packed triangle has ``size = d (d + 1) / 2`` entries."""
    dim = (math.isqrt(8 * size + 1) - 1) // 2
    if dim < 1 or dim * (dim + 1) // 2 != size:
        raise ValueError(f"{size} values are not the upper triangle of any square matrix")
    return dim


def diagonal_positions(dim: int) -> Tensor:
    """Return where the diagonal lies in a packed upper triangle (row by row)."""
    i = torch.arange(dim)
    return i * dim - i * (i - 1) // 2


def pack(matrix: Tensor) -> Tensor:
    """Copy the upper triangle of a square matrix, row by row, into one vector."""
    source = _numbers(matrix)
    # LAPACK counts by columns: what we call the upper triangle of a matrix is its lower one.
    (to_packed,) = get_lapack_funcs(("trttp",), dtype=source.dtype)
    return torch.from_numpy(to_packed(source.T, "L")[0])


def unpack_upper(triangle: Tensor) -> Tensor:
    """Return a square matrix with this upper triangle; what is below the diagonal is arbitrary."""
    source = _numbers(triangle)
    (to_full,) = get_lapack_funcs(("tpttr",), dtype=source.dtype)
    return torch.from_numpy(to_full(triangle_dim(len(source)), source, "L")[0].T)


def unpack(triangle: Tensor, block: int = 256) -> Tensor:
    """Rebuild the full symmetric matrix from its packed upper triangle."""
    matrix = unpack_upper(triangle)
    for i in range(0, len(matrix), block):
        rows = matrix[i : i + block, i:]
        square, rest = rows[:, : len(rows)], rows[:, len(rows) :]
        square.copy_(square.triu() + square.triu(1).T)
        matrix[i + len(rows) :, i : i + len(rows)] = rest.T
    return matrix


def add_outer(matrix: Tensor, rows: Tensor, block: int = 256) -> None:
    """Add ``rowsᵀ rows`` to the upper triangle of ``matrix`` in place.

    Only the blocks on and above the diagonal are computed, which is close to half of the work of a
    full product; what lies below the diagonal blocks is never read by :func:`pack`.
    """
    for i in range(0, len(matrix), block):
        matrix[i : i + block, i:].addmm_(rows[:, i : i + block].T, rows[:, i:])


def feature_order(index: Tensor | Sequence[int], dim: int) -> Tensor | None:
    """Expand a channel permutation to ``dim`` features; ``None`` stands for the identity."""
    channels = torch.as_tensor(index, dtype=torch.long).cpu()
    count = channels.numel()
    identity = torch.arange(count)
    if channels.ndim != 1 or count == 0 or not torch.equal(channels.sort().values, identity):
        raise ValueError(f"index is not a permutation of 0..{count - 1}")
    block, tail = divmod(dim, count)
    if block == 0 or tail > 1:
        raise ValueError(f"a permutation of {count} channels does not fit a Gram of {dim} features")
    if torch.equal(channels, identity):
        return None
    order = (channels[:, None] * block + torch.arange(block)).flatten()
    return torch.cat([order, torch.arange(dim - tail, dim)])


def compress(rows: Tensor, rank: int) -> tuple[Tensor, float]:
    """Return at most ``rank`` rows ``U`` with ``UᵀU ≈ rowsᵀ rows``, and the lost share of energy.

    With the eigenvectors ``V`` of ``rows rowsᵀ`` (small), ``U = V_rᵀ rows`` is the best
    approximation of that rank, and equal up to rounding when ``rank`` reaches the rank of ``rows``.
    """
    energy, vectors = torch.linalg.eigh((rows @ rows.T).double())
    energy = energy.clamp(min=0.0)
    total = float(energy.sum())
    # Directions below the rounding of the product carry no information.
    noise = float(energy[-1]) * len(rows) * torch.finfo(rows.dtype).eps * 1e-2
    kept = min(rank, max(1, int((energy > noise).sum())))
    lost = float(energy[: len(rows) - kept].sum())
    factor = vectors[:, len(rows) - kept :].flip(1).T.to(rows.dtype) @ rows
    return factor, lost / total if total > 0 else 0.0


class FactorStack:
    """Rows ``U`` with a growing ``UᵀU``, held to a bounded number by :func:`compress`.

    Parameters
    ----------
    rank
        Number of rows after a compression.
    limit
        Number of rows that triggers one; ``2 * rank`` unless given.
    """

    def __init__(self, rank: int, limit: int | None = None) -> None:
        if rank < 1:
            raise ValueError(f"the rank of a factor must be at least 1, got {rank}")
        self.rank = rank
        self.limit = max(rank, 2 * rank if limit is None else limit)
        self.lost = 0.0
        self._parts: list[Tensor] = []

    def __len__(self) -> int:
        """Return the number of rows held."""
        return sum(len(part) for part in self._parts)

    def push(self, rows: Tensor, scale: float = 1.0) -> None:
        """Stack ``scale * rows``."""
        for i in range(0, len(rows), self.limit):
            self._parts.append(rows[i : i + self.limit] * scale)
            if len(self) > self.limit:
                self._compress(self.rank)

    def factor(self, rank: int | None = None) -> Tensor:
        """Return the stacked rows, compressed to ``rank`` rows if there are more."""
        if rank is not None and len(self) > rank:
            self._compress(rank)
        if len(self._parts) > 1:
            self._parts = [torch.cat(self._parts)]
        return self._parts[0]

    def copy(self) -> FactorStack:
        """Return an independent copy (parts are never changed in place, so they are shared)."""
        copy = FactorStack(self.rank, self.limit)
        copy.lost, copy._parts = self.lost, list(self._parts)
        return copy

    def _compress(self, rank: int) -> None:
        stacked = torch.cat(self._parts)
        self._parts.clear()
        factor, lost = compress(stacked, rank)
        self._parts.append(factor)
        self.lost = max(self.lost, lost)


def _numbers(values: Tensor) -> Any:
    kind = torch.float64 if values.dtype == torch.float64 else torch.float32
    return values.detach().to("cpu", kind).numpy()
