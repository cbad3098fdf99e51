"""Secure aggregation, the client's side.

A client does its usual work, but keeps the reply and answers with public keys. In the five short
exchanges that follow, it sends shares of its secrets, names the peers whose shares are false, sends
the reply as a masked vector, signs the list of clients that sent theirs, and sends the shares that
remove the masks from the sum. Each message may reach a new process, so the client keeps its state
on disk between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord, Context, MetricRecord, RecordDict

from client_app.sums import KeptSums
from hfedatm.base.masked_reply import IN_THE_CLEAR, check_range, flatten
from hfedatm.base.memory import NodeMemory
from hfedatm.base.privacy_settings import secure_threshold
from hfedatm.base.records import Task, arrays_to_record, find_record
from hfedatm.base.trust.cohort import step_of, verify_peers
from hfedatm.base.trust.enrolment import Identity
from hfedatm.base.trust.policy import Policy
from hfedatm_core.secagg import SecureAggregationError, SecureClient
from hfedatm_core.secagg.messages import load, take_clients

_MOST_CLIENTS = 100_000
_SESSION_BYTES = range(16, 65)


@dataclass(frozen=True)
class Start:
    """How a station begins a secure sum.

    Attributes
    ----------
    session
        Name of the sum.
    asked
        Number of clients asked; the threshold follows from it.
    metrics
        Names of the numbers to average.
    """

    session: bytes
    asked: int
    metrics: tuple[str, ...]

    @classmethod
    def of(cls, content: RecordDict) -> Start | None:
        """Read it from a message; None if the message begins no secure sum."""
        said = find_record(content, "secure", ConfigRecord)
        if said is None:
            return None
        session, asked, metrics = (said.get(key) for key in ("session", "asked", "metrics"))
        if not isinstance(session, bytes) or len(session) not in _SESSION_BYTES:
            raise SecureAggregationError("the station does not name the secure sum")
        if type(asked) is not int or not 2 <= asked <= _MOST_CLIENTS:
            raise SecureAggregationError(f"a secure sum of {str(asked)[:20]} clients is refused")
        if not isinstance(metrics, list) or not all(isinstance(name, str) for name in metrics):
            raise SecureAggregationError("the station does not say which numbers are to be summed")
        return cls(session, asked, tuple(metrics))  # type: ignore[arg-type]


def withhold(reply: RecordDict, content: RecordDict, task: Task, context: Context) -> RecordDict:
    """Keep ``reply`` if the run aggregates securely, and return public keys in its place."""
    if not task.settings.secure_aggregation:
        return reply
    start = Start.of(content)
    if start is None:
        raise SecureAggregationError(
            "secure-aggregation is on, but the station asked for a reply in the clear"
        )
    layout, vector = flatten(reply, task.settings, start.metrics)
    check_range(layout, vector, start.asked)
    client = SecureClient(
        task.client,
        start.session,
        step=step_of(task),
        threshold=secure_threshold(task.settings, start.asked),
        smallest_cohort=Policy.current().secure_sum.least_clients,
    )
    keys = client.advertise(Identity.load())
    kept = _kept(task, context)
    with kept.lock():
        kept.begin(client, vector)
    clear = {name: v for name, v in reply.metric_records["metrics"].items() if name in IN_THE_CLEAR}
    return RecordDict(
        {
            "keys": ConfigRecord({"message": keys}),
            "layout": layout.to_record(),
            "metrics": MetricRecord(clear),
        }
    )


def share(content: RecordDict, context: Context) -> RecordDict:
    """Answer the key directory with one encrypted share per peer."""
    kept = _kept(_task(content), context)
    with kept.under_way() as client:
        answer = client.share(_message(content), verify_peers(Identity.load()))
        kept.claim(client).bind("cohort", client.names.values())
    return _answer(answer)


def check(content: RecordDict, context: Context) -> RecordDict:
    """Answer the peers' shares with a list of those that are false."""
    with _kept(_task(content), context).under_way() as client:
        answer = client.check(_message(content))
    return _answer(answer)


def mask(content: RecordDict, context: Context) -> RecordDict:
    """Answer the list of participants with the masked vector."""
    kept = _kept(_task(content), context)
    with kept.under_way() as client:
        participants = _clients(content, "participants")
        client.expect("mask")
        masked = client.mask(participants, kept.vector())
        claim = kept.claim(client)
        claim.bind("cohort", client.names.values())
        kept.keep(claim, client)
    return RecordDict({"masked": arrays_to_record({"vector": masked})})


def sign(content: RecordDict, context: Context) -> RecordDict:
    """Answer the list of survivors with this client's signature of it."""
    kept = _kept(_task(content), context)
    with kept.under_way() as client:
        answer = client.sign(_clients(content, "survivors"))
        claim = kept.claim(client)
        claim.bind("survivors", (client.names[survivor] for survivor in client.survivors))
        kept.keep(claim, client)
    return _answer(answer)


def reveal(content: RecordDict, context: Context) -> RecordDict:
    """Answer the signatures of the survivors with the shares that remove the masks."""
    with _kept(_task(content), context).under_way() as client:
        answer = client.reveal(_message(content))
    return _answer(answer)


def _kept(task: Task, context: Context) -> KeptSums:
    """Return this client's stored sums; an enrolled node is one client, whatever a task says."""
    own = Identity.load()
    name = own.name if own else f"client-{task.client}"
    state_dir: Any = context.node_config.get("state-dir")
    return KeptSums(NodeMemory(task.run, name, state_dir).folder)


def _task(content: RecordDict) -> Task:
    return Task.from_record(content["task"])


def _message(content: RecordDict) -> bytes:
    return content["secure"]["message"]  # type: ignore[return-value]


def _clients(content: RecordDict, what: str) -> list[int]:
    return take_clients(load(_message(content), f"the list of {what}"), what, "the message")


def _answer(message: bytes) -> RecordDict:
    return RecordDict({"secure": ConfigRecord({"message": message})})
