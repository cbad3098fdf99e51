"""From a matching cost to a permutation: entropic optimal transport, or the exact assignment."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

Solver = Literal["sinkhorn", "exact"]
SOLVERS: tuple[Solver, ...] = get_args(Solver)

# exp(±200) is far inside float64, also squared: beyond it the scaling vectors could overflow.
_KERNEL_RANGE = 200.0


def rounding(cost: Tensor) -> float:
    """Differences between two entries of a cost matrix up to this size are rounding: a tie."""
    scale = max(1.0, float(cost.abs().max())) if cost.numel() else 1.0
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
        P in float64; its rows sum to 1/n, its columns only in the limit.

    Notes
    -----
    The same iterates as ``ot.sinkhorn``. Costs of normalised filters span a few units, so that
    ``exp(-D/reg)`` is well inside float64 and two matrix-vector products make an iteration; only
    where it is not, POT iterates in the log domain, which takes some 25 times as long.
    """
    n = cost.shape[0]
    shifted = cost.to("cpu", torch.float64)
    shifted = shifted - shifted.min()  # a constant in D only rescales u
    if float(shifted.max()) / reg > _KERNEL_RANGE:
        import ot  # over a second to import, and seldom needed

        weights = np.full(n, 1.0 / n)
        plan = ot.sinkhorn(
            *(weights, weights, shifted.numpy(), reg),
            method="sinkhorn_log",
            numItermax=iterations,
            stopThr=0.0,
            warn=False,
        )
        return torch.from_numpy(plan)
    kernel = torch.exp(shifted / -reg)
    u = torch.ones(n, dtype=torch.float64)
    for _ in range(iterations):
        v = (1.0 / n) / (kernel.T @ u)
        u = (1.0 / n) / (kernel @ v)
    return u[:, None] * kernel * v


def assign(
    cost: Tensor, solver: Solver = "sinkhorn", reg: float = 0.05, iterations: int = 25
) -> Tensor:
    """Match every row to one column of a square cost matrix.

    ``"exact"`` minimises the sum of ``cost[i, p[i]]``. ``"sinkhorn"`` maximises the mass
    ``P[i, p[i]]`` of the entropic plan: some of its rows have their maximum in the same column, so
    that the row-wise maximum would not be a permutation. Ties go to the identity.

    Returns
    -------
    Tensor
        The permutation ``p`` as int64 on the CPU.

    Examples
    --------
    >>> assign(torch.tensor([[2.0, 0.0], [1.0, 2.0]]), "exact")
    tensor([1, 0])
    """
    if solver not in SOLVERS:
        raise ValueError(f"solver must be one of {', '.join(SOLVERS)}, not {solver!r}")
    if cost.dim() != 2 or cost.shape[0] != cost.shape[1]:
        raise ValueError(f"the cost must be a square matrix, not of shape {tuple(cost.shape)}")
    tie = rounding(cost)
    n = cost.shape[0]
    # With every row's minimum on the diagonal nothing can be cheaper than the identity.
    if n < 2 or bool((cost.diagonal() <= cost.amin(1) + tie).all()):
        return torch.arange(n)
    if solver == "exact":
        objective = cost.to("cpu", torch.float64)
    else:
        objective = sinkhorn_plan(cost, reg, iterations).mul_(-n)
        tie = rounding(objective)
    _, columns = linear_sum_assignment(objective.numpy() - tie * np.eye(n))
    return torch.from_numpy(np.asarray(columns, dtype=np.int64))
