"""Real numbers as integers modulo 2^bits, in which masks cancel exactly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hfedatm_core.secagg.errors import SecureAggregationError

Ring = npt.NDArray[np.unsignedinteger]


@dataclass(frozen=True)
class FixedPoint:
    r"""Round to multiples of :math:`2^{-fraction}` in the ring of integers modulo :math:`2^{bits}`.

    A sum of n vectors differs from the exact sum by at most :math:`n\,2^{-fraction-1}` per entry,
    and holds values up to :math:`2^{bits-1-fraction}`: by default an error below n * 1.2e-10 and
    sums up to 2.1e9.
    """

    bits: int = 64
    fraction: int = 32

    def __post_init__(self) -> None:
        if self.bits not in (32, 64):
            raise ValueError(f"bits must be 32 or 64, got {self.bits}")
        if not 0 <= self.fraction < self.bits - 1:
            raise ValueError(f"fraction must be in [0, {self.bits - 2}], got {self.fraction}")

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """The little-endian unsigned integer type of the ring."""
        return np.dtype(f"<u{self.bits // 8}")

    def limit(self, terms: int) -> float:
        """Return the largest magnitude of one of ``terms`` numbers whose sum cannot overflow."""
        return float(2 ** (self.bits - 1 - self.fraction) / terms)

    def encode(self, values: npt.ArrayLike, terms: int) -> Ring:
        """Return ``values`` in the ring, or an error if ``terms`` such vectors might overflow."""
        exact = np.asarray(values, dtype=np.float64)
        if exact.ndim != 1:
            raise SecureAggregationError(f"expected one flat vector, got shape {exact.shape}")
        if not np.isfinite(exact).all():
            raise SecureAggregationError("the vector holds NaN or infinite entries")
        largest = float(np.abs(exact).max(initial=0.0))
        # Half a unit is left for rounding.
        if largest * 2.0**self.fraction + 0.5 >= 2.0 ** (self.bits - 1) / terms:
            raise SecureAggregationError(
                f"an entry of size {largest:.4g} does not fit: a sum of {terms} vectors in "
                f"{self.bits} bits with {self.fraction} fraction bits takes entries below "
                f"{self.limit(terms):.4g}. Scale the vector down or use fewer fraction bits."
            )
        signed = np.rint(exact * 2.0**self.fraction).astype(f"<i{self.bits // 8}")
        return signed.view(self.dtype)

    def decode(self, total: Ring) -> npt.NDArray[np.float64]:
        """Return the real numbers of a sum in the ring."""
        signed = total.astype(self.dtype).view(f"<i{self.bits // 8}")
        return signed.astype(np.float64) * 2.0**-self.fraction
