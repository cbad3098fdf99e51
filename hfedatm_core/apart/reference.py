"""What networks are matched to: the mean of the networks before them."""

from __future__ import annotations

from collections.abc import Mapping, Set

from torch import Tensor

from hfedatm_core.fot.costs.gram import GramSide
from hfedatm_core.grams.gram import Gram
from hfedatm_core.grams.grouped import GroupedGram
from hfedatm_core.grams.layer_moments import centred, input_means
from hfedatm_core.tensors import State


class Reference:
    """Running means of the covariances between outputs and inputs, and of the inputs' energies.

    The mean of the networks' own covariances stands for the covariance of the mean network. It
    needs no product beyond those that every network needs anyway, and no copy of the pooled Grams.
    """

    def __init__(self) -> None:
        self._products: dict[str, Tensor] = {}
        self._energies: dict[str, Tensor] = {}
        self._weights: dict[str, float] = {}

    def add(
        self,
        state: State,
        grams: Mapping[str, Gram],
        outputs: Mapping[str, Tensor],
        weight: float,
        absent: Set[str],
    ) -> None:
        """Add one network in the order of the merged one, with its products ``[W b] G``."""
        for layer, gram in grams.items():
            name = f"{layer}.weight"
            if name in absent:
                continue
            width = state[name][0].numel()
            product, energy = outputs[layer], gram.diagonal()[..., :width]
            known = self._weights.get(layer, 0.0)
            self._weights[layer] = known + weight
            if layer not in self._products:
                product = centred(product, gram) if gram.dim > width else product.clone()
                self._products[layer], self._energies[layer] = product, energy.clone()
                continue
            share = weight / (known + weight) if weight > 0 else 0.0
            _approach(self._products[layer], product.to(self._products[layer]), gram, share)
            self._energies[layer].lerp_(energy.to(self._energies[layer]), share)

    def side(self, state: State) -> GramSide:
        """Return the mean network for the comparison with a network."""
        return GramSide.of_means(state, self._products, self._energies)


def _approach(mean: Tensor, product: Tensor, gram: Gram, share: float) -> None:
    """Move a mean to the covariances of one network; only those of small layers are copied."""
    width = mean.shape[1]
    if gram.dim == width:
        mean.lerp_(product, share)
    elif isinstance(gram, GroupedGram):
        mean.lerp_(centred(product, gram), share)
    else:
        mean.lerp_(product[:, :width], share)
        means = input_means(gram)[:width].to(mean.dtype)
        mean.addr_(product[:, width], means, alpha=-share)
