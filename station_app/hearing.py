"""The replies of its clients that a station can use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from hfedatm.base.admission import Admission
from hfedatm.base.class_profiles import ProfileShapes
from hfedatm.base.errors import UserError
from hfedatm.base.index_maps import RECORD
from hfedatm.base.kept_model import Sending
from hfedatm.base.privacy_settings import clients_asked
from hfedatm.base.records import Task, state_to_record
from hfedatm.base.round_record import Failure
from hfedatm.base.seeding import derive
from hfedatm.base.wire import (
    Expected,
    NodeUpdate,
    Scores,
    checked,
    read_update,
)
from hfedatm.contracts import Rule, StationRule
from hfedatm_core import Gram, Update
from hfedatm_core.profiles import Profiles
from hfedatm_core.tensors import State
from station_app.result import grouped

V = TypeVar("V", NodeUpdate, Scores)


class TooFewClients(UserError):
    """Fewer clients than the quorum gave a usable reply."""


class Hearing(Strategy):
    """Checked replies of the clients, whatever the clients are asked for.

    Parameters
    ----------
    task
        Task from the server.
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
        self.rule = rule
        self.station_rule = rule.at_station() if rule else StationRule()
        self.settings, self.layers, self.shared = task.settings, dict(layers or {}), shared
        self.sums: State = {}
        """Sums of the evaluation metrics: empty at first, then over all clients."""
        self.maps: ArrayRecord | None = None
        """Index maps of this station for its clients, whose state follows the channels."""
        self.failures: list[Failure] = []
        self.grams: dict[str, Gram] = {}
        self.num_examples = self.num_clients = self.bytes_up = self.gram_bytes_up = 0
        self.gram_seconds = 0.0
        self.epsilon = 0.0
        self.cuts: list[Failure] = []
        """Clients whose update was cut back by a lot, and how."""
        self.standing: dict[str, float] = {}
        """Agreement of each client with the others so far."""
        self.profile_shapes: ProfileShapes | None = None
        """The class profiles that clients send with their Grams."""
        self.profiles: Profiles | None = None
        self.sending: Sending | None = None
        """How the merged model goes to the clients, to be refined, measured or evaluated."""
        self.looked: set[int] = set()
        """Clients that have measured, and keep, the merged model."""
        self._asked = self._expected_number = 0
        self._absent = "have not connected"
        self._secure = self.settings.secure_aggregation

    def summary(self) -> None:
        """Log nothing: the server prints one line per round for the whole tree."""

    def _messages(
        self,
        grid: Grid,
        kind: str,
        task: Task,
        arrays: ArrayRecord,
        everyone: bool = False,
        extra: State | None = None,
        also: Mapping[str, ConfigRecord] | None = None,
    ) -> list[Message]:
        clients = sorted(grid.get_node_ids())
        if not everyone:
            clients = self._draw(clients, task.station_round)
        self._asked = len(clients)
        # Configured clients that have not connected count as missing.
        configured = self.settings.clients_per_station if everyone else clients_asked(self.settings)
        self._expected_number = max(self._asked, configured)
        model, records = self.sending or Sending(arrays), dict[str, Any](also or {})
        if self.maps and task.kind == "train":
            records[RECORD] = self.maps
        if self.shared or extra:
            records["shared"] = ArrayRecord({**(self.shared or {}), **state_to_record(extra or {})})
        return [
            Message(
                RecordDict({**records, **model.to(c), "task": task.but(client=c).to_record()}),
                c,
                kind,
            )
            for c in clients
        ]

    def _draw(self, clients: list[int], station_round: int) -> list[int]:
        count = max(1, round(self.settings.client_fraction * len(clients)))
        seed = derive(self.settings.seed, "draw", self.task.round, station_round, self.task.station)
        chosen = np.random.default_rng(seed).permutation(len(clients))[:count]
        return sorted(clients[i] for i in chosen)

    def _expected(self, **parts: Any) -> Expected:
        """Return the parts a client's reply must have; a secure sum stands for all asked."""
        together = self._asked if self._secure else 1
        return Expected(self.settings, "client", together=together, secure=self._secure, **parts)

    def _admitted(self, usable: Iterable[NodeUpdate], admission: Admission) -> Iterator[Update]:
        """Yield the updates that enter the mean, once all usable ones have arrived."""
        for update in usable:
            self.bytes_up += update.bytes
            self.gram_bytes_up += update.gram_bytes
            self.gram_seconds += update.metrics.get("gram-seconds", 0.0) if update.grams else 0.0
            self.epsilon = max(self.epsilon, update.metrics.get("epsilon", 0.0))
            admission.add(update.as_update())
            del update
        yield from admission
        self.failures += admission.left_out()
        self.cuts += admission.cut_back()

    def hear(self, replies: Sequence[Message], expected: Expected) -> dict[int, Update]:
        """Return the updates of usable replies by client, cut back as far as those before a mean.

        The updates may be sent on to other clients; nobody has been named as failing yet.
        """
        nodes: dict[str, int] = {}
        admission = Admission(self.settings, "clients", dict(expected.arrays), compare=False)
        for update in checked(replies, lambda r: read_update(r, expected), "client", _say_nothing):
            nodes[update.name] = update.node
            admission.add(update.as_update())
            del update
        found = {nodes[update.name]: update for update in admission}
        admission.close()
        return found

    def _usable(self, replies: Iterable[Message], read: Callable[[Message], V]) -> Iterator[V]:
        """Yield the replies that pass the checks; raise `TooFewClients` below the quorum."""
        failed: list[Failure] = []
        taken = 0
        for value in checked(replies, read, "client", failed.append):
            taken += 1
            yield value
            del value
        self.failures += failed
        # A refused secure sum counts as a failure of every client asked.
        answered = self._asked - len(failed) if taken else 0
        needed = max(1, math.ceil(self.settings.client_quorum * self._expected_number))
        if answered < needed:
            absent = self._expected_number - self._asked
            reasons = grouped(failed) if self._asked else ["it has no clients"]
            reasons += [f"{absent} {self._absent}"] if absent and self._asked else []
            raise TooFewClients(
                f"{answered} of {self._expected_number} clients answered, {needed} are needed: "
                f"{'; '.join(reasons)}"
            )


def _say_nothing(failure: Failure) -> None:
    """Leave it to the end of the station round to name who failed."""
