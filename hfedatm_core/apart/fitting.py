r"""Correct one layer by what it misses, as far as its inputs tell more than chance.

With the mean :math:`G` of :math:`u u^\top` over :math:`n` inputs, and the mean :math:`R` of
:math:`r u^\top`, where :math:`r` is what the outputs miss, the correction

.. math:: \Delta = R\,(G + \lambda I)^{-1}

leaves :math:`E\|r - \Delta u\|^2 = E\|r\|^2 - \langle R, \Delta\rangle - \lambda\|\Delta\|^2` of
:math:`E\|r\|^2` on these inputs, and more on others. A layer with more inputs than it has seen
examples could learn them all by heart. Generalised cross-validation (Golub, Heath and Wahba, 1979)
estimates from the same sums what is left on inputs that the fit has not seen:

.. math:: \frac{E\|r - \Delta u\|^2}{(1 - t/n)^2}, \qquad
    t = \operatorname{tr} G\,(G + \lambda I)^{-1} .

Ridges are tried from the largest on, as long as the estimate falls: below, where a fit leaves
nothing on its own inputs, the estimate is a ratio of rounding errors. If no ridge beats
:math:`E\|r\|^2`, nothing is corrected.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hfedatm_core.grams.gram import Gram
from hfedatm_core.grams.grouped import GroupedGram
from hfedatm_core.regmean.linear_solvers import LinearSolver, solver_attempts

RIDGES = (10.0, 1.0, 1e-1, 1e-2, 1e-3)
"""The ridges to choose from, relative to the mean diagonal of the Gram."""

_PROBES = 32  # random vectors that estimate a trace


def correction(
    gram: Gram, missing: Tensor, error: float, ridge: float | None = None
) -> Tensor | None:
    """Return what to add to a layer's matrix; ``None`` if nothing, or nothing finite, helps.

    Parameters
    ----------
    gram
        ``E u uᵀ`` of the layer's inputs.
    missing
        ``E r uᵀ``, where ``r`` is what the layer's outputs miss.
    error
        ``E |r|²``, over all outputs together.
    ridge
        Take this one instead of choosing, relative to the mean diagonal. For a convolution in
        groups none is chosen: the least is taken.
    """
    if isinstance(gram, GroupedGram) and ridge is None:
        ridge = RIDGES[-1]  # a filter reads few inputs, of which there are many examples
    scale = float(gram.diagonal().double().mean())
    if not (scale > 0.0 and bool(torch.isfinite(missing).all())):
        return None
    system = RidgeSystem(gram, missing.clone(memory_format=torch.contiguous_format))
    if ridge is not None:
        return system.solve(ridge * scale)
    best, least = None, float("inf")
    for candidate in RIDGES:
        change = system.solve(candidate * scale)
        left = float("inf") if change is None else system.left(change, candidate * scale, error)
        if left >= least:  # smaller ridges fit these inputs better, and others worse
            break
        best, least = change, left
    return best if least < error else None


class RidgeSystem:
    """``Δ (G + λ I) = R`` for several λ."""

    def __init__(self, gram: Gram, missing: Tensor) -> None:
        self._gram, self._missing = gram, missing
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, (_PROBES, gram.dim), generator=generator)
        self._probes = 2.0 * signs.double() - 1.0
        self._solver: LinearSolver | None = None

    def solve(self, shift: float) -> Tensor | None:
        """Return ``Δ``."""
        nothing = torch.zeros_like(self._missing)
        for attempt in solver_attempts(self._gram, shift, torch.float64):
            self._solver = attempt()
            found = None if self._solver is None else self._solver.solve(self._missing, nothing)
            if found is not None and bool(torch.isfinite(found).all()):
                return found
        return None

    def left(self, change: Tensor, shift: float, error: float) -> float:
        """Return what this ``Δ``, the last that was solved for, leaves on other inputs."""
        assert self._solver is not None
        here = error - float((self._missing * change).sum()) - shift * float(change.square().sum())
        images = torch.zeros_like(self._probes)
        self._gram.add_product(images, self._probes)
        solved = self._solver.solve(images, torch.zeros_like(images))
        if solved is None:
            return float("inf")
        used = float((solved * self._probes).sum()) / _PROBES
        free = 1.0 - used / self._gram.rows
        # Rounded sums can say that less than nothing is left: then they say nothing.
        return here / free**2 if free > 0.0 and here > 0.0 else float("inf")
