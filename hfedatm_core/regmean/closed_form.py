"""RegMean: the weight that reproduces every model's outputs on that model's own inputs best."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hfedatm_core.averaging import MeanAccumulator
from hfedatm_core.grams.gram import Gram
from hfedatm_core.grams.sums import GramSum
from hfedatm_core.regmean.linear_solvers import LinearSolver, solver_attempts

# Up to this width float64 costs next to nothing.
_DOUBLE_DIM = 512
# Rows of stacked factors at which the sum is compressed, so that memory does not grow for ever.
_FACTOR_ROWS = 4096
# Numbers of one right-hand side solved at a time.
_CHUNK = 2**24


@dataclass(frozen=True)
class Solution:
    """Merged weights of the layers that share an input, and how they were found."""

    weights: dict[str, Tensor]
    how: Literal["regmean", "averaged"]
    reason: str = ""


class RegMeanAccumulator:
    """Streaming RegMean of layers that share one input, see :func:`regmean`.

    It holds ``S = Σ γ_k G_k`` and, per layer, ``R = Σ γ_k (W_k − P) G_k`` with a fixed pivot ``P``
    (any weight near the result). Solving for the correction to ``P`` keeps the digits that the
    difference of nearly equal models would lose, and ``R`` needs no second pass.

    Parameters
    ----------
    pivots
        ``P`` per layer, ``out × in``.
    """

    def __init__(self, pivots: Mapping[str, Tensor]) -> None:
        self._pivots = dict(pivots)
        self._gram = GramSum(limit=_FACTOR_ROWS)
        self._product: Tensor | None = None  # R of all layers, one below the other

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers."""
        return tuple(self._pivots)

    def add(self, weights: Mapping[str, Tensor], gram: Gram, coefficient: float = 1.0) -> None:
        """Add one model's weights with the Gram of the input they share."""
        for name, pivot in self._pivots.items():
            if weights[name].shape != pivot.shape or pivot.ndim != 2 or pivot.shape[1] != gram.dim:
                raise ValueError(
                    f"layer '{name}': weight of shape {tuple(weights[name].shape)} and Gram of "
                    f"{gram.dim} features do not fit the reference of shape {tuple(pivot.shape)}"
                )
        self._gram.add(gram, coefficient)
        if self._product is None:
            rows = sum(len(pivot) for pivot in self._pivots.values())
            dtype = _work_dtype(next(iter(self._pivots.values())), gram)
            self._product = torch.zeros(rows, gram.dim, dtype=dtype)
        moved = [weights[n].data_ptr() != pivot.data_ptr() for n, pivot in self._pivots.items()]
        if any(moved):  # the pivot's own model adds nothing
            dtype = self._product.dtype
            parts = [weights[n].to(dtype) - pivot.to(dtype) for n, pivot in self._pivots.items()]
            differences = torch.cat(parts) if len(parts) > 1 else parts[0]
            gram.add_product(self._product, differences, coefficient)

    def take(self, layers: Sequence[str]) -> RegMeanAccumulator:
        """Return an independent accumulator for some of the layers."""
        part = RegMeanAccumulator({name: self._pivots[name] for name in layers})
        part._gram = self._gram.copy()
        if self._product is not None:
            products = self._by_layer(self._product)
            part._product = torch.cat([products[name] for name in layers])
        return part

    def _by_layer(self, stacked: Tensor) -> dict[str, Tensor]:
        parts = torch.split(stacked, [len(pivot) for pivot in self._pivots.values()])
        return dict(zip(self._pivots, parts, strict=True))

    def solve(self, means: Mapping[str, Tensor], ridge: float = 1e-6) -> Solution:
        """Return the merged weights given ``W̄`` per layer; the accumulator is emptied."""
        if not ridge >= 0.0:
            raise ValueError(f"ridge must be ≥ 0, got {ridge}")
        total, product, lost = self._gram.total(), self._product, self._gram.lost
        assert product is not None  # there is one wherever there is a sum of Grams
        self._gram, self._product = GramSum(limit=_FACTOR_ROWS), None
        if not total.is_finite():
            return _averaged(means, "the sum of Grams is not finite")
        if ridge == float("inf"):
            return _averaged(means, "the ridge is infinite")
        level = float(total.diagonal().double().mean())
        if not level > 0.0:
            return _averaged(means, "the mean diagonal of the Grams is not positive")
        shift = ridge * level
        attempts = solver_attempts(total, shift, product.dtype)
        del total
        notes = [f"factors compressed, {lost:.1e} of the energy lost"] if lost > 1e-12 else []
        for attempt in attempts:
            solver = attempt()
            if solver is None:
                continue
            solved: dict[str, Tensor] = {}
            for name, rows in self._by_layer(product).items():
                merged = _merged(solver, rows, self._pivots[name], means[name])
                if merged is None:
                    break
                solved[name] = merged
            else:
                return Solution(solved, "regmean", "; ".join(filter(None, [*notes, solver.note])))
        return _averaged(means, "the sum of Grams is singular or indefinite beyond repair")


def regmean(
    weights: Sequence[Tensor],
    grams: Sequence[Gram],
    coefficients: Sequence[float] | None = None,
    ridge: float = 1e-6,
) -> Tensor:
    """Merge weights of one Linear layer in closed form.

    The result minimises ``Σ γ_k tr((W − W_k) G_k (W − W_k)ᵀ) + λ ‖W − W̄‖²``, that is

        (Σ γ_k G_k + λ I) Wᵀ = Σ γ_k G_k W_kᵀ + λ W̄ᵀ,     W̄ = Σ γ_k W_k / Σ γ_k,

    with ``λ = ridge ×`` the mean diagonal of ``Σ γ_k G_k``. The ridge stands on both sides: a dead
    input feature gets the mean weight, and a large ridge gives the mean. Where the system cannot
    be solved the mean is returned with a warning.

    Parameters
    ----------
    weights
        ``W_k``, each ``out × in``.
    grams
        ``G_k``, each over ``in`` features.
    coefficients
        ``γ_k ≥ 0``; 1 each unless given.
    ridge
        Relative ridge.

    References
    ----------
    Jin et al., "Dataless Knowledge Fusion by Merging Weights of Language Models", ICLR 2023.
    """
    gammas = [1.0] * len(weights) if coefficients is None else list(coefficients)
    if not weights or not len(weights) == len(grams) == len(gammas):
        raise ValueError(
            f"regmean needs as many Grams and coefficients as weights, at least one; got "
            f"{len(weights)} weights, {len(grams)} Grams, {len(gammas)} coefficients"
        )
    accumulator = RegMeanAccumulator({"weight": weights[0]})
    mean = MeanAccumulator()
    for number, (weight, gram, gamma) in enumerate(zip(weights, grams, gammas, strict=True)):
        mean.add({"weight": weight}, gamma, f"model {number}")
        accumulator.add({"weight": weight}, gram, gamma)
    solution = accumulator.solve(mean.result(), ridge)
    if solution.how == "averaged" and ridge != float("inf"):
        warnings.warn(f"regmean returns the mean: {solution.reason}", stacklevel=2)
    return solution.weights["weight"]


def _merged(solver: LinearSolver, product: Tensor, pivot: Tensor, mean: Tensor) -> Tensor | None:
    """Solve for one layer, a few output rows at a time."""
    merged = torch.empty_like(mean)
    step = max(1, _CHUNK // mean.shape[1])
    for i in range(0, len(mean), step):
        rows = slice(i, i + step)
        base = pivot[rows].to(product.dtype)
        correction = solver.solve(product[rows], mean[rows].to(product.dtype) - base)
        if correction is None:
            return None
        merged[rows] = correction + base
    return merged


def _averaged(means: Mapping[str, Tensor], reason: str) -> Solution:
    return Solution(dict(means), "averaged", reason)


def _work_dtype(weight: Tensor, gram: Gram) -> torch.dtype:
    if torch.float64 in (weight.dtype, gram.dtype) or gram.dim <= _DOUBLE_DIM:
        return torch.float64
    return torch.float32
