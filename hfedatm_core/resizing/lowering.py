r"""Bring a merged network into a smaller shape, with its layers fitted to the joined channels.

Where a smaller network has one channel for several of the merged network, it computes their mean:
with the plan's :math:`B^\top` from inputs :math:`u` come :math:`z = B^\top u`, and instead of the
outputs :math:`M u` of a layer are wanted :math:`y = B_{\text{out}}^\top M u`. Channels that were
merged from unlike networks differ, so a layer that reads their mean as if it were each of them,
:math:`V_0 = B_{\text{out}}^\top M A`, computes something else. The pooled Gram
:math:`G = E\,u u^\top` of the merge says what the mean tells about them:

.. math:: V = V_0 + R\, (E\,z z^\top + \lambda I)^{-1}, \qquad
    R = E\,(y - V_0 z)\, z^\top = B_{\text{out}}^\top M G B - V_0\, B^\top G B .

This is RegMean's equation for one network, and what refining measures, here in closed form. If the
channels were split from one, :math:`R = 0` and the network comes back as it was.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hfedatm_core.apart.folding import fold
from hfedatm_core.apart.refining import Answers, fit_layers
from hfedatm_core.grams.gram import Gram
from hfedatm_core.grams.grouped import GroupedGram
from hfedatm_core.grams.layer_moments import input_means, is_augmented, layer_matrix
from hfedatm_core.resizing.fitting import Fit
from hfedatm_core.tensors import State


def lowered(fit: Fit, state: State, grams: Mapping[str, Gram]) -> dict[str, Tensor]:
    """Return a network of the target's shape in the station's shape, fitted by its Grams.

    Parameters
    ----------
    fit
        The way from the station's architecture to the target's.
    state
        The network of the target's shape.
    grams
        Grams of its layers' inputs, with the constant input. A layer without one goes down as it
        is, and so does one in groups.
    """
    plain = fit.down(state)
    small = fold(plain, fit.station.graph)
    large = fold(state, fit.target.graph)
    names = {theirs: ours for ours, theirs in fit.pairs.items()}
    known: dict[str, Gram] = {}
    residuals: dict[str, Tensor] = {}
    moments: dict[str, Tensor] = {}
    for own, gram in fit.down_grams(grams).items():
        layer = names[f"{own}.weight"].removesuffix(".weight")
        if isinstance(gram, GroupedGram) or not is_augmented(gram, small[f"{own}.weight"]):
            continue
        known[own] = gram
        residuals[own], moments[own] = _missing(fit, layer, own, large, small, grams[layer], gram)
    return fit_layers(plain, fit.station.graph, [Answers(known, residuals, moments)])


def _missing(
    fit: Fit, layer: str, own: str, large: State, small: State, gram: Gram, lower: Gram
) -> tuple[Tensor, Tensor]:
    """Return ``R``, and the moments ``E y``, ``E y²`` and ``E (y - V z)²`` of a layer."""
    wanted = fit.join(f"{layer}.weight", layer_matrix(large, layer).double(), 0)
    product = _times(wanted, gram)  # E y uᵀ
    mean, square = wanted @ input_means(gram).double(), (product * wanted).sum(1)
    weight = large[f"{layer}.weight"]
    features = product[:, :-1].reshape(len(product), *weight.shape[1:])
    joined = fit.join(f"{layer}.weight", features, 1).flatten(1)  # E y zᵀ
    both = torch.cat([joined, product[:, -1:]], 1)
    before = layer_matrix(small, own).double()
    reached = _times(before, lower)
    residual = both - reached
    error = square - 2 * (both * before).sum(1) + (reached * before).sum(1)
    return residual, torch.stack([mean, square, error])


def _times(rows: Tensor, gram: Gram) -> Tensor:
    product = torch.zeros_like(rows)
    gram.add_product(product, rows.contiguous())
    return product
