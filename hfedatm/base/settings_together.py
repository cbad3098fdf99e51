"""Settings that exclude each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfedatm.base.options import as_key, parse_params
from hfedatm.base.station_models import check_station_models

if TYPE_CHECKING:
    from hfedatm.base.settings import Settings


PARAMS = (
    "dataset_params",
    "model_params",
    "lora_params",
    "client_params",
    "rule_params",
    "rule_keys",
)
"""Fields of the form ``key=value,...``."""


def check_params(s: Settings) -> None:
    """Raise ``ValueError`` for parameters that cannot be read."""
    for key in PARAMS:
        try:
            parse_params(getattr(s, key))
        except ValueError as error:
            raise ValueError(f"{as_key(key)}: {error}") from None


def check_together(s: Settings) -> None:
    """Raise ``ValueError`` for values that are valid alone but not together."""
    check_station_models(s)
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
    if s.lora_params and s.train_only.strip().lower() != "lora":
        raise ValueError(f"lora-params: got {s.lora_params!r}; it needs train-only=lora")
    if s.augment and s.train_only:
        raise ValueError(
            f"augment: got {s.augment!r}; with train-only the activations of the frozen part are "
            "computed once, so batches cannot change: leave augment or train-only empty"
        )
