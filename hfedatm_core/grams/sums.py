"""Running sums and means of Gram matrices, one reply in memory at a time."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hfedatm_core.grams.by_layer import regroup
from hfedatm_core.grams.gram import FactorGram, Gram, PackedGram
from hfedatm_core.grams.triangle import FactorStack, compress


class GramSum:
    """Running sum ``Σ w_k G_k`` that holds one matrix, however many are added.

    Factors are stacked; beyond ``limit`` rows (twice their rank unless given) they are compressed.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.weight = 0.0
        self.rows = 0
        self._limit = limit
        self._triangle: Tensor | None = None
        self._stack: FactorStack | None = None
        self._diagonal: Tensor | None = None

    @property
    def lost(self) -> float:
        """Largest share of energy that one compression dropped (0 while lossless)."""
        return self._stack.lost if self._stack is not None else 0.0

    def add(self, gram: Gram, weight: float = 1.0) -> None:
        """Add ``weight * gram``."""
        if not 0.0 <= weight < float("inf"):
            raise ValueError(f"the weight of a Gram must be finite and ≥ 0, got {weight}")
        if isinstance(gram, PackedGram) and self._stack is None:
            if self._triangle is None:
                self._triangle = gram.triangle * weight
            else:
                self._check(self._triangle.numel(), gram.triangle.numel())
                self._triangle.add_(gram.triangle, alpha=weight)
        elif isinstance(gram, FactorGram) and self._triangle is None:
            if self._stack is None or self._diagonal is None:
                rank = gram.rank if self._limit is None else self._limit // 2
                self._stack = FactorStack(rank, self._limit)
                self._diagonal = gram.diagonal() * weight
            else:
                self._check(self._diagonal.numel(), gram.dim)
                self._diagonal.add_(gram.diagonal(), alpha=weight)
            self._stack.push(gram.factor, weight**0.5)
        else:
            raise ValueError("cannot combine a packed Gram with a factored one of the same layer")
        self.weight += weight
        self.rows += gram.rows

    def total(self) -> Gram:
        """Return the sum."""
        if self._triangle is not None:
            return PackedGram(self._triangle, self.rows)
        if self._stack is None or self._diagonal is None:
            raise ValueError("no Gram has been added")
        return FactorGram(self._stack.factor(), self._diagonal, self.rows)

    def mean(self) -> Gram:
        """Return ``Σ w_k G_k / Σ w_k``; a factor is compressed to the rank of its parts."""
        total = self.total()
        if self.weight <= 0.0:
            raise ValueError("the weights of the Grams sum to zero")
        scale = 1.0 / self.weight
        if self._stack is None or not isinstance(total, FactorGram):
            return total * scale
        rank = self._stack.rank
        factor = total.factor if len(total.factor) <= rank else compress(total.factor, rank)[0]
        return FactorGram(factor * scale**0.5, total.diagonal() * scale, self.rows, rank)

    def copy(self) -> GramSum:
        """Return an independent copy."""
        copy = GramSum(self._limit)
        copy.weight, copy.rows = self.weight, self.rows
        copy._triangle = None if self._triangle is None else self._triangle.clone()
        copy._diagonal = None if self._diagonal is None else self._diagonal.clone()
        copy._stack = None if self._stack is None else self._stack.copy()
        return copy

    @staticmethod
    def _check(have: int, got: int) -> None:
        if have != got:
            raise ValueError(f"cannot combine Grams of different sizes ({have} and {got} values)")


class GramAccumulator:
    """Weighted mean of the Grams of many children, layer by layer: ``Σ w_k G_k / Σ w_k``.

    With equal weights this is the station's mean over its clients. Layers that share one Gram in
    every reply share one running sum and one result. A layer that a reply lacks is averaged over
    the replies that have it.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[str, ...], GramSum] = {}

    def add(self, grams: Mapping[str, Gram], weight: float = 1.0) -> None:
        """Add one child's Grams."""
        known = {name for group in self._groups for name in group}
        fresh = tuple(name for name in grams if name not in known)
        if fresh:
            self._groups[fresh] = GramSum()
        owners = {name: id(gram) for name, gram in grams.items()}
        self._groups = regroup(self._groups, owners, lambda total, _: total.copy())
        for group, total in self._groups.items():
            if group[0] in grams:
                try:
                    total.add(grams[group[0]], weight)
                except ValueError as error:
                    raise ValueError(f"layer '{group[0]}': {error}") from None

    def result(self) -> dict[str, Gram]:
        """Return the mean per layer; layers that share an input get the same object."""
        if not self._groups:
            raise ValueError("no Grams have been added")
        means = {group: total.mean() for group, total in self._groups.items()}
        return {name: mean for group, mean in means.items() for name in group}
