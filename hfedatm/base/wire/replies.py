"""From messages to values: updates, scores, who a node is, and the failures of the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from hfedatm.base.handover.recordfile import content_bytes
from hfedatm.base.records import MOST_FAILURES, BadReply, Failure, find_record, record_to_failures
from hfedatm.base.text import printable
from hfedatm.base.wire.arrays import read_grams, read_state
from hfedatm.base.wire.expected import ALLOWANCE, Expected, Tier
from hfedatm.base.wire.numbers import (
    LARGEST,
    LARGEST_LOSS,
    MOST_SCORES,
    Metrics,
    count,
    need,
    read_counts,
    read_metrics,
)
from hfedatm_core import Update
from hfedatm_core.grams.gram import Gram

V = TypeVar("V")
MOST_NODES = 1_000_000


@dataclass(frozen=True)
class NodeUpdate:
    """A reply with tensors or Grams, every part of it checked.

    Attributes
    ----------
    node, name
        Who sent it: the logical id, and the words for it.
    state, grams
        What was asked for; empty where nothing was.
    examples, clients
        What stands behind it.
    weight
        How much its tensors count in the mean of its tier.
    metrics
        All numbers it reports.
    bytes, gram_bytes, bytes_below
        What travelled: all arrays, those of Grams, and what the node's own children sent it.
    failures, cuts
        Children that the node left out, and those whose update it cut back.
    """

    node: int
    name: str
    examples: int
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    grams: dict[str, Gram] = field(default_factory=dict)
    clients: int = 1
    weight: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    bytes: int = 0
    gram_bytes: int = 0
    bytes_below: int = 0
    failures: tuple[Failure, ...] = ()
    cuts: tuple[Failure, ...] = ()

    def as_update(self) -> Update:
        """Return what is merged of it."""
        return Update(self.state, self.grams, self.examples, self.clients, self.name, self.metrics)


@dataclass(frozen=True)
class Scores:
    """An evaluation: ``correct`` and ``num-examples``, in all and by domain, and the loss."""

    node: int
    name: str
    examples: int
    loss_sum: float
    counts: Mapping[str, float]
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True)
class NodeIdentity:
    """What a node says of its place in the tree; ``name`` is what the operator enrolled it as."""

    node_id: int
    tier: Tier
    index: int
    siblings: int
    name: str = ""


def checked(
    replies: Iterable[Message],
    parse: Callable[[Message], V],
    tier: Tier,
    failed: Callable[[Failure], None],
) -> Iterator[V]:
    """Yield the value of each reply; ``failed`` is called for whoever's cannot be read.

    Nothing but ``parse`` runs within the ``try``: what is done with a value is not undone by a
    later complaint about it.
    """
    for reply in replies:
        try:
            value = parse(reply)
        except Exception as error:  # of any class: it is this node's failure and nobody else's
            failed(Failure(name_of(reply, tier), reason_of(error)))
            del reply, error
            continue
        del reply  # one reply in memory at a time
        yield value
        del value


def reason_of(error: BaseException) -> str:
    """Return one line that says what was wrong with a reply."""
    if isinstance(error, BadReply):
        return printable(error)
    return printable(f"{type(error).__name__}: {printable(error)}")


def name_of(reply: Message, tier: Tier) -> str:
    """Return the words for who sent a reply."""
    return f"{tier} {reply.metadata.src_node_id}"


def open_reply(message: Message, most_bytes: int) -> RecordDict:
    """Return the content of a reply, or raise `BadReply` with the node's reason."""
    if message.has_error():
        raise BadReply(message.error.reason or f"Flower error {message.error.code}")
    content = message.content
    if "failure" in content:
        reason = (find_record(content, "failure", ConfigRecord) or ConfigRecord()).get("reason")
        raise BadReply(reason if isinstance(reason, str) and reason else "it failed, and not why")
    size = content_bytes(content) + sum(_plain_bytes(record) for record in content.values())
    if size > most_bytes:
        raise BadReply(
            f"reply of {size / 1e6:.1f} MB is larger than the {most_bytes / 1e6:.1f} MB that one "
            "of this model can have (or than max-reply-mb)"
        )
    return content


def read_update(
    message: Message, expected: Expected, weigh: Callable[[Metrics], float] | None = None
) -> NodeUpdate:
    """Read a reply with tensors, Grams or both.

    ``weigh`` returns how much the tensors count in a mean; by examples unless given.
    """
    content = open_reply(message, expected.most_bytes)
    metrics = read_metrics(content)
    examples = count(metrics, "num-examples", expected.most_examples)
    need(metrics, expected.needed)
    expected.check(metrics)
    several = expected.secure or (expected.tier == "station" and expected.record == "model")
    clients = count(metrics, "num-clients", min(examples, MOST_NODES)) if several else 1
    below = _amount(metrics, "bytes-up")
    state = read_state(content, expected) if expected.arrays else {}
    grams = read_grams(content, expected) if expected.layers else {}
    gram_bytes = content["grams"].count_bytes() if grams else 0
    size = content_bytes(content)
    if expected.secure:
        size, gram_bytes = below, min(_amount(metrics, "gram-bytes-up"), below)
    weight = float(examples if weigh is None else weigh(metrics))
    if not (math.isfinite(weight) and 0.0 <= weight <= LARGEST):
        raise BadReply(f"metrics: they would give its model a weight of {weight:g}")
    return NodeUpdate(
        node=message.metadata.src_node_id,
        name=name_of(message, expected.tier),
        examples=examples,
        state=state,
        grams=grams,
        clients=clients,
        weight=weight,
        metrics=metrics,
        bytes=size,
        gram_bytes=gram_bytes,
        bytes_below=below,
        failures=_failures(content) if expected.tier == "station" else (),
        cuts=_failures(content, "cuts") if expected.tier == "station" else (),
    )


def read_scores(message: Message, expected: Expected) -> Scores:
    """Read an evaluation; a client reports its mean loss, a station the sum of its clients'."""
    tier = expected.tier
    content = open_reply(message, expected.most_bytes)
    metrics = read_metrics(content, MOST_SCORES)
    counts = read_counts(metrics, expected.most_examples)
    examples = int(counts["num-examples"])
    loss = "loss" if tier == "client" else "loss-sum"
    need(metrics, (loss,))
    loss_sum = metrics[loss] * examples if tier == "client" else metrics[loss]
    if not abs(loss_sum) <= LARGEST_LOSS * examples:
        raise BadReply(f"metrics: {loss} = {metrics[loss]:g} is not plausible")
    return Scores(
        node=message.metadata.src_node_id,
        name=name_of(message, tier),
        examples=examples,
        loss_sum=loss_sum,
        counts=counts,
        failures=_failures(content) if tier == "station" else (),
    )


def read_identity(message: Message) -> NodeIdentity:
    """Read what a node says of its place."""
    content = open_reply(message, ALLOWANCE)
    said = find_record(content, "node", ConfigRecord)
    if said is None:
        raise BadReply("no usable answer")
    tier, index, siblings = (said.get(key) for key in ("tier", "index", "siblings"))
    if tier not in ("client", "station"):
        raise BadReply(f"it says that it is a {printable(tier, 40)!r}, not a client or a station")
    if type(index) is not int or not -1 <= index < MOST_NODES:
        raise BadReply(f"its place {printable(index, 40)} is no number of a node")
    if type(siblings) is not int or not 0 <= siblings <= MOST_NODES:
        raise BadReply(f"it says that there are {printable(siblings, 40)} nodes")
    return NodeIdentity(message.metadata.src_node_id, tier, index, siblings)  # type: ignore[arg-type]


def _plain_bytes(record: Mapping[str, Any]) -> int:
    """Return about how many bytes the names and values of a record of plain values have."""
    if isinstance(record, ArrayRecord):
        return 0
    values = [
        v for value in record.values() for v in (value if isinstance(value, list) else [value])
    ]
    texts = sum(len(v) for v in values if isinstance(v, str | bytes))
    return texts + 8 * len(values) + sum(map(len, record))


def _amount(metrics: Mapping[str, float], name: str) -> int:
    value = metrics.get(name, 0)
    if value < 0:
        raise BadReply(f"metrics: {name} = {value:g} is negative")
    return int(value)


def _failures(content: RecordDict, key: str = "failures") -> tuple[Failure, ...]:
    record = find_record(content, key, ConfigRecord)
    return tuple(record_to_failures(record)[: MOST_FAILURES + 1]) if record else ()
