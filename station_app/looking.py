"""What the clients of a station measure at the merged model: layers, and BatchNorm statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from flwr.app import Message
from flwr.serverapp import Grid

from hfedatm.base.admission import Admission
from hfedatm.base.exchange import RECORD, AskedLayers
from hfedatm.base.kept_model import Sending
from hfedatm.base.records import record_to_state
from hfedatm.base.wire import Expected, NodeUpdate, read_answers, read_statistics
from hfedatm_core import GramAccumulator, MeanAccumulator
from hfedatm_core.tensors import State
from station_app.hearing import Hearing


class Looking(Hearing):
    """Means over the clients of numbers that are no models."""

    # --- layers of the merged model, to be refined

    def configure_refine(self, model: Sending, asked: AskedLayers, grid: Grid) -> list[Message]:
        """Ask every client, or all that answered the exchange before, about some layers."""
        self.sending = model
        messages = self._messages(
            grid, "train.refine", self.task, model.whole, everyone=True, also=asked.to_records()
        )
        if self.task.station_round > 1:  # a client that missed one would need both models again
            messages = [m for m in messages if m.metadata.dst_node_id in model.kept_by]
            self._asked, self._absent = len(messages), "did not answer before"
        return messages

    def aggregate_refine(self, replies: Iterable[Message], asked: AskedLayers) -> State:
        """Average the clients' answers by examples; `grams` are their Grams."""
        assert self.sending is not None
        template = asked.template(record_to_state(self.sending.whole))
        expected = Expected(
            self.settings, "client", arrays=template, record=RECORD, layers=asked.plain
        )
        return self._looked(replies, template, lambda r: read_answers(r, expected, asked))

    # --- BatchNorm statistics of the merged model

    def configure_look(self, model: Sending, grid: Grid) -> list[Message]:
        """Ask every client for the BatchNorm statistics of the merged model."""
        self.sending = model
        return self._messages(grid, "train.look", self.task, model.whole, everyone=True)

    def aggregate_look(self, replies: Iterable[Message], template: State) -> State:
        """Average the clients' moments by examples; ``template`` holds those of a right model."""
        expected = Expected(self.settings, "client", arrays=template, record="statistics")
        return self._looked(replies, template, lambda r: read_statistics(r, expected))

    def _looked(
        self, replies: Iterable[Message], template: State, read: Callable[[Message], NodeUpdate]
    ) -> State:
        """Return the mean of what clients measured, and note who keeps the merged model."""

        def noted(reply: Message) -> NodeUpdate:
            update = read(reply)
            self.looked.add(update.node)
            return update

        return self._mean(self._usable(replies, noted), template)

    def _mean(self, usable: Iterable[NodeUpdate], template: State) -> State:
        """Return the mean by examples of arrays that are no models; keep that of their Grams."""
        mean, grams, measured = MeanAccumulator(), GramAccumulator(), False
        admission = Admission(self.settings, "clients", template, compare=False)
        for update in self._admitted(usable, admission):
            mean.add(update.state, update.num_examples, update.name, checked=True)
            if update.grams:
                grams.add(update.grams, update.num_examples)
                measured = True
            self.num_examples += update.num_examples
            del update
        admission.close()
        self.grams = grams.result() if measured else {}
        return mean.result()
