"""Turn messages into values: updates, scores, introductions, and the failures of other replies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from hfedatm.base import tracebacks
from hfedatm.base.errors import UserError
from hfedatm.base.handover.recordfile import content_bytes
from hfedatm.base.records import MOST_FAILURES, BadReply, find_record, record_to_failures
from hfedatm.base.round_record import Failure
from hfedatm.base.text import printable
from hfedatm.base.wire.arrays import read_grams, read_state
from hfedatm.base.wire.expected import ALLOWANCE, Expected, Tier
from hfedatm.base.wire.numbers import (
    BY_STATIONS,
    LARGEST,
    LARGEST_LOSS,
    MOST_SCORES,
    MOVED,
    Metrics,
    count,
    need,
    read_counts,
    read_metrics,
)
from hfedatm.base.wire.profiles import read_profiles
from hfedatm_core import Update
from hfedatm_core.grams.gram import Gram
from hfedatm_core.profiles import Profiles

V = TypeVar("V")
MOST_NODES = 1_000_000


@dataclass(frozen=True)
class NodeUpdate:
    """A reply with tensors or Grams, every part of it checked.

    Attributes
    ----------
    node, name
        The sender: its logical id, and its name in messages.
    state, grams, profiles
        The requested tensors, Grams and class profiles; empty if none were requested.
    examples, clients
        The numbers of examples and clients behind the update.
    weight
        The weight of its tensors in the mean of its tier.
    metrics
        All numbers it reports.
    bytes, gram_bytes, bytes_below
        Bytes sent: all arrays, those of Grams, and those that the node's own children sent to it.
    failures, cuts
        Children that the node left out, and those whose update it cut back.
    absent
        Tensors on which the update has no vote, because the node's model lacks them.
    """

    node: int
    name: str
    examples: int
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    grams: dict[str, Gram] = field(default_factory=dict)
    profiles: Profiles | None = None
    clients: int = 1
    weight: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    bytes: int = 0
    gram_bytes: int = 0
    bytes_below: int = 0
    failures: tuple[Failure, ...] = ()
    cuts: tuple[Failure, ...] = ()
    absent: frozenset[str] = frozenset()

    def as_update(self) -> Update:
        """Return the part of the reply that is merged."""
        return Update(
            self.state,
            self.grams,
            self.examples,
            self.clients,
            self.name,
            self.metrics,
            moved=int(self.metrics.get(MOVED, 0)),
            profiles=self.profiles,
            absent=self.absent,
        )


@dataclass(frozen=True)
class Scores:
    """An evaluation: ``correct`` and ``num-examples``, in total and by domain, loss and metrics."""

    node: int
    name: str
    examples: int
    loss_sum: float
    counts: Mapping[str, float]
    failures: tuple[Failure, ...] = ()
    sums: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeIdentity:
    """A node's claimed place in the tree; ``name`` is its name in the operator's certificate."""

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
    """Yield the value of each reply; call ``failed`` for each reply that cannot be read.

    Only ``parse`` runs within the ``try``: once a value has been used, no later error turns its
    reply into a failure.
    """
    for reply in replies:
        try:
            value = parse(reply)
        except Exception as error:  # an error of any class is the failure of this node alone
            failed(Failure(node=name_of(reply, tier), reason=reason_of(error)))
            del reply, error
            continue
        del reply  # one reply in memory at a time
        yield value
        del value


def reason_of(error: BaseException) -> str:
    """Return one line that says what was wrong with a reply."""
    if isinstance(error, BadReply | UserError):  # these explain themselves
        return printable(error)
    return printable(f"{type(error).__name__}: {printable(error)}")


def name_of(reply: Message, tier: Tier) -> str:
    """Return the name of a reply's sender, for messages."""
    return f"{tier} {reply.metadata.src_node_id}"


def open_reply(message: Message, most_bytes: int) -> RecordDict:
    """Return the content of a reply, or raise `BadReply` with the node's reason."""
    if message.has_error():
        raise BadReply(message.error.reason or f"Flower error {message.error.code}")
    content = message.content
    if "failure" in content:
        said = find_record(content, "failure", ConfigRecord) or ConfigRecord()
        reason, trace = said.get("reason"), said.get("traceback")
        if isinstance(trace, str):
            tracebacks.keep(f"node {message.metadata.src_node_id}", trace)
        raise BadReply(
            reason if isinstance(reason, str) and reason else "it failed without a reason"
        )
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
    """Read a reply that has tensors, Grams or both.

    ``weigh`` returns the weight of the tensors in a mean; by default the number of examples.
    """
    content = open_reply(message, expected.most_bytes)
    metrics = read_metrics(content)
    if expected.height == 1:  # only a station of stations reports these
        metrics = {name: value for name, value in metrics.items() if name not in BY_STATIONS}
    examples = count(metrics, "num-examples", expected.most_examples)
    need(metrics, expected.needed)
    expected.check(metrics)
    several = expected.secure or (expected.tier == "station" and expected.record == "model")
    clients = count(metrics, "num-clients", min(examples, MOST_NODES)) if several else 1
    below = int(metrics.get("bytes-up", 0))
    state = read_state(content, expected) if expected.arrays else {}
    grams = read_grams(content, expected) if expected.layers else {}
    gram_bytes = content["grams"].count_bytes() if grams else 0
    profiles = read_profiles(content, expected, examples) if expected.profiles else None
    size = content_bytes(content)
    if expected.secure:
        size, gram_bytes = below, min(int(metrics.get("gram-bytes-up", 0)), below)
    weight = float(examples if weigh is None else weigh(metrics))
    if not (math.isfinite(weight) and 0.0 <= weight <= LARGEST):
        raise BadReply(f"metrics: they would give its model a weight of {weight:g}")
    return NodeUpdate(
        node=message.metadata.src_node_id,
        name=name_of(message, expected.tier),
        examples=examples,
        state=state,
        grams=grams,
        profiles=profiles,
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
    """Read an evaluation; a client reports its mean loss, a station the sum of all losses."""
    tier = expected.tier
    content = open_reply(message, expected.most_bytes)
    metrics = read_metrics(content, MOST_SCORES)
    counts = read_counts(metrics, expected.most_examples, expected.graded)
    examples = int(counts["num-examples"])
    loss = "loss" if tier == "client" else "loss-sum"
    need(metrics, (loss,))
    loss_sum = metrics[loss] * examples if tier == "client" else metrics[loss]
    if not abs(loss_sum) <= LARGEST_LOSS * examples:
        raise BadReply(f"metrics: {loss} = {metrics[loss]:g} is not plausible")
    sums = read_state(content, expected) if expected.arrays else {}
    for name, value in sums.items():
        # Each is a sum over the examples of a number between 0 and 1.
        if value.numel() and not (value.min() >= 0 and value.max() <= examples * (1 + 1e-9)):
            raise BadReply(f"sums: {name} cannot come from {examples} examples")
    return Scores(
        node=message.metadata.src_node_id,
        name=name_of(message, tier),
        examples=examples,
        loss_sum=loss_sum,
        counts=counts,
        failures=_failures(content) if tier == "station" else (),
        sums=sums,
    )


def read_identity(message: Message) -> NodeIdentity:
    """Read a node's claim of its place."""
    content = open_reply(message, ALLOWANCE)
    said = find_record(content, "node", ConfigRecord)
    if said is None:
        raise BadReply("no usable answer")
    tier, index, siblings = (said.get(key) for key in ("tier", "index", "siblings"))
    if tier not in ("client", "station"):
        raise BadReply(f"it says that it is a {printable(tier, 40)!r}, not a client or a station")
    if type(index) is not int or not -1 <= index < MOST_NODES:
        raise BadReply(f"its place {printable(index, 40)} is not valid")
    if type(siblings) is not int or not 0 <= siblings <= MOST_NODES:
        raise BadReply(f"its number of nodes {printable(siblings, 40)} is not plausible")
    return NodeIdentity(message.metadata.src_node_id, tier, index, siblings)  # type: ignore[arg-type]


def _plain_bytes(record: Mapping[str, Any]) -> int:
    """Return about how many bytes the names and values of a record of plain values take."""
    if isinstance(record, ArrayRecord):
        return 0
    values = [
        v for value in record.values() for v in (value if isinstance(value, list) else [value])
    ]
    texts = sum(len(v) for v in values if isinstance(v, str | bytes))
    return texts + 8 * len(values) + sum(map(len, record))


def _failures(content: RecordDict, key: str = "failures") -> tuple[Failure, ...]:
    record = find_record(content, key, ConfigRecord)
    return tuple(record_to_failures(record)[: MOST_FAILURES + 1]) if record else ()
