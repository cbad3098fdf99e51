r"""Moments of a layer's outputs before the activation, from its weights and its Gram alone.

With the augmented input :math:`u = [x; 1]`, its Gram :math:`G = E\,u u^\top` and a layer's matrix
:math:`M = [W\ b]`, the outputs have

.. math:: \text{mean } M g, \qquad \text{second moment } \operatorname{diag}(M G M^\top),

where :math:`g`, the last column of :math:`G`, is the mean of the input.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hfedatm_core.grams.gram import Gram
from hfedatm_core.grams.grouped import GroupedGram
from hfedatm_core.tensors import State


def is_augmented(gram: Gram, weight: Tensor) -> bool:
    """Tell whether a Gram holds the constant input of this layer's bias."""
    return gram.dim == weight[0].numel() + 1


def layer_matrix(state: State, layer: str) -> Tensor:
    """Return ``[W b]`` of a layer, one row per output; ``b = 0`` where it has none."""
    weight = state[f"{layer}.weight"].detach().flatten(1)
    bias = state.get(f"{layer}.bias")
    column = weight.new_zeros(len(weight)) if bias is None else bias.detach().to(weight.dtype)
    return torch.cat([weight, column[:, None]], dim=1)


def output_moments(matrix: Tensor, gram: Gram) -> tuple[Tensor, Tensor]:
    """Return mean and second moment of each output of ``[W b]`` in float64."""
    product = _product(matrix, gram)
    second = (product * matrix).sum(1, dtype=torch.float64)
    return product[:, -1].double(), second


def covariance_product(weight: Tensor, gram: Gram) -> Tensor:
    """Return ``W C`` with the covariance ``C`` of the input, or its second moment.

    A Gram without the constant input has no means: then ``C`` is the second moment.
    """
    if gram.dim == weight.shape[1]:
        return _product(weight, gram)
    rows = torch.cat([weight, weight.new_zeros(len(weight), 1)], dim=1)
    product = _product(rows, gram)
    means = input_means(gram).to(product.dtype)
    if isinstance(gram, GroupedGram):
        means = means.repeat_interleave(len(weight) // len(means), dim=0)
    return product[:, :-1] - product[:, -1:] * means[..., :-1]


def input_means(gram: Gram) -> Tensor:
    """Return the last column of an augmented Gram: the mean of its inputs, and 1."""
    if isinstance(gram, GroupedGram):
        return gram.blocks[:, :, -1]
    last = torch.zeros(1, gram.dim, dtype=gram.dtype)
    last[0, -1] = 1.0
    return _product(last, gram)[0]


def _product(rows: Tensor, gram: Gram) -> Tensor:
    product = torch.zeros(rows.shape, dtype=torch.promote_types(rows.dtype, gram.dtype))
    gram.add_product(product, rows.to(product.dtype).contiguous())
    return product
