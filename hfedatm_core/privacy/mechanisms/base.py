r"""The interface of a mechanism: what it clips, its sensitivity, and whom its noise hides.

A mechanism bounds the *contribution* of one example, or of one whole client, to a Gram. Gaussian
noise is then added in proportion to the sensitivity, the largest Frobenius distance between the
releases of two neighbours (:mod:`hfedatm_core.privacy.release`).

*Neighbours* are data sets in which one contribution is set to zero and the number of examples
stays as it is (zero-out adjacency: the add/remove relation with a public count). The number of
examples is public here: it is the averaging weight and travels in the clear. If one contribution
is *replaced* by another, the sensitivity is sqrt(2) times larger and not twice, because the inner
product of two positive semi-definite matrices is never negative.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from torch import Tensor

from hfedatm_core.grams.gram import Gram, PackedGram
from hfedatm_core.privacy.clipping import check_bound
from hfedatm_core.privacy.psd import repair

Adjacency = Literal["zero-out", "replace"]
Hidden = Literal["none", "example", "client"]
"""The contribution that noise hides; each value hides more than the one before."""


@dataclass(frozen=True)
class Mechanism(ABC):
    """Base of all mechanisms. A mechanism's fields are its settings, each ``privacy.<field>``.

    Parameters
    ----------
    clip
        The bound of one contribution, per Gram.
    """

    clip: float = 1.0

    hides: ClassVar[Hidden]
    """The contribution that the noise hides."""
    whom: ClassVar[str] = ""
    """The same in words."""
    released: ClassVar[Literal["sum", "mean"]] = "mean"
    """Whether noise is added to the sum over all examples or to their mean.

    A sum is divided by the public number of examples afterwards.
    """
    clips_examples: ClassVar[bool] = False
    """Whether the rows of each example must be clipped while Grams are collected."""

    def __post_init__(self) -> None:
        check_bound(self.clip)

    @abstractmethod
    def bounded(self, gram: PackedGram, examples: int) -> Tensor:
        """Return the upper triangle of the matrix to release, in float64 and within the bound.

        Raise ``ValueError`` for a Gram that cannot be brought within the bound.
        """

    @abstractmethod
    def largest(self, dim: int) -> float:
        """Return the largest Frobenius norm of one contribution to a Gram of ``dim`` features."""

    # The following properties are derived from the fields above.

    @property
    def noised(self) -> bool:
        """Whether the client adds noise to its Grams."""
        return self.hides != "none"

    @property
    def example_clip(self) -> float | None:
        """The bound of an example's rows while Grams are collected, if they are to be clipped."""
        return self.clip if self.clips_examples else None

    def sensitivity(self, dim: int, adjacency: Adjacency = "zero-out") -> float:
        """Return the largest Frobenius distance between the releases of two neighbours."""
        return self.largest(dim) * _apart(adjacency)

    def divisor(self, examples: int) -> int:
        """Return the factor that turns a noised release into the mean that is sent."""
        return examples if self.released == "sum" else 1

    @property
    def weights(self) -> Literal["examples", "uniform"] | None:
        """The weighting of Grams that a secure sum requires; None if any weighting is right.

        The noise of the sum hides all clients equally only if all contribute equally to the sum.
        """
        if not self.noised:
            return None
        return "examples" if self.released == "sum" else "uniform"

    def hides_at_least(self, hidden: Hidden) -> bool:
        """Whether this mechanism hides as much as an owner asks for."""
        order = get_args(Hidden)
        return order.index(self.hides) >= order.index(hidden)

    @property
    def change_by_one_example(self) -> Adjacency:
        """The adjacency for one example, which may turn a client's Gram into any other."""
        return "replace" if self.hides == "client" else "zero-out"

    @property
    def sigma_of_one_example(self) -> float:
        """The share of the noise multiplier that counts when single examples are accounted for."""
        return 1 / _apart(self.change_by_one_example)

    def repaired(self, mean: Gram) -> Gram:
        """Return the repaired mean of released Grams: the noise leaves the mean indefinite."""
        return repair(mean) if self.noised else mean


def _apart(adjacency: Adjacency) -> float:
    return math.sqrt(2) if adjacency == "replace" else 1.0
