import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.task_identity import TaskIdentity

from hfedatm.base.handover import parcel
from hfedatm.base.records import BadReply
from hfedatm.base.wire import open_reply


@pytest.fixture(autouse=True)
def identity():
    # Flower tells a process who it is before it may make a message; here that is us.
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 7


def content(layers=20):
    arrays = {f"layer{n}": Array(np.full((3, 2), n, "float32")) for n in range(layers)}
    return RecordDict(
        {
            "model": ArrayRecord(arrays),
            "task": ConfigRecord({"round": 1, "key": b"\x00\xff", "names": ["a", "b"]}),
            "metrics": MetricRecord({"loss": 0.5, "num-examples": 7}),
        }
    )


def message(given):
    made = Message(given, 1, "train")
    made.metadata.__dict__["_message_id"] = "m"
    return made


@pytest.fixture(params=["string", "array"])
def wrap(request, monkeypatch):
    """Put content into a parcel of both kinds."""
    if request.param == "array":
        monkeypatch.setattr(parcel, "MAX_STRING", 0)
    return parcel.wrap


def test_everything_comes_back(wrap):
    assert parcel.unwrap(wrap(content())) == content()


def test_flower_has_few_objects_to_move(monkeypatch):
    assert len(get_all_nested_objects(message(content()))) > 40
    assert len(get_all_nested_objects(message(parcel.wrap(content())))) == 3
    monkeypatch.setattr(parcel, "MAX_STRING", 0)
    assert len(get_all_nested_objects(message(parcel.wrap(content())))) == 5


def test_large_content_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(parcel, "MAX_BYTES", 100)
    large = content()
    assert parcel.wrap(large) is large


def test_who_is_asked_by_parcel_answers_so(wrap):
    def work(asked, context):
        assert asked.content == content()
        return Message(content(3), reply_to=asked)

    reply = parcel.by_parcel(message(wrap(content())), None, work)
    assert parcel.is_wrapped(reply.content)
    assert parcel.opened(reply).content == content(3)


def test_who_is_asked_without_answers_without():
    reply = parcel.by_parcel(
        message(content()), None, lambda asked, _: Message(content(3), reply_to=asked)
    )
    assert reply.content == content(3)
    assert parcel.opened(reply).content == content(3)


@pytest.mark.parametrize(
    "given",
    [
        RecordDict({"parcel": ArrayRecord({"parcel": Array("uint8", (3,), "parcel", b"abc")})}),
        RecordDict({"parcel": ArrayRecord()}),
        RecordDict({"parcel": ConfigRecord({"parcel": "text"})}),
        RecordDict({"parcel": ConfigRecord({"parcel": b"abc"})}),
        RecordDict({"parcel": ConfigRecord({"parcel": [b"abc"]})}),
        RecordDict({"parcel": ConfigRecord({"parcel": 10**12})}),
    ],
)
def test_a_reply_that_cannot_be_read_is_a_failure_of_its_node(given):
    reply = parcel.opened(Message(given, reply_to=message(content())))
    with pytest.raises(BadReply, match="the message cannot be read"):
        open_reply(reply, 10**6)


def test_a_request_that_cannot_be_read_is_answered_with_the_reason():
    damaged = parcel.wrap(content())
    damaged["parcel"]["parcel"] = damaged["parcel"]["parcel"][:-30]
    reply = parcel.by_parcel(message(damaged), None, lambda asked, _: pytest.fail("it was read"))
    assert "the message cannot be read" in reply.content["failure"]["reason"]
