"""Who is there: a tier asks a node for its place in the tree, and the node proves its answer."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from flwr.app import ConfigRecord, Context, Message, RecordDict

from hfedatm.trust.enrolment import EnrolmentError, Identity, read_certificate
from hfedatm.trust.secrets import secrets_folder

_NONCE_BYTES = 32
_MOST_NODES = 10_000_000


@dataclass(frozen=True)
class Node:
    """What a node says of itself; ``name`` and ``index`` are proved where nodes are enrolled."""

    node_id: int
    tier: str
    index: int
    siblings: int
    name: str = ""


def new_nonce() -> bytes:
    """Return what makes one question different from all others."""
    return secrets.token_bytes(_NONCE_BYTES)


def question(nonce: bytes) -> RecordDict:
    """Return the question who a node is."""
    return RecordDict({"challenge": ConfigRecord({"nonce": nonce})})


def introduction(message: Message, context: Context, tier: str) -> RecordDict:
    """Return a node's answer, with a proof where it is enrolled."""
    config = context.node_config
    said: dict[str, str | int | bytes] = {
        "tier": tier,
        "index": int(config.get("partition-id", -1)),
        "siblings": int(config.get("num-partitions", 0)),
    }
    if own := Identity.load():
        challenge = message.content.get("challenge")
        nonce = challenge.get("nonce") if isinstance(challenge, ConfigRecord) else None
        if not isinstance(nonce, bytes) or len(nonce) != _NONCE_BYTES:
            raise EnrolmentError("the question has no nonce")
        said["certificate"] = own.certificate
        said["signature"] = own.sign(_proof(nonce, context.node_id))
    return RecordDict({"node": ConfigRecord(said)})  # type: ignore[arg-type]


def introduced(reply: Message, nonce: bytes) -> Node:
    """Return who a node says it is; where nodes are enrolled, only what it can prove.

    Raises
    ------
    ValueError
        With the reason why the answer cannot be used.
    """
    if reply.has_error():
        raise ValueError(reply.error.reason)
    said = reply.content.get("node")
    if not isinstance(said, ConfigRecord):
        raise ValueError("no usable answer")
    tier, index, siblings = said.get("tier"), said.get("index"), said.get("siblings")
    if tier not in ("client", "station"):
        raise ValueError("it is neither a client nor a station")
    if not (isinstance(index, int) and isinstance(siblings, int)):
        raise ValueError("its place is not a number")
    if not (-1 <= index < _MOST_NODES and 0 <= siblings < _MOST_NODES):
        raise ValueError("its place is out of range")
    node_id = reply.metadata.src_node_id
    node = Node(node_id, str(tier), index, siblings)
    if secrets_folder() is None:
        return node
    certificate, signature = said.get("certificate"), said.get("signature")
    if not (isinstance(certificate, bytes) and isinstance(signature, bytes)):
        raise EnrolmentError("it proves nothing")
    enrolled = read_certificate(certificate)
    enrolled.check(signature, _proof(nonce, node_id))
    if index not in (-1, enrolled.place):
        raise EnrolmentError(f"{enrolled.name} claims place {index}; its own is {enrolled.place}")
    return replace(node, name=enrolled.name)


def _proof(nonce: bytes, node_id: int) -> bytes:
    return b"hfedatm/who-are-you/" + nonce + str(node_id).encode()
