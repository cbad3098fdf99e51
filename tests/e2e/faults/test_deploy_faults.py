"""Whatever is killed, cut off, late or hostile: the run ends well and says who and why."""

import os
import signal

import psutil
import pytest
from deployment import wait_until
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from hfedatm.deploy import flower

from .staging import SMALL, assert_same, pause, paused, reasons, release, server_app_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]


def test_a_killed_training_process_and_a_hostile_reply(deployment, faults):
    pause(faults, "station-1-client-2")
    (faults / "hostile-station-2-client-1").touch()
    run = deployment.submit("spoilt", **SMALL)
    os.kill(paused(faults, "station-1-client-2"), signal.SIGKILL)
    release(faults)
    first, second = run.wait()
    assert "killed by signal 9" in reasons(first, "station 0, client 1")[0]
    assert "cannot be read" in reasons(first, "station 1, client 2")[0]
    assert "station 1, client 2" in run.log and "killed by signal 9" in run.log
    assert not (faults / "unpickled").exists()
    assert (first["clients"]["answered"], second["clients"]["answered"]) == (2, 4)
    assert len(first["failures"]) == 2 and second["failures"] == []


def test_a_client_killed_in_the_middle_of_training(deployment, faults):
    pause(faults, "station-1-client-1")
    run = deployment.submit("client-killed", **SMALL)
    trainer = psutil.Process(paused(faults, "station-1-client-1"))
    for process in (trainer, trainer.parent()):
        process.kill()
    deployment.kill("station-1-client-1-node")
    first, second = run.wait()
    assert "it is cut off: its SuperLink has had no" in reasons(first, "station 0, client 0")[0]
    assert (first["clients"]["answered"], second["clients"]["answered"]) == (3, 3)
    assert first["stations"]["answered"] == 2


def test_a_station_run_killed_in_the_middle_of_a_round(deployment, faults, undisturbed):
    pause(faults, "station-1-client-1")
    run = deployment.submit("station-run-killed", **SMALL)
    paused(faults, "station-1-client-1")
    server_app_of(deployment, "station-1").kill()
    release(faults)
    rounds = run.wait()
    assert [r["clients"]["answered"] for r in rounds] == [4, 4]
    assert_same(run, undisturbed)


def test_a_station_link_killed_in_the_middle_of_a_round(deployment, faults, undisturbed):
    pause(faults, "station-2-client-1")
    run = deployment.submit("station-link-killed", **SMALL)
    paused(faults, "station-2-client-1")
    deployment.kill("station-2-link")
    deployment.start("station-2-link")
    release(faults)
    rounds = run.wait()
    assert [r["clients"]["answered"] for r in rounds] == [4, 4]
    assert_same(run, undisturbed)


def test_a_station_node_killed_in_the_middle_of_a_round(deployment, faults):
    pause(faults, "station-1-client-1")
    run = deployment.submit("station-node-killed", **SMALL)
    paused(faults, "station-1-client-1")
    deployment.kill("station-1-node")
    release(faults)
    first, second = run.wait()
    assert "it is cut off: its SuperLink has had no sign of life" in reasons(first, "station 0")[0]
    assert [first["stations"]["answered"], first["clients"]["answered"]] == [1, 2]
    assert second["stations"]["answered"] >= 1


def test_a_station_cut_off_for_a_round_and_back(deployment, faults):
    pause(faults, "station-2-client-2")
    run = deployment.submit("cut-off", **SMALL | {"rounds": 3})
    paused(faults, "station-2-client-2")
    node = deployment.process("station-2-node")
    node.suspend()  # its connections stay open and silent, as behind a dead cable
    try:
        wait_until(lambda: run.rounds(), "the round has gone on without it")
    finally:
        node.resume()
        release(faults)
    rounds = run.wait()
    assert "it is cut off" in reasons(rounds[0], "station 1")[0]
    assert rounds[0]["stations"]["answered"] == 1
    assert rounds[-1]["stations"]["answered"] == 2 and rounds[-1]["failures"] == []


def test_the_server_app_killed_and_the_run_resumed(deployment, faults, undisturbed):
    run = deployment.submit("server-killed", **SMALL)
    wait_until(lambda: len(run.rounds()) == 1, "one round is done")
    server_app_of(deployment, "server").kill()
    assert run.process.wait(600) != 0
    rounds = deployment.submit("server-killed", resume=run.folder).wait()
    assert [r["round"] for r in rounds] == [1, 2]
    assert_same(run, undisturbed)


def test_a_client_slower_than_the_timeout(deployment, faults):
    pause(faults, "station-2-client-1")
    run = deployment.submit("slow", **SMALL | {"rounds": 1, "client-timeout": 60})
    paused(faults, "station-2-client-1")
    wait_until(lambda: run.rounds(), "the round has gone on without it")
    release(faults)
    (only,) = run.wait()
    assert reasons(only, "station 1, client 2") == ["no reply within 60 s"]
    assert only["clients"]["answered"] == 3


def test_too_few_stations_keep_the_model_and_the_run_goes_on(deployment, faults):
    for client in ("station-1-client-1", "station-1-client-2"):
        pause(faults, client)
    run = deployment.submit("quorum", **SMALL | {"station-quorum": 1, "client-quorum": 1})
    for client in ("station-1-client-1", "station-1-client-2"):
        os.kill(paused(faults, client), signal.SIGKILL)
    release(faults)
    first, second = run.wait()
    assert first["kept"] == "1 of 2 stations usable, 2 needed"
    assert "0 of 2 clients answered, 2 are needed" in reasons(first, "station 0")[0]
    assert "kept" not in second and second["stations"]["answered"] == 2


def test_a_message_delivered_twice_is_not_trained_twice(
    deployment, faults, undisturbed, monkeypatch
):
    """The station's face gets the same message again: same answer, nobody trains."""
    from hfedatm.base.records import Task, layers_to_record, state_to_record
    from hfedatm.base.resolving import resolve
    from station_app.app import client as face

    node = next(p for m, _, p in deployment.layout.nodes if m.name == "station-1")
    for key, value in flower.environment(node.home).items():
        monkeypatch.setenv(key, value)
    # Flower tells a process who it is before it may make a message; here that is us.
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 7
    (faults / "trained").unlink(missing_ok=True)  # what the fixtures trained
    settings = resolve(SMALL)
    content = RecordDict(
        {
            "task": Task("train", settings, 1, station=0).to_record(),
            "model": state_to_record(undisturbed),
            "layers": layers_to_record({}),
        }
    )
    message = Message(content, 1, "train")
    message.metadata.__dict__["_message_id"] = "delivered-twice"
    place = {"spool": str(deployment.folder / "station-1/spool"), "link": "station-1"}
    context = Context(7, 1, {"partition-id": 0, **place}, RecordDict(), {})
    first = face(message, context).content
    assert "failure" not in first, first
    trained = (faults / "trained").read_text()
    assert sorted(trained.split()) == ["station-1-client-1", "station-1-client-2"]
    second = face(message, context).content
    assert (faults / "trained").read_text() == trained
    assert {k: a.data for k, a in second["model"].items()} == {
        k: a.data for k, a in first["model"].items()
    }
