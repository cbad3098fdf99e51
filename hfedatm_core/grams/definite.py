"""Check whether a matrix can be a Gram, that is, a mean of outer products.

Negative energy of one matrix in some direction cancels the energy of the other Grams there. RegMean
divides by the sum, so one indefinite matrix of an ordinary size can move a merge by any amount.
"""

from __future__ import annotations

from scipy.linalg import get_lapack_funcs
from torch import Tensor

from hfedatm_core.grams.gram import FactorGram, Gram, PackedGram
from hfedatm_core.grams.grouped import GroupedGram
from hfedatm_core.grams.triangle import diagonal_positions, scale_features, triangle_dim


def is_semidefinite(gram: Gram, rounding: float, alpha: float = 1.0) -> bool:
    r"""Tell whether a Gram is positive semi-definite up to rounding.

    .. math:: G - (1 - \alpha) \, diag(G) + t D \succeq 0

    with :math:`D = diag(G)`, whose small entries are raised to ``rounding`` times the largest, and
    :math:`t = 4 \cdot rounding \cdot \sqrt d`. Independent relative errors of at most
    ``rounding`` in every entry move an eigenvalue of the matrix in the scale of ``D`` by about
    :math:`1.2 \cdot rounding \cdot \sqrt d`.

    Parameters
    ----------
    gram
        The Gram; its diagonal must not be negative.
    rounding
        Largest relative error of an entry.
    alpha
        The Gram was shrunk by this factor; the Gram before that must be positive semi-definite.
    """
    if isinstance(gram, GroupedGram):
        return all(
            is_semidefinite(Gram.from_dense(block), rounding, alpha) for block in gram.blocks
        )
    diagonal = gram.diagonal().double()
    scale = diagonal.clamp(min=rounding * float(diagonal.max()))
    if not float(scale.min()) > 0.0:  # the Gram is zero, or its diagonal is negative
        return bool((diagonal == 0.0).all()) and not _beyond_diagonal(gram)
    slack = 4 * rounding * gram.dim**0.5
    if isinstance(gram, FactorGram):
        reached = gram.factor.double().square().sum(0)
        return bool((alpha * diagonal - reached >= -slack * scale).all())
    assert isinstance(gram, PackedGram)
    matrix = scale_features(gram.triangle, scale.rsqrt()).float()
    matrix[diagonal_positions(gram.dim)] = (alpha * diagonal / scale + slack).float()
    return _has_cholesky(matrix)


def _beyond_diagonal(gram: Gram) -> bool:
    rest = gram.factor if isinstance(gram, FactorGram) else gram.triangle  # type: ignore[attr-defined]
    return bool(rest.any())


def _has_cholesky(triangle: Tensor) -> bool:
    """Tell whether the matrix of a packed triangle is positive definite; needs a copy of it."""
    packed = triangle.numpy()
    dim = triangle_dim(len(packed))
    to_blocks, factorise = get_lapack_funcs(("tpttf", "pftrf"), dtype=packed.dtype)
    # LAPACK stores matrices by columns: our upper triangle is its lower triangle.
    blocks, _ = to_blocks(dim, packed, uplo="L")
    _, info = factorise(dim, blocks, uplo="L", overwrite_a=True)
    return bool(info == 0)
