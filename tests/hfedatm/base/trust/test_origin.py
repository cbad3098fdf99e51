"""A node does what the tier above signed for it, once, and nothing else."""

import hashlib
import time

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from hfedatm.base.handover.parcel import by_parcel, wrap
from hfedatm.base.trust.origin import Signer, digest, known_origin
from hfedatm.deploy import certificates

RUN, NODE = 77, 1_000_002


def content(epochs=1, weights=(1.0, 2.0)):
    task = {"run": "mine", "round": 1, "station_round": 1, "kind": "train", "epochs": epochs}
    return RecordDict(
        {
            "task": ConfigRecord(task),
            "model": ArrayRecord({"w": Array(np.array(weights, np.float32))}),
        }
    )


def message(content, kind="train"):
    return Message(content, NODE, kind)


def sent(be, content, recipient="station-1-client-2", step="mine/1/1/", kind="train"):
    """Return a message as the station signs it."""
    be("station-1")
    made = message(content, kind)
    made.content = Signer.load().signed(content, made.metadata, recipient, step)
    return made


class Client:
    """The second client of the station; counts what it does."""

    def __init__(self, be):
        self.be, self.done = be, 0

    def get(self, message):
        self.be("station-1-client-2")
        return known_origin(message, None, self.work).content

    def work(self, message, context):
        assert "origin" not in message.content
        self.done += 1
        answer = RecordDict({"metrics": MetricRecord({"number": self.done})})
        return Message(answer, reply_to=message)


@pytest.fixture
def client(be):
    return Client(be)


def refusal(reply):
    return reply["failure"]["reason"]


def test_a_signed_task_is_done(be, client):
    assert client.get(sent(be, content()))["metrics"]["number"] == 1


def test_a_signed_parcel_is_opened_after_it_was_verified(be, client):
    def work(asked, context):
        assert asked.content["task"]["epochs"] == 1
        return Message(RecordDict(), reply_to=asked)

    client.work = lambda asked, context: by_parcel(asked, context, work)
    assert "failure" not in client.get(sent(be, wrap(content())))


def test_an_unsigned_task_is_refused(be, client):
    assert "not signed" in refusal(client.get(message(content())))
    assert client.done == 0


def test_a_clients_own_signature_is_not_the_stations(be, client, secrets, tmp_path, monkeypatch):
    """A peer has no task key; one it makes itself is not the one its victim knows."""
    certificates.make_task_key(tmp_path / "peer")
    forged = message(content())
    monkeypatch.setenv("HFEDATM_SECRETS", str(tmp_path / "peer"))
    signer = Signer.load()
    forged.content = signer.signed(content(), forged.metadata, "station-1-client-2", "mine/1/1/")
    assert "not that of the tier above" in refusal(client.get(forged))
    assert client.done == 0


def test_changed_settings_are_refused(be, client):
    forged = sent(be, content(epochs=1))
    forged.content["task"] = content(epochs=1000)["task"]
    assert "content was changed" in refusal(client.get(forged))


def test_changed_arrays_are_refused(be, client):
    forged = sent(be, content())
    forged.content["model"] = content(weights=(1.0, 2.5))["model"]
    assert "content was changed" in refusal(client.get(forged))


def test_an_added_record_is_refused(be, client):
    forged = sent(be, content())
    forged.content["shared"] = ConfigRecord({"more": 1})
    assert "content was changed" in refusal(client.get(forged))


def test_a_task_for_another_node_is_refused(be, client):
    forged = sent(be, content(), recipient="station-1-client-1")
    assert "sent to station-1-client-1" in refusal(client.get(forged))


def test_a_task_of_another_run_is_refused(be, client):
    forged = sent(be, content())
    forged.metadata.__dict__["_run_id"] = 78
    assert "another run" in refusal(client.get(forged))


def test_a_task_sent_as_another_kind_is_refused(be, client):
    forged = sent(be, content())
    forged.metadata.__dict__["_message_type"] = "train.measure"
    assert "sent as train" in refusal(client.get(forged))


def test_a_task_of_yesterday_is_refused(be, client, monkeypatch):
    forged = sent(be, content())
    tomorrow = time.time() + 13 * 3600
    monkeypatch.setattr(time, "time", lambda: tomorrow)
    assert "out of date" in refusal(client.get(forged))


def test_the_same_task_again_gets_the_same_reply_and_nothing_is_done(be, client):
    task = sent(be, content())
    proof = task.content
    assert client.get(task)["metrics"]["number"] == 1
    task.content = proof
    assert client.get(task)["metrics"]["number"] == 1
    assert client.done == 1


def test_a_second_task_for_the_same_step_with_other_content_is_refused(be, client):
    be("station-1")
    signer = Signer.load()
    for number, weights in enumerate([(1.0, 2.0), (1.0, 3.0)]):
        task = message(content(weights=weights))
        task.content = signer.signed(task.content, task.metadata, "station-1-client-2", "mine/1/1/")
        reply = client.get(task)
        assert ("failure" in reply) == bool(number)
    assert "asked for before" in refusal(reply)
    assert client.done == 1


def test_a_step_whose_reply_is_forgotten_is_not_done_again(be, client):
    be("station-1")
    signer = Signer.load()
    first = None
    for number in range(4):
        task = message(content(epochs=number))
        task.content = signer.signed(
            task.content, task.metadata, "station-1-client-2", f"mine/{number}/1/"
        )
        first = first or (task, task.content)
        client.get(task)
    task, task.content = first
    assert "reply is gone" in refusal(client.get(task))
    assert client.done == 4


def test_a_step_that_failed_may_be_tried_again(be, client):
    def fail(asked, context):
        failure = RecordDict({"failure": ConfigRecord({"reason": "no memory"})})
        return Message(failure, reply_to=asked)

    honest, client.work = client.work, fail
    task = sent(be, content())
    proof = task.content
    assert refusal(client.get(task)) == "no memory"
    client.work, task.content = honest, proof
    assert client.get(task)["metrics"]["number"] == 1


def test_a_station_that_was_started_again_may_ask_again(be, client):
    for _ in range(2):
        assert "failure" not in client.get(sent(be, content()))
    assert client.done == 2


def test_a_node_whose_key_of_the_tier_above_is_lost_does_nothing(be, client, secrets, tmp_path):
    task = sent(be, content())
    be("station-1-client-2")
    (secrets / "station-1-client-2/tasks.pub").rename(tmp_path / "lost")
    try:
        assert "refused" in refusal(client.get(task))
    finally:
        (tmp_path / "lost").rename(secrets / "station-1-client-2/tasks.pub")
    assert client.done == 0


def test_without_secrets_everything_is_done(client, monkeypatch, be):
    be("station-1-client-2")
    monkeypatch.delenv("HFEDATM_SECRETS")
    client.be = lambda machine: None
    assert "failure" not in client.get(message(content()))


def test_a_refusal_is_in_the_nodes_log(be, client, caplog):
    client.get(message(content()))
    assert "refused a task of node 1: it is not signed" in caplog.text


@pytest.mark.parametrize(
    "statement", [b"", b"[]", b"{}", b"\xff", b"x" * 5000, 7, "text", [1, 2], None]
)
def test_a_proof_that_makes_no_sense_is_refused(be, client, statement):
    forged = message(content())
    proof = {"signature": bytes(64)} | ({} if statement is None else {"statement": statement})
    forged.content["origin"] = ConfigRecord(proof)
    assert refusal(client.get(forged))
    assert client.done == 0


def test_the_digest_depends_on_every_part_and_not_on_the_order():
    one = content()
    other = RecordDict({"model": one["model"], "task": one["task"]})
    assert digest(one) == digest(other)
    assert len(digest(one)) == hashlib.sha256().digest_size * 2
    other["task"] = ConfigRecord({**one["task"], "epochs": "1"})
    assert digest(one) != digest(other)
