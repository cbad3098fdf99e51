"""What a server rule is: a function from the stations' updates to the next global model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hfedatm.settings import Settings
from hfedatm_core import ChannelGraph, Merged, Update


@dataclass(frozen=True)
class Situation:
    """What a rule may look at besides the updates."""

    settings: Settings
    graph: ChannelGraph
    previous: dict[str, Tensor]
    round: int


@dataclass
class Rule(ABC):
    """Base of all server rules.

    A rule is a dataclass: its fields are its hyper-parameters (``rule-params``).
    """

    needs_grams: ClassVar[bool] = False
    """Whether clients must send Gram matrices; what is not needed is not sent."""

    @abstractmethod
    def merge(self, updates: Iterable[Update], situation: Situation) -> Merged:
        """Return the merged model; ``updates`` is a stream and may be read once."""
