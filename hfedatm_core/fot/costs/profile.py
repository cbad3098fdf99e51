r"""Compare channels by their class profiles, beside another cost.

With :math:`p_a` the profile of a channel (its mean activation per class and place, see
:mod:`hfedatm_core.profiles`) minus the mean of its entries, the profiles of two channels correlate
by

.. math:: \frac{p_a^\top p_b}{\|p_a\| \, \|p_b\|}

over the classes that both networks have examples of. One minus this and the other cost count
equally, for every tensor of a group.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hfedatm_core.channels.groups import ChannelGroup, Member
from hfedatm_core.fot.costs.base import Cost, Orders, dissimilarity
from hfedatm_core.profiles import Profiles

# A profile that varies by less than this share of its size is constant: rounding, no signature.
_CONSTANT = 1e-10


class ProfileCost:
    """The mean of another cost and the dissimilarity of class profiles.

    A group without profiles, or networks without a common class, are left to the other cost.
    """

    def __init__(self, other: Cost, reference: Profiles, station: Profiles) -> None:
        self._other = other
        common = (reference.counts > 0) & (station.counts > 0)
        self._profiles: dict[str, Tensor] = {}
        for name, mean in reference.means.items():
            if name in station.means and bool(common.any()):
                self._profiles[name] = _between(mean[:, common], station.means[name][:, common])

    def members(self, group: ChannelGroup) -> Sequence[Member]:
        """Return what the other cost compares."""
        return self._other.members(group)

    def between(self, group: ChannelGroup, member: Member, orders: Orders) -> Tensor:
        """Return the mean of both costs."""
        cost = self._other.between(group, member, orders)
        profiles = self._profiles.get(group.name)
        return cost if profiles is None else (cost + profiles.to(cost.dtype)) / 2


def _between(ours: Tensor, theirs: Tensor) -> Tensor:
    one, other = ours.flatten(1), theirs.flatten(1)
    (one, energy), (other, their_energy) = _centred(one), _centred(other)
    return dissimilarity(one @ other.T, energy, their_energy)


def _centred(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows without their mean, and their energy: 0 for a constant row."""
    whole = rows.square().sum(1)
    rows = rows - rows.mean(1, keepdim=True)
    energy = rows.square().sum(1)
    return rows, energy.where(energy > _CONSTANT * whole, energy.new_zeros(()))
