"""A server rule's part at an inner station, from job to job."""

from __future__ import annotations

from collections.abc import Mapping

from flwr.app import ArrayRecord, RecordDict

from hfedatm.base.memory import Moment, NodeMemory
from hfedatm.base.records import Task, find_record, need_record, record_to_state, state_to_record
from hfedatm.contracts import Rule, StationRule
from hfedatm_core.tensors import State


class RulePart:
    """What a rule does in one job of an inner station; most rules do nothing there."""

    def __init__(self, rule: Rule, task: Task, node: str, content: RecordDict, at: Moment) -> None:
        found = rule.at_inner_station()
        self._rule, self._own, self._at = found or StationRule(), found is not None, at
        if self._own:
            self._memory = NodeMemory(task.run, f"{node}-rule")
            self._rule.begin(
                task,
                record_to_state(need_record(content, "model", ArrayRecord)),
                record_to_state(find_record(content, "rule", ArrayRecord) or ArrayRecord()),
                self._memory.load(before=at),
            )

    def records(self, station_round: int) -> dict[str, ArrayRecord]:
        """Return the record that replaces the server's arrays for the stations of this station."""
        return {"rule": state_to_record(self._rule.shared(station_round))} if self._own else {}

    def after(self, station_round: int, model: State, means: Mapping[str, float]) -> None:
        """Observe a finished round of this station."""
        self._rule.after(station_round, model, means)

    def metrics(self) -> dict[str, float]:
        """Return the rule's numbers for the level above, instead of the means of those below."""
        return self._rule.metrics()

    def keep(self) -> None:
        """Keep what the rule needs in the next job."""
        if self._own and (kept := self._rule.remember()):
            self._memory.save(self._at, kept)
