"""Notes that the server takes while a round's replies arrive, and the record made of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from hfedatm.base.own_metrics import OwnMeans
from hfedatm.base.round_record import (
    BytesUp,
    ClientCounts,
    Failure,
    Merge,
    Privacy,
    RoundRecord,
    StationCounts,
    StationRecord,
)
from hfedatm.base.settings import Settings
from hfedatm.base.tiers import is_deep, levels, stations_at
from hfedatm.base.wire import NodeUpdate
from hfedatm.base.wire.numbers import ANSWERED, STATION_BYTES
from hfedatm_core import Merged
from hfedatm_core.robust.counting import bounded_counts

MOST_NOTED = 1000
"""Most failures that the record of a round lists."""


@dataclass
class RoundNotes:
    """Stations that answered, nodes that failed and bytes that travelled in one round."""

    failures: list[Failure] = field(default_factory=list)
    cuts: list[Failure] = field(default_factory=list)
    stations: list[StationRecord] = field(default_factory=list)
    from_clients: int = 0
    from_stations: int = 0
    _known: set[tuple[str, str]] = field(default_factory=set)

    def fail(self, failure: Failure, station: str = "") -> None:
        """Note a failure once, unless the list is full; a node that is away misses every step."""
        failure = _below(station, failure) if station else failure
        known = (failure.node, failure.reason)
        if len(self.failures) > MOST_NOTED or known in self._known:
            return
        self._known.add(known)
        if len(self.failures) == MOST_NOTED:
            failure = Failure(node="others", reason="more failures are not listed")
        self.failures.append(failure)

    def arrive(self, update: NodeUpdate) -> None:
        """Note the failures, cuts and bytes that came with a station's update."""
        for failure in update.failures:
            self.fail(failure, update.name)
        self.cuts += [_below(update.name, cut) for cut in update.cuts]
        self.from_stations += update.bytes + int(update.metrics.get(STATION_BYTES, 0))
        self.from_clients += update.bytes_below

    def train(self, update: NodeUpdate) -> None:
        """Note the metrics of a station's model; no metric can replace the station's name."""
        own = {"name": update.name, "bytes_up": update.bytes}
        self.stations.append(StationRecord.model_validate({**update.metrics, **own}))

    def own_means(self, others: Collection[str], claim_factor: float) -> dict[str, float]:
        """Return the means of all training metrics but the loss and the rule's ``others``."""
        counts = [{"num-examples": float(station.num_examples)} for station in self.stations]
        means = OwnMeans(others)
        for station, one in zip(self.stations, bounded_counts(counts, claim_factor), strict=True):
            means.add(station.model_extra or {}, one["num-examples"])
        return means.result()

    def on(self, record: RoundRecord) -> RoundRecord:
        """Return the record with what was noted since it was made."""
        return record.but(
            failures=list(self.failures),
            cuts=list(self.cuts),
            bytes_up=BytesUp(clients=self.from_clients, stations=self.from_stations),
        )

    def record(
        self,
        number: int,
        asked: int,
        merged: Merged | None,
        *,
        own: Mapping[str, float] | None = None,
        kept: str = "",
        privacy: Privacy | None = None,
        train_seconds: float,
        merge_seconds: float,
        settings: Settings | None = None,
    ) -> RoundRecord:
        """Return the record of a round up to its merge; ``kept`` says why nothing was merged."""
        examples = sum(station.num_examples for station in self.stations)
        loss = sum(station.loss * station.num_examples for station in self.stations)
        return RoundRecord(
            round=number,
            failures=list(self.failures),
            cuts=self.cuts,
            bytes_up=BytesUp(clients=self.from_clients, stations=self.from_stations),
            stations=StationCounts(asked=asked, answered=len(self.stations)),
            clients=ClientCounts(answered=int(sum(s.num_clients for s in self.stations))),
            per_station=self.stations,
            train_seconds=train_seconds,
            merge_seconds=merge_seconds,
            loss=loss / examples if examples else None,
            metrics=dict(own) if own else None,
            privacy=privacy,
            tiers=self._tiers(settings) if settings and is_deep(settings) else None,
            kept=kept or None,
            merge=Merge.model_validate(merged.report.to_dict()) if merged else None,
            moved=merged.moved if merged else None,
        )

    def _tiers(self, settings: Settings) -> list[StationCounts]:
        """Return how many stations of every level answered."""
        found = [StationCounts(asked=stations_at(settings, 1), answered=len(self.stations))]
        for level in range(2, levels(settings) + 1):
            most, name = stations_at(settings, level), f"{ANSWERED}{level}"
            said = sum((one.model_extra or {}).get(name, 0) for one in self.stations)
            found.append(StationCounts(asked=most, answered=min(most, int(said))))
        return found


def _below(station: str, failure: Failure) -> Failure:
    return Failure(node=f"{station}, {failure.node}", reason=failure.reason)
