"""Nobody takes another node's place."""

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from hfedatm.base.records import BadReply
from hfedatm.base.trust import enrolment, revocation
from hfedatm.base.trust.introduction import introduced, introduction, new_nonce, question
from hfedatm.base.trust.secrets import secrets_folder
from hfedatm.base.versions import WrongVersion, own_version

NODE = 1_000_002


def answer(be, nonce, *, machine="station-1-client-2", index=1, node=NODE):
    """Return what a node answers, as it arrives at the station."""
    be(machine)
    asked = Message(question(nonce), NODE, "query")
    context = Context(7, node, {"partition-id": index}, RecordDict(), {})
    reply = Message(introduction(asked, context, "client"), reply_to=asked)
    be("station-1")
    return reply


def test_a_node_is_known_by_its_enrolled_name_and_place(be):
    nonce = new_nonce()
    node = introduced(answer(be, nonce), nonce)
    assert (node.name, node.index, node.tier) == ("station-1-client-2", 1, "client")


def test_a_node_that_claims_no_place_has_its_enrolled_one(be):
    nonce = new_nonce()
    assert introduced(answer(be, nonce, index=-1), nonce).index == 1


def test_another_nodes_place_is_refused(be):
    nonce = new_nonce()
    with pytest.raises(ValueError, match="claims place 0; its certificate says 1"):
        introduced(answer(be, nonce, index=0), nonce)


def test_an_answer_to_an_older_question_is_refused(be):
    with pytest.raises(ValueError, match="did not sign"):
        introduced(answer(be, new_nonce()), new_nonce())


def test_an_answer_that_another_node_passes_on_is_refused(be):
    nonce = new_nonce()
    with pytest.raises(ValueError, match="did not sign"):
        introduced(answer(be, nonce, machine="station-1-client-1", index=0, node=5), nonce)


def test_who_proves_nothing_is_refused(be):
    nonce = new_nonce()
    reply = answer(be, nonce)
    reply.content["node"] = ConfigRecord(
        {"tier": "client", "index": 1, "siblings": 0, "version": own_version()}
    )
    with pytest.raises(ValueError, match="has no proof"):
        introduced(reply, nonce)


@pytest.mark.parametrize(
    "change",
    [
        {"index": 2**62},
        {"index": "1"},
        {"index": [1]},
        {"siblings": -1},
        {"tier": "server"},
        {"tier": 7},
        {"certificate": b"x"},
        {"signature": "x"},
    ],
)
def test_nonsense_is_refused_with_a_reason(be, change):
    nonce = new_nonce()
    reply = answer(be, nonce)
    reply.content["node"] = ConfigRecord({**reply.content["node"], **change})
    with pytest.raises((ValueError, BadReply), match="."):
        introduced(reply, nonce)


@pytest.mark.parametrize("theirs", ["0.0.1", "99.0.0", "", "no version", 7, None])
def test_a_node_of_another_version_is_refused_with_the_cure(be, theirs):
    nonce = new_nonce()
    reply = answer(be, nonce)
    said = {**reply.content["node"], "version": theirs}
    reply.content["node"] = ConfigRecord({k: v for k, v in said.items() if v is not None})
    with pytest.raises(WrongVersion, match=r"install (hfedatm )?\d+\.\d+\.x there"):
        introduced(reply, nonce)


def test_a_node_refuses_to_answer_another_version(be):
    be("station-1-client-2")
    asked = Message(question(new_nonce()), NODE, "query")
    asked.content["challenge"]["version"] = "99.0.0"
    context = Context(7, NODE, {"partition-id": 1}, RecordDict(), {})
    with pytest.raises(WrongVersion, match="it has hfedatm 99.0.0 and this node"):
        introduction(asked, context, "client")


def test_a_patch_release_more_or_less_does_not_matter(be):
    nonce = new_nonce()
    reply = answer(be, nonce)
    major, minor, *_ = own_version().split(".")
    reply.content["node"]["version"] = f"{major}.{minor}.999"
    assert introduced(reply, nonce).name == "station-1-client-2"


def test_a_revoked_key_proves_nothing(be):
    nonce = new_nonce()
    reply = answer(be, nonce)
    key = enrolment.read_certificate(reply.content["node"]["certificate"]).key
    revocation.add(secrets_folder(), revocation.fingerprint(key), "station-1-client-2")
    try:
        with pytest.raises(ValueError, match="the operator has revoked its key"):
            introduced(reply, nonce)
    finally:
        (secrets_folder() / revocation.FILE).unlink()
    assert introduced(reply, nonce).name == "station-1-client-2"
