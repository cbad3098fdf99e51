"""Hide a client: its Gram is clipped as a whole, whatever examples it was collected on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hfedatm_core.grams.gram import PackedGram
from hfedatm_core.grams.triangle import pack
from hfedatm_core.privacy.clipping import clip_frobenius
from hfedatm_core.privacy.mechanisms.base import Mechanism


@dataclass(frozen=True)
class Client(Mechanism):
    """The client's Gram, its Frobenius norm clipped to ``clip``."""

    hides = "client"
    whom = "one client's Gram"

    def bounded(self, gram: PackedGram, examples: int) -> Tensor:
        """Return the Gram, scaled down if it is too large."""
        return pack(clip_frobenius(gram.dense().double(), self.clip))

    def largest(self, dim: int) -> float:
        """Return C."""
        return self.clip
