"""Refuse a task that the node's owner does not allow: in one line, before any data is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from pydantic import ValidationError

from hfedatm.base.answering import reply_with_failure
from hfedatm.base.errors import UserError
from hfedatm.base.handover.recordfile import content_bytes
from hfedatm.base.trust.checking import check, check_cohort
from hfedatm.base.trust.policy import Policy, PolicyRefusal

KINDS = {
    "train": ("train",),
    "train.default": ("train",),
    "train.prepare": ("prepare",),
    "train.measure": ("measure",),
    "train.refine": ("refine",),
    "train.look": ("look",),
    "train.count": ("count",),
    "evaluate": ("evaluate",),
    "evaluate.default": ("evaluate",),
    # Every stage of a secure sum carries the task whose replies are summed.
    "train.share": ("train", "prepare", "measure"),
    "train.check": ("train", "prepare", "measure"),
    "train.mask": ("train", "prepare", "measure"),
    "train.sign": ("train", "prepare", "measure"),
    "train.reveal": ("train", "prepare", "measure"),
}
"""Message type -> kinds of task it may carry, so that the checked task is the one that is done."""

MB = 2**20


def obey(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Handle a message only if the owner's policy allows its task (a Flower mod).

    This mod runs after the one that opens parcels, and before a message causes any import or read.
    """
    if message.metadata.message_type.split(".")[0] == MessageType.QUERY:
        return call_next(message, context)  # a node tells anyone its place in the tree
    try:
        policy = Policy.current()
        if not policy.is_owners:
            return call_next(message, context)
        check_message(policy, message.metadata.message_type, message.content)
    except Exception as error:  # a task that cannot be parsed is not allowed
        return reply_with_failure(message, error)
    reply = call_next(message, context)
    try:
        check_reply(policy, reply)
    except PolicyRefusal as error:
        return reply_with_failure(message, error)
    return reply


def check_message(policy: Policy, message_type: str, content: RecordDict) -> None:
    """Raise `UserError` if the owner does not allow the task of a message."""
    from hfedatm.base.settings import Settings

    task: Any = content.get("task")
    if not isinstance(task, ConfigRecord):
        raise UserError("the message carries no task")
    kind = task.get("kind")
    if kind not in KINDS.get(message_type, ()):
        raise PolicyRefusal(f"task: a message of type {message_type!r} cannot ask for {kind!r}")
    try:
        settings = Settings.model_validate_json(str(task["settings"]))
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        place = ".".join(map(str, wrong["loc"]))
        raise UserError(f"task: its settings are not valid: {place}: {wrong['msg']}") from None
    check(policy, settings, str(kind), bool(task.get("send_grams")))
    if settings.secure_aggregation and kind != "evaluate":
        # A client itself refuses a sum that shrinks later; a station's task names no cohort.
        secure = content.get("secure")
        if isinstance(secure, ConfigRecord) and "asked" in secure:
            asked: Any = secure["asked"]
            check_cohort(policy, int(asked))


def check_reply(policy: Policy, reply: Message) -> None:
    """Refuse to send a reply that is larger than the owner allows."""
    most = policy.limits.reply_mb
    if most is None or reply.has_error():
        return
    size = content_bytes(reply.content) / MB
    if size > most:
        raise PolicyRefusal(
            f"reply: it takes {size:.1f} MB, the owner of this node allows at most {most:g} MB "
            "(policy: limits.reply-mb)"
        )
