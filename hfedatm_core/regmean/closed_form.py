"""RegMean: the weight that reproduces every model's outputs on that model's own inputs best."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from hfedatm_core.averaging import MeanAccumulator
from hfedatm_core.grams.definite import is_semidefinite
from hfedatm_core.grams.gram import Gram
from hfedatm_core.grams.grouped import GroupedGram
from hfedatm_core.grams.sums import GramSum
from hfedatm_core.regmean.linear_solvers import LinearSolver, solver_attempts

# Up to this width float64 costs hardly any time.
_DOUBLE_DIM = 512
# Number of stacked factor rows at which the sum is compressed, which bounds the memory.
_FACTOR_ROWS = 4096
# A feature whose energy is below this share of the largest energy is dead.
_DEAD = 1e-20
# Relative error of the entries of a Gram that was summed in float32.
_SUMMED = 1e-5
# Numbers of one right-hand side solved at a time.
_CHUNK = 2**24


RidgeScale = Literal["mean", "feature"]


@dataclass(frozen=True)
class Solution:
    """Merged weights of the layers that share an input, and the method that found them.

    ``total`` is the sum of Grams, if it was asked for, and ``shift`` the ridge.
    """

    weights: dict[str, Tensor]
    how: Literal["regmean", "averaged"]
    reason: str = ""
    total: Gram | None = None
    shift: float = 0.0


class RegMeanAccumulator:
    """Streaming RegMean of layers that share one input, see :func:`regmean`.

    It stores ``S = Σ γ_k G_k`` and, per layer, ``R = Σ γ_k (W_k − P) G_k`` with a fixed pivot ``P``
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
        product = self._product_for(gram)
        if not all(_is_same(weights[name], pivot) for name, pivot in self._pivots.items()):
            dtype = product.dtype
            parts = [weights[n].to(dtype) - pivot.to(dtype) for n, pivot in self._pivots.items()]
            differences = torch.cat(parts) if len(parts) > 1 else parts[0]
            gram.add_product(product, differences, coefficient)

    def add_mean(self, products: Mapping[str, Tensor], gram: Gram, coefficient: float) -> None:
        """Add what `mean` returned elsewhere, for the same pivots; ``coefficient`` is ``Σ γ_k``."""
        for name, pivot in self._pivots.items():
            if products[name].shape != pivot.shape or pivot.shape[1] != gram.dim:
                raise ValueError(
                    f"layer '{name}': product of shape {tuple(products[name].shape)} and Gram of "
                    f"{gram.dim} features do not fit the reference of shape {tuple(pivot.shape)}"
                )
        self._gram.add(gram, coefficient)
        total = self._product_for(gram)
        parts = [products[name].to(total.dtype) for name in self._pivots]
        total.add_(torch.cat(parts), alpha=coefficient)

    def mean(self) -> tuple[Gram, dict[str, Tensor]]:
        """Return ``S / Σ γ_k`` and per layer ``R / Σ γ_k``."""
        gram = self._gram.mean()
        return gram, self._by_layer(self._product_for(gram) / self._gram.weight)

    def _product_for(self, gram: Gram) -> Tensor:
        if self._product is None:
            rows = sum(len(pivot) for pivot in self._pivots.values())
            dtype = work_dtype(next(iter(self._pivots.values())), gram)
            self._product = torch.zeros(rows, gram.dim, dtype=dtype)
        return self._product

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

    def solve(
        self,
        means: Mapping[str, Tensor],
        ridge: float = 1e-6,
        ridge_scale: RidgeScale = "mean",
        *,
        keep_total: bool = False,
    ) -> Solution:
        """Return the merged weights given ``W̄`` per layer; the accumulator is emptied."""
        if not ridge >= 0.0:
            raise ValueError(f"ridge must be ≥ 0, got {ridge}")
        if ridge_scale not in get_args(RidgeScale):
            raise ValueError(f"ridge_scale must be 'mean' or 'feature', got {ridge_scale!r}")
        total, product, lost = self._gram.total(), self._product, self._gram.lost
        assert product is not None  # add() sets it together with the sum of Grams
        self._gram, self._product = GramSum(limit=_FACTOR_ROWS), None
        if not total.is_finite():
            return _averaged(means, "the sum of Grams is not finite")
        if ridge == float("inf"):
            return _averaged(means, "the ridge is infinite")
        level = float(total.diagonal().double().mean())
        if not level > 0.0:
            return _averaged(means, "the mean diagonal of the Grams is not positive")
        kept, ridge_of = (total, ridge * level) if keep_total else (None, 0.0)
        units: Tensor | None = None
        if ridge_scale == "feature" and not isinstance(total, GroupedGram):
            # Scale every feature to energy 1, so that one ridge fits all features.
            units = _units(total.diagonal().double(), level)
            total, level = total.scale_features(1 / units), 1.0
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
                merged = _merged(solver, rows, self._pivots[name], means[name], units)
                if merged is None:
                    break
                solved[name] = merged
            else:
                note = "; ".join(filter(None, [*notes, solver.note]))
                return Solution(solved, "regmean", note, kept, ridge_of)
        return _averaged(means, "the sum of Grams is singular or indefinite beyond repair")


def regmean(
    weights: Sequence[Tensor],
    grams: Sequence[Gram],
    coefficients: Sequence[float] | None = None,
    ridge: float = 1e-6,
    ridge_scale: RidgeScale = "mean",
) -> Tensor:
    """Merge weights of one Linear layer in closed form.

    The result minimises ``Σ γ_k tr((W − W_k) G_k (W − W_k)ᵀ) + tr((W − W̄) Λ (W − W̄)ᵀ)``, that is

        (Σ γ_k G_k + Λ) Wᵀ = Σ γ_k G_k W_kᵀ + Λ W̄ᵀ,     W̄ = Σ γ_k W_k / Σ γ_k,

    with ``Λ = λ I`` and ``λ = ridge ×`` the mean diagonal of ``Σ γ_k G_k``. The ridge stands on
    both sides: a dead input feature gets the mean weight, and a large ridge gives the mean. If the
    system cannot be solved, the mean is returned with a warning; a Gram that is not positive
    semi-definite also causes a warning.

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
    ridge_scale
        ``"mean"`` as above. ``"feature"``: ``Λ_ii = ridge × (Σ γ_k G_k)_ii``, so that the ridge of
        features with a large scale does not dominate features with a small scale, and multiplying
        a feature by a number and its weights by the inverse changes nothing.

    References
    ----------
    Jin et al., "Dataless Knowledge Fusion by Merging Weights of Language Models",
    ICLR 2023, arXiv:2212.09849.
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
        if gram.is_finite() and not is_semidefinite(gram, _SUMMED):
            warnings.warn(f"the Gram of model {number} is not positive semi-definite", stacklevel=2)
        mean.add({"weight": weight}, gamma, f"model {number}")
        accumulator.add({"weight": weight}, gram, gamma)
    solution = accumulator.solve(mean.result(), ridge, ridge_scale)
    if solution.how == "averaged" and ridge != float("inf"):
        warnings.warn(f"regmean returns the mean: {solution.reason}", stacklevel=2)
    return solution.weights["weight"]


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors of one shape share their memory; a transpose does not count."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.stride() == other.stride()
        and one.dtype == other.dtype
    )


def _units(energy: Tensor, level: float) -> Tensor:
    """Return the scale of every feature; a dead feature gets the mean scale."""
    dead = energy <= _DEAD * energy.max()
    return torch.where(dead, level, energy).sqrt()


def _merged(
    solver: LinearSolver, product: Tensor, pivot: Tensor, mean: Tensor, units: Tensor | None
) -> Tensor | None:
    """Solve for one layer, a few output rows at a time."""
    merged = torch.empty_like(mean)
    step = max(1, _CHUNK // mean.shape[1])
    for i in range(0, len(mean), step):
        rows = slice(i, i + step)
        base = pivot[rows].to(product.dtype)
        right, apart = product[rows], mean[rows].to(product.dtype) - base
        if units is not None:
            right, apart = (right / units).to(right.dtype), (apart * units).to(right.dtype)
        correction = solver.solve(right, apart)
        if correction is None:
            return None
        merged[rows] = (correction if units is None else correction / units) + base
    return merged


def _averaged(means: Mapping[str, Tensor], reason: str) -> Solution:
    return Solution(dict(means), "averaged", reason)


def work_dtype(weight: Tensor, gram: Gram) -> torch.dtype:
    """Return the type in which the products of a weight with a Gram are summed."""
    if torch.float64 in (weight.dtype, gram.dtype) or gram.dim <= _DOUBLE_DIM:
        return torch.float64
    return torch.float32
