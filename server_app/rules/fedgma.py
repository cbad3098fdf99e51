"""FedGMA (Tenison et al., 2022): gradient-masked averaging of the stations' updates.

A weight on whose direction the stations agree has probably learnt something that holds in all their
domains. With the update ``d_e = x_e - x`` of station ``e`` and the mean update ``d`` by examples,

    a = | sum_e sign(d_e) | / E          agreement of the signs, per weight
    x <- x + lr m d ,                    m = 1 where a >= tau, and m = a elsewhere .

The paper leaves three things open for a tree of stations:

- *Whose signs.* The paper has clients and no stations. Here the stations' updates are compared: a
  station holds neighbouring domains, and a mask at the stations would need the clients' signs.
- *Weights.* The agreement counts every station once, as in the paper's formula; the mean update is
  weighted by examples, as its clients are.
- *BatchNorm.* Running means and variances are no gradients. They are averaged without a mask.

Tenison et al., "Gradient Masked Averaging for Federated Learning", arXiv:2201.11986.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hfedatm.base.errors import UserError
from hfedatm.base.settings import Settings
from hfedatm.contracts import Rule, Situation, State, option
from hfedatm_core import Merged, Update, merge

STATISTICS = ("running_mean", "running_var")


@dataclass
class FedGMA(Rule):
    """The mean update, damped where the stations pull in different directions."""

    tau: float = option(
        0.4, "agreement of signs from which a weight takes the whole mean update", ge=0, le=1
    )
    server_lr: float = option(1.0, "step of the server along the masked update", gt=0, le=10)

    def check(self, settings: Settings) -> None:
        """Refuse stations that did not start from one model: they have no update to compare."""
        if settings.station_start == "own":
            raise UserError(
                "server-rule fedgma compares what stations add to one model: set "
                "station-start=shared"
            )

    def merge(self, updates: Iterable[Update], situation: Situation) -> Merged:
        """Average, and mask the step by the agreement of its signs."""
        signs, count = _zeros(situation.previous), 0

        def counted() -> Iterator[Update]:
            nonlocal count
            for update in updates:
                count += 1
                for name, total in signs.items():
                    total += torch.sign(update.state[name] - situation.previous[name])
                yield update
                del update

        merged = merge(counted(), fot=False, regmean=False)
        state = dict(merged.state)
        for name, total in signs.items():
            old = situation.previous[name]
            mask = self._mask(total.abs() / count)
            state[name] = old + self.server_lr * mask * (state[name] - old)
        return replace(merged, state=state)

    def _mask(self, agreement: Tensor) -> Tensor:
        return torch.where(agreement >= self.tau, torch.ones_like(agreement), agreement)


def _zeros(state: State) -> dict[str, Tensor]:
    """Return zeros for every tensor that has gradients."""
    return {
        name: torch.zeros_like(value)
        for name, value in state.items()
        if value.is_floating_point() and not name.endswith(STATISTICS)
    }
