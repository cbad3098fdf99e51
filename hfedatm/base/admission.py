"""The way of a step's updates into the mean of their tier: held, bounded, chosen by a rule.

The same at a station, whose updates are its clients', and at the server, whose are the stations'.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from hfedatm.base.building import build_robust
from hfedatm.base.plugins import calling
from hfedatm.base.records import Failure
from hfedatm.base.settings import Settings
from hfedatm_core import Update
from hfedatm_core.robust.bounding import Bounds
from hfedatm_core.robust.updates import BoundedUpdates
from hfedatm_core.tensors import State

WORTH_A_LINE = 0.5
"""An update of which a part was multiplied by less than this is named."""


class Admission:
    """The updates of one step.

    Parameters
    ----------
    settings
        The run's settings.
    tier
        Whose updates they are.
    start
        The model they started from.
    earlier
        What `standing` was after the step before.
    start_of
        The model that one update started from, where each has its own.
    compare
        Whether the updates are models, whose directions can be compared and chosen among.
    """

    def __init__(
        self,
        settings: Settings,
        tier: Literal["clients", "stations"],
        start: State,
        *,
        earlier: Mapping[str, float] | None = None,
        start_of: Callable[[Update], State] | None = None,
        compare: bool = True,
    ) -> None:
        self._setting = f"robust-{tier}"
        self._name = settings.robust_clients if tier == "clients" else settings.robust_stations
        self._rule = build_robust(settings, tier) if compare else None
        bounds = Bounds(
            settings.bound_factor,
            settings.claim_factor,
            settings.least_agreement if compare else 0.0,
        )
        folder = os.environ.get("HFEDATM_STATE")
        self._updates = BoundedUpdates(start, bounds, folder, start_of, earlier)

    def add(self, update: Update) -> None:
        """Hold one update; all are added before the first is read."""
        self._updates.add(update)

    def __iter__(self) -> Iterator[Update]:
        """Yield what enters the mean."""
        if self._rule is None:
            yield from self._updates
            return
        with calling(self._setting, self._name):
            admitted = iter(self._rule.admit(self._updates))
        while True:
            with calling(self._setting, self._name):
                update = next(admitted, None)
            if update is None:
                return
            yield update
            del update

    @property
    def standing(self) -> dict[str, float]:
        """How much each node agrees with the others, for the next step."""
        return self._updates.standing

    def left_out(self) -> list[Failure]:
        """Return who was left out, and why."""
        return [Failure(c.name, c.what) for c in self._updates.cuts() if c.factor == 0.0]

    def cut_back(self) -> list[Failure]:
        """Return whose update was cut back by a lot, and how."""
        cuts = self._updates.cuts()
        return [Failure(c.name, c.what) for c in cuts if 0.0 < c.factor < WORTH_A_LINE]

    def close(self) -> None:
        """Let go of all updates."""
        self._updates.close()
