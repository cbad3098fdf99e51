"""FedGA (Zhang et al., 2023): generalisation adjustment of the stations' weights.

A station on whose data the merged model is much worse than the station's own model is the one that
the mean neglects; it gets more weight in the next round. With the generalisation gap of station
``e`` in round ``r`` of ``R``

    g_e = loss of the merged model on the station - loss of the station's own model

the weights of the mean move along the gaps, less from round to round, and stay shares:

    a_e <- a_e + weight_step (1 - r / R) (g_e - mean g) / max |g - mean g| ,

    then a_e >= 0 and sum a_e = 1 .

The paper leaves three things open for a tree of stations:

- *First weights.* They are the stations' shares of examples, as in plain averaging.
- *The losses.* The paper evaluates both models on each client's data. Here nothing more is sent
  than in any run: the merged model's loss is that of the source validation, the station's own is
  the mean loss of its clients in their last local epoch. A constant difference between the two
  kinds of loss cancels in ``g_e - mean g``.
- *Absent stations.* A station that does not answer keeps its weight for later rounds, and the
  others share the mean.

Zhang et al., "Federated Domain Generalization with Generalization Adjustment", CVPR 2023,
https://openaccess.thecvf.com/content/CVPR2023/html/Zhang_Federated_Domain_Generalization_With_Generalization_Adjustment_CVPR_2023_paper.html
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

import torch

from hfedatm.base.errors import UserError
from hfedatm.base.settings import Settings
from hfedatm.contracts import Rule, Situation, State, option
from hfedatm_core import MeanAccumulator, Merged, Update
from hfedatm_core.merge_report import MergeReport

_WEIGHT = "weight/"


def adjusted(
    weights: Mapping[str, float], gaps: Mapping[str, float], step: float
) -> dict[str, float]:
    """Return the weights after one move along the gaps; they sum to what they summed to before."""
    total, found = sum(weights.values()), dict(weights)
    known = {name: gap for name, gap in gaps.items() if name in weights}
    centre = fmean(known.values()) if known else 0.0
    largest = max((abs(gap - centre) for gap in known.values()), default=0.0)
    # Equal gaps differ from their mean by rounding, which is no direction to move in.
    if largest > 1e-12 * max((abs(gap) for gap in known.values()), default=0.0):
        for name, gap in known.items():
            found[name] = max(0.0, found[name] + step * total * (gap - centre) / largest)
    new = sum(found.values())
    return {name: weight * total / new for name, weight in found.items()}


@dataclass
class FedGA(Rule):
    """A mean whose weights follow the stations' generalisation gaps."""

    weight_step: float = option(0.2, "largest change of a station's weight in round 1", ge=0, le=1)

    def __post_init__(self) -> None:
        """Start without weights: round 1 averages by examples."""
        self._weights: dict[str, float] = {}
        self._own: dict[str, float] = {}
        self._left = 0.0

    def check(self, settings: Settings) -> None:
        """Refuse a run that never measures the merged model at the stations."""
        if not settings.validation_fraction:
            raise UserError(
                "server-rule fedga weighs stations by their validation losses: set "
                "validation-fraction above 0"
            )

    def merge(self, updates: Iterable[Update], situation: Situation) -> Merged:
        """Average by the weights; a new station starts with its share of examples."""
        mean, names = MeanAccumulator(), []
        self._own, self._left = {}, 1 - situation.round / situation.settings.rounds
        for update in updates:
            self._weights.setdefault(update.name, float(update.num_examples))
            self._own[update.name] = update.metrics["loss"]
            names.append(update.name)
            mean.add(update.state, self._weights[update.name] * update.share, update.name)
            del update
        return Merged(mean.result(), MergeReport("", {name: {} for name in names}))

    def judged(self, losses: Mapping[str, float]) -> None:
        """Move the weights along the gaps of the stations that trained and judged."""
        gaps = {name: loss - self._own[name] for name, loss in losses.items() if name in self._own}
        self._weights = adjusted(self._weights, gaps, self.weight_step * self._left)

    def remember(self) -> State:
        """Keep the weights."""
        return {
            _WEIGHT + name: torch.tensor(weight, dtype=torch.float64)
            for name, weight in self._weights.items()
        }

    def restore(self, memory: State) -> None:
        """Restore the weights."""
        self._weights = {name.removeprefix(_WEIGHT): float(w) for name, w in memory.items()}
