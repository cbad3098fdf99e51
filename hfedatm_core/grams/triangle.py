"""Symmetric matrices as packed upper triangles."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from scipy.linalg import get_blas_funcs, get_lapack_funcs
from torch import Tensor

from hfedatm_core.tensors import plain_floats


def triangle_dim(size: int) -> int:
    """Return the ``d`` for which a packed triangle has ``size = d (d + 1) / 2`` entries."""
    dim = (math.isqrt(8 * size + 1) - 1) // 2
    if dim < 1 or dim * (dim + 1) // 2 != size:
        raise ValueError(f"{size} values are not the upper triangle of any square matrix")
    return dim


def diagonal_positions(dim: int) -> Tensor:
    """Return the positions of the diagonal in a packed upper triangle (row by row)."""
    i = torch.arange(dim)
    return i * dim - i * (i - 1) // 2


def last_column(triangle: Tensor) -> Tensor:
    """Return the last column of the matrix of a packed upper triangle."""
    dim = triangle_dim(len(triangle))
    return triangle[diagonal_positions(dim) + torch.arange(dim - 1, -1, -1)]


def pack(matrix: Tensor) -> Tensor:
    """Copy the upper triangle of a square matrix, row by row, into one vector."""
    source = plain_floats(matrix).numpy()
    # LAPACK stores matrices by columns: our upper triangle is its lower triangle.
    (to_packed,) = get_lapack_funcs(("trttp",), dtype=source.dtype)
    return torch.from_numpy(to_packed(source.T, "L")[0])


def unpack_upper(triangle: Tensor) -> Tensor:
    """Return a square matrix with this upper triangle; entries below the diagonal are arbitrary."""
    source = plain_floats(triangle).numpy()
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
    full product; :func:`pack` never reads the entries below the diagonal blocks.
    """
    for i in range(0, len(matrix), block):
        matrix[i : i + block, i:].addmm_(rows[:, i : i + block].T, rows[:, i:])


def add_product(out: Tensor, left: Tensor, triangle: Tensor, scale: float = 1.0) -> None:
    """Add ``scale * left @ S`` to ``out`` in place, with ``S`` the matrix of a packed triangle."""
    # SciPy's BLAS is faster than torch's and reads one triangle only. It expects columns first, so
    # it sees all matrices transposed, and it would copy a matrix that is not contiguous.
    if not out.is_contiguous():
        raise ValueError("a product is added to a contiguous tensor only")
    matrix = unpack_upper(triangle).to(out.dtype).numpy().T
    (symm,) = get_blas_funcs(("symm",), dtype=matrix.dtype)
    columns = left.to(out.dtype).numpy().T
    symm(scale, matrix, columns, 1.0, out.numpy().T, lower=True, overwrite_c=True)


def scale_features(triangle: Tensor, factors: Tensor) -> Tensor:
    """Return the packed triangle of ``diag(f) S diag(f)``; products are taken in float64."""
    scaled = torch.empty_like(triangle)
    start = 0
    for i in range(len(factors)):
        row = slice(start, start + len(factors) - i)
        scaled[row] = triangle[row].double() * factors[i] * factors[i:]
        start = row.stop
    return scaled


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


class TriangleSum:
    """Running sum ``Σ w_k T_k`` of packed triangles."""

    def __init__(self) -> None:
        self._total: Tensor | None = None

    def add(self, triangle: Tensor, weight: float) -> None:
        """Add ``weight * triangle``."""
        if self._total is None:
            self._total = triangle * weight
        else:
            require_same_size(self._total, triangle)
            self._total.add_(triangle, alpha=weight)

    def total(self) -> Tensor:
        """Return the sum, not a copy of it."""
        assert self._total is not None
        return self._total

    def copy(self) -> TriangleSum:
        """Return an independent copy."""
        copy = TriangleSum()
        copy._total = None if self._total is None else self._total.clone()
        return copy


def require_same_size(have: Tensor, got: Tensor) -> None:
    """Raise ``ValueError`` unless two Grams store equally many numbers."""
    if have.numel() != got.numel():
        raise ValueError(
            f"cannot combine Grams of different sizes ({have.numel()} and {got.numel()} values)"
        )
