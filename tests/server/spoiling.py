"""Replies that fail or lie, for tests of an exchange between the server and the clients."""

from flwr.app import Message, MetricRecord, RecordDict

from hfedatm.base.records import record_to_state, state_to_record

UNBOUNDED = {"bound_factor": 0, "claim_factor": 0}
"""Settings without the bounds that would cut an honest reply of a tiny federation."""


def spoilt(key, change):
    """Return a spoiler that changes the tensors of ``key`` in a reply."""

    def spoil(message, reply):
        state = change(record_to_state(reply.content[key]))
        content = {**reply.content, key: state_to_record(state)}
        return Message(RecordDict(content), reply_to=message)

    return spoil


def without(key):
    """Return a spoiler that leaves ``key`` out of a reply."""

    def spoil(message, reply):
        content = {name: record for name, record in reply.content.items() if name != key}
        return Message(RecordDict(content), reply_to=message)

    return spoil


def counting(count):
    """Return a spoiler that claims ``count`` examples."""

    def spoil(message, reply):
        metrics = MetricRecord({"num-examples": count})
        return Message(RecordDict({**reply.content, "metrics": metrics}), reply_to=message)

    return spoil


def raising(message, reply):
    raise RuntimeError("disk on fire")


def silent(message, reply):
    return Message(RecordDict(), reply_to=message)
