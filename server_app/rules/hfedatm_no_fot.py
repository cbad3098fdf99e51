"""The paper's ablation "w/o FOT": RegMean without alignment."""

from dataclasses import dataclass
from typing import ClassVar

from server_app.rules.hfedatm import HFedATM


@dataclass
class HFedATMNoFOT(HFedATM):
    """RegMean in each station's own basis."""

    fot: ClassVar[bool] = False
