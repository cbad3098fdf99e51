"""The contract of a server rule: a function from the stations' updates to the next global model.

Most rules are nothing else. A rule that also changes the work below the server overrides two hooks:
`Rule.on_client` and `Rule.at_station`. The clients and stations themselves call these hooks, with
the same settings, so a rule is still one file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from hfedatm.base.records import Task
from hfedatm.base.settings import Settings
from hfedatm.contracts.method import Method
from hfedatm_core import ChannelGraph, Merged, Update
from hfedatm_core.tensors import State


@dataclass(frozen=True)
class Situation:
    """The information that a rule may use besides the updates."""

    settings: Settings
    graph: ChannelGraph
    previous: State
    round: int


class StationRule:
    """A rule's part at a station; this base class computes only the example-weighted mean."""

    def begin(self, task: Task, received: State, broadcast: State, memory: State) -> None:
        """Set up a global round: received model, the rule's arrays, tensors from `remember`."""

    def shared(self, station_round: int) -> State:
        """Return arrays the clients get along with the model of this station round."""
        return {}

    def weight(self, metrics: Mapping[str, float], shared: State) -> float:
        """Return the weight of a client's model; ``shared`` holds the arrays its method shares."""
        return metrics["num-examples"]

    def after(self, station_round: int, model: State, metrics: Mapping[str, float]) -> None:
        """Observe the station model of a finished station round and its clients' mean metrics."""

    def metrics(self) -> dict[str, float]:
        """Return numbers for the server."""
        return {}

    def remember(self) -> State:
        """Return the tensors the station needs in its next global round; they never leave it."""
        return {}


@dataclass
class Rule(ABC):
    """Base of all server rules.

    A rule is a dataclass: its fields are its hyper-parameters (``rule-params``).
    """

    needs_grams: ClassVar[bool] = False
    """Whether clients must send Gram matrices; otherwise they send none."""

    merges_apart: ClassVar[bool] = False
    """Whether stations that did not share a start are merged by the Grams of all layers."""

    reports: ClassVar[tuple[str, ...]] = ()
    """Numbers every client must report; a station passes on their example-weighted mean."""

    station_reports: ClassVar[tuple[str, ...]] = ()
    """Numbers every station must report besides these means."""

    def check_report(self, metrics: Mapping[str, float]) -> None:
        """Raise ``ValueError`` for numbers of a client or a station that cannot be true.

        The numbers in `reports`, and for a station those in `station_reports`, are present and
        finite. A node that reports impossible numbers is left out of the round.
        """
        return None

    @abstractmethod
    def merge(self, updates: Iterable[Update], situation: Situation) -> Merged:
        """Return the model to publish; ``updates`` is a stream that can be read only once."""

    def next_start(self, merged: Merged) -> State:
        """Return the model the stations start the next round from."""
        return merged.state

    def wants_grams(self, round: int, rounds: int) -> bool:
        """Return whether this round's merge needs Grams."""
        return self.needs_grams

    def looks_again(self, settings: Settings, round: int) -> bool:
        """Return whether clients measure BatchNorm statistics of this round's merged model."""
        return False

    def check(self, settings: Settings) -> None:
        """Raise `UserError` for settings this rule cannot work with."""
        return None

    # --- the work of a rule below the server

    def on_client(self, method: Method) -> Method:
        """Return the method clients train with under this rule."""
        return method

    def at_station(self) -> StationRule:
        """Return the rule's part at a station."""
        return StationRule()

    def shared(self) -> State:
        """Return arrays every station gets with the model."""
        return {}

    # --- memory that survives a restart of the server

    def remember(self) -> State:
        """Return the tensors of earlier merges that the next merge needs."""
        return {}

    def restore(self, memory: State) -> None:
        """Restore the tensors that `remember` returned; empty means the state before round 1."""
        return None
