"""RegMean of grouped convolutions: one small linear system per group."""

from __future__ import annotations

import torch
from torch import Tensor

from hfedatm_core.grams.grouped import GroupedGram


class GroupedSolver:
    """Solves ``X_g (S_g + λ I) = R_g + λ M_g`` for all groups at once."""

    note = ""

    def __init__(self, gram: GroupedGram, shift: float) -> None:
        self._shift = shift
        self._blocks = gram.dense().double()
        torch.diagonal(self._blocks, dim1=1, dim2=2).add_(shift)

    def solve(self, product: Tensor, mean: Tensor) -> Tensor | None:
        """Return ``X`` for all rows of the layer; ``None`` if a system is singular."""
        right = product.double().add(mean.double(), alpha=self._shift)
        rows = right.view(len(self._blocks), -1, self._blocks.shape[1])
        solution, info = torch.linalg.solve_ex(self._blocks, rows.transpose(1, 2))
        if bool(info.any()) or not bool(torch.isfinite(solution).all()):
            return None
        found: Tensor = solution.transpose(1, 2).reshape(right.shape)
        return found
