"""What the stations say about a merged model: BatchNorm statistics, and how good it is."""

from __future__ import annotations

from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid

from hfedatm.base.kept_model import Sending
from hfedatm.base.metric_sums import HeldSums, no_sums
from hfedatm.base.privacy_settings import why_not_exact
from hfedatm.base.records import record_to_state, state_to_record
from hfedatm.base.round_record import SecondLook, Source
from hfedatm.base.schedule import evaluates
from hfedatm.base.wire import (
    checked,
    read_scores,
    read_statistics,
)
from hfedatm_core.norm_statistics import with_moments
from server_app.refining import Refining
from server_app.scores import source_scores
from server_app.second_look import pooled
from server_app.undoing import Accepted, fall, sentence


class Judging(Refining):
    """A second look at the merged model, its evaluation, and the way back from a bad one."""

    # --- a second look

    def _look(self, arrays: ArrayRecord, grid: Grid) -> None:
        """Replace the merged model's BatchNorm statistics by those that the clients measure."""
        why = why_not_exact(self.settings)
        if not self.norms:
            why = "the model has no BatchNorm with running statistics"
        if why:
            self.record = self.record.but(second_look=SecondLook(reason=why))
            return
        look, self._sending = SecondLook(), self._sending or Sending(arrays)
        expected = self._expected(arrays=self.norms, record="statistics")
        for number in range(1, self._passes + 1):
            messages = self._messages("look", "train.look", arrays, grid, number)
            replies = grid.send_and_receive(messages, timeout=self.settings.station_timeout)
            updates = self._updates(replies, expected, read_statistics)
            found = pooled(updates, self.settings, self.norms, self._notes)
            self._sending.kept_by = set(found.nodes)
            if why := self._too_few(found.stations):
                look = look.model_copy(update={"reason": why})
                break
            look = SecondLook(
                stations=found.stations, examples=found.examples, passes=number, reason=""
            )
            changes = state_to_record(with_moments(record_to_state(arrays), found.moments))
            self._sending.changes = changes
            arrays.update(changes)  # in place, because Flower continues from this record
        self.record = self._notes.on(self.record).but(second_look=look)

    # --- evaluation

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask the stations how good the merged model is on their clients' validation examples."""
        if self._merged_stations:
            self._refine(arrays, grid)
        if self._passes:
            self._look(arrays, grid)
        if not evaluates(self.settings, self._round):
            self._asked = 0
            return []
        self._judged = arrays
        return self._messages("evaluate", MessageType.EVALUATE, arrays, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Add up the stations' counts."""
        template, notes = no_sums(self.metrics, self.settings), self._notes
        expected = self._expected(arrays=template, record="sums")
        evaluated: dict[str, dict[str, float]] = {}
        answered, sums = 0, HeldSums()
        for scores in checked(replies, lambda r: read_scores(r, expected), "station", notes.fail):
            answered += 1
            for failure in scores.failures:
                notes.fail(failure, scores.name)
            if scores.examples:
                evaluated[scores.name] = {**scores.counts, "loss-sum": scores.loss_sum}
                sums.add(scores.sums)
        before, most = self.memory.accepted, self.settings.max_fall
        factor, found = self.settings.claim_factor, None
        if evaluated:
            found = source_scores(evaluated, factor, sums, self.metrics, self.method.task.measure)
        self.record = self.record.but(failures=list(notes.failures))
        # If most stations cannot evaluate the model, it returns no finite numbers.
        if before and most and answered < self._asked / 2:
            self._take_back(before, None)
        elif before and most and found and fall(before.source, found) > most:
            self._take_back(before, found)
        elif found:
            self.rule.judged(
                {name: one["loss-sum"] / one["num-examples"] for name, one in evaluated.items()}
            )
            self.memory.accept(record_to_state(self._judged), found, self._round)
            self.record = self.record.but(source=found)
        if found is None:
            return None
        return MetricRecord({"accuracy": found.accuracy, "loss": found.loss or 0.0})

    def _take_back(self, before: Accepted, found: Source | None) -> None:
        """Continue from the last accepted model, as if this round had not happened."""
        why = sentence(before.source, found)
        self.record = self.record.but(source=before.source, taken_back=why)
        model = self.memory.take_back(before, self._round)
        # Flower continues from this record and offers no other way back.
        self._judged.clear()
        self._judged.update(state_to_record(model))
