"""Make a noised symmetric matrix a valid Gram again."""

from __future__ import annotations

import torch
from torch import Tensor

from hfedatm_core.grams.gram import Gram, PackedGram
from hfedatm_core.grams.triangle import pack


def repair(gram: Gram) -> Gram:
    """Return the nearest positive semi-definite Gram.

    Repair once, after the noised Grams of all clients were averaged: the repair costs no privacy,
    and the noise has mostly cancelled by then. Apply shrinkage and ridge afterwards. Grams in
    factor form are positive semi-definite already.
    """
    if not isinstance(gram, PackedGram):
        return gram
    return PackedGram(pack(nearest_psd(gram.dense())), gram.rows)


def nearest_psd(matrix: Tensor) -> Tensor:
    r"""Return the nearest positive semi-definite matrix in Frobenius norm.

    .. math:: V \max(\Lambda, 0) V^\top \quad\text{for}\quad (M + M^\top)/2 = V \Lambda V^\top

    The repair is post-processing of a private release, so it costs no privacy. It is not linear and
    its bias is positive: repair the *mean* of many noised Grams once, not each Gram before
    averaging.
    """
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"expected a square matrix, got shape {tuple(matrix.shape)}")
    if not torch.isfinite(matrix).all():
        raise ValueError("the matrix holds NaN or infinite entries and cannot be repaired")
    symmetric = (matrix.double() + matrix.double().T) / 2
    values, vectors = torch.linalg.eigh(symmetric)
    if values[0] >= 0:
        return symmetric.to(matrix.dtype)
    kept = values > 0
    root = vectors[:, kept] * values[kept].sqrt()
    repaired: Tensor = root @ root.T
    return repaired.to(matrix.dtype)
