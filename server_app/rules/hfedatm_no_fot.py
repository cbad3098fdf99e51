"""The paper's ablation "w/o FOT": RegMean without alignment.

Nguyen et al., "HFedATM: Hierarchical Federated Domain Generalization via Optimal Transport and
Regularized Mean Aggregation", arXiv:2508.05135.
"""

from dataclasses import dataclass
from typing import ClassVar

from server_app.rules.hfedatm import HFedATM


@dataclass
class HFedATMNoFOT(HFedATM):
    """RegMean in each station's own basis."""

    fot: ClassVar[bool] = False
    merges_apart: ClassVar[bool] = False
