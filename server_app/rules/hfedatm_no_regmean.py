"""The paper's ablation "w/o RegMean": average the aligned models.

Nguyen et al., "HFedATM: Hierarchical Federated Domain Generalization via Optimal Transport and
Regularized Mean Aggregation", arXiv:2508.05135.
"""

from dataclasses import dataclass
from typing import ClassVar

from server_app.rules.hfedatm import HFedATM


@dataclass
class HFedATMNoRegMean(HFedATM):
    """Alignment alone; no Gram leaves a client."""

    needs_grams: ClassVar[bool] = False
    regmean: ClassVar[bool] = False
