"""A tier of stations between a Flower app's server and its clients."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from hfedatm.base.errors import explain
from hfedatm.flower.carrying import UNWANTED, Carried, put_grams, take_grams
from hfedatm.runtime.mapped import MappedGrid
from hfedatm.runtime.stations import LocalStationsGrid
from hfedatm_core import GramAccumulator

STATION_FAILED = 1_003
"""Error code of a station's reply when it could not do its work."""
_LOG = logging.getLogger("flwr")


class Station(FedAvg):
    """A station's strategy over its clients: ``FedAvg``, and the mean of their Grams.

    It takes the arguments of ``FedAvg``; by default one client is enough.
    """

    def __init__(self, *fedavg: Any, **named: Any) -> None:
        least = ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes")
        super().__init__(*fedavg, **{**(dict.fromkeys(least, 1) if not fedavg else {}), **named})
        self.carried = Carried({})
        self.examples = 0.0

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average models by examples and Grams by client."""
        answers = list(replies)
        total, clients = GramAccumulator(), 0
        forms: dict[str, object] = {}
        for message in answers:
            grams = take_grams(message).grams
            own = {name: (type(gram), gram.dim) for name, gram in grams.items()}
            forms = forms or {**own}
            if grams and own != forms:
                sender = message.metadata.src_node_id
                _LOG.warning("hfedatm: the Grams of node %d are unlike the others'", sender)
            elif grams:
                total.add(grams)
                clients += 1
        arrays, metrics = super().aggregate_train(server_round, answers)
        self._count(answers)
        self.carried = Carried(total.result(), clients) if clients else Carried({})
        return arrays, metrics

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Average metrics by examples."""
        answers = list(replies)
        self._count(answers)
        return super().aggregate_evaluate(server_round, answers)

    def _count(self, answers: list[Message]) -> None:
        usable = [message.content for message in answers if not message.has_error()]
        weights = [r[self.weighted_by_key] for c in usable for r in c.metric_records.values()]
        self.examples = sum(weights)  # type: ignore[arg-type]


def stations(
    grid: Grid,
    which: int | Sequence[Sequence[int]],
    *,
    rounds: int = 1,
    strategy: Callable[[], Station] = Station,
    timeout: float = 3600.0,
    clients: int = 0,
) -> Grid:
    """Return a Grid whose nodes are stations, for ``strategy.start(grid=stations(grid, 4))``.

    Each station runs its own rounds over its clients, from the model the server sent, and answers
    with their mean, their aggregated metrics and the mean of their Grams. The stations live in the
    process of the ServerApp, and the clients' replies pass through its SuperLink.

    Parameters
    ----------
    grid
        The Grid of the ServerApp.
    which
        The number of stations, over which the clients that are connected are spread in the order
        of their ids; or the node ids of each station.
    rounds
        Station rounds in a round of the server.
    strategy
        Makes the strategy of one station for one message.
    timeout
        Seconds a station waits for its clients in each of its rounds.
    clients
        Number of clients to wait for before they are spread. Without it, this waits until there is
        one for every station and no other has joined for a second.
    """
    if isinstance(which, int) and which < 1:
        raise ValueError(f"at least one station is needed, not {which}")
    if isinstance(which, int):
        groups = _groups(_connected(grid, max(clients, which)), which)
    else:
        groups = {number: list(group) for number, group in enumerate(which, 1)}
    grids = {number: MappedGrid(grid, {n: n for n in group}) for number, group in groups.items()}
    return _AppStations(grids, rounds, strategy, timeout)


def _connected(grid: Grid, least: int) -> list[int]:
    """Wait for the clients, which join one after the other, as ``FedAvg`` does."""
    before: list[int] = []
    while True:
        nodes = sorted(grid.get_node_ids())
        if len(nodes) >= least and nodes == before:
            return nodes
        if len(nodes) < least:
            _LOG.info("Waiting for clients to connect: %d of %d", len(nodes), least)
        before = nodes
        time.sleep(1)


def _groups(nodes: list[int], count: int) -> dict[int, list[int]]:
    """Return station -> its nodes; stations are numbered from 1."""
    ends = [round(number * len(nodes) / count) for number in range(count + 1)]
    return {number: nodes[ends[number - 1] : ends[number]] for number in range(1, count + 1)}


class _AppStations(LocalStationsGrid):
    """Stations that understand the messages of another app."""

    def __init__(
        self,
        grids: Mapping[int, Grid],
        rounds: int,
        strategy: Callable[[], Station],
        timeout: float,
    ) -> None:
        super().__init__(lambda _grid, content: content, grids)
        self._rounds, self._strategy, self._timeout = rounds, strategy, timeout

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Return all replies at once: some strategies of Flower read them twice."""
        return list(super().send_and_receive(messages, timeout=timeout))

    def _work(self, message: Message) -> Message:
        try:
            return Message(self._answer(message), reply_to=message)
        except Exception as error:
            return Message(Error(STATION_FAILED, explain(error)), reply_to=message)

    def _answer(self, message: Message) -> RecordDict:
        grid = self.grids[message.metadata.dst_node_id]
        strategy = self._strategy()
        # Clients get the model and the config under the names the app's own strategy uses.
        [(strategy.arrayrecord_key, arrays)] = message.content.array_records.items()
        [(strategy.configrecord_key, config)] = message.content.config_records.items()
        number = int(config.get("server-round", 0))  # type: ignore[arg-type]
        if message.metadata.message_type == MessageType.EVALUATE:
            sent = strategy.configure_evaluate(number, arrays, ConfigRecord(dict(config)), grid)
            replies = grid.send_and_receive(sent, timeout=self._timeout)
            scores = strategy.aggregate_evaluate(number, replies)
            return RecordDict({"metrics": _with_examples(scores, strategy)})
        for left in reversed(range(self._rounds)):
            own = ConfigRecord({**config, **({UNWANTED: True} if left else {})})
            sent = strategy.configure_train(number, arrays, own, grid)
            replies = grid.send_and_receive(sent, timeout=self._timeout)
            mean, metrics = strategy.aggregate_train(number, replies)
            if mean is None:
                raise ValueError("no client of this station gave a usable reply")
            arrays = mean
        content = RecordDict({strategy.arrayrecord_key: arrays})
        content["metrics"] = _with_examples(metrics, strategy)
        if strategy.carried.grams:
            put_grams(content, strategy.carried)
        return content


def _with_examples(metrics: MetricRecord | None, strategy: Station) -> MetricRecord:
    """Return a station's metrics with the weight it has at the server."""
    if metrics is None:
        raise ValueError("no client of this station gave a usable reply")
    return MetricRecord({**metrics, strategy.weighted_by_key: strategy.examples})
