"""Gram matrices of convolutions in groups: one small matrix per group of channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
from hfedatm_core.grams.gram import Gram
from hfedatm_core.tensors import is_finite, plain_floats


class GroupedGram(Gram):
    """One Gram per group of a convolution, of the inputs of that group's filters.

    A filter of a depthwise convolution reads one channel: ``c`` channels with 3 × 3 kernels have
    ``c`` matrices of 9 × 9 instead of one of ``9c × 9c``.

    Parameters
    ----------
    blocks
        ``groups × d × d``, each symmetric.
    """

    def __init__(self, blocks: Tensor, rows: int = 1) -> None:
        if blocks.ndim != 3 or blocks.shape[1] != blocks.shape[2] or 0 in blocks.shape:
            raise ValueError(f"Grams of groups are groups × d × d, got shape {tuple(blocks.shape)}")
        self.blocks = plain_floats(blocks)
        self.rows = require_positive(rows, "rows")

    @property
    def dim(self) -> int:
        """Number of input features of one group."""
        return self.blocks.shape[1]

    @property
    def nbytes(self) -> int:  # noqa: D102
        return self.blocks.nbytes

    @property
    def dtype(self) -> torch.dtype:  # noqa: D102
        return self.blocks.dtype

    def dense(self) -> Tensor:
        """Return the matrices, ``groups × d × d``."""
        return self.blocks.clone()

    def diagonal(self) -> Tensor:
        """Return the diagonals, ``groups × d``."""
        return torch.diagonal(self.blocks, dim1=1, dim2=2)

    def shrink(self, alpha: float) -> GroupedGram:  # noqa: D102
        shrunk = self.blocks * require_unit(alpha)
        torch.diagonal(shrunk, dim1=1, dim2=2).copy_(self.diagonal())
        return GroupedGram(shrunk, self.rows)

    def scale_features(self, factors: Tensor) -> GroupedGram:
        """Multiply the features of every group by ``factors``, one per feature of a group."""
        scaled = self.blocks.double() * factors[..., :, None] * factors[..., None, :]
        return GroupedGram(scaled.to(self.dtype), self.rows)

    def permute(self, index: Tensor | Sequence[int]) -> GroupedGram:
        """Reorder the groups: ``new[g] = old[index[g]]``."""
        order = torch.as_tensor(index, dtype=torch.long)
        if not torch.equal(order.sort().values, torch.arange(len(self.blocks))):
            raise ValueError(f"index is not a permutation of 0..{len(self.blocks) - 1}")
        return GroupedGram(self.blocks[order], self.rows)

    def leading(self, count: int) -> GroupedGram:  # noqa: D102
        return GroupedGram(self.blocks[:, :count, :count], self.rows)

    def add_product(self, out: Tensor, left: Tensor, scale: float = 1.0) -> None:
        """Add ``scale * left_g @ G_g`` to ``out``; the rows are stored group after group."""
        rows = left.to(out.dtype).view(len(self.blocks), -1, self.dim)
        out.add_((rows @ self.blocks.to(out.dtype)).view(out.shape), alpha=scale)

    def to_arrays(self, dtype: WireType | None = None) -> dict[str, Array]:  # noqa: D102
        blocks, scale = encode(self.blocks, dtype)
        return {"blocks": blocks, "rows": one_integer(self.rows), "scale": np.array([scale])}

    def is_finite(self) -> bool:  # noqa: D102
        return is_finite(self.blocks)

    def __mul__(self, factor: float) -> GroupedGram:  # noqa: D105
        return GroupedGram(self.blocks * require_nonnegative(factor), self.rows)

    def _pooled(self, other: GroupedGram) -> GroupedGram:
        rows = self.rows + other.rows
        total = self.blocks * (self.rows / rows) + other.blocks * (other.rows / rows)
        return GroupedGram(total, rows)


def read_gram(arrays: Mapping[str, Array]) -> Gram:
    """Read the wire form of any Gram; raises ``ValueError`` on anything malformed."""
    if set(arrays) != {"blocks", "rows", "scale"}:
        return Gram.from_arrays(arrays)
    return GroupedGram(read_values(arrays, "blocks", 3, "scale"), read_integer(arrays, "rows"))
