"""Metrics of an evaluation on their way up: sums that are held, bounded and added."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence

import torch

from hfedatm.base.errors import UserError
from hfedatm.base.plugins import calling
from hfedatm.base.privacy_settings import is_private
from hfedatm.base.settings import Settings
from hfedatm_core import Update
from hfedatm_core.metrics import Metric
from hfedatm_core.robust.held import HeldUpdates
from hfedatm_core.tensors import State

Counts = Mapping[str, float]


def leave_clients(settings: Settings) -> bool:
    """Return whether clients send the sums of metrics.

    The sums are exact and reveal how many examples of each class a client has. A run that hides the
    data of single clients, by noise or by secure sums, does not send them.
    """
    return not (settings.secure_aggregation or is_private(settings))


def no_sums(metrics: Mapping[str, Metric], settings: Settings) -> State:
    """Return the sums over no examples, for the metrics that clients send."""
    sent = metrics if leave_clients(settings) else {}
    return {name: metric.nothing() for name, metric in sent.items()}


def require_bounded(sums: State, examples: int) -> None:
    """Refuse sums that a receiver would refuse: entries that exceed the number of examples."""
    for name, found in sums.items():
        if found.numel() and not (found.min() >= 0 and found.max() <= examples):
            raise UserError(
                f"metrics: {name}: sums of {examples} examples reach from {float(found.min()):g} "
                f"to {float(found.max()):g}; each entry must be a sum over the examples of a "
                "number between 0 and 1: scale what is larger"
            )


def values(metrics: Mapping[str, Metric], sums: State) -> dict[str, float]:
    """Return the metrics that these sums define."""
    found = {}
    for name in sums:
        with calling("metrics", name):
            found[name] = float(metrics[name].value(sums[name]))
    return {name: value for name, value in found.items() if math.isfinite(value)}


class HeldSums:
    """The sums of several nodes, kept until the weight of each node is known.

    Sums are kept like updates: a few in memory, the others in an unnamed file.
    """

    def __init__(self) -> None:
        self._held = HeldUpdates(os.environ.get("HFEDATM_STATE"))

    def add(self, sums: State) -> None:
        """Keep one node's sums."""
        self._held.add(Update(sums))

    def total(self, claimed: Sequence[Counts], bounded: Sequence[Counts]) -> State:
        """Return the sums over all nodes, each cut back as its number of examples was."""
        total: State = {}
        for update, said, counted in zip(self._held, claimed, bounded, strict=True):
            share = counted["num-examples"] / (said["num-examples"] or 1.0)
            for name, value in update.state.items():
                total[name] = total.get(name, torch.zeros_like(value)) + share * value
        self._held.close()
        return total
