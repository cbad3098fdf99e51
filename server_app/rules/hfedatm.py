"""HFedATM: align the stations' channels by optimal transport, then merge by RegMean."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from hfedatm_core import Merged, Update, merge
from server_app.rules.base import Rule, Situation


@dataclass
class HFedATM(Rule):
    """Both halves of the method; the ablations switch one of them off."""

    needs_grams: ClassVar[bool] = True
    fot: ClassVar[bool] = True
    regmean: ClassVar[bool] = True

    def merge(self, updates: Iterable[Update], situation: Situation) -> Merged:
        """Align and merge with the options of the settings."""
        s = situation.settings
        return merge(
            updates,
            situation.graph,
            fot=self.fot,
            regmean=self.regmean,
            reference=s.reference,
            previous=situation.previous,
            solver=s.ot_solver,
            scope=s.ot_scope,
            reg=s.ot_reg,
            iterations=s.ot_iterations,
            margin=s.ot_margin,
            ridge=s.ridge,
            coefficients=s.regmean_weights,
        )
