"""Hide a client with the clipping of the HFedATM paper, and with the noise this clipping needs.

A spectral norm of S only bounds the Frobenius norm by S * sqrt(rank). Noise scaled to S, as in the
paper, would be too small by sqrt(rank).

Nguyen et al., "HFedATM: Hierarchical Federated Domain Generalization via Optimal Transport and
Regularized Mean Aggregation", arXiv:2508.05135.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from hfedatm_core.grams.gram import PackedGram
from hfedatm_core.grams.triangle import pack
from hfedatm_core.privacy.clipping import clip_spectral
from hfedatm_core.privacy.mechanisms.base import Mechanism


@dataclass(frozen=True)
class Paper(Mechanism):
    """The client's Gram, its spectral norm clipped to ``clip``.

    Parameters
    ----------
    rank
        Number of largest eigenvalues that are kept; 0 keeps all.
    """

    rank: int = 0

    hides = "client"
    whom = "one client's Gram"

    def bounded(self, gram: PackedGram, examples: int) -> Tensor:
        """Return the Gram with its spectrum cut and scaled down if it is too large."""
        return pack(clip_spectral(gram.dense().double(), self.clip, self.rank or None))

    def largest(self, dim: int) -> float:
        """Return S times the root of the rank."""
        return self.clip * math.sqrt(min(self.rank or dim, dim))
