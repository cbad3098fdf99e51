"""HierFAVG (Liu et al., 2020): the example-weighted mean at both tiers."""

from dataclasses import dataclass
from typing import ClassVar

from server_app.rules.hfedatm import HFedATM


@dataclass
class Avg(HFedATM):
    """Neither alignment nor RegMean."""

    needs_grams: ClassVar[bool] = False
    fot: ClassVar[bool] = False
    regmean: ClassVar[bool] = False
