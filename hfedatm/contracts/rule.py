"""What a server rule is: a function from the stations' updates to the next global model.

Most rules are nothing else. A rule that also changes what happens below the server says so in two
hooks: `Rule.on_client` and `Rule.at_station`. Both are called where the work is done, from the
same settings, so a rule is still one file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from hfedatm.base.records import Task
from hfedatm.base.settings import Settings
from hfedatm.base.state import State
from hfedatm.contracts.method import Method
from hfedatm_core import ChannelGraph, Merged, Update


@dataclass(frozen=True)
class Situation:
    """What a rule may look at besides the updates."""

    settings: Settings
    graph: ChannelGraph
    previous: State
    round: int


class StationSide:
    """A rule's part at a station; as it stands, nothing but the example-weighted mean."""

    def begin(self, task: Task, received: State, broadcast: State, memory: State) -> None:
        """Set up a global round: the received model, the rule's arrays, what `remember` kept."""

    def shared(self, station_round: int) -> State:
        """Return arrays the clients get along with the model of this station round."""
        return {}

    def weight(self, metrics: Mapping[str, float], shared: State) -> float:
        """Return how much a client's model counts; ``shared`` is what its method shares."""
        return metrics["num-examples"]

    def after(self, station_round: int, model: State, metrics: Mapping[str, float]) -> None:
        """Look at the station model of a finished station round and its clients' mean metrics."""

    def metrics(self) -> dict[str, float]:
        """Return numbers for the server."""
        return {}

    def remember(self) -> State:
        """Return what the station needs in its next global round; it never leaves the station."""
        return {}


@dataclass
class Rule(ABC):
    """Base of all server rules.

    A rule is a dataclass: its fields are its hyper-parameters (``rule-params``).
    """

    needs_grams: ClassVar[bool] = False
    """Whether clients must send Gram matrices; what is not needed is not sent."""

    reports: ClassVar[tuple[str, ...]] = ()
    """Numbers every client must report; a station passes on their example-weighted mean."""

    station_reports: ClassVar[tuple[str, ...]] = ()
    """Numbers every station must report besides these means."""

    def check_report(self, metrics: Mapping[str, float]) -> None:
        """Raise ``ValueError`` for numbers of a client or a station that cannot be true.

        All those in `reports`, and of a station those in `station_reports`, are there and finite.
        Whoever reports such numbers is left out of the round.
        """
        return None

    @abstractmethod
    def merge(self, updates: Iterable[Update], situation: Situation) -> Merged:
        """Return the model to publish; ``updates`` is a stream and may be read once."""

    def next_start(self, merged: Merged) -> State:
        """Return the model the stations start the next round from."""
        return merged.state

    def wants_grams(self, round: int, rounds: int) -> bool:
        """Return whether this round's merge needs Grams."""
        return self.needs_grams

    def check(self, settings: Settings) -> None:
        """Raise `UserError` for settings this rule cannot work with."""
        return None

    # --- what a rule does below the server

    def on_client(self, method: Method) -> Method:
        """Return the method clients train with under this rule."""
        return method

    def at_station(self) -> StationSide:
        """Return the rule's part at a station."""
        return StationSide()

    def shared(self) -> State:
        """Return arrays every station gets with the model."""
        return {}

    # --- what survives a restart of the server

    def remember(self) -> State:
        """Return what the next merge needs of the earlier ones."""
        return {}

    def restore(self, memory: State) -> None:
        """Take up what `remember` returned; an empty one is the state before round 1."""
        return None
