"""Admit updates to the mean of their tier: they are held, bounded, and chosen by a robust rule.

A station uses this for its clients' updates, the server for its stations' updates.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Literal

from hfedatm.base.building import build_robust
from hfedatm.base.class_profiles import ProfileBounds
from hfedatm.base.plugins import calling
from hfedatm.base.round_record import Failure
from hfedatm.base.settings import Settings
from hfedatm_core import Update
from hfedatm_core.robust.bounding import Bounds
from hfedatm_core.robust.updates import BoundedUpdates
from hfedatm_core.tensors import State

WORTH_A_LINE = 0.5
"""An update is reported if a part of it was multiplied by less than this factor."""


class Admission:
    """The updates of one step.

    Parameters
    ----------
    settings
        The run's settings.
    tier
        The tier that sent the updates.
    start
        The model that the updates started from.
    earlier
        The value of `standing` after the previous step.
    start_of
        Returns the model that one update started from, if each has a start of its own.
    compare
        Whether the updates are models, so that a rule can compare their directions and choose.
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
        self._profiles = ProfileBounds(settings.bound_factor, settings.claim_factor)
        folder = os.environ.get("HFEDATM_STATE")
        self._updates = BoundedUpdates(start, bounds, folder, start_of, earlier)

    def add(self, update: Update) -> None:
        """Hold one update; all are added before the first is read."""
        self._profiles.note(update.name, update.profiles)
        self._updates.add(update)

    def __iter__(self) -> Iterator[Update]:
        """Yield the updates that enter the mean, their class profiles within bounds, too."""
        for update in self._admitted():
            yield (
                replace(update, profiles=self._profiles.cut(update)) if update.profiles else update
            )
            del update

    def _admitted(self) -> Iterator[Update]:
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
        """Return the nodes that were left out, with the reason."""
        cuts = self._updates.cuts()
        return [Failure(node=c.name, reason=c.what) for c in cuts if c.factor == 0.0]

    def cut_back(self) -> list[Failure]:
        """Return the nodes whose update was cut back by a lot, and how."""
        cuts = self._updates.cuts()
        some = (c for c in cuts if 0.0 < c.factor < WORTH_A_LINE)
        return [Failure(node=c.name, reason=c.what) for c in some]

    def close(self) -> None:
        """Release all updates."""
        self._updates.close()
