"""Introduce nodes: a tier asks a node for its place in the tree, and the node proves its answer.

Both say their version; each refuses one that it does not work with.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Context, Message, RecordDict

from hfedatm.base.trust.enrolment import EnrolmentError, Identity, read_certificate
from hfedatm.base.trust.secrets import secrets_folder
from hfedatm.base.versions import check_version, own_version

if TYPE_CHECKING:
    from hfedatm.base.wire import NodeIdentity

_NONCE_BYTES = 32


def new_nonce() -> bytes:
    """Return a random nonce that makes each question unique."""
    return secrets.token_bytes(_NONCE_BYTES)


def question(nonce: bytes) -> RecordDict:
    """Return the question that asks a node for its place."""
    return RecordDict({"challenge": ConfigRecord({"nonce": nonce, "version": own_version()})})


def introduction(message: Message, context: Context, tier: str) -> RecordDict:
    """Return a node's answer, with a proof if the node is enrolled."""
    challenge = message.content.get("challenge")
    asked = challenge if isinstance(challenge, ConfigRecord) else ConfigRecord()
    if challenge is not None:  # else it is no tier that asks, and no task will follow
        check_version(asked.get("version"))
    config = context.node_config
    said: dict[str, str | int | bytes] = {
        "tier": tier,
        "index": int(config.get("partition-id", -1)),
        "siblings": int(config.get("num-partitions", 0)),
        "version": own_version(),
    }
    if own := Identity.load():
        nonce = asked.get("nonce")
        if not isinstance(nonce, bytes) or len(nonce) != _NONCE_BYTES:
            raise EnrolmentError("the question has no nonce")
        said["certificate"] = own.certificate
        said["signature"] = own.sign(_proof(nonce, context.node_id))
    return RecordDict({"node": ConfigRecord(said)})  # type: ignore[arg-type]


def introduced(reply: Message, nonce: bytes) -> NodeIdentity:
    """Return the identity that a node claims; where nodes are enrolled, it must be proved.

    Raises
    ------
    BadReply, EnrolmentError, WrongVersion
        The message says why the answer cannot be used.
    """
    from hfedatm.base.wire import read_identity  # late: only the asking tier needs torch

    node = read_identity(reply)
    said: Any = reply.content["node"]
    check_version(said.get("version"))
    if secrets_folder() is None:
        return node
    certificate, signature = said.get("certificate"), said.get("signature")
    if not (isinstance(certificate, bytes) and isinstance(signature, bytes)):
        raise EnrolmentError("its answer has no proof")
    enrolled = read_certificate(certificate)
    enrolled.check(signature, _proof(nonce, node.node_id))
    if node.index not in (-1, enrolled.place):
        raise EnrolmentError(
            f"{enrolled.name} claims place {node.index}; its certificate says {enrolled.place}"
        )
    return replace(node, name=enrolled.name, index=enrolled.place)


def _proof(nonce: bytes, node_id: int) -> bytes:
    return b"hfedatm/who-are-you/" + nonce + str(node_id).encode()
