"""The contract of a server rule: a function from the stations' updates to the next global model.

Most rules are nothing else. A rule that also changes the work below the server overrides two hooks:
`Rule.on_client` and `Rule.at_station`. The clients and stations themselves call these hooks, with
the same settings, so a rule is still one file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from flwr.app import Message

from hfedatm.base.errors import UserError
from hfedatm.base.records import Task
from hfedatm.base.settings import Settings
from hfedatm.contracts.method import Method
from hfedatm_core import ChannelGraph, Combined, Merged, Update, combine
from hfedatm_core.merging import split_products
from hfedatm_core.tensors import State

Send = Callable[[Sequence[Message]], Iterable[Message]]
"""Sends messages to clients; yields their replies, in the order of the messages."""
Hear = Callable[[Sequence[Message]], Mapping[int, Update]]
"""Returns the updates of usable replies by client, checked and bounded by each other."""


@dataclass(frozen=True)
class Situation:
    """The information that a rule may use besides the updates.

    ``previous`` is the model that the server sent out; ``level`` is 0 at the server, and at a
    station whose children are stations its level in the tree.
    """

    settings: Settings
    graph: ChannelGraph
    previous: State
    round: int
    level: int = 0


class StationRule:
    """A rule's part at a station; this base class computes only the example-weighted mean.

    In a tree of more levels `Rule.at_inner_station` returns the part at a station whose children
    are stations. There ``broadcast`` and `shared` are what a parent gives its stations.
    """

    def begin(self, task: Task, received: State, broadcast: State, memory: State) -> None:
        """Set up a global round: received model, the rule's arrays, tensors from `remember`."""

    def shared(self, station_round: int) -> State:
        """Return arrays that the children get along with the model of this station round."""
        return {}

    def gather(self, messages: Sequence[Message], send: Send, hear: Hear) -> Iterable[Message]:
        """Return one reply to each message of a station round.

        A rule may ask some clients again before it returns their last reply.
        """
        return send(messages)

    def weight(self, metrics: Mapping[str, float], shared: State) -> float:
        """Return the weight of a client's model; ``shared`` holds the arrays its method shares."""
        return metrics["num-examples"]

    def after(self, station_round: int, model: State, metrics: Mapping[str, float]) -> None:
        """Observe the station model of a finished station round and its children's mean metrics."""

    def metrics(self) -> dict[str, float]:
        """Return numbers for the server."""
        return {}

    def remember(self) -> State:
        """Return the tensors the station needs in its next global round; they never leave it.

        A tensor that is named after one of the model, with any prefix, and has its shape, follows
        if the server moves the station's channels.
        """
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

    passes_products: ClassVar[bool] = False
    """Whether `combine` returns products of Grams and moves beside the weights."""

    def combine(self, updates: Iterable[Update], situation: Situation) -> Combined:
        """Return one update for all children of a station whose children are stations.

        Unless a rule overrides this, it is the mean of their models by examples and of their Grams
        by clients; `merge` then sees one update per child of the server.
        """
        combined = combine(updates, situation.previous, regmean=True)
        weights, _ = split_products(combined.update.state)
        return replace(combined, update=replace(combined.update, state=weights))

    any_depth: ClassVar[bool] = False
    """Whether the rule's part at stations and clients also holds below stations of stations."""

    def check_tiers(self, settings: Settings) -> None:
        """Raise `UserError` if this rule cannot work with stations whose children are stations."""
        mine, base = type(self), Rule
        own = mine.at_station is not base.at_station or mine.on_client is not base.on_client
        if own and not mine.any_depth:
            raise UserError(
                f"server-rule: {settings.server_rule} has a part at each station or client that is "
                f"defined for server, stations and clients, and tiers={settings.tiers} has more "
                "levels: use two numbers in tiers, or another server-rule, such as hfedatm or avg"
            )

    def next_start(self, merged: Merged) -> State:
        """Return the model the stations start the next round from."""
        return merged.state

    def judged(self, losses: Mapping[str, float]) -> None:
        """Learn the published model's mean loss on each station's validation examples, by name.

        This follows `merge` in rounds that are evaluated and whose model is not taken back. A
        station claims its loss; the losses are finite.
        """
        return None

    def wants_grams(self, round: int, rounds: int) -> bool:
        """Return whether this round's merge needs Grams."""
        return self.needs_grams

    def looks_again(self, settings: Settings, round: int) -> int:
        """Return how often clients measure BatchNorm statistics of this round's merged model."""
        return 0

    def refines(self, settings: Settings, round: int) -> int:
        """Return how many layers an exchange after this round's merge fits; 0: none follows."""
        return 0

    def wants_profiles(self, settings: Settings, round: int) -> int:
        """Return the fewest examples of a class whose profile this round's merge uses; 0: none."""
        return 0

    def check(self, settings: Settings) -> None:
        """Raise `UserError` for settings this rule cannot work with."""
        return None

    # --- the work of a rule below the server

    def on_client(self, method: Method) -> Method:
        """Return the method clients train with under this rule."""
        return method

    def at_station(self) -> StationRule:
        """Return the rule's part at a station with clients."""
        return StationRule()

    def at_inner_station(self) -> StationRule | None:
        """Return the rule's part at a station of stations; None passes the server's arrays on."""
        return None

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
