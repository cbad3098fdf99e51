"""The attacks of a hostile client or station, for `poison.py` and the tests.

A node lies about its training, its Grams and its counts. It knows the protocol and follows it; it
does not know the other nodes' updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from flwr.app import Context, Error, Message, MetricRecord
from torch import Tensor

import client_app.client
import hfedatm.runtime.local as local
import hfedatm.runtime.stations as stations
from hfedatm.base.records import (
    Task,
    grams_to_record,
    record_to_grams,
    record_to_state,
    state_to_record,
)
from hfedatm_core import Gram

Tier = Literal["client", "station"]


@dataclass
class Sent:
    """The model a node received, and the reply it would honestly send."""

    received: dict[str, Tensor]
    trained: dict[str, Tensor]
    grams: dict[str, Gram]
    metrics: dict[str, float]
    most_examples: int
    noise: torch.Generator = field(default_factory=torch.Generator)

    def move(self, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Replace every floating tensor by ``change(received, move)``."""
        for name, value in self.trained.items():
            if value.is_floating_point():
                start = self.received[name]
                self.trained[name] = change(start, value - start)

    def scale_grams(self, factor: float) -> None:
        """Multiply every Gram."""
        self.grams = {name: gram * factor for name, gram in self.grams.items()}


def _times(factor: float) -> Callable[[Sent], None]:
    return lambda sent: sent.move(lambda start, move: start + factor * move)


def _largest(sent: Sent) -> None:
    sent.move(lambda start, _: torch.full_like(start, torch.finfo(start.dtype).max))


def _noise(sent: Sent) -> None:
    def change(start: Tensor, move: Tensor) -> Tensor:
        drawn = torch.randn(start.shape, generator=sent.noise)
        return start + 10 * move.norm() * drawn / drawn.norm().clamp(min=1e-12)

    sent.move(change)


def _claim(sent: Sent) -> None:
    _times(-1)(sent)
    sent.metrics["num-examples"] = sent.most_examples
    if "num-clients" in sent.metrics:
        sent.metrics["num-clients"] = min(sent.most_examples, 1_000_000)


def _grams(factor: float, hostile: bool) -> Callable[[Sent], None]:
    def lie(sent: Sent) -> None:
        if hostile:
            _times(-1)(sent)
        sent.scale_grams(factor)

    return lie


def _drift(sent: Sent) -> None:
    """Add to the honest move one as long that always goes the same way: all weights up."""
    sent.move(lambda start, move: start + move + move.norm() / start.numel() ** 0.5)


def _nan(sent: Sent) -> None:
    sent.move(lambda start, _: torch.full_like(start, float("nan")))


ATTACKS: dict[str, Callable[[Sent], None]] = {
    "update × −10": _times(-10),
    "update × 1e6": _times(1e6),
    "largest float32": _largest,
    "noise": _noise,
    "sign flip": _times(-1),
    "claim at the limit, sign flip": _claim,
    "Gram × 1e6, honest weights": _grams(1e6, hostile=False),
    "Gram × 1e6, sign flip": _grams(1e6, hostile=True),
    "Gram × 1e-6, honest weights": _grams(1e-6, hostile=False),
    "Gram × 1e-6, sign flip": _grams(1e-6, hostile=True),
    "label flip": lambda sent: None,  # the attack has changed its examples already
    "free rider": _times(0),
    "NaN": _nan,
    "slow drift": _drift,
}
ABSENT = "absent"
"""Not an attack: the node does not take part. All attacks are compared with this run."""
HONEST = "honest"


def _answer(attack: str, tier: Tier, message: Message, honest: Callable[[], Message]) -> Message:
    """Return the hostile node's reply; ``honest`` does its honest work."""
    kind = message.metadata.message_type
    # The node's evaluation is left out of every run, so that all runs score the same examples.
    if attack == ABSENT or kind == "evaluate":
        return Message(Error(0, "absent"), reply_to=message)
    reply = honest()
    if kind != "train" or reply.has_error() or "model" not in reply.content:
        return reply
    content = reply.content
    settings = Task.from_record(message.content["task"]).settings  # type: ignore[arg-type]
    together = settings.clients_per_station if tier == "station" else 1
    sent = Sent(
        record_to_state(message.content["model"]),  # type: ignore[arg-type]
        record_to_state(content["model"]),  # type: ignore[arg-type]
        record_to_grams(content["grams"]) if "grams" in content else {},  # type: ignore[arg-type]
        dict(content["metrics"]),  # type: ignore[call-overload]
        settings.max_examples * together,
        torch.Generator().manual_seed(settings.seed),
    )
    ATTACKS[attack](sent)
    content["model"] = state_to_record(sent.trained)
    content["metrics"] = MetricRecord(sent.metrics)  # type: ignore[arg-type]
    if sent.grams:
        content["grams"] = grams_to_record(sent.grams, settings.gram_dtype)
    return Message(content, reply_to=message)


@contextmanager
def hostile(attack: str, tier: Tier, node: int = 0) -> Iterator[None]:
    """Make one node of every run in this process hostile.

    Station 0 is the worst case: its update comes first, and the others are aligned to it.
    """
    if attack == HONEST:
        yield
        return
    app, data = local.client_app, client_app.client.client_data
    grid = stations.LocalStationsGrid

    def client(message: Message, context: Context) -> Message:
        if tier == "client" and message.metadata.dst_node_id == node:
            return _answer(attack, tier, message, lambda: app(message, context))
        return app(message, context)

    class Stations(grid):  # type: ignore[misc, valid-type]
        def _work(self, message: Message) -> Message:
            if tier == "station" and message.metadata.dst_node_id == node:
                return _answer(attack, tier, message, lambda: super(Stations, self)._work(message))
            reply: Message = super()._work(message)
            return reply

    def examples(settings: Any, index: int, node_config: Any) -> Any:
        found = data(settings, index, node_config)
        own = index if tier == "client" else index // settings.clients_per_station
        if attack != "label flip" or own != node:
            return found
        flipped = found.spec.num_classes - 1 - found.train.targets
        return replace(found, train=replace(found.train, targets=flipped))

    local.client_app = client  # type: ignore[assignment]
    stations.LocalStationsGrid = Stations  # type: ignore[misc]
    client_app.client.client_data = examples
    try:
        yield
    finally:
        local.client_app = app
        stations.LocalStationsGrid = grid  # type: ignore[misc]
        client_app.client.client_data = data
