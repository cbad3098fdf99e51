"""A node's answer to a task its owner does not allow: one line, before anything is read."""

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
    "evaluate": ("evaluate",),
    "evaluate.default": ("evaluate",),
    # The stages of a secure sum carry the task whose reply is summed.
    "train.share": ("train", "prepare", "measure"),
    "train.check": ("train", "prepare", "measure"),
    "train.mask": ("train", "prepare", "measure"),
    "train.sign": ("train", "prepare", "measure"),
    "train.reveal": ("train", "prepare", "measure"),
}
"""What a task may be, by the type of its message: what is asked must be what is checked."""

MB = 2**20


def obey(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Do what a message asks if the owner's policy allows it (a Flower mod).

    It comes after what opens parcels, and before anything is imported or read because of a message.
    """
    if message.metadata.message_type.split(".")[0] == MessageType.QUERY:
        return call_next(message, context)  # a node says its place in the tree to anyone
    try:
        policy = Policy.current()
        if not policy.is_owners:
            return call_next(message, context)
        check_message(policy, message.metadata.message_type, message.content)
    except Exception as error:  # what cannot be understood is not allowed
        return reply_with_failure(message, error)
    reply = call_next(message, context)
    try:
        check_reply(policy, reply)
    except PolicyRefusal as error:
        return reply_with_failure(message, error)
    return reply


def check_message(policy: Policy, message_type: str, content: RecordDict) -> None:
    """Raise `UserError` if a message asks for what the owner does not allow."""
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
        # A client refuses by itself a sum that becomes smaller; a station is asked without one.
        secure: Any = content.get("secure")
        if isinstance(secure, ConfigRecord) and "asked" in secure:
            check_cohort(policy, int(secure["asked"]))


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
