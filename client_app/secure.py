"""Secure aggregation, the client's side.

A client does its work as always, but keeps the reply and answers with public keys. In three short
exchanges that follow it sends shares of its secrets, the reply as a masked vector, and what takes
the masks off the sum. Each message may find a new process, so the state between them is a file of
this client's.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
from flwr.app import ConfigRecord, Context, MetricRecord, RecordDict

from hfedatm.base.masked_reply import IN_THE_CLEAR, flatten
from hfedatm.base.memory import NodeMemory
from hfedatm.base.privacy_settings import secure_threshold
from hfedatm.base.records import Task, arrays_to_record, find_record
from hfedatm_core.secagg import SecureAggregationError, SecureClient
from hfedatm_core.secagg.messages import Directory


def withhold(reply: RecordDict, content: RecordDict, task: Task, folder: Path) -> RecordDict:
    """Return what to answer instead of ``reply`` when the run aggregates securely."""
    if not task.settings.secure_aggregation:
        return reply
    asked = find_record(content, "secure", ConfigRecord)
    if asked is None:
        raise SecureAggregationError(
            "secure-aggregation is on, but the station asked for a reply in the clear"
        )
    layout, vector = flatten(reply, task.settings.gram_weights)
    client = SecureClient(task.client, asked["session"])  # type: ignore[arg-type]
    keys = client.advertise()
    threshold = secure_threshold(task.settings, int(asked["asked"]))  # type: ignore[arg-type]
    kept = _Kept(folder)
    kept.clear()
    kept.write(client, threshold)
    np.save(kept.vector, vector)
    clear = {name: v for name, v in reply["metrics"].items() if name in IN_THE_CLEAR}
    return RecordDict(
        {
            "keys": ConfigRecord({"message": keys}),
            "layout": layout.to_record(),
            "metrics": MetricRecord(clear),
        }
    )


def share(content: RecordDict, context: Context) -> RecordDict:
    """Answer the key directory with one encrypted share per peer."""
    kept = _Kept.of(content, context)
    client, threshold = kept.read()
    directory = _message(content)
    # The noise of this reply counts on so many clients to add theirs.
    if Directory.from_bytes(directory).threshold < threshold:
        raise SecureAggregationError(
            f"the station would be content with fewer than the agreed {threshold} clients"
        )
    shares = client.share(directory)
    kept.write(client, threshold)
    return _answer(shares)


def mask(content: RecordDict, context: Context) -> RecordDict:
    """Answer the peers' shares with the masked vector."""
    kept = _Kept.of(content, context)
    client, threshold = kept.read()
    if client.stage != "mask":
        raise SecureAggregationError(f"client {client.client} is at stage {client.stage!r}")
    masked = client.mask(_message(content), np.load(kept.vector, allow_pickle=False))
    kept.write(client, threshold)
    kept.vector.unlink()
    return RecordDict({"masked": arrays_to_record({"vector": masked})})


def reveal(content: RecordDict, context: Context) -> RecordDict:
    """Answer the list of survivors with the shares that take the masks off."""
    kept = _Kept.of(content, context)
    client, threshold = kept.read()
    survivors: list[int] = content["secure"]["survivors"]  # type: ignore[assignment, index]
    shares = client.reveal(survivors)
    kept.write(client, threshold)
    return _answer(shares)


class _Kept:
    """What a client keeps between the exchanges of one secure sum; the next one replaces it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "secure"
        self._state = self._folder / "state"
        self.vector = self._folder / "vector.npy"

    @classmethod
    def of(cls, content: RecordDict, context: Context) -> _Kept:
        task = Task.from_record(content["task"])  # type: ignore[arg-type]
        state_dir = context.node_config.get("state-dir")
        memory = NodeMemory(task.run, f"client-{task.client}", state_dir)  # type: ignore[arg-type]
        return cls(memory.folder)

    def clear(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True, mode=0o700)

    def read(self) -> tuple[SecureClient, int]:
        try:
            threshold, _, state = self._state.read_bytes().partition(b"\n")
        except FileNotFoundError:
            raise SecureAggregationError("this client has no secure sum under way") from None
        return SecureClient.from_bytes(state), int(threshold)

    def write(self, client: SecureClient, threshold: int) -> None:
        """Keep the state; called before an answer leaves, so that no stage is answered twice."""
        part = self._state.with_suffix(".part")
        with part.open("wb") as file:
            file.write(b"%d\n" % threshold + client.to_bytes())
            file.flush()
            os.fsync(file.fileno())
        part.replace(self._state)


def _message(content: RecordDict) -> bytes:
    return content["secure"]["message"]  # type: ignore[return-value, index]


def _answer(message: bytes) -> RecordDict:
    return RecordDict({"secure": ConfigRecord({"message": message})})
