"""Running sums and means of Gram matrices, one reply in memory at a time."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hfedatm_core.grams.by_layer import regroup
from hfedatm_core.grams.gram import MIXED_FORMS, FactorGram, Gram, PackedGram
from hfedatm_core.grams.grouped import GroupedGram
from hfedatm_core.grams.low_rank import FactorSum
from hfedatm_core.grams.triangle import TriangleSum


class GramSum:
    """Running sum ``Σ w_k G_k`` that stores one matrix, however many are added.

    ``limit`` is passed to :class:`FactorSum`.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.weight = 0.0
        self.rows = 0
        self._limit = limit
        self._form: type[Gram] = PackedGram
        self._sum: TriangleSum | FactorSum | None = None

    @property
    def lost(self) -> float:
        """Largest share of energy that one compression dropped (0 while lossless)."""
        return self._sum.lost if isinstance(self._sum, FactorSum) else 0.0

    def add(self, gram: Gram, weight: float = 1.0) -> None:
        """Add ``weight * gram``."""
        if not 0.0 <= weight < float("inf"):
            raise ValueError(f"the weight of a Gram must be finite and ≥ 0, got {weight}")
        if self._sum is None:
            self._sum = FactorSum(self._limit) if isinstance(gram, FactorGram) else TriangleSum()
            self._form = type(gram)
        if type(gram) is not self._form:
            raise ValueError(MIXED_FORMS)
        if isinstance(gram, PackedGram) and isinstance(self._sum, TriangleSum):
            self._sum.add(gram.triangle, weight)
        elif isinstance(gram, GroupedGram) and isinstance(self._sum, TriangleSum):
            self._sum.add(gram.blocks, weight)
        elif isinstance(gram, FactorGram) and isinstance(self._sum, FactorSum):
            self._sum.add(gram.factor, gram.diagonal(), gram.rank, weight)
        else:
            raise ValueError(MIXED_FORMS)
        self.weight += weight
        self.rows += gram.rows

    def total(self) -> Gram:
        """Return the sum."""
        if self._sum is None:
            raise ValueError("no Gram has been added")
        if isinstance(self._sum, TriangleSum):
            return self._whole(self._sum.total())
        return FactorGram(*self._sum.total(), self.rows)

    def mean(self) -> Gram:
        """Return ``Σ w_k G_k / Σ w_k``; a factor is compressed to the rank of its parts."""
        if self._sum is None:
            raise ValueError("no Gram has been added")
        if self.weight <= 0.0:
            raise ValueError("the weights of the Grams sum to zero")
        if isinstance(self._sum, TriangleSum):
            return self._whole(self._sum.total() * (1.0 / self.weight))
        factor, diagonal, rank = self._sum.mean(self.weight)
        return FactorGram(factor, diagonal, self.rows, rank)

    def copy(self) -> GramSum:
        """Return an independent copy."""
        copy = GramSum(self._limit)
        copy.weight, copy.rows, copy._form = self.weight, self.rows, self._form
        copy._sum = None if self._sum is None else self._sum.copy()
        return copy

    def _whole(self, total: Tensor) -> Gram:
        return (GroupedGram if self._form is GroupedGram else PackedGram)(total, self.rows)


class GramAccumulator:
    """Weighted mean of the Grams of many children, layer by layer: ``Σ w_k G_k / Σ w_k``.

    With equal weights this is the station's mean over its clients. Layers that share one Gram in
    every reply share one running sum and one result. If a reply lacks a layer, the layer is
    averaged over the replies that have it.
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
