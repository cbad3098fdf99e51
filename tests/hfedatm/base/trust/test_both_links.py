"""A station verifies the server's tasks as its clients verify its own, before it reads anything."""

from functools import partial

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from test_origin import content, message, refusal

from client_app.app import app as client_app
from hfedatm.base.trust.origin import Signer, known_origin
from hfedatm.deploy import certificates
from station_app.app import client as station_app

APPS = {"station-1": station_app, "station-1-client-2": client_app}
ABOVE = {"station-1": "server", "station-1-client-2": "station-1"}
STEP = "mine/1/1/"


def signed(be, content, recipient, by=None, step=STEP, kind="train"):
    """Return a message with the signature of the tier above, or of somebody else."""
    be(by or ABOVE[recipient])
    made = message(content, kind)
    made.content = Signer.load().signed(content, made.metadata, recipient, step)
    return made


class Station:
    """The door of a station; counts what passes it."""

    def __init__(self, be):
        self.be, self.passed = be, 0

    def get(self, asked):
        self.be("station-1")
        return partial(known_origin, keep=False)(asked, None, self.work).content

    def work(self, asked, context):
        self.passed += 1
        return Message(RecordDict({"metrics": MetricRecord({"n": 1})}), reply_to=asked)


@pytest.fixture
def station(be):
    return Station(be)


def test_what_the_server_signs_for_this_station_passes(be, station):
    assert "failure" not in station.get(signed(be, content(), "station-1"))
    assert station.passed == 1


def test_a_station_does_not_take_its_own_signature_for_the_servers(be, station):
    """Whoever has a station's key can speak to its clients, and to no station."""
    forged = signed(be, content(), "station-1", by="station-1")
    assert "not that of the tier above" in refusal(station.get(forged))
    assert station.passed == 0


def test_the_servers_task_for_a_station_is_none_for_a_client(be):
    """The server cannot go round a station, and a station's task is no client's."""
    forged = signed(be, content(), "station-1-client-2", by="server")
    be("station-1-client-2")
    called = []
    reply = known_origin(forged, None, lambda *given: called.append(given))
    assert "not that of the tier above" in refusal(reply.content)
    assert not called


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"task": content(epochs=1000)["task"]}, "content was changed"),
        ({"model": content(weights=(9.0, 9.0))["model"]}, "content was changed"),
        ({"secure": ConfigRecord({"asked": 2})}, "content was changed"),
    ],
    ids=["settings", "arrays", "another record"],
)
def test_what_was_changed_on_its_way_is_refused(be, station, change, said):
    forged = signed(be, content(), "station-1")
    for name, record in change.items():
        forged.content[name] = record
    assert said in refusal(station.get(forged))
    assert station.passed == 0


def test_a_task_for_another_station_is_refused(be, station):
    be("server")
    forged = message(content())
    forged.content = Signer.load().signed(content(), forged.metadata, "station-2", STEP)
    assert "sent to station-2, not to station-1" in refusal(station.get(forged))


def test_a_step_is_asked_once_and_the_same_way(be, station):
    be("server")
    signer = Signer.load()

    def task(step, **given):
        made = message(content(**given))
        made.content = signer.signed(made.content, made.metadata, "station-1", step)
        return made

    first = task(STEP)
    proof = first.content
    assert "failure" not in station.get(first)
    assert "asked for before" in refusal(station.get(task(STEP, epochs=7)))
    assert "failure" not in station.get(task("mine/2/1/", epochs=2))
    # The first round's task in the second round: the spool, which keeps replies, answers it.
    first.content = proof
    assert "failure" not in station.get(first)
    first.metadata.__dict__["_run_id"] = 78
    first.content = proof
    assert "another run" in refusal(station.get(first))


def garbage():
    """Return what would break, or do harm, if anybody opened it."""
    bomb = Array("float32", (1,), "numpy.ndarray", b"\x80\x04cos\nsystem\n.")
    return RecordDict(
        {
            "parcel": ArrayRecord({"parcel": bomb}),
            "task": ConfigRecord({"kind": "train", "settings": "{" * 1000}),
            "model": ArrayRecord({"w": Array(np.zeros(2, np.float32))}),
        }
    )


@pytest.mark.parametrize("machine", APPS)
@pytest.mark.parametrize("kind", ["train", "train.prepare", "evaluate"])
def test_a_node_reads_nothing_that_nobody_signed(be, machine, kind, monkeypatch):
    def opened(*given):
        raise AssertionError("it was opened")

    monkeypatch.setattr("hfedatm.base.handover.parcel.unwrap", opened)
    monkeypatch.setattr("hfedatm.base.records.Task.from_record", opened)
    be(machine)
    context = Context(77, 1, {}, RecordDict(), {})
    assert "it is not signed" in refusal(APPS[machine](message(garbage(), kind), context).content)


@pytest.mark.parametrize("machine", APPS)
def test_a_key_of_ones_own_is_worth_nothing(be, machine, tmp_path, monkeypatch):
    certificates.make_task_key(tmp_path / "liar")
    monkeypatch.setenv("HFEDATM_SECRETS", str(tmp_path / "liar"))
    forged = message(garbage())
    forged.content = Signer.load().signed(garbage(), forged.metadata, machine, STEP)
    be(machine)
    context = Context(77, 1, {}, RecordDict(), {})
    said = refusal(APPS[machine](forged, context).content)
    assert "not that of the tier above" in said
