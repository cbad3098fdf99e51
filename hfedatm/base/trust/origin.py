"""Proof of a task's origin: the tier above signs it, the node verifies it before reading the rest.

Flower tells a node that it talks to its SuperLink, not that a message comes from the run it works
for. So the sender of a task signs, with Ed25519, a statement of the run, the kind of message, the
step, the recipient, the time and the hash of all records, arrays included. The node compares each
part of the statement with its own knowledge.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    Metadata,
    MetricRecord,
    RecordDict,
)

from hfedatm.base.answering import reply_with_failure
from hfedatm.base.errors import UserError
from hfedatm.base.trust.enrolment import Identity
from hfedatm.base.trust.journal import Journal
from hfedatm.base.trust.secrets import secrets_folder

log = logging.getLogger("hfedatm.base.trust")

_RECORD = "origin"
_CLOCKS_DIFFER = 300.0
"""Seconds by which the clocks of two machines may differ."""
_LONGEST_STATEMENT = 4096


class ForgedTask(ValueError):
    """A task differs from what the tier above sent to this node; the message says how."""


@dataclass(frozen=True)
class Statement:
    """The statement that is signed.

    Attributes
    ----------
    run
        Flower's id of the run that sends the message.
    sender
        A number drawn for each job of the sender, so that a restarted job may ask again.
    type
        Flower's type of the message, for example ``train.measure``.
    step
        Run, round and station round of the task.
    recipient
        The name under which the node is enrolled.
    expires
        Seconds since the epoch after which the task must not be done any more.
    digest
        Hash of the content.
    """

    run: int
    sender: str
    type: str
    step: str
    recipient: str
    expires: float
    digest: str

    def to_bytes(self) -> bytes:
        """Return the bytes that are signed."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Statement:
        """Read a statement whose signature is valid."""
        return cls(**json.loads(data))

    @property
    def key(self) -> str:
        """The name of the step in the journal."""
        parts = (str(self.run), self.sender, self.type, self.step)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


class Signer:
    """Signs the tasks of one job."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self._sender = secrets.token_hex(16)

    @classmethod
    def load(cls) -> Signer | None:
        """Return the signer of this machine's link; None if there are no secrets."""
        folder = secrets_folder()
        if folder is None:
            return None
        key = serialization.load_pem_private_key((folder / "tasks.key").read_bytes(), None)
        assert isinstance(key, Ed25519PrivateKey)
        return cls(key)

    def signed(
        self, content: RecordDict, metadata: Metadata, recipient: str, step: str
    ) -> RecordDict:
        """Return ``content`` with a signed statement of its origin."""
        statement = Statement(
            metadata.run_id,
            self._sender,
            metadata.message_type,
            step,
            recipient,
            metadata.created_at + metadata.ttl,
            digest(content),
        ).to_bytes()
        proof = {"statement": statement, "signature": self._key.sign(statement)}
        return RecordDict({**content, _RECORD: ConfigRecord(proof)})  # type: ignore[arg-type]


class Verifier:
    """Verifies the tasks that arrive at one node."""

    def __init__(self, key: Ed25519PublicKey, name: str) -> None:
        self._key, self._name = key, name

    @classmethod
    def load(cls) -> Verifier | None:
        """Return the verifier of this node; None if there are no secrets."""
        folder, own = secrets_folder(), Identity.load()
        if folder is None or own is None:
            return None
        return cls(_read_public(folder / "tasks.pub"), own.name)

    def check(self, message: Message) -> Statement:
        """Return the signed statement of a task, or raise `ForgedTask` that says what is wrong.

        This reads only the proof, and parses the statement only after its signature is valid.
        """
        record = message.content.get(_RECORD)
        if not isinstance(record, ConfigRecord):
            raise ForgedTask("it is not signed")
        said, signature = record.get("statement"), record.get("signature")
        if not (isinstance(said, bytes) and isinstance(signature, bytes)):
            raise ForgedTask("it is not signed")
        if len(said) > _LONGEST_STATEMENT:
            raise ForgedTask("its statement is too long")
        try:
            self._key.verify(signature, said)
        except InvalidSignature:
            raise ForgedTask("its signature is not that of the tier above") from None
        statement, metadata = Statement.from_bytes(said), message.metadata
        if statement.recipient != self._name:
            raise ForgedTask(f"it was sent to {statement.recipient}, not to {self._name}")
        if statement.run != metadata.run_id:
            raise ForgedTask("it belongs to another run")
        if statement.type != metadata.message_type:
            raise ForgedTask(f"it was sent as {statement.type}, not as {metadata.message_type}")
        if time.time() > statement.expires + _CLOCKS_DIFFER:
            raise ForgedTask("it is out of date")
        if statement.digest != digest(without_proof(message.content)):
            raise ForgedTask("its content was changed")
        return statement


def known_origin(
    message: Message,
    context: Context,
    call_next: Callable[[Message, Context], Message],
    *,
    keep: bool = True,
) -> Message:
    """Let a task through only if the tier above sent it to this node (a Flower mod).

    A repeated task gets the same reply, which is kept here unless ``keep`` is false; a different
    task for the same step is refused. Anybody may ask who a node is.
    """
    if message.metadata.message_type == MessageType.QUERY:
        return call_next(message, context)
    try:
        verifier = Verifier.load()
        statement = verifier.check(message) if verifier else None
        message.content = without_proof(message.content)
        if statement is None:
            return call_next(message, context)
        expires = statement.expires
        with Journal().step(statement.key, statement.digest, expires, keep=keep) as entry:
            if entry.reply is None:
                reply = call_next(message, context)
                if reply.has_error() or "failure" in reply.content:
                    return reply  # not kept: the next attempt may succeed
                entry.reply = reply.content
            return Message(entry.reply, reply_to=message)
    except (OSError, ValueError) as error:
        log.warning("refused a task of node %d: %s", message.metadata.src_node_id, error)
        return reply_with_failure(message, UserError(f"refused: {error}"))


def without_proof(content: RecordDict) -> RecordDict:
    """Return the content without its proof."""
    if _RECORD not in content:
        return content
    return RecordDict({name: record for name, record in content.items() if name != _RECORD})


def digest(content: RecordDict) -> str:
    """Return a hash of all records that does not depend on the order of the records."""
    total = hashlib.sha256()
    for name in sorted(content):
        record = content[name]
        _add(total, name, type(record).__name__, len(record))
        if isinstance(record, ArrayRecord):
            for key in sorted(record):
                array = record[key]
                _add(total, key, array.dtype, list(array.shape), array.stype, len(array.data))
                total.update(array.data)
        else:
            _add(total, *_items(record))
    return total.hexdigest()


def _items(record: ConfigRecord | MetricRecord) -> Iterable[object]:
    for key in sorted(record):
        yield key
        yield record[key]


def _add(total: hashlib._Hash, *parts: object) -> None:
    """Hash parts so that two different lists of parts never give the same bytes."""
    data = json.dumps(parts, default=_tagged_bytes).encode()
    total.update(len(data).to_bytes(8, "big") + data)


def _tagged_bytes(value: object) -> dict[str, str]:
    if not isinstance(value, bytes):
        raise TypeError(f"a record cannot hold a value of type {type(value).__name__}")
    return {"bytes": value.hex()}


def _read_public(path: Path) -> Ed25519PublicKey:
    key = serialization.load_pem_public_key(path.read_bytes())
    assert isinstance(key, Ed25519PublicKey)
    return key
