r"""Hide one example: its rows are clipped together, and the sum over all examples is noised.

``collect_grams(..., clip=c)`` clips the examples while it reads the rows: it scales the rows of one
example (tokens, patches) together to :math:`\sum_t \|x_t\|^2 \le c^2`, which bounds
:math:`\|\sum_t x_t x_t^\top\|_F` by c^2.

**What it protects.** Activations depend on the data twice: through the example and through the
weights the client trained on it. The sensitivity c^2 holds for given weights. The guarantee
therefore covers what a Gram reveals *beyond the weights*. It is complete only when the weights are
private too (DP-SGD); the releases of both then compose.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hfedatm_core.grams.gram import PackedGram
from hfedatm_core.privacy.mechanisms.base import Mechanism

_ROUNDING = 1e-4  # a generous bound on the rounding of a float32 trace


@dataclass(frozen=True)
class Example(Mechanism):
    """The sum of ``x xᵀ``, each example's rows clipped to norm ``clip``."""

    hides = "example"
    whom = "one example"
    released = "sum"
    clips_examples = True

    def bounded(self, gram: PackedGram, examples: int) -> Tensor:
        """Return the sum over rows; refuse a Gram whose trace shows that nothing was clipped."""
        energy = float(gram.diagonal().double().sum()) * gram.rows
        if energy > examples * self.clip**2 * (1 + _ROUNDING):
            raise ValueError(
                f"was not collected with clip={self.clip:g}: its examples have a mean square norm "
                f"of {energy / examples:.4g}"
            )
        return gram.triangle.double() * gram.rows

    def largest(self, dim: int) -> float:
        """Return c²."""
        return self.clip**2
