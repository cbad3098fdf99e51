"""Work that several cells of a table share: a client does each piece of it once.

Avg, HFedATM, its ablations and most of its options are different merges of the same stations: if
the server publishes the merge but sends out the mean, their clients train the same models. A
client's answer depends only on the message, the client's memory and some of the settings. So an
answer is kept under a digest of these, and a later cell that asks for the same gets the kept
answer. Stations and server work as in any other run, which makes the results equal, bit for bit,
to those of a run by itself. A cell whose trajectory leaves that of the others (the paper's loop)
shares the rounds before, and its clients train for the rest.

Grams are kept apart from the trained models, once for each form that a cell asks for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, MetricRecord, RecordDict

from hfedatm.base.building import build_rule, measures_all
from hfedatm.base.handover import recordfile
from hfedatm.base.memory import NodeMemory
from hfedatm.base.privacy_settings import is_private
from hfedatm.base.records import Task, record_to_state, state_to_record
from hfedatm.base.settings import Settings
from hfedatm.contracts import Rule
from hfedatm.runtime.in_process import Clients
from hfedatm_core.tensors import State

MOST_BYTES = 2 * 2**30
"""Bytes that the answers of one group of cells may take on the disk; later ones are not kept."""
KINDS = ("prepare", "train", "measure", "evaluate")
WHERE = frozenset({"preset", "output", "run_name", "resume", "track", "diagnostics"})
OF_SERVER = frozenset(
    {"server_rule", "rule_params", "rule_keys", "alpha", "gram_weights", "gram_model"}
)
OF_GRAMS = frozenset(
    {
        "regmean_bias",
        "regmean_conv",
        "gram_layers",
        "gram_batches",
        "gram_max_dim",
        "gram_rank",
        "gram_dtype",
        "gram_min_rows",
    }
)


def can_share(settings: Settings) -> bool:
    """Return whether the answers of a client are the same under every other such server rule.

    A rule that changes how clients train, or what they send, shares nothing. Noise differs from run
    to run, and a training function of the user's reads all settings.
    """
    rule = build_rule(settings)
    profiled = any(rule.wants_profiles(settings, r) for r in range(1, settings.rounds + 1))
    unchanged = type(rule).on_client is Rule.on_client and not profiled
    secret = is_private(settings) or settings.secure_aggregation
    return unchanged and not secret and not settings.train_fn


def trajectory(settings: Settings) -> str:
    """Return a digest of all settings that clients depend on, besides the form of Grams."""
    return _digest(_dump(settings, OF_GRAMS))


@dataclass
class SharedWork:
    """Clients that answer from ``folder`` what an earlier cell has asked them already."""

    clients: Clients
    folder: Path
    reused: int = field(default=0, init=False)
    """How many trained models came from the folder."""

    def __post_init__(self) -> None:
        """Count what the folder holds already."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._bytes = sum(path.stat().st_size for path in self.folder.iterdir())

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer like the clients themselves."""
        task = Task.from_record(message.content["task"])
        # The answer to changes depends on a model that an earlier message brought.
        alone = task.kind not in KINDS or "changes" in message.content
        if alone or not can_share(task.settings):
            return self.clients(message, context)
        if not task.send_grams:
            return Message(self._once(message, task, context), reply_to=message)
        answer = self._once(_changed(message, task.but(send_grams=False)), task, context)
        if "failure" not in answer:
            measuring = task.but(kind="measure", send_grams=False)
            asked = _changed(message, measuring, model=answer["model"])
            answer = _together(answer, self._once(asked, measuring, context))
        return Message(answer, reply_to=message)

    def _once(self, message: Message, task: Task, context: Context) -> RecordDict:
        """Return the kept answer to a message, or ask the client and keep what it says."""
        memory = NodeMemory(task.run, f"client-{task.client}")
        moment = (task.round, task.station_round)
        before = memory.load(before=moment) if task.kind == "train" else {}
        path = self.folder / _key(message.content, task, before)
        if path.is_file():
            answer = recordfile.load(path)
            if kept := answer.pop("memory", None):
                memory.save(moment, record_to_state(kept))  # type: ignore[arg-type]
            self.reused += task.kind == "train"
            return answer
        reply = self.clients(message, context)
        if reply.has_error():
            raise RuntimeError(reply.error.reason)
        answer = reply.content
        if "failure" not in answer:
            after = memory.load(before=(task.round, task.station_round + 1))
            remembers = task.kind == "train" and bool(after)
            extra = {"memory": state_to_record(after)} if remembers else {}
            self._keep(RecordDict({**answer, **extra}), path)
        return answer

    def _keep(self, answer: RecordDict, path: Path) -> None:
        size = recordfile.content_bytes(answer)
        if self._bytes + size <= MOST_BYTES:
            recordfile.save(answer, path, durable=False)
            self._bytes += size


def _changed(message: Message, task: Task, **records: Any) -> Message:
    """Return the message with another task."""
    kind = "train.measure" if task.kind == "measure" else message.metadata.message_type
    content = RecordDict({**message.content, **records, "task": task.to_record()})
    return Message(content, message.metadata.dst_node_id, kind)


def _together(trained: RecordDict, measured: RecordDict) -> RecordDict:
    """Return the answer of a client that trains and measures its Grams."""
    if "failure" in measured:
        return measured
    metrics: Any = {**trained["metrics"], **measured["metrics"]}
    answer = {"model": trained["model"], "grams": measured["grams"]}
    return RecordDict({**answer, "metrics": MetricRecord(metrics)})


def _key(content: RecordDict, task: Task, memory: State) -> str:
    """Return a digest of everything that the answer depends on."""
    measures = task.kind == "measure"
    sha = hashlib.sha256()
    for records in (
        {name: record for name, record in content.items() if name != "task"},
        {"memory": state_to_record(memory)},
    ):
        sha.update(recordfile.to_bytes(RecordDict(records)))  # type: ignore[arg-type]
    full = measures and measures_all(task.settings, task.round)
    step = (task.kind, task.round, task.station_round, task.client, full)
    sha.update(_digest(_dump(task.settings, frozenset() if measures else OF_GRAMS), step).encode())
    return sha.hexdigest()


def _dump(settings: Settings, besides: frozenset[str]) -> Mapping[str, Any]:
    return settings.model_dump(exclude=set(WHERE | OF_SERVER | besides))


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
