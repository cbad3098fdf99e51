"""RegMean of low-rank adapters: merge the products ``B A``, then factor the result.

The factors of an adapter cannot be merged one by one: ``B A`` is all that a layer computes, and
``(B R⁻¹)(R A)`` computes the same for any invertible ``R``. So the products are merged, by the Gram
of the layer's input, and the result ``M``, whose rank may be that of all stations together, is
brought back to rank ``r``.

RegMean minimises ``Σ γ_k tr((W − W_k) G_k (W − W_k)ᵀ)``, which is ``tr((W − M) S (W − M)ᵀ)`` plus a
constant, with ``S = Σ γ_k G_k``. Its minimiser among the matrices of rank ``r`` is therefore the
truncated singular value decomposition in the metric of ``S``, not the plain one: ``U Uᵀ M`` with
the ``r`` leading eigenvectors ``U`` of ``M S Mᵀ``, the principal directions of the layer's outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hfedatm_core.grams.gram import Gram
from hfedatm_core.tensors import State

# Directions whose energy is below this share of the largest are rounding errors.
_NOISE = 1e-13
# Condition number of the mean ``A`` above which the factors no longer follow it.
_SKEW = 1e4


def product(state: State, first: str, second: str) -> Tensor:
    """Return ``B A``."""
    return state[f"{second}.weight"].detach() @ state[f"{first}.weight"].detach()


def factored(merged: Tensor, metric: Gram, shift: float, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``A`` and ``B`` whose product is closest to ``merged``, in the metric of its inputs.

    ``B A`` minimises ``tr((B A − M)(S + shift I)(B A − M)ᵀ)``. Among the pairs with this product,
    ``A`` is the projection of ``mean`` onto the rows of the product, stretched back to the singular
    values of ``mean``. So equal adapters stay as they are, and where the product has a smaller
    rank, ``A`` keeps rows that can still be trained. Without the stretching, a direction that
    ``mean`` hardly has would get a tiny ``A`` and a huge ``B``, and training on from such a pair
    diverges, because the gradient of ``A`` is multiplied by ``B``.

    Parameters
    ----------
    merged
        ``M``, out × in.
    metric, shift
        ``S`` and the ridge.
    mean
        The mean of the stations' ``A``, rank × in.
    """
    whole, near = merged.double(), mean.double()
    rank = len(near)
    weighted = torch.zeros_like(whole)
    metric.add_product(weighted, whole)
    energy = weighted @ whole.T + shift * whole @ whole.T
    values, vectors = torch.linalg.eigh((energy + energy.T) / 2)
    values, vectors = values.flip(0)[:rank], vectors.flip(1)[:, :rank]
    kept = vectors[:, values > max(float(values[0]), 0.0) * _NOISE]
    rows = kept.T @ whole
    basis = _row_space(rows, near)
    inside = rows @ basis
    sizes = torch.linalg.svdvals(near)
    if sizes[0] < _SKEW * sizes[-1]:
        left, _, right = torch.linalg.svd(near @ basis)
        first = left * sizes @ right
        second = inside @ right.T / sizes @ left.T
        return (first @ basis.T).to(mean.dtype), (kept @ second).to(merged.dtype)
    size = float(near.norm()) / rank**0.5 or 1.0
    return (size * basis.T).to(mean.dtype), (kept @ inside / size).to(merged.dtype)


def _row_space(rows: Tensor, near: Tensor) -> Tensor:
    """Return an orthonormal basis, in × rank, of ``rows`` and of further directions of ``near``."""
    basis: Tensor = torch.linalg.qr(rows.T).Q
    missing = len(near) - len(rows)
    if missing <= 0:
        return basis
    rest = near - near @ basis @ basis.T
    more = torch.linalg.svd(rest, full_matrices=False).Vh[:missing].T
    whole: Tensor = torch.linalg.qr(torch.cat([basis, more], dim=1)).Q
    return whole
