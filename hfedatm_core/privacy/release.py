"""What a client may send of its Grams: clipped, noised, and repaired by whoever averages them.

Every released Gram is one Gaussian mechanism with noise ``sigma x sensitivity``, whichever way it
is clipped. Several layers in several rounds are several releases and compose in the
:class:`~hfedatm_core.privacy.accounting.Ledger`. Layers that share one Gram are one release.

**What example-level noise protects.** Activations depend on the data twice: through the example and
through the weights the client trained on it. The sensitivity c^2 holds for given weights. The
guarantee is therefore about what a Gram tells *beyond the weights*, and complete only when the
weights are private too (DP-SGD), over which the releases then compose. Client-level clipping bounds
the whole Gram, however it came about.

Together with DP-SGD, which speaks about one example, use ``adjacency="replace"`` with ``client``
and ``paper``: one example may change a whole client's Gram from any value to any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hfedatm_core.grams.by_layer import distinct
from hfedatm_core.grams.gram import Gram, PackedGram
from hfedatm_core.grams.triangle import pack
from hfedatm_core.privacy.accounting import Ledger
from hfedatm_core.privacy.clipping import (
    Adjacency,
    Mechanism,
    clip_frobenius,
    clip_spectral,
    sensitivity,
)
from hfedatm_core.privacy.noise import NoiseSource, shared_noise_std, triangle_noise
from hfedatm_core.privacy.psd import nearest_psd

_ROUNDING = 1e-4  # of a float32 trace, generously


class GramNotReleasableError(ValueError):
    """A Gram must not leave the client; the text names the layer and the fix."""


@dataclass(frozen=True)
class GramRelease:
    """How a client's Grams are made private.

    Attributes
    ----------
    mechanism
        ``example``, ``client`` or ``paper``, see :mod:`hfedatm_core.privacy.clipping`.
    clip
        The bound c, C or S of that mechanism.
    sigma
        Noise multiplier: the noise's standard deviation is ``sigma`` x sensitivity.
    rank
        For ``paper``: eigenvalues kept, which bounds the rank. The dimension when not given.
    honest_survivors
        With secure aggregation, how many clients the noise of the sum is shared out to.
    adjacency
        What ``epsilon`` is about: one contribution set to zero, or replaced by another.
    """

    mechanism: Mechanism
    clip: float
    sigma: float
    rank: int | None = None
    honest_survivors: int = 1
    adjacency: Adjacency = "zero-out"

    def noise_std(self, dim: int) -> float:
        """Return the standard deviation of this client's noise on a Gram of ``dim`` features."""
        bound = sensitivity(
            self.mechanism, self.clip, dim, rank=self.rank, adjacency=self.adjacency
        )
        return shared_noise_std(self.sigma * bound, self.honest_survivors)

    def cost(self, grams: Mapping[str, Gram]) -> Ledger:
        """Return what releasing these Grams spends: one Gaussian release per distinct Gram."""
        return Ledger().spend_gaussian(self.sigma, len(distinct(grams)))

    def privatise(
        self, grams: Mapping[str, Gram], num_examples: int, source: NoiseSource
    ) -> dict[str, Gram]:
        """Return the Grams to send. They are symmetric and, by the noise, in general not PSD.

        With ``example``, the *sum* over rows is noised and divided by ``num_examples``, which is
        public, and not by the number of rows, which for text would tell how long the examples are.
        The result's ``rows`` is ``num_examples`` in every mechanism, for the same reason.

        Parameters
        ----------
        grams
            By layer. For ``example`` they must have been collected with ``clip`` at this bound.
        num_examples
            Examples behind the Grams.
        source
            Where the noise comes from.
        """
        released: dict[str, Gram] = {}
        for layers, gram in distinct(grams).items():
            noised = self._privatise(layers[0], gram, num_examples, source)
            released |= dict.fromkeys(layers, noised)
        return {layer: released[layer] for layer in grams}

    def _privatise(
        self, layer: str, gram: Gram, num_examples: int, source: NoiseSource
    ) -> PackedGram:
        if not isinstance(gram, PackedGram):
            raise GramNotReleasableError(
                f"the Gram of layer {layer!r} ({gram.dim} features) is in factor form, for which "
                f"there is no noise mechanism. Raise gram-max-dim to {gram.dim} (the Gram then "
                f"takes {gram.dim * (gram.dim + 1) * 2 / 1e6:.0f} MB) or use a narrower model."
            )
        if num_examples < 1:
            raise GramNotReleasableError(f"layer {layer!r}: a Gram needs at least one example")
        if not gram.is_finite():
            raise GramNotReleasableError(
                f"the Gram of layer {layer!r} holds NaN or infinite values: training diverged"
            )
        noise = triangle_noise(gram.dim, self.noise_std(gram.dim), source)
        if self.mechanism == "example":
            self._check_clipped(layer, gram, num_examples)
            released = (gram.triangle.double() * gram.rows + noise) / num_examples
        elif self.mechanism == "client":
            released = pack(clip_frobenius(gram.dense().double(), self.clip)) + noise
        else:
            released = pack(clip_spectral(gram.dense().double(), self.clip, self.rank)) + noise
        return PackedGram(released.to(gram.dtype), num_examples)

    def _check_clipped(self, layer: str, gram: PackedGram, num_examples: int) -> None:
        """Refuse a Gram whose trace shows that its examples were not clipped."""
        energy = float(gram.diagonal().double().sum()) * gram.rows
        if energy > num_examples * self.clip**2 * (1 + _ROUNDING):
            raise GramNotReleasableError(
                f"the Gram of layer {layer!r} was not collected with clip={self.clip:g}: its "
                f"examples have a mean square norm of {energy / num_examples:.4g}"
            )


def repair(gram: Gram) -> Gram:
    """Return the nearest positive semi-definite Gram.

    Repair once, after the noised Grams of all clients were averaged: it costs no privacy, and the
    noise has mostly cancelled by then. Shrinkage and ridge come after it. Grams in factor form are
    positive semi-definite already.
    """
    if not isinstance(gram, PackedGram):
        return gram
    return PackedGram(pack(nearest_psd(gram.dense())), gram.rows)
