"""Send the numbers of each round to experiment trackers, besides the run's own folder.

A tracker is a `Tracker`; the built-in ones are the modules of this package, one file each, found by
their names. You name your own as ``package.module:Class`` or announce it under the entry-point
group ``hfedatm.trackers``. A tracker that fails during a run is dropped with a warning: no tracker
ends a run.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hfedatm.base.plugins import find_class
from hfedatm.base.round_record import RoundRecord
from hfedatm.base.settings import Settings
from hfedatm.base.text import printable
from hfedatm.contracts import Tracker

__all__ = ["Tracker", "Trackers", "check_trackers", "open_trackers", "scalars"]

log = logging.getLogger("hfedatm")


class Trackers:
    """All trackers of a run, as one."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._open = dict(trackers)

    def log(self, record: RoundRecord) -> None:
        """Send the numbers of a finished round."""
        numbers = {_plain(path): number for path, number in scalars(record.to_dict())}
        self._each(lambda tracker: tracker.log(record.round, numbers))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Send the outcome and close."""
        self._each(lambda tracker: tracker.finish(dict(scalars(summary))))

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                call(tracker)
            except Exception as error:  # a tracker's network or disk may fail in any way
                del self._open[name]
                why = printable(f"{type(error).__name__}: {error}")
                log.warning("tracker %s is dropped: %s", name, why)


def check_trackers(settings: Settings) -> None:
    """Refuse a tracker that does not exist or is not installed, before round 1."""
    for cls in _classes(settings).values():
        cls.require()


def open_trackers(settings: Settings, folder: Path, done: int = 0) -> Trackers:
    """Start every tracker the settings name; ``done`` rounds were logged before a resume."""
    return Trackers({name: cls(settings, folder, done) for name, cls in _classes(settings).items()})


def scalars(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a nested record as ``path/to/number``; lists only by their length."""
    for key, value in record.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from scalars(value, f"{path}/")
        elif isinstance(value, list):
            yield path, float(len(value))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield path, float(value)


def _plain(path: str) -> str:
    """Return a name that every tracker accepts: a node's domain name must not end tracking."""
    return re.sub(r"[^\w .:/-]|\.{2,}|/{2,}", "_", path, flags=re.ASCII)


def _classes(settings: Settings) -> dict[str, type[Tracker]]:
    package = sys.modules[__name__]
    names = filter(None, (name.strip() for name in settings.track.split(",")))
    return {name: find_class("track", name, package, Tracker, "hfedatm.trackers") for name in names}
