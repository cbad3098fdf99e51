"""Gram matrices of layer inputs: what a client tells about its data so that weights can be merged.

A :class:`Gram` is the *mean* ``G = (1/n) Σ x xᵀ`` over the ``n = rows`` inputs ``x`` of one layer.
There are two forms with the same operations: :class:`PackedGram` (upper triangle) and, for wide
layers, :class:`FactorGram` (``UᵀU`` with few rows, and the exact diagonal).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from scipy.linalg import get_blas_funcs
from torch import Tensor

from hfedatm_core.grams.triangle import (
    diagonal_positions,
    feature_order,
    pack,
    triangle_dim,
    unpack,
    unpack_upper,
)
from hfedatm_core.tensors import Array, WireType, encode, is_finite, read_integer, read_values


class Gram(ABC):
    """Mean outer product of a layer's inputs; immutable.

    ``a + b`` pools the rows of both: ``(n_a G_a + n_b G_b) / (n_a + n_b)``, so the Grams of the
    parts of a data set add up to the Gram of the whole. ``g * c`` multiplies the matrix by
    ``c ≥ 0`` and leaves ``rows`` alone. For a mean that ignores ``rows`` see
    :class:`GramAccumulator`.
    """

    rows: int
    """Number of inputs averaged."""

    @staticmethod
    def from_dense(matrix: Tensor, rows: int = 1) -> PackedGram:
        """Make a Gram from a full symmetric matrix."""
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
            raise ValueError(f"a Gram matrix is square, got shape {tuple(matrix.shape)}")
        return PackedGram(pack(matrix), rows)

    @property
    @abstractmethod
    def dim(self) -> int:
        """Number of input features ``d``."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the stored numbers."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Type of the stored numbers."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return the full ``d × d`` matrix."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """Return the diagonal, which is exact in both forms."""

    @abstractmethod
    def shrink(self, alpha: float) -> Gram:
        """Return ``α G + (1 − α) diag(G)``: off-diagonal entries times ``α``."""

    @abstractmethod
    def permute(self, index: Tensor | Sequence[int]) -> Gram:
        """Reorder rows and columns: ``new[i, j] = old[index[i], index[j]]``.

        An ``index`` over ``c < d`` channels moves blocks of ``d // c`` features (the kernel
        positions of a convolution's patch); a constant feature behind the last block (the
        bias) stays.
        """

    @abstractmethod
    def add_product(self, out: Tensor, left: Tensor, scale: float = 1.0) -> None:
        """Add ``scale * left @ G`` to ``out`` in place; a factored ``G`` is not formed."""

    @abstractmethod
    def to_arrays(self, dtype: WireType | None = None) -> dict[str, Array]:
        """Return the wire form: named numpy arrays.

        ``dtype=None`` keeps the type of the numbers (float32 for a float32 model); ``"float16"``
        and ``"bfloat16"`` halve the bytes and carry one scale per matrix.
        """

    @abstractmethod
    def is_finite(self) -> bool:
        """Tell whether all stored numbers are finite."""

    @abstractmethod
    def __mul__(self, factor: float) -> Gram:
        """Multiply the matrix by ``factor``."""

    def __rmul__(self, factor: float) -> Gram:
        """Multiply the matrix by ``factor``."""
        return self * factor

    def __add__(self, other: Gram) -> Gram:
        """Pool the rows of two Grams."""
        if not isinstance(other, Gram):
            return NotImplemented
        from hfedatm_core.grams.sums import GramSum

        pooled = GramSum()
        pooled.add(self, self.rows)
        pooled.add(other, other.rows)
        return pooled.mean()

    def __repr__(self) -> str:
        """Show form, size and rows."""
        return f"{type(self).__name__}(dim={self.dim}, rows={self.rows}, nbytes={self.nbytes})"

    @staticmethod
    def from_arrays(arrays: Mapping[str, Array]) -> Gram:
        """Read the wire form; raises ``ValueError`` on anything malformed or not finite."""
        rows = read_integer(arrays, "rows")
        if set(arrays) == {"triangle", "rows", "scale"}:
            return PackedGram(read_values(arrays, "triangle", 1, "scale"), rows)
        if set(arrays) == {"factor", "diagonal", "rows", "rank", "scale"}:
            factor = read_values(arrays, "factor", 2, "scale")
            diagonal = read_values(arrays, "diagonal", 1, None).to(factor.dtype)
            return FactorGram(factor, diagonal, rows, read_integer(arrays, "rank"))
        raise ValueError(
            "a Gram is sent as {triangle, rows, scale} or {factor, diagonal, rows, rank, scale}, "
            f"got {sorted(arrays)}"
        )


class PackedGram(Gram):
    """A Gram matrix stored as its upper triangle, row by row."""

    def __init__(self, triangle: Tensor, rows: int = 1) -> None:
        self._dim = triangle_dim(triangle.numel())
        self.triangle = _float(triangle)
        self.rows = _positive(rows, "rows")

    @property
    def dim(self) -> int:  # noqa: D102
        return self._dim

    @property
    def nbytes(self) -> int:  # noqa: D102
        return self.triangle.nbytes

    @property
    def dtype(self) -> torch.dtype:  # noqa: D102
        return self.triangle.dtype

    def dense(self) -> Tensor:  # noqa: D102
        return unpack(self.triangle)

    def diagonal(self) -> Tensor:  # noqa: D102
        return self.triangle[diagonal_positions(self.dim)]

    def shrink(self, alpha: float) -> PackedGram:  # noqa: D102
        shrunk = self.triangle * _unit(alpha)
        shrunk[diagonal_positions(self.dim)] = self.diagonal()
        return PackedGram(shrunk, self.rows)

    def permute(self, index: Tensor | Sequence[int]) -> PackedGram:  # noqa: D102
        order = feature_order(index, self.dim)
        if order is None:
            return self
        return PackedGram(pack(self.dense()[order[:, None], order]), self.rows)

    def add_product(self, out: Tensor, left: Tensor, scale: float = 1.0) -> None:  # noqa: D102
        # SciPy's BLAS is quicker than torch's and reads one triangle only; it counts by columns,
        # in which all matrices here are transposed. One that is not contiguous it would copy.
        if not out.is_contiguous():
            raise ValueError("a product is added to a contiguous tensor only")
        matrix = unpack_upper(self.triangle).to(out.dtype).numpy().T
        (symm,) = get_blas_funcs(("symm",), dtype=matrix.dtype)
        columns = left.to(out.dtype).numpy().T
        symm(scale, matrix, columns, 1.0, out.numpy().T, lower=True, overwrite_c=True)

    def to_arrays(self, dtype: WireType | None = None) -> dict[str, Array]:  # noqa: D102
        triangle, scale = encode(self.triangle, dtype)
        return {"triangle": triangle, "rows": _array(self.rows), "scale": np.array([scale])}

    def is_finite(self) -> bool:  # noqa: D102
        return is_finite(self.triangle)

    def __mul__(self, factor: float) -> PackedGram:  # noqa: D105
        return PackedGram(self.triangle * _nonnegative(factor), self.rows)


class FactorGram(Gram):
    """A Gram matrix ``UᵀU`` whose diagonal is replaced by the exact one.

    ``G = UᵀU + diag(diagonal − Σ_k U_k²)``: what the factor does not reach goes to the diagonal,
    so the form is lossless while ``rank`` reaches the rank of the data and never too small there.

    Parameters
    ----------
    factor
        ``U``, of shape ``r × d``.
    diagonal
        The exact diagonal; the factor's own unless given.
    rank
        Number of rows a combination with other Grams is compressed to (at least ``r``).
    """

    def __init__(
        self,
        factor: Tensor,
        diagonal: Tensor | None = None,
        rows: int = 1,
        rank: int | None = None,
    ) -> None:
        if factor.ndim != 2 or 0 in factor.shape:
            raise ValueError(f"a Gram factor is r × d with r, d ≥ 1, got {tuple(factor.shape)}")
        self.factor = _float(factor)
        self._diagonal = self.factor.square().sum(0) if diagonal is None else _float(diagonal)
        if self._diagonal.shape != self.factor.shape[1:]:
            raise ValueError(
                f"a Gram factor of shape {tuple(factor.shape)} needs a diagonal of "
                f"{factor.shape[1]} values, got shape {tuple(self._diagonal.shape)}"
            )
        self.rows = _positive(rows, "rows")
        self.rank = max(len(factor), _positive(rank or len(factor), "rank"))

    @property
    def dim(self) -> int:  # noqa: D102
        return self.factor.shape[1]

    @property
    def nbytes(self) -> int:  # noqa: D102
        return self.factor.nbytes + self._diagonal.nbytes

    @property
    def dtype(self) -> torch.dtype:  # noqa: D102
        return self.factor.dtype

    def dense(self) -> Tensor:  # noqa: D102
        matrix = self.factor.T @ self.factor
        matrix.diagonal().copy_(self._diagonal)
        return matrix

    def diagonal(self) -> Tensor:  # noqa: D102
        return self._diagonal

    def remainder(self) -> Tensor:
        """Return the part of the diagonal that the factor does not reach."""
        return self._diagonal - self.factor.square().sum(0)

    def shrink(self, alpha: float) -> FactorGram:  # noqa: D102
        return FactorGram(self.factor * _unit(alpha) ** 0.5, self._diagonal, self.rows, self.rank)

    def permute(self, index: Tensor | Sequence[int]) -> FactorGram:  # noqa: D102
        order = feature_order(index, self.dim)
        if order is None:
            return self
        return FactorGram(self.factor[:, order], self._diagonal[order], self.rows, self.rank)

    def add_product(self, out: Tensor, left: Tensor, scale: float = 1.0) -> None:  # noqa: D102
        factor = self.factor.to(out.dtype)
        out.addcmul_(left, self.remainder().to(out.dtype), value=scale)
        out.addmm_(left @ factor.T, factor, alpha=scale)

    def to_arrays(self, dtype: WireType | None = None) -> dict[str, Array]:  # noqa: D102
        factor, scale = encode(self.factor, dtype)
        return {
            "factor": factor,
            "diagonal": self._diagonal.numpy(),
            "rows": _array(self.rows),
            "rank": _array(self.rank),
            "scale": np.array([scale]),
        }

    def is_finite(self) -> bool:  # noqa: D102
        return is_finite(self.factor) and is_finite(self._diagonal)

    def __mul__(self, factor: float) -> FactorGram:  # noqa: D105
        scale = _nonnegative(factor)
        return FactorGram(self.factor * scale**0.5, self._diagonal * scale, self.rows, self.rank)


def _float(values: Tensor) -> Tensor:
    kind = torch.float64 if values.dtype == torch.float64 else torch.float32
    return values.detach().to("cpu", kind).contiguous()


def _array(value: int) -> Array:
    return np.array([value], dtype=np.int64)


def _positive(value: int, what: str) -> int:
    if value < 1:
        raise ValueError(f"{what} of a Gram must be at least 1, got {value}")
    return int(value)


def _nonnegative(factor: float) -> float:
    if not 0.0 <= factor < float("inf"):
        raise ValueError(f"a Gram can be scaled by a finite factor ≥ 0 only, got {factor}")
    return float(factor)


def _unit(alpha: float) -> float:
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha must lie in [0, 1], got {alpha}")
    return float(alpha)
