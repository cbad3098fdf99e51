r"""Transport plans between two numbers of channels.

A plan ``T`` (target channels × station channels, ``T ≥ 0``) says how much of a station's channel
belongs to a channel of the target. With its rows or its columns scaled to sum 1,

.. math:: A = \operatorname{diag}(T 1)^{-1} T, \qquad B = T \operatorname{diag}(1^\top T)^{-1},

a station's channels :math:`x` become the target's channels :math:`A x`, and a layer ``V`` that
reads them becomes :math:`V B^\top`. If every target channel belongs to one station channel (a
channel is *split* into copies), then :math:`B^\top A = I`: the network computes the same function,
:math:`V B^\top A x = V x`. The way back swaps both: :math:`B^\top` writes, :math:`A` reads. It
*joins* what was split, and so gives the same network again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Plan:
    """How the channels of one group of a station belong to those of the target."""

    mass: Tensor
    """``T``, target × station, float64."""

    def __post_init__(self) -> None:
        """Refuse a plan that loses a channel of the smaller side."""
        mass = self.mass
        if mass.dim() != 2 or not bool((mass >= 0).all()) or not bool(torch.isfinite(mass).all()):
            raise ValueError("a transport plan is a matrix of finite numbers that are not negative")
        smaller = mass.sum(0) if mass.shape[0] >= mass.shape[1] else mass.sum(1)
        if not bool((smaller > 0).all()):
            raise ValueError("a transport plan must give every channel of the smaller side a place")

    @property
    def sizes(self) -> tuple[int, int]:
        """Number of channels of the target and of the station."""
        return self.mass.shape[0], self.mass.shape[1]

    @cached_property
    def rows(self) -> Tensor:
        """``A``: every target channel that has a place is a mean of station channels."""
        return _scaled(self.mass, 1)

    @cached_property
    def columns(self) -> Tensor:
        """``Bᵀ``: every station channel that has a place is a mean of target channels."""
        return _scaled(self.mass, 0).T

    @cached_property
    def is_identity(self) -> bool:
        """Whether all channels stay where they are."""
        rows, columns = self.sizes
        return rows == columns and torch.equal(self.mass, torch.eye(rows, dtype=self.mass.dtype))

    @property
    def empty(self) -> Tensor:
        """Target channels that no station channel belongs to."""
        return self.mass.sum(1) == 0

    def after(self, order: Tensor) -> Plan:
        """Return the plan for a target whose channel ``i`` was channel ``order[i]``."""
        return Plan(self.mass[order])


def _scaled(mass: Tensor, axis: int) -> Tensor:
    total = mass.sum(axis, keepdim=True)
    return mass / torch.where(total > 0, total, 1.0)


def even_plan(target: int, station: int, uneven: bool = False) -> Plan:
    """Return the plan that keeps the order of the channels and splits or joins neighbours evenly.

    Parameters
    ----------
    uneven
        Give the copies of a channel different shares. Copies with equal shares get equal gradients
        and would stay copies for ever.
    """
    large, small = max(target, station), min(target, station)
    owner = torch.arange(large) * small // large
    mass = torch.zeros(large, small, dtype=torch.float64)
    mass[torch.arange(large), owner] = 1.0
    if uneven and large > small:
        share = 1.0 + torch.frac(torch.arange(1, large + 1, dtype=torch.float64) * 0.6180339887)
        mass *= share[:, None]
    return Plan(mass if target >= station else mass.T.contiguous())


def transport_plan(cost: Tensor, leave: float = float("inf")) -> Plan:
    r"""Return the cheapest plan between different numbers of channels: unbalanced transport.

    Every channel of the smaller side gets at least one channel of the larger side, so that the
    smaller network keeps its function. Every other channel of the larger side joins the nearest one
    at its cost, or stays alone at the cost ``leave``:

    .. math:: \min_T \langle T, D \rangle + \text{leave} \cdot |\{i : T_{i\cdot} = 0\}|, \qquad
        T_{ij} \in \{0, 1\}, \quad \sum_j T_{ij} \le 1, \quad \sum_i T_{ij} \ge 1 .

    A point beside the smaller side takes the surplus, at each channel's smaller cost of both; what
    remains is balanced transport between uniform marginals, which POT solves exactly and whose
    solution is whole numbers.

    Parameters
    ----------
    cost
        ``D``, target × station.
    leave
        Cost of a channel of the larger side that joins none.
    """
    import ot  # takes over a second to import

    turned = cost.shape[0] < cost.shape[1]
    work = (cost.T if turned else cost).detach().double().cpu().contiguous()
    large, small = work.shape
    nearest = work.argmin(1)
    surplus = work.amin(1).clamp(max=leave)
    supply, demand = np.ones(large), np.append(np.ones(small), large - small)
    costs = torch.cat([work, surplus[:, None]], 1).numpy()
    if large == small:
        demand, costs = demand[:-1], np.ascontiguousarray(costs[:, :-1])
    found = torch.from_numpy(np.asarray(ot.emd(supply, demand, costs, numItermax=10_000_000)))
    choice = found.argmax(1)
    joins = work.gather(1, nearest[:, None])[:, 0] <= leave
    mass = torch.zeros(large, small, dtype=torch.float64)
    for row in range(large):
        if int(choice[row]) < small:
            mass[row, choice[row]] = 1.0
        elif bool(joins[row]):
            mass[row, nearest[row]] = 1.0
    return Plan(mass.T.contiguous() if turned else mass)
