"""Private Grams: a client clips and noises them, and the node that averages them repairs the mean.

Every released Gram is one Gaussian release with noise ``sigma x sensitivity``, whichever mechanism
clips it. Several layers in several rounds are several releases, which compose in the
:class:`~hfedatm_core.privacy.accounting.Ledger`. Layers that share one Gram are one release.

DP-SGD protects one example. Together with it, use the adjacency that the mechanism names for one
example (``change_by_one_example``): one example may change a whole client's Gram from any value to
any other.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hfedatm_core.grams.by_layer import distinct
from hfedatm_core.grams.gram import Gram, PackedGram
from hfedatm_core.privacy.accounting import Ledger
from hfedatm_core.privacy.mechanisms.base import Adjacency, Mechanism
from hfedatm_core.privacy.noise import NoiseSource, shared_noise_std, triangle_noise

_LOGGER = logging.getLogger(__name__)


class GramNotReleasableError(ValueError):
    """A Gram must not leave the client; the text names the layer and the fix."""


@dataclass(frozen=True)
class GramRelease:
    """The settings with which a client makes its Grams private.

    Attributes
    ----------
    mechanism
        Decides what is clipped, and whom the noise hides.
    sigma
        Noise multiplier: the noise's standard deviation is ``sigma`` x sensitivity.
    honest_survivors
        With secure aggregation, the number of clients that share the noise of the sum.
    adjacency
        The change that ``epsilon`` bounds: one contribution set to zero, or replaced by another.
    """

    mechanism: Mechanism
    sigma: float
    honest_survivors: int = 1
    adjacency: Adjacency = "zero-out"

    def noise_std(self, dim: int) -> float:
        """Return the standard deviation of this client's noise on a Gram of ``dim`` features."""
        bound = self.mechanism.sensitivity(dim, self.adjacency)
        return shared_noise_std(self.sigma * bound, self.honest_survivors)

    def cost(self, grams: Mapping[str, Gram]) -> Ledger:
        """Return the cost of releasing these Grams: one Gaussian release per distinct Gram."""
        return Ledger().spend_gaussian(self.sigma, len(distinct(grams)))

    def privatise(
        self, grams: Mapping[str, Gram], num_examples: int, source: NoiseSource
    ) -> dict[str, Gram]:
        """Return the Grams to send, in float64; because of the noise they are in general not PSD.

        A single release may be rounded on its way. A term of a secure sum may not: its own noise is
        only a part of the sum's noise, so only changes to the sum itself are post-processing.

        A *sum* over rows is noised and divided by ``num_examples``, which is public, and not by the
        number of rows, which for text would reveal how long the examples are. The result's ``rows``
        is ``num_examples`` in every mechanism, for the same reason.

        Parameters
        ----------
        grams
            Grams by layer, collected with the mechanism's ``example_clip``.
        num_examples
            Number of examples that the Grams were collected on.
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
            if self.mechanism.clips_examples:  # collecting with a clip leaves no such value
                raise GramNotReleasableError(f"the Gram of layer {layer!r} holds NaN or infinity")
            _LOGGER.warning("the Gram of layer %r is not finite; zeros are sent for it", layer)
            # A refusal would reveal what the noise should hide.
            gram = PackedGram(torch.zeros_like(gram.triangle), gram.rows)
        try:
            bounded = self.mechanism.bounded(gram, num_examples)
        except ValueError as error:
            raise GramNotReleasableError(f"the Gram of layer {layer!r} {error}") from error
        noise = triangle_noise(gram.dim, self.noise_std(gram.dim), source)
        return PackedGram((bounded + noise) / self.mechanism.divisor(num_examples), num_examples)
