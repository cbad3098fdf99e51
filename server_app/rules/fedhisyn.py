"""FedHiSyn (Li et al., 2022): fast clients pass models around a ring while slow ones still train.

A station groups its clients by the time they need (k-means of the times). The clients of a group
form a ring, from fast to slow. In a station round every client first trains the station's model;
then it trains the model that its predecessor in the ring has just trained, and so on. With ``T``,
the time of the slowest client of the station, and ``t``, that of the slowest client of the group, a
group makes

    hops = min(floor(T / t), 1 + ahead)

hops, so that all groups end together. The station then averages the last models of all clients by
examples, and the server averages the stations, through however many levels of them.

The publication has one server, whose clients send models to each other. Left open, or different
here:

- *The way.* Clients of a station have no links between them: the station passes models on. A client
  thus gets a model that one other client trained, and refuses the rule unless its owner allows it
  (``privacy.model-to-peers``).
- *Time.* Without owners' policies (one process, simulation) times are simulated: between 1 and
  ``spread``, drawn from the seed, evenly on a logarithmic scale. A deployed station uses the
  seconds that its clients reported in the round before; in round 1 nobody hops. A false time costs
  little: it cannot cause more than ``1 + ahead`` hops, nor fewer than one.
- *Staleness.* The publication has no bound: here the model of the slowest group is at most
  ``ahead`` hops behind.
- *Dropping out.* A client that fails is skipped: its successor gets the model of its predecessor. A
  model that the bounds on updates exclude is not passed on, either.

A station holds the models of a group at once. It hears the fastest group first, while the others
train; a third group hops only when the first has finished.

Li et al., "FedHiSyn: A Hierarchical Synchronous Federated Learning Framework for Resource and Data
Heterogeneity", arXiv:2206.10546.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

import numpy as np
import torch
from flwr.app import Message, RecordDict

from hfedatm.base.errors import UserError
from hfedatm.base.records import Task, state_to_record
from hfedatm.base.seeding import derive
from hfedatm.base.settings import Settings
from hfedatm.base.trust.policy import Policy
from hfedatm.contracts import Method, Rule, Situation, State, StationRule, Update, Wrapper, option
from hfedatm.contracts.rule import Hear, Send
from hfedatm_core import Merged, merge

SECONDS = "seconds."
LEAST_TIME = 1e-6


def simulated_time(seed: int, client: int, spread: float) -> float:
    """Return the simulated time of a client, between 1 and ``spread``."""
    drawn = np.random.default_rng(derive(seed, "speed", client % 2**32)).random()
    return float(spread**drawn)


def grouped_by_time(times: Mapping[int, float], groups: int) -> list[list[int]]:
    """Return the clients in groups, by the best k-means of their times; all from fast to slow."""
    order = sorted(times, key=lambda client: (times[client], client))
    values = np.array([times[client] for client in order])
    count = min(groups, len(np.unique(values)))

    def spread(start: int, stop: int) -> float:
        part = values[start:stop]
        return float(((part - part.mean()) ** 2).sum())

    # In one dimension groups are pieces of the sorted times: best[stop] is the least sum of squares
    # of pieces of the first `stop` times, with the places where they begin and end.
    best: dict[int, tuple[float, tuple[int, ...]]]
    best = {stop: (spread(0, stop), (0, stop)) for stop in range(1, len(order) + 1)}
    for pieces in range(2, count + 1):
        best = {
            stop: min(
                (best[cut][0] + spread(cut, stop), (*best[cut][1], stop))
                for cut in range(pieces - 1, stop)
            )
            for stop in range(pieces, len(order) + 1)
        }
    edges = best[len(order)][1]
    return [order[start:stop] for start, stop in pairwise(edges)]


def hops_of(group: Sequence[int], times: Mapping[int, float], ahead: int) -> int:
    """Return how often the clients of a group train in one station round."""
    slowest = max(times.values())
    return min(math.floor(slowest / max(times[c] for c in group) + 1e-9), 1 + ahead)


class RingStation(StationRule):
    """A station that passes models around the rings of its clients."""

    def __init__(self, rule: FedHiSyn) -> None:
        self._rule = rule

    def begin(self, task: Task, received: State, broadcast: State, memory: State) -> None:
        """Restore the times that the clients needed in earlier rounds."""
        self._seed = task.settings.seed
        self._seconds = {
            int(name.removeprefix(SECONDS)): float(value)
            for name, value in memory.items()
            if name.startswith(SECONDS)
        }
        self._heard: dict[int, float] = {}

    def times(self, clients: Iterable[int]) -> dict[int, float]:
        """Return the time of each client; one that has never answered counts as the slowest."""
        if not self._rule.measures:
            return {c: simulated_time(self._seed, c, self._rule.spread) for c in clients}
        slowest = max(self._seconds.values(), default=1.0)
        return {c: max(self._seconds.get(c, slowest), LEAST_TIME) for c in clients}

    def gather(self, messages: Sequence[Message], send: Send, hear: Hear) -> Iterator[Message]:
        """Yield the last reply of every client, group by group."""
        asked = {message.metadata.dst_node_id: message for message in messages}
        times = self.times(asked)
        groups = grouped_by_time(times, self._rule.groups)
        first = iter(send([asked[client] for group in groups for client in group]))
        for group in groups:
            replies = {client: next(first) for client in group}
            for hop in range(1, hops_of(group, times, self._rule.ahead)):
                trained = self._note(hear(list(replies.values())))
                ring = [client for client in group if client in trained]
                if not ring:
                    break
                sent = [
                    _passed(asked[client], trained[before].state, hop)
                    for before, client in zip([ring[-1], *ring[:-1]], ring, strict=True)
                ]
                replies |= {reply.metadata.src_node_id: reply for reply in send(sent)}
            if self._rule.measures:
                self._note(hear(list(replies.values())))
            yield from replies.values()

    def _note(self, trained: Mapping[int, Update]) -> Mapping[int, Update]:
        """Note the times of usable replies."""
        for client, update in trained.items():
            if "seconds" in update.metrics:
                self._heard[client] = float(update.metrics["seconds"])
        return trained

    def remember(self) -> State:
        """Keep the times."""
        if not self._rule.measures:
            return {}
        times = {**self._seconds, **self._heard}
        return {f"{SECONDS}{c}": torch.tensor(t, dtype=torch.float64) for c, t in times.items()}


def _passed(message: Message, state: State, hop: int) -> Message:
    """Return the message of a station round with another model, for one more hop."""
    task = Task.from_record(message.content["task"]).but(hop=hop)
    content = {**message.content, "model": state_to_record(state), "task": task.to_record()}
    meta = message.metadata
    # A node refuses the same step twice, unless its group differs.
    return Message(RecordDict(content), meta.dst_node_id, meta.message_type, group_id=f"hop-{hop}")


class PassedOn(Wrapper):
    """A client method whose trained model goes to other clients, too."""

    prefix: ClassVar[str] = "fedhisyn."
    own_reveals: ClassVar[tuple[str, ...]] = ("model-to-peers",)


@dataclass
class FedHiSyn(Rule):
    """The example-weighted mean of models that went around rings of equally fast clients."""

    any_depth: ClassVar[bool] = True

    groups: int = option(2, "groups of clients by speed, in each station", ge=1, le=100)
    ahead: int = option(3, "most hops that a group may be ahead of another", ge=0, le=100)
    speeds: Literal["auto", "simulated", "measured"] = option(
        "auto", "times of clients: drawn from the seed, or measured; auto: measured if deployed"
    )
    spread: float = option(10.0, "slowest simulated time, if the fastest is 1", ge=1, le=1000)

    @property
    def measures(self) -> bool:
        """Whether the times of clients are measured."""
        if self.speeds == "auto":
            return Policy.current().is_owners
        return self.speeds == "measured"

    def check(self, settings: Settings) -> None:
        """Refuse what hides a client's model from its station, or counts its steps."""
        for key in ("secure_aggregation", "dp_sgd"):
            if getattr(settings, key):
                raise UserError(
                    "server-rule fedhisyn passes each client's model on, and clients train several "
                    f"times in a station round: remove {key.replace('_', '-')}"
                )

    def on_client(self, method: Method) -> Method:
        """Say that the trained model goes to other clients."""
        return PassedOn(method)

    def at_station(self) -> StationRule:
        """Pass models around rings."""
        return RingStation(self)

    def merge(self, updates: Iterable[Update], situation: Situation) -> Merged:
        """Average the stations by examples."""
        return merge(updates, fot=False, regmean=False)
