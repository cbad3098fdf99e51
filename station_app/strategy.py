"""A station's rounds over its clients, as a Flower strategy.

In each station round the station sends its *current* model to some of its clients and takes the
example-weighted mean of their models. In the last station round the clients add Gram matrices,
which the station averages and shrinks. The updates of all clients bound each single one, so the
station holds all replies before it averages, in memory that does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid

from hfedatm.base.admission import Admission
from hfedatm.base.building import measures_all
from hfedatm.base.handover.recordfile import content_bytes
from hfedatm.base.metric_sums import HeldSums
from hfedatm.base.own_metrics import OwnMeans, needed
from hfedatm.base.privacy_settings import gram_examples, gram_mechanism
from hfedatm.base.records import record_to_state, state_to_record
from hfedatm.base.wire import (
    Expected,
    NodeUpdate,
    read_scores,
    read_update,
)
from hfedatm.contracts.rule import Send
from hfedatm_core import GramAccumulator, MeanAccumulator, Update
from hfedatm_core.grams.by_layer import distinct
from hfedatm_core.robust.counting import bounded_counts, with_domains
from hfedatm_core.tensors import State
from station_app.looking import Looking


class StationStrategy(Looking):
    """One global round of one station."""

    # --- training

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Send the station model to the clients drawn for this station round."""
        task = self.task.but(station_round=server_round, send_grams=self._grams_due(server_round))
        self._reference = record_to_state(arrays)
        extra = self.station_rule.shared(server_round)
        return self._messages(grid, MessageType.TRAIN, task, arrays, extra=extra)

    def expected_update(self, server_round: int) -> Expected:
        """Return the parts that a client's update must have."""
        due = self._grams_due(server_round)
        return self._expected(
            arrays=self._reference,
            layers=self.layers if due else {},
            profiles=self.profile_shapes if due else None,
            needed=needed(self.settings, self.reports),
            **({"check": self.rule.check_report} if self.rule else {}),
        )

    def gather(
        self, server_round: int, messages: Sequence[Message], send: Send
    ) -> Iterator[Message]:
        """Yield one reply of every client, after as many messages as the rule sends."""
        expected, passed = self.expected_update(server_round), 0

        def counted(some: Sequence[Message]) -> Iterator[Message]:
            nonlocal passed
            for reply in send(some):
                passed += _size(reply)
                yield reply
                del reply

        hear = partial(self.hear, expected=expected)
        for reply in self.station_rule.gather(messages, counted, hear):
            passed -= _size(reply)
            yield reply
            del reply
        self.bytes_up += passed  # replies that only went on to another client

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord, MetricRecord]:
        """Average models by the rule's weights, and Grams by client or by examples."""
        models, grams = MeanAccumulator(), GramAccumulator()
        self.num_examples, self.num_clients = 0, 0
        sums, own = dict.fromkeys(self.reports, 0.0), OwnMeans(self.reports)
        shared = record_to_state(self.shared) if self.shared else {}
        expected = self.expected_update(server_round)

        def read(reply: Message) -> NodeUpdate:
            return read_update(
                reply, expected, lambda metrics: self.station_rule.weight(metrics, shared)
            )

        admission = Admission(self.settings, "clients", self._reference, earlier=self.standing)
        for update in self._admitted(self._usable(replies, read), admission):
            weight = self.station_rule.weight(update.metrics, shared) * update.share
            models.add(update.state, weight, update.name, checked=True)
            for name in sums:
                sums[name] += update.metrics[name] * update.num_examples
            own.add(update.metrics, update.num_examples)
            if update.grams:
                self._add_grams(grams, update)
            self.num_examples += update.num_examples
            self.num_clients += update.num_clients
            del update  # so that memory never holds two updates at once
        self.standing = admission.standing
        admission.close()
        if expected.layers:
            self._keep_grams(grams)
        model = models.result()
        means = {name: total / self.num_examples for name, total in sums.items()}
        self.station_rule.after(server_round, model, means)
        return state_to_record(model), MetricRecord({**means, **own.result()})

    # --- Grams, with the last update or at the finished station model

    def configure_measure(self, arrays: ArrayRecord, grid: Grid) -> list[Message]:
        """Ask the clients of the last station round for the Grams at the station model."""
        task = self.task.but(kind="measure", station_round=self._last_round)
        return self._messages(grid, "train.measure", task, arrays)

    def expected_grams(self) -> Expected:
        """Return the parts that a reply with Grams must have."""
        return self._expected(layers=self.layers, profiles=self.profile_shapes)

    def aggregate_measure(self, replies: Iterable[Message]) -> None:
        """Average Grams by client or by examples."""
        grams = GramAccumulator()
        expected = self.expected_grams()
        admission = Admission(self.settings, "clients", {}, compare=False)
        usable = self._usable(replies, lambda reply: read_update(reply, expected))
        for update in self._admitted(usable, admission):
            self._add_grams(grams, update)
            del update
        admission.close()
        self._keep_grams(grams)

    @property
    def _last_round(self) -> int:
        return self.task.station_round + self.settings.station_rounds

    def _grams_due(self, station_round: int) -> bool:
        last = station_round == self._last_round
        return last and bool(self.layers) and self.settings.gram_model == "client"

    def _add_grams(self, total: GramAccumulator, update: Update) -> None:
        by_examples = self.settings.gram_weights == "examples"
        weight = gram_examples(self.settings, update.num_examples) if by_examples else 1
        total.add(update.grams, weight * update.share)
        if (found := update.profiles) is not None:
            self.profiles = found if self.profiles is None else self.profiles.pool(found)

    def _keep_grams(self, total: GramAccumulator) -> None:
        self.grams = {}
        mechanism = gram_mechanism(self.settings)
        # Stations that did not share a start are matched by Grams as they are.
        alpha = 1.0 if measures_all(self.settings, self.task.round) else self.settings.alpha
        for layers, gram in distinct(total.result()).items():
            gram = mechanism.repaired(gram).shrink(alpha)
            self.grams |= dict.fromkeys(layers, gram)

    # --- arrays that a method shares before a round

    def configure_prepare(self, arrays: ArrayRecord, grid: Grid) -> list[Message]:
        """Ask the clients of the first station round for the arrays their method shares."""
        task = self.task.but(kind="prepare", station_round=self.task.station_round + 1)
        return self._messages(grid, "train.prepare", task, arrays)

    def expected_shared(self, template: State) -> Expected:
        """Return the arrays that a reply must have; ``template`` gives their names and shapes."""
        return self._expected(arrays=template, record="shared")

    def aggregate_prepare(self, replies: Iterable[Message], template: State) -> State:
        """Average the shared arrays by examples; ``template`` gives their names and shapes."""
        expected = self.expected_shared(template)
        return self._mean(self._usable(replies, lambda r: read_update(r, expected)), template)

    # --- evaluation

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask every client to evaluate."""
        return self._messages(grid, MessageType.EVALUATE, self.task, arrays, everyone=True)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord:
        """Add up the clients' counts and the sums of their metrics."""
        total = {"correct": 0.0, "num-examples": 0.0, "loss-sum": 0.0}
        # `_expected` is not used here, because counts are not summed securely.
        expected = Expected(self.settings, "client", arrays=self.sums, record="sums")
        said, sums = [], HeldSums()
        for scores in self._usable(replies, lambda reply: read_scores(reply, expected)):
            said.append({**scores.counts, "loss-sum": scores.loss_sum})
            sums.add(scores.sums)
        bounded = bounded_counts(with_domains(said), self.settings.claim_factor)
        self.sums = sums.total(said, bounded)
        for one in bounded:
            for name, value in one.items():
                total[name] = total.get(name, 0.0) + value
        return MetricRecord({**total})


def _size(reply: Message) -> int:
    return 0 if reply.has_error() else content_bytes(reply.content)
