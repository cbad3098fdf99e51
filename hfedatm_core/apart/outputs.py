r"""The products :math:`[W\ b]\,G` of one network, which all steps of the merge share.

Such a product is :math:`E\,y u^\top`, of a layer's outputs :math:`y` with its inputs :math:`u`. It
costs far more than anything else that is done once per network. The matching needs it (centred,
the covariances), the repair (its last column is the mean of the outputs), and RegMean.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hfedatm_core.channels.graph import ChannelGraph
from hfedatm_core.factor_names import second_factor
from hfedatm_core.grams.by_layer import distinct
from hfedatm_core.grams.gram import Gram
from hfedatm_core.grams.grouped import GroupedGram
from hfedatm_core.grams.layer_moments import gram_product, is_augmented, layer_matrix
from hfedatm_core.grams.triangle import feature_order
from hfedatm_core.regmean.adapters import product as adapter
from hfedatm_core.regmean.closed_form import work_dtype
from hfedatm_core.tensors import State, take


def layer_outputs(state: State, grams: Mapping[str, Gram]) -> dict[str, Tensor]:
    """Return the products of all layers with a Gram."""
    found: dict[str, Tensor] = {}
    for layer, gram in grams.items():
        matrix = _matrix(state, layer, gram)
        found[layer] = gram_product(matrix.to(work_dtype(matrix, gram)), gram)
    return found


def permute_outputs(
    outputs: Mapping[str, Tensor], state: State, graph: ChannelGraph, moving: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the products with outputs and inputs in the order of the permutations."""
    permuted: dict[str, Tensor] = {}
    for layer, product in outputs.items():
        name = f"{layer}.weight"
        rows, columns = (graph.index(name, i, state[name].shape[i], moving) for i in (0, 1))
        order = None if columns is None else feature_order(columns, product.shape[1])
        if order is not None:
            product = take(product, order, 1)
        permuted[layer] = product if rows is None else take(product, rows, 0)
    return permuted


def shrink_outputs(
    outputs: dict[str, Tensor], state: State, grams: Mapping[str, Gram], alpha: float | None
) -> tuple[dict[str, Gram], dict[str, Tensor]]:
    r"""Return the shrunk Grams and the products with them; ``outputs`` are overwritten.

    A layer without a bias has no constant input here. With :math:`D` the diagonal of :math:`G`,

    .. math:: W (\alpha G + (1 - \alpha) D) = \alpha\, W G + (1 - \alpha)\, W D.

    Parameters
    ----------
    alpha
        By default ``n / (n + d)`` for a Gram of ``n`` rows and ``d`` features.
    """
    shrunk: dict[str, Gram] = {}
    products: dict[str, Tensor] = {}
    for layers, gram in distinct(grams).items():
        trusted = gram.rows / (gram.rows + gram.dim) if alpha is None else alpha
        whole, bare = gram.shrink(trusted), None
        for layer in layers:
            weight = state[f"{layer}.weight"]
            constant = not is_augmented(gram, weight) or f"{layer}.bias" in state
            if not constant:
                bare = bare or whole.leading(gram.dim - 1)
            shrunk[layer] = whole if constant or bare is None else bare
            if second := second_factor(layer, state):
                matrix = adapter(state, layer, second)
                products[layer] = gram_product(matrix, shrunk[layer])
                continue
            matrix, width = _matrix(state, layer, gram), shrunk[layer].dim
            diagonal = gram.diagonal()
            if isinstance(gram, GroupedGram):
                diagonal = diagonal.repeat_interleave(len(matrix) // len(diagonal), dim=0)
            product = outputs[layer].mul_(trusted).addcmul_(matrix, diagonal, value=1.0 - trusted)
            products[layer] = product[:, :width]
    return shrunk, products


def _matrix(state: State, layer: str, gram: Gram) -> Tensor:
    weight = state[f"{layer}.weight"]
    return layer_matrix(state, layer) if is_augmented(gram, weight) else weight.detach().flatten(1)
