"""HierFAVG (Liu et al., 2020): the example-weighted mean at both tiers.

With ``stations=1 station-rounds=1`` and all clients at that station this is flat FedAvg.

Liu et al., "Client-Edge-Cloud Hierarchical Federated Learning", arXiv:1905.06641.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hfedatm.contracts import Paced, Situation
from hfedatm_core import Merged, Update, merge


@dataclass
class Avg(Paced):
    """Average without alignment and without RegMean."""

    def merge(self, updates: Iterable[Update], situation: Situation) -> Merged:
        """Average by examples."""
        return merge(updates, fot=False, regmean=False)
