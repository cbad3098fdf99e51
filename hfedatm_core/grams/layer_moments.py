r"""Moments of a layer's outputs before the activation, from its weights and its Gram alone.

With the augmented input :math:`u = [x; 1]`, its Gram :math:`G = E\,u u^\top` and a layer's matrix
:math:`M = [W\ b]`, the outputs have

.. math:: \text{mean } M g, \qquad \text{second moment } \operatorname{diag}(M G M^\top),

where :math:`g`, the last column of :math:`G`, is the mean of the input.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hfedatm_core.grams.gram import FactorGram, Gram, PackedGram
from hfedatm_core.grams.grouped import GroupedGram
from hfedatm_core.grams.triangle import last_column
from hfedatm_core.tensors import State, times_transposed


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
    return moments_of(gram_product(matrix, gram), matrix)


def moments_of(product: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same if the product ``[W b] G`` is known."""
    second = (product * matrix).sum(1, dtype=torch.float64)
    return product[:, -1].double(), second


def covariance_product(weight: Tensor, gram: Gram) -> Tensor:
    """Return ``W C`` with the covariance ``C`` of the input, or its second moment.

    A Gram without the constant input has no means: then ``C`` is the second moment.
    """
    if gram.dim == weight.shape[1]:
        return gram_product(weight, gram)
    rows = torch.cat([weight, weight.new_zeros(len(weight), 1)], dim=1)
    return centred(gram_product(rows, gram), gram)


def centred(product: Tensor, gram: Gram) -> Tensor:
    """Return ``W C`` from ``[W b] G``, whatever the bias is."""
    means = input_means(gram).to(product.dtype)
    if isinstance(gram, GroupedGram):
        means = means.repeat_interleave(len(product) // len(means), dim=0)
    return torch.addcmul(product[:, :-1], product[:, -1:], means[..., :-1], value=-1.0)


def input_means(gram: Gram) -> Tensor:
    """Return the last column of an augmented Gram: the mean of its inputs, and 1."""
    if isinstance(gram, GroupedGram):
        return gram.blocks[:, :, -1]
    if isinstance(gram, PackedGram):
        return last_column(gram.triangle)
    last = torch.zeros(1, gram.dim, dtype=gram.dtype)
    last[0, -1] = 1.0
    return gram_product(last, gram)[0]


def gram_product(rows: Tensor, gram: Gram) -> Tensor:
    """Return ``rows @ G``: of a layer's ``[W b]`` the mean products of its outputs and inputs."""
    kind = torch.promote_types(rows.dtype, gram.dtype)
    rows = rows.to(kind)
    if isinstance(gram, PackedGram) and kind == torch.float32:
        return times_transposed(rows, gram.dense())
    if isinstance(gram, FactorGram) and kind == torch.float32:
        inner = times_transposed(rows, gram.factor)
        return times_transposed(inner, gram.factor.T).addcmul_(rows, gram.remainder())
    product = torch.zeros_like(rows, memory_format=torch.contiguous_format)
    gram.add_product(product, rows.contiguous())
    return product
