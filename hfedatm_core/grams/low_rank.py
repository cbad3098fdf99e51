"""Factors ``U`` of Gram matrices ``UᵀU``: rows that are stacked and compressed to a low rank."""

from __future__ import annotations

import torch
from torch import Tensor

from hfedatm_core.grams.triangle import require_same_size


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
        Number of rows that triggers a compression; ``2 * rank`` unless given.
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


class FactorSum:
    """Running sum ``Σ w_k U_kᵀU_k``, with the sum of the exact diagonals beside it.

    Factors are stacked; beyond ``limit`` rows (twice their rank unless given) they are compressed.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._stack: FactorStack | None = None
        self._diagonal: Tensor | None = None

    @property
    def lost(self) -> float:
        """Largest share of energy that one compression dropped (0 while lossless)."""
        return self._stack.lost if self._stack is not None else 0.0

    def add(self, factor: Tensor, diagonal: Tensor, rank: int, weight: float) -> None:
        """Add ``weight * UᵀU``; the rank of the first factor is used for the sum."""
        if self._stack is None or self._diagonal is None:
            self._stack = FactorStack(
                rank if self._limit is None else self._limit // 2, self._limit
            )
            self._diagonal = diagonal * weight
        else:
            require_same_size(self._diagonal, diagonal)
            self._diagonal.add_(diagonal, alpha=weight)
        self._stack.push(factor, weight**0.5)

    def total(self) -> tuple[Tensor, Tensor]:
        """Return the factor and the diagonal of the sum."""
        assert self._stack is not None and self._diagonal is not None
        return self._stack.factor(), self._diagonal

    def mean(self, weight: float) -> tuple[Tensor, Tensor, int]:
        """Return the factor, compressed to the rank of its parts, the diagonal and that rank."""
        factor, diagonal = self.total()
        assert self._stack is not None
        rank, scale = self._stack.rank, 1.0 / weight
        if len(factor) > rank:
            factor = compress(factor, rank)[0]
        return factor * scale**0.5, diagonal * scale, rank

    def copy(self) -> FactorSum:
        """Return an independent copy."""
        copy = FactorSum(self._limit)
        copy._diagonal = None if self._diagonal is None else self._diagonal.clone()
        copy._stack = None if self._stack is None else self._stack.copy()
        return copy
