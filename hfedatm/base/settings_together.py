"""Settings that exclude each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hfedatm.base.settings import Settings


def check_together(s: Settings) -> None:
    """Raise ``ValueError`` for values that are valid alone but not together."""
    if s.secure_aggregation and s.robust_clients != "none":
        raise ValueError(
            f"robust-clients: got {s.robust_clients!r}; with secure-aggregation a station "
            "sees only a sum: choose none, and let the server compare stations "
            "(robust-stations)"
        )
    if s.station_start == "own" and s.robust_stations != "none":
        raise ValueError(
            f"robust-stations: got {s.robust_stations!r}; with station-start=own the "
            "stations' models cannot be compared number by number: choose none"
        )
    if s.augment and s.dp_sgd:
        raise ValueError(
            f"augment: got {s.augment!r}; DP-SGD protects single examples, and a change to a batch "
            "may mix them: leave augment empty"
        )
    if s.augment and s.train_only:
        raise ValueError(
            f"augment: got {s.augment!r}; with train-only the activations of the frozen part are "
            "computed once, so batches cannot change: leave augment or train-only empty"
        )
