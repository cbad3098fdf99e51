"""Gram matrices of layer inputs: the statistics of a client's data with which weights are merged.

A :class:`Gram` is the *mean* ``G = (1/n) Σ x xᵀ`` over the ``n = rows`` inputs ``x`` of one layer.
Its forms have the same operations: :class:`PackedGram` (upper triangle), for wide layers
:class:`FactorGram` (``UᵀU`` with few rows, and the exact diagonal), and for convolutions in groups
:class:`~hfedatm_core.grams.grouped.GroupedGram` (one small matrix per group).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hfedatm_core.grams.checks import require_nonnegative, require_positive, require_unit
from hfedatm_core.grams.encoding import (
    Array,
    WireType,
    encode,
    one_integer,
    read_integer,
    read_values,
)
from hfedatm_core.grams.low_rank import FactorSum
from hfedatm_core.grams.triangle import (
    TriangleSum,
    add_product,
    diagonal_positions,
    feature_order,
    pack,
    scale_features,
    triangle_dim,
    unpack,
    unpack_upper,
)
from hfedatm_core.tensors import is_finite, plain_floats, take

MIXED_FORMS = "cannot combine a packed Gram with a factored one of the same layer"


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
        """Return the diagonal, which is exact in every form."""

    @abstractmethod
    def shrink(self, alpha: float) -> Gram:
        """Return ``α G + (1 − α) diag(G)``: off-diagonal entries times ``α``."""

    @abstractmethod
    def scale_features(self, factors: Tensor) -> Gram:
        """Return the Gram of inputs whose feature ``i`` is multiplied by ``factors[i]``."""

    @abstractmethod
    def permute(self, index: Tensor | Sequence[int]) -> Gram:
        """Reorder rows and columns: ``new[i, j] = old[index[i], index[j]]``.

        An ``index`` over ``c < d`` channels moves blocks of ``d // c`` features (the kernel
        positions of a convolution's patch); a constant feature behind the last block (the
        bias) stays.
        """

    @abstractmethod
    def leading(self, count: int) -> Gram:
        """Return the Gram of the first ``count`` features, e.g. without the constant of a bias."""

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
        if type(other) is not type(self):
            raise ValueError(MIXED_FORMS)
        return self._pooled(other)

    @abstractmethod
    def _pooled(self, other: Any) -> Gram:
        """Return the sum with a Gram of the same form."""

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
        self.triangle = plain_floats(triangle)
        self.rows = require_positive(rows, "rows")

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
        shrunk = self.triangle * require_unit(alpha)
        shrunk[diagonal_positions(self.dim)] = self.diagonal()
        return PackedGram(shrunk, self.rows)

    def scale_features(self, factors: Tensor) -> PackedGram:  # noqa: D102
        return PackedGram(scale_features(self.triangle, factors), self.rows)

    def permute(self, index: Tensor | Sequence[int]) -> PackedGram:  # noqa: D102
        order = feature_order(index, self.dim)
        if order is None:
            return self
        return PackedGram(pack(take(take(self.dense(), order, 0), order, 1)), self.rows)

    def leading(self, count: int) -> PackedGram:  # noqa: D102
        return PackedGram(pack(unpack_upper(self.triangle)[:count, :count]), self.rows)

    def add_product(self, out: Tensor, left: Tensor, scale: float = 1.0) -> None:  # noqa: D102
        add_product(out, left, self.triangle, scale)

    def to_arrays(self, dtype: WireType | None = None) -> dict[str, Array]:  # noqa: D102
        triangle, scale = encode(self.triangle, dtype)
        return {"triangle": triangle, "rows": one_integer(self.rows), "scale": np.array([scale])}

    def is_finite(self) -> bool:  # noqa: D102
        return is_finite(self.triangle)

    def __mul__(self, factor: float) -> PackedGram:  # noqa: D105
        return PackedGram(self.triangle * require_nonnegative(factor), self.rows)

    def _pooled(self, other: PackedGram) -> PackedGram:
        total = TriangleSum()
        total.add(self.triangle, self.rows)
        total.add(other.triangle, other.rows)
        rows = self.rows + other.rows
        return PackedGram(total.total() * (1.0 / rows), rows)


class FactorGram(Gram):
    """A Gram matrix ``UᵀU`` whose diagonal is replaced by the exact one.

    ``G = UᵀU + diag(diagonal − Σ_k U_k²)``: the diagonal keeps the energy that the factor misses.
    So the form is lossless while ``rank`` reaches the rank of the data, and the diagonal is never
    too small.

    Parameters
    ----------
    factor
        ``U``, of shape ``r × d``.
    diagonal
        The exact diagonal; the factor's own unless given.
    rank
        Number of rows to which a sum with other Grams is compressed (at least ``r``).
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
        self.factor = plain_floats(factor)
        self._diagonal = self.factor.square().sum(0) if diagonal is None else plain_floats(diagonal)
        if self._diagonal.shape != self.factor.shape[1:]:
            raise ValueError(
                f"a Gram factor of shape {tuple(factor.shape)} needs a diagonal of "
                f"{factor.shape[1]} values, got shape {tuple(self._diagonal.shape)}"
            )
        self.rows = require_positive(rows, "rows")
        self.rank = max(len(factor), require_positive(rank or len(factor), "rank"))

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
        """Return the part of the diagonal that the factor misses."""
        return self._diagonal - self.factor.square().sum(0)

    def shrink(self, alpha: float) -> FactorGram:  # noqa: D102
        return FactorGram(
            self.factor * require_unit(alpha) ** 0.5, self._diagonal, self.rows, self.rank
        )

    def scale_features(self, factors: Tensor) -> FactorGram:  # noqa: D102
        factor = (self.factor.double() * factors).to(self.dtype)
        diagonal = (self._diagonal.double() * factors.square()).to(self.dtype)
        return FactorGram(factor, diagonal, self.rows, self.rank)

    def permute(self, index: Tensor | Sequence[int]) -> FactorGram:  # noqa: D102
        order = feature_order(index, self.dim)
        if order is None:
            return self
        return FactorGram(self.factor[:, order], self._diagonal[order], self.rows, self.rank)

    def leading(self, count: int) -> FactorGram:  # noqa: D102
        return FactorGram(self.factor[:, :count], self._diagonal[:count], self.rows, self.rank)

    def add_product(self, out: Tensor, left: Tensor, scale: float = 1.0) -> None:  # noqa: D102
        factor = self.factor.to(out.dtype)
        out.addcmul_(left, self.remainder().to(out.dtype), value=scale)
        out.addmm_(left @ factor.T, factor, alpha=scale)

    def to_arrays(self, dtype: WireType | None = None) -> dict[str, Array]:  # noqa: D102
        factor, scale = encode(self.factor, dtype)
        return {
            "factor": factor,
            "diagonal": self._diagonal.numpy(),
            "rows": one_integer(self.rows),
            "rank": one_integer(self.rank),
            "scale": np.array([scale]),
        }

    def is_finite(self) -> bool:  # noqa: D102
        return is_finite(self.factor) and is_finite(self._diagonal)

    def __mul__(self, factor: float) -> FactorGram:  # noqa: D105
        scale = require_nonnegative(factor)
        return FactorGram(self.factor * scale**0.5, self._diagonal * scale, self.rows, self.rank)

    def _pooled(self, other: FactorGram) -> FactorGram:
        total = FactorSum()
        for gram in (self, other):
            total.add(gram.factor, gram.diagonal(), gram.rank, gram.rows)
        rows = self.rows + other.rows
        factor, diagonal, rank = total.mean(rows)
        return FactorGram(factor, diagonal, rows, rank)
