"""Numbers of examples by class that clients send to a station, and stations to theirs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Error, MetricRecord, RecordDict
from fuzz_targets import HOSTILE, Target, _Tier
from helpers import small_settings

from hfedatm.base.counting import COUNTS
from hfedatm.base.records import Task, record_to_failures, state_to_record
from hfedatm.base.tiers import clients_below
from station_app.station import run_station

CLASSES = 4


class ClassCounts(_Tier):
    """A table of counts is used whole, or its sender is dropped in one line."""

    def __init__(self, name: str, tree: str, stations: int, clients: int) -> None:
        size = {"tiers": tree, "stations": stations, "clients_per_station": clients}
        self._settings = small_settings(**size, bound_factor=0)
        rows = clients_below(self._settings, 2)
        self._node = f"{'client' if rows == 1 else 'station'} {HOSTILE}"

        def honest(node: int, kind: str) -> RecordDict:
            table = torch.arange(rows * CLASSES).reshape(rows, CLASSES) + node
            metrics = MetricRecord({"num-examples": int(table.sum())})
            return RecordDict({COUNTS: state_to_record({COUNTS: table}), "metrics": metrics})

        super().__init__(name, "train.count", honest)

    def _run(self, given: RecordDict | Error) -> RecordDict:
        task = Task("count", self._settings, round=1, station=0)
        empty = {COUNTS: torch.zeros(1, CLASSES, dtype=torch.int64)}
        content = RecordDict({"task": task.to_record(), COUNTS: state_to_record(empty)})
        return run_station(self._replies(given), content)

    def _outcome(self, found: RecordDict) -> tuple[Any, list[tuple[str, str]]]:
        record = found[COUNTS]
        assert isinstance(record, ArrayRecord)
        table = record[COUNTS].numpy()
        assert (table >= 0).all() and table.dtype == np.int64
        assert table.sum() == found["metrics"]["num-examples"]
        failures = record_to_failures(found["failures"])
        mine = [(f.node, f.reason) for f in failures if f.node == self._node]
        return table.tolist(), mine


def make_count_targets() -> list[Target]:
    return [
        ClassCounts("client: count", "1x3", 1, 3),
        ClassCounts("inner: count", "1x3x2", 3, 2),
    ]
