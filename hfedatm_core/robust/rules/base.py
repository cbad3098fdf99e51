"""What a robust rule is: a function from the updates of one step to those that enter the merge.

A rule may leave updates out, lower their share, or move their values into the range that others
vouch for. What comes out is merged as always, by the mean, RegMean or whatever the server's rule
is, so a robust rule works at a station and at the server alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from hfedatm_core.robust.updates import BoundedUpdates
from hfedatm_core.update import Update

State = dict[str, Tensor]


@dataclass
class RobustRule(ABC):
    """Base of all robust rules.

    Parameters
    ----------
    liars
        Hostile updates the rule has to withstand.
    """

    liars: int = 1

    def expected(self, updates: BoundedUpdates) -> int:
        """Return how many hostile updates may still be among these: some are left out already."""
        return max(0, self.liars - updates.left_out)

    @abstractmethod
    def admit(self, updates: BoundedUpdates) -> Iterable[Update]:
        """Return what enters the merge; ``updates`` are already within the bounds."""


def products(updates: BoundedUpdates) -> Tensor:
    """Return ``Σ_t ⟨u_it, u_jt⟩ / d_t²`` for every two updates.

    ``u_it`` is how update ``i`` moves tensor ``t`` and ``d_t`` the median length of such moves.
    Counted in what is usual for it, a bias weighs as much as a large matrix.
    """
    total = torch.zeros(len(updates), len(updates), dtype=torch.float64)
    for name, value in updates.start.items():
        usual = float(updates.norms(name).median())
        if not value.is_floating_point() or usual == 0.0:  # counters tell nothing of a direction
            continue
        for block in updates.moves(name):
            block /= usual
            total += block @ block.T
    return total


def ranges(updates: BoundedUpdates, trimmed: int) -> tuple[State, State]:
    """Return, coordinate by coordinate, the smallest and largest value after trimming.

    The ``trimmed`` lowest and highest values of every coordinate are left out; where that would
    leave nothing, both ends are the median.
    """
    count = len(updates)
    low, high = {}, {}
    for name, start in updates.start.items():
        ends = torch.empty(2, start.numel(), dtype=start.dtype)
        for part, block in updates.values(name):
            ordered = block.sort(dim=0).values
            if 2 * trimmed < count - 1:
                ends[:, part] = ordered[[trimmed, count - 1 - trimmed]]
            else:
                low_middle, high_middle = ordered[(count - 1) // 2], ordered[count // 2]
                if start.is_floating_point():  # halves first: their sum does not overflow
                    ends[:, part] = low_middle * 0.5 + high_middle * 0.5
                else:
                    ends[:, part] = low_middle
        low[name], high[name] = ends.view(2, *start.shape)
    return low, high
