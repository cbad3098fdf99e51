"""From a matching cost to a permutation: entropic optimal transport, or the exact assignment."""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from hfedatm_core.fot.options import DEFAULT, AlignmentOptions

# Largest exponent of the kernel and its scaling vectors that is safe in a dtype's range.
_KERNEL_RANGE = {torch.float32: 30.0, torch.float64: 200.0}


def rounding(cost: Tensor) -> float:
    """Return the largest difference that rounding makes between equal, non-negative costs."""
    scale = max(1.0, float(cost.max())) if cost.numel() else 1.0
    return 8 * torch.finfo(cost.dtype).eps * scale


def sinkhorn_plan(cost: Tensor, reg: float = 0.05, iterations: int = 25) -> Tensor:
    r"""Entropic transport plan between uniform marginals after a fixed number of iterations.

    .. math:: \min_P \langle P, D \rangle + \mathrm{reg} \sum_{ij} P_{ij} (\log P_{ij} - 1),
        \qquad P = \mathrm{diag}(u)\, e^{-D/\mathrm{reg}}\, \mathrm{diag}(v)

    Parameters
    ----------
    cost
        D, ``n x n``.
    reg
        Entropic regularisation.
    iterations
        Number of updates of ``v`` and ``u``.

    Returns
    -------
    Tensor
        P; its rows sum to 1/n, its columns only in the limit.

    Notes
    -----
    The same iterates as ``ot.sinkhorn``. Costs of normalised filters span a few units, so that
    ``exp(-D/reg)`` is well inside the range of its dtype and two matrix-vector products make an
    iteration. Only if ``exp(-D/reg)`` leaves the range even of float64, POT iterates in the log
    domain, which takes some 25 times as long.
    """
    n = cost.shape[0]
    shifted = cost.cpu()
    shifted = shifted - shifted.min()  # a constant in D only rescales u
    exponent = float(shifted.max()) / reg
    if exponent > _KERNEL_RANGE.get(cost.dtype, 0.0):
        shifted = shifted.double()
    if exponent > _KERNEL_RANGE[torch.float64]:
        import ot  # takes over a second to import, and is seldom needed

        weights = np.full(n, 1.0 / n)
        plan = ot.sinkhorn(
            *(weights, weights, shifted.numpy(), reg),
            method="sinkhorn_log",
            numItermax=iterations,
            stopThr=0.0,
            warn=False,
        )
        return torch.from_numpy(plan)
    kernel = shifted.div_(-reg).exp_().numpy()
    # NumPy has less overhead than torch for operations as small as these.
    share = kernel.dtype.type(1.0 / n)
    u = np.ones(n, dtype=kernel.dtype)
    for _ in range(iterations):
        v = share / (u @ kernel)
        u = share / (kernel @ v)
    kernel *= u[:, None]
    kernel *= v
    return torch.from_numpy(kernel)


def assign(cost: Tensor, options: AlignmentOptions = DEFAULT) -> Tensor:
    """Match every row to one column of a square cost matrix.

    The solver ``"exact"`` minimises the sum of ``cost[i, p[i]]``. ``"sinkhorn"`` maximises the mass
    ``P[i, p[i]]`` of the entropic plan: some of its rows have their maximum in the same column, so
    that the row-wise maximum would not be a permutation. Ties go to the identity.

    Returns
    -------
    Tensor
        The permutation ``p`` as int64 on the CPU.

    Examples
    --------
    >>> assign(torch.tensor([[2.0, 0.0], [1.0, 2.0]]), AlignmentOptions(solver="exact"))
    tensor([1, 0])
    """
    if cost.dim() != 2 or cost.shape[0] != cost.shape[1]:
        raise ValueError(f"the cost must be a square matrix, not of shape {tuple(cost.shape)}")
    tie = rounding(cost)
    n = cost.shape[0]
    # If every row's minimum is on the diagonal, no permutation is cheaper than the identity.
    if n < 2 or bool((cost.diagonal() <= cost.amin(1) + tie).all()):
        return torch.arange(n)
    if options.solver == "exact":
        objective = cost.to("cpu", torch.float64, copy=True)
    else:
        objective = sinkhorn_plan(cost, options.reg, options.iterations).to(torch.float64).mul_(-n)
        tie /= (
            options.reg
        )  # a mass is at most one here, and exp(-D / reg) divides the errors of D by reg
    objective.diagonal().sub_(tie)
    favourites = objective.argmin(1)
    if len(torch.unique(favourites)) == n:  # all rows prefer different columns: nothing to solve
        return favourites
    # Subtracting a constant per row and column does not change the best assignment, and gives the
    # solver a zero in each row and column to start from.
    objective -= objective.amin(1, keepdim=True)
    objective -= objective.amin(0)
    _, columns = linear_sum_assignment(objective.numpy())
    return torch.from_numpy(np.asarray(columns, dtype=np.int64))
