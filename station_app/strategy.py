"""A station's rounds over its clients, as a Flower strategy.

In each station round the station sends its *current* model to some of its clients and takes the
example-weighted mean of what they return. In the last one the clients add Gram matrices, which the
station averages and shrinks. Replies are folded in one at a time: memory does not grow with the
number of clients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from hfedatm.errors import UserError
from hfedatm.handover.recordfile import content_bytes
from hfedatm.privacy import gram_examples
from hfedatm.records import (
    Failure,
    State,
    Task,
    open_grams,
    open_metrics,
    open_reply,
    open_scores,
    open_state,
    record_to_state,
    state_to_record,
    take_each,
)
from hfedatm.seeding import derive
from hfedatm_core import Gram, GramAccumulator, MeanAccumulator
from hfedatm_core.sharing import distinct
from server_app.rules.base import Rule, StationSide


class TooFewClients(UserError):
    """Fewer clients than the quorum gave a usable reply."""


class StationStrategy(Strategy):
    """One global round of one station.

    Parameters
    ----------
    task
        What the server asked for.
    layers
        Linear layers that need a Gram, with their widths; empty when the rule needs none.
    shared
        Arrays that every client gets along with the model.
    rule
        The server's rule, which may have a part at the station.
    """

    def __init__(
        self,
        task: Task,
        layers: Mapping[str, int] | None = None,
        shared: ArrayRecord | None = None,
        rule: Rule | None = None,
    ) -> None:
        self.task = task
        self.reports = ("loss", *(rule.reports if rule else ()))
        self.side = rule.at_station() if rule else StationSide()
        self.settings = task.settings
        self.layers = dict(layers or {})
        self.shared = shared
        self.failures: list[Failure] = []
        self.grams: dict[str, Gram] = {}
        self.num_examples = self.num_clients = 0
        self.bytes_up = self.gram_bytes_up = 0
        self.gram_seconds = 0.0
        self.epsilon = 0.0
        self._secure = self.settings.secure_aggregation

    def summary(self) -> None:
        """Log nothing: the server prints one line per round for the whole tree."""

    # --- training

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Send the station model to the clients drawn for this station round."""
        task = self.task.but(station_round=server_round, send_grams=self._grams_due(server_round))
        self._reference = record_to_state(arrays)
        extra = self.side.shared(server_round)
        return self._messages(grid, MessageType.TRAIN, task, arrays, extra=extra)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord, MetricRecord]:
        """Average models as the rule weighs them, and Grams by client or by examples."""
        models, grams = MeanAccumulator(), GramAccumulator()
        self.num_examples, self.num_clients = 0, 0
        sums = dict.fromkeys(self.reports, 0.0)
        shared = record_to_state(self.shared) if self.shared else {}
        need_grams = self._grams_due(server_round)

        def take(reply: Message) -> None:
            content = open_reply(reply, self.settings.max_reply_mb)
            metrics = open_metrics(content, needed=self.reports, most=self._most_examples)
            state = open_state(content, self._reference)
            # Everything is checked before anything is added.
            max_dim = self.settings.gram_max_dim
            found = open_grams(content, self.layers, max_dim) if need_grams else {}
            examples = int(metrics["num-examples"])
            models.add(state, self.side.weight(metrics, shared))
            for name in sums:
                sums[name] += metrics[name] * examples
            if need_grams:
                self._add_grams(grams, content, found, metrics)
            self._count_bytes(content, metrics)
            self.num_examples += examples
            # A secure sum is one reply of many clients.
            self.num_clients += int(metrics["num-clients"]) if self._secure else 1
            self.epsilon = max(self.epsilon, metrics.get("epsilon", 0.0))

        self._fold(replies, take)
        if need_grams:
            self._keep_grams(grams)
        model = models.result()
        means = {name: total / self.num_examples for name, total in sums.items()}
        self.side.after(server_round, model, means)
        return state_to_record(model), MetricRecord(means)

    # --- Grams, with the last update or at the finished station model

    def configure_measure(self, arrays: ArrayRecord, grid: Grid) -> list[Message]:
        """Ask the clients of the last station round for the Grams at the station model."""
        task = self.task.but(kind="measure", station_round=self.settings.station_rounds)
        return self._messages(grid, "train.measure", task, arrays)

    def aggregate_measure(self, replies: Iterable[Message]) -> None:
        """Average Grams by client or by examples."""
        grams = GramAccumulator()

        def take(reply: Message) -> None:
            content = open_reply(reply, self.settings.max_reply_mb)
            metrics = open_metrics(content, most=self._most_examples)
            found = open_grams(content, self.layers, self.settings.gram_max_dim)
            self._add_grams(grams, content, found, metrics)
            self.epsilon = max(self.epsilon, metrics.get("epsilon", 0.0))
            self._count_bytes(content, metrics)

        self._fold(replies, take)
        self._keep_grams(grams)

    def _grams_due(self, station_round: int) -> bool:
        last = station_round == self.settings.station_rounds
        return last and bool(self.layers) and self.settings.gram_model == "client"

    def _add_grams(
        self,
        total: GramAccumulator,
        content: RecordDict,
        grams: dict[str, Gram],
        metrics: Mapping[str, float],
    ) -> None:
        by_examples = self.settings.gram_weights == "examples"
        examples = int(metrics["num-examples"])
        total.add(grams, gram_examples(self.settings, examples) if by_examples else 1)
        size = metrics["gram-bytes-up"] if self._secure else content["grams"].count_bytes()
        self.gram_bytes_up += int(size)
        self.gram_seconds += metrics.get("gram-seconds", 0.0)

    @property
    def _most_examples(self) -> int:
        """What one reply may claim; a secure sum is the reply of all clients asked."""
        return self.settings.max_examples * (self._asked if self._secure else 1)

    def _count_bytes(self, content: RecordDict, metrics: Mapping[str, float]) -> None:
        self.bytes_up += int(metrics["bytes-up"]) if self._secure else content_bytes(content)

    def _keep_grams(self, total: GramAccumulator) -> None:
        self.grams = {}
        for layers, gram in distinct(total.result()).items():
            if self.settings.privacy_mechanism != "none":
                gram = _repair(gram)
            self.grams |= dict.fromkeys(layers, gram.shrink(self.settings.alpha))

    # --- what a method shares before a round

    def configure_prepare(self, arrays: ArrayRecord, grid: Grid) -> list[Message]:
        """Ask the clients of the first station round for what their method shares."""
        task = self.task.but(kind="prepare", station_round=1)
        return self._messages(grid, "train.prepare", task, arrays)

    def aggregate_prepare(self, replies: Iterable[Message], template: State) -> State:
        """Average it by examples; ``template`` says which arrays, of what shapes."""
        mean = MeanAccumulator()

        def take(reply: Message) -> None:
            content = open_reply(reply, self.settings.max_reply_mb)
            metrics = open_metrics(content, most=self._most_examples)
            examples = int(metrics["num-examples"])
            mean.add(open_state(content, template, "shared"), examples)
            self._count_bytes(content, metrics)
            self.num_examples += examples

        self._fold(replies, take)
        return mean.result()

    # --- evaluation

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask every client to evaluate."""
        return self._messages(grid, MessageType.EVALUATE, self.task, arrays, everyone=True)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord:
        """Add up the clients' counts."""
        total = {"correct": 0.0, "num-examples": 0.0, "loss-sum": 0.0}

        def take(reply: Message) -> None:
            metrics = open_scores(open_reply(reply, self.settings.max_reply_mb))
            total["loss-sum"] += metrics["loss"] * metrics["num-examples"]
            for name, value in metrics.items():
                if name.startswith(("correct", "num-examples")):  # of all, and of each domain
                    total[name] = total.get(name, 0.0) + value

        self._fold(replies, take)
        return MetricRecord(total)

    # --- both

    def _messages(
        self,
        grid: Grid,
        kind: str,
        task: Task,
        arrays: ArrayRecord,
        everyone: bool = False,
        extra: State | None = None,
    ) -> list[Message]:
        clients = sorted(grid.get_node_ids())
        if not everyone:
            clients = self._draw(clients, task.station_round)
        self._asked = len(clients)
        records = {"model": arrays}
        if self.shared or extra:
            records["shared"] = ArrayRecord({**(self.shared or {}), **state_to_record(extra or {})})
        return [
            Message(RecordDict({**records, "task": task.but(client=c).to_record()}), c, kind)
            for c in clients
        ]

    def _draw(self, clients: list[int], station_round: int) -> list[int]:
        count = max(1, round(self.settings.client_fraction * len(clients)))
        seed = derive(self.settings.seed, "draw", self.task.round, station_round, self.task.station)
        chosen = np.random.default_rng(seed).permutation(len(clients))[:count]
        return sorted(clients[i] for i in chosen)

    def _fold(self, replies: Iterable[Message], take: Callable[[Message], None]) -> None:
        taken = 0

        def count(reply: Message) -> None:
            nonlocal taken
            take(reply)
            taken += 1

        failed = take_each(replies, count, "client")
        self.failures += failed
        # A secure sum that is refused was the reply of everybody.
        answered = self._asked - len(failed) if taken else 0
        needed = max(1, math.ceil(self.settings.client_quorum * self._asked))
        if answered < needed:
            reasons = "; ".join(f"{f.node}: {f.reason}" for f in failed) or "it has no clients"
            raise TooFewClients(
                f"{answered} of {self._asked} clients answered, {needed} are needed: {reasons}"
            )


def _repair(gram: Gram) -> Gram:
    """Undo what noise did to a mean Gram; on the mean, where most of the noise has cancelled."""
    from hfedatm_core.privacy.release import repair  # late: Opacus is slow to import

    return repair(gram)
