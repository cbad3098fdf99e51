"""Ways to solve ``X (S + λ I) = R + λ M`` for a Gram sum ``S``, from the fastest to the safest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from scipy.linalg import get_lapack_funcs
from torch import Tensor

from hfedatm_core.grams.gram import FactorGram, Gram
from hfedatm_core.grams.grouped import GroupedGram
from hfedatm_core.regmean.grouped import GroupedSolver

# Largest relative residual of an accepted solution, by type of the arithmetic.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
# The Woodbury identity divides by the ridge: below this relative ridge it loses its digits.
_FLOOR = {torch.float32: 1e-6, torch.float64: 1e-10}
_REFINEMENTS = 3
_PROBES = 4


class LinearSolver(Protocol):
    """A solver for a block of rows."""

    note: str
    """A note for the user about the method; empty in the usual case."""

    def solve(self, product: Tensor, mean: Tensor) -> Tensor | None:
        """Return ``X`` for rows ``R``, ``M``; ``None`` if the solution is not accurate."""


class CheckedSolver(ABC):
    """A factorised system whose solutions are checked by their residual."""

    note = ""

    def __init__(self, shift: float, dtype: torch.dtype) -> None:
        self.shift = shift
        self.dtype = dtype

    def solve(self, product: Tensor, mean: Tensor) -> Tensor | None:
        """Return ``X``, refined if necessary; ``None`` if its residual stays too large."""
        right = product.to(self.dtype).add(mean.to(self.dtype), alpha=self.shift)
        solution = self._invert(right)
        for _ in range(_REFINEMENTS):
            error = self._probe(solution, right)
            if error <= _TOLERANCE[self.dtype]:
                return solution
            if self.dtype != torch.float64 or error > 0.1:
                return None
            solution += self._invert(right - self._apply(solution))
        return solution if self._probe(solution, right) <= _TOLERANCE[self.dtype] else None

    def _probe(self, solution: Tensor, right: Tensor) -> float:
        """Return the relative residual of a few random combinations of the rows."""
        generator = torch.Generator().manual_seed(0)
        mix = torch.randn(_PROBES, len(right), generator=generator, dtype=self.dtype)
        wanted = mix @ right
        error = float(torch.linalg.norm(self._apply(mix @ solution) - wanted))
        scale = float(torch.linalg.norm(wanted))
        if error != error or scale != scale:
            return float("inf")
        return error / scale if scale > 0.0 else error

    @abstractmethod
    def _invert(self, right: Tensor) -> Tensor: ...

    @abstractmethod
    def _apply(self, solution: Tensor) -> Tensor: ...


class CholeskySolver(CheckedSolver):
    """``S`` as a full matrix, factorised by Cholesky."""

    def __init__(self, gram: Gram, shift: float, dtype: torch.dtype) -> None:
        super().__init__(shift, dtype)
        self._matrix = gram.dense().to(dtype)
        self._matrix.diagonal().add_(shift)
        # SciPy's LAPACK takes half the time of torch's for wide layers. A symmetric matrix equals
        # its transpose, which LAPACK, in column order, reads without a copy.
        potrf, self._potrs = get_lapack_funcs(("potrf", "potrs"), dtype=self._matrix.numpy().dtype)
        self._lower, info = potrf(self._matrix.numpy().T, lower=True, clean=False)
        if info != 0:
            raise ValueError("the matrix is not positive definite")

    def _invert(self, right: Tensor) -> Tensor:
        return torch.from_numpy(self._potrs(self._lower, right.numpy().T, lower=True)[0].T)

    def _apply(self, solution: Tensor) -> Tensor:
        return solution @ self._matrix


class WoodburySolver(CheckedSolver):
    """``S = D + UᵀU`` with few rows ``U``, by the Woodbury identity; nothing ``d × d`` is formed.

    ``B (D + UᵀU)⁻¹ = (B − B D⁻¹Uᵀ (I + U D⁻¹ Uᵀ)⁻¹ U) D⁻¹``
    """

    def __init__(self, gram: FactorGram, shift: float, dtype: torch.dtype) -> None:
        super().__init__(max(shift, _FLOOR[dtype] * float(gram.diagonal().mean())), dtype)
        self._factor = gram.factor.to(dtype)
        remainder = gram.diagonal().to(dtype) - self._factor.square().sum(0)
        self._diagonal = remainder.clamp(min=0.0).add_(self.shift)
        inner = (self._factor / self._diagonal) @ self._factor.T
        inner.diagonal().add_(1.0)
        self._lower, info = torch.linalg.cholesky_ex(inner)
        if int(info) != 0:
            raise ValueError("the matrix is not positive definite")

    def _invert(self, right: Tensor) -> Tensor:
        inner = (right / self._diagonal) @ self._factor.T
        inner = torch.cholesky_solve(inner.T, self._lower).T
        return torch.addmm(right, inner, self._factor, alpha=-1.0).div_(self._diagonal)

    def _apply(self, solution: Tensor) -> Tensor:
        return (solution @ self._factor.T) @ self._factor + solution * self._diagonal


class RepairedSolver:
    """Solves with the eigenvectors of ``S``; directions without energy keep the mean weight."""

    note = "the sum of Grams was not positive definite and has been repaired"

    def __init__(self, gram: Gram, shift: float) -> None:
        self._shift = shift
        energy, self._vectors = torch.linalg.eigh(gram.dense().double())
        noise = float(energy.abs().max()) * len(energy) * torch.finfo(gram.dtype).eps
        self._energy = torch.where(energy > noise, energy, torch.zeros_like(energy))

    def solve(self, product: Tensor, mean: Tensor) -> Tensor | None:
        """Return ``X``, computed in the basis of the eigenvectors."""
        projected = product.double() @ self._vectors
        kept = mean.double() @ self._vectors
        solved = (projected + self._shift * kept) / (self._energy + self._shift)
        solution = torch.where(self._energy > 0.0, solved, kept) @ self._vectors.T
        return solution if bool(torch.isfinite(solution).all()) else None


def solver_attempts(
    gram: Gram, shift: float, dtype: torch.dtype
) -> list[Callable[[], LinearSolver | None]]:
    """Return the solvers to try for ``gram + shift I``, in this order."""
    if isinstance(gram, GroupedGram):
        return [partial(GroupedSolver, gram, shift)]
    types = [dtype] if dtype == torch.float64 else [torch.float32, torch.float64]
    if isinstance(gram, FactorGram) and len(gram.factor) < gram.dim:
        return [partial(_made, WoodburySolver, gram, shift, kind) for kind in types]
    attempts: list[Callable[[], LinearSolver | None]] = [
        partial(_made, CholeskySolver, gram, shift, kind) for kind in types
    ]
    return [*attempts, partial(RepairedSolver, gram, shift)]


def _made(
    build: Callable[..., LinearSolver], gram: Gram, shift: float, dtype: torch.dtype
) -> LinearSolver | None:
    try:
        return build(gram, shift, dtype)
    except ValueError:
        return None
