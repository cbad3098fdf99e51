"""The interface of a robust rule: from the updates of one step it makes those that are merged.

A rule may exclude updates, lower their share, or move their values into the range of other updates.
The results are merged as always, by the mean, RegMean or another rule of the server, so a robust
rule works at a station and at the server alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from hfedatm_core.robust.updates import BoundedUpdates
from hfedatm_core.tensors import State
from hfedatm_core.update import Update


@dataclass
class RobustRule(ABC):
    """Base of all robust rules.

    Parameters
    ----------
    liars
        Number of hostile updates that the rule has to withstand.
    """

    liars: int = 1

    def expected(self, updates: BoundedUpdates) -> int:
        """Return how many hostile updates may remain, less those that were excluded already."""
        return max(0, self.liars - updates.left_out)

    @abstractmethod
    def admit(self, updates: BoundedUpdates) -> Iterable[Update]:
        """Return the updates to merge; ``updates`` are already within the bounds."""


def products(updates: BoundedUpdates) -> Tensor:
    """Return ``Σ_t ⟨u_it, u_jt⟩ / d_t²`` for every two updates.

    ``u_it`` is the move of tensor ``t`` by update ``i``, and ``d_t`` the median length of such
    moves. In units of ``d_t`` a bias has as much weight as a large matrix.
    """
    total = torch.zeros(len(updates), len(updates), dtype=torch.float64)
    for name, value in updates.start.items():
        usual = float(updates.norms(name).median())
        if not value.is_floating_point() or usual == 0.0:  # a counter has no direction
            continue
        for block in updates.moves(name):
            block /= usual
            total += block @ block.T
    return total


def ranges(updates: BoundedUpdates, trimmed: int) -> tuple[State, State]:
    """Return, coordinate by coordinate, the smallest and largest value after trimming.

    The ``trimmed`` lowest and highest values of every coordinate are ignored; if no more than one
    value would remain, both ends are the median.
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
                if start.is_floating_point():  # halving first avoids an overflow of the sum
                    ends[:, part] = low_middle * 0.5 + high_middle * 0.5
                else:
                    ends[:, part] = low_middle
        low[name], high[name] = ends.view(2, *start.shape)
    return low, high
