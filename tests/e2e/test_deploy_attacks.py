"""Attacks with real processes: by a client with its own credentials, by the holder of a link."""

import json
import os
import subprocess
from pathlib import Path

import httpx
import pytest
import tomli_w
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from deployment import Deployment, wait_until
from flwr.app import Message, RecordDict
from flwr.app.message.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from safetensors.torch import load_file

from hfedatm.base.records import Task, state_to_record
from hfedatm.base.resolving import resolve
from hfedatm.deploy import flower

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]

PLUGINS = Path(__file__).parent / "plugins"
STATION, ATTACKER, VICTIM = "station-1", "station-1-client-1", "station-1-client-2"
SMALL = {
    "stations": 1,
    "clients-per-station": 2,
    "rounds": 1,
    "station-rounds": 1,
    "local-epochs": 1,
    "batch-size": 64,
    "validation-fraction": 0,
    "diagnostics": False,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    folder, search = tmp_path_factory.mktemp("attacks"), [str(PLUGINS)]
    (folder / "imported").mkdir()
    made = Deployment(
        folder,
        stations=1,
        IMPORTED=str(folder / "imported"),
        PYTHONPATH=os.pathsep.join([*search, *filter(None, [os.environ.get("PYTHONPATH")])]),
    )
    try:
        made.up()
        made.submit("honest", **SMALL).wait()  # the station's run is there from now on
        yield made
    finally:
        made.down()


def flwr(deployment, *arguments):
    """Ask a SuperLink as its operator would."""
    done = subprocess.run(
        ["flwr", *arguments, "--format", "json"],
        env=flower.environment(deployment.folder / "operator"),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def key_of(deployment, machine):
    key = deployment.folder / "secrets" / machine / "node"
    return load_ssh_private_key(key.read_bytes(), None)


def node_ids(deployment):
    """Return the ids of the attacker and the victim at their station."""
    nodes = flwr(deployment, "supernode", "list", STATION)["nodes"]
    ids = [int(node["node-id"]) for node in nodes]
    with fleet(deployment, deployment.layout.gateways[STATION].port) as client:
        for place, node_id in enumerate(ids):
            try:
                client.PullMessages(PullMessagesRequest(node=Node(node_id=node_id)))
            except httpx.HTTPStatusError:
                continue  # its key is not mine
            return node_id, ids[1 - place]
    raise AssertionError("no node has the attacker's key")


def fleet(deployment, port):
    """Return a connection with the attacker's own credentials."""
    key = key_of(deployment, ATTACKER)
    return FleetHttpClient.from_server_address(
        f"127.0.0.1:{port}",
        False,
        str(deployment.folder / "secrets" / ATTACKER / "ca.pem"),
        interceptors=[NodeAuthHttpInterceptor(key, key.public_key())],
    )


def forged_task(deployment, run_id, victim, command):
    """Return a task for the victim in the name of the station, whose data set is a command."""
    TaskIdentity.task_id = TaskIdentity.node_id = 1
    TaskIdentity.run_id = run_id
    settings = resolve({**SMALL, "dataset": "os:system", "data-dir": command})
    task = Task("train", settings, 1, station=0, station_round=1, client=1)
    model = load_file(deployment.output / "honest/last.safetensors")
    content = RecordDict({"task": task.to_record(), "model": state_to_record(model)})
    message = Message(content, victim, "train")
    message.metadata.__dict__["_message_id"] = message.object_id
    return message


def push(deployment, port, attacker, message):
    with fleet(deployment, port) as client:
        answer = client.PushMessages(
            PushMessagesRequest(
                node=Node(node_id=attacker),
                messages_list=[message_to_proto(remove_content_from_message(message))],
                message_object_trees=[get_object_tree(message)],
                clientapp_runtime_list=[1.0],
            )
        )
        for name, part in get_all_nested_objects(message).items():
            client.PushObject(
                PushObjectRequest(
                    node=Node(node_id=attacker),
                    run_id=message.metadata.run_id,
                    object_id=name,
                    object_content=part.deflate(),
                    session_id=answer.session_id,
                )
            )


def log_of(deployment, process):
    return (deployment.folder / f"{process}.log").read_text(errors="replace")


def test_a_client_cannot_make_a_peer_run_a_command(deployment, tmp_path):
    """Refused at the gateway and, with the gateway out of the way, at the peer."""
    ran = tmp_path / "it-ran"
    runs = flwr(deployment, "list", STATION)["runs"]
    run_id = next(int(run["run-id"]) for run in runs if run["status"] == "running")
    attacker, victim = node_ids(deployment)
    message = forged_task(deployment, run_id, victim, f"touch {ran}")

    with pytest.raises(httpx.HTTPStatusError, match="403"):
        push(deployment, deployment.layout.gateways[STATION].port, attacker, message)
    assert "pushes a message in the name of 1" in log_of(deployment, f"{STATION}-gateway")

    push(deployment, deployment.layout.links[STATION].port, attacker, message)
    wait_until(
        lambda: (
            "refused a task of node 1: it is not signed" in log_of(deployment, f"{VICTIM}-node")
        ),
        "the victim refuses",
        120,
    )
    assert not ran.exists()
    (only,) = deployment.submit("afterwards", **SMALL).wait()
    assert (only["clients"]["answered"], only["failures"]) == (2, [])


BROUGHT = """
from pathlib import Path
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

app = ClientApp()
server = ServerApp()

@app.train()
def train(message, context):
    Path({ran!r}).touch()
    return Message(RecordDict(), reply_to=message)

@server.main()
def main(grid, context):
    messages = [Message(RecordDict(), node, "train") for node in grid.get_node_ids()]
    replies = grid.send_and_receive(messages, timeout=120)
    said = [r.content["failure"]["reason"] if r.has_content() else r.error.reason for r in replies]
    Path({said!r}).write_text(repr(said))
"""


def test_whoever_holds_the_link_cannot_bring_code_to_its_nodes(deployment, tmp_path):
    ran, said = tmp_path / "it-ran", tmp_path / "said"
    app = flower.write_app(tmp_path / "app", "station", {})
    manifest = (app / "pyproject.toml").read_text()
    for ours, brought in (("station_app.app:server", "server"), ("client_app.app:app", "app")):
        manifest = manifest.replace(ours, f"brought:{brought}")
    (app / "pyproject.toml").write_text(manifest)
    (app / "brought.py").write_text(BROUGHT.format(ran=str(ran), said=str(said)))
    flower.start_run(app, STATION, deployment.folder / "operator")
    wait_until(lambda: said.exists() and said.read_text(), "the nodes have answered", 300)
    assert said.read_text().count("refused: it is not signed") == 2
    assert not ran.exists()


def test_code_that_an_owner_did_not_allow_is_refused_and_the_person_is_told(deployment):
    """By the server for itself; then, where server and station allow it, by every client."""
    asked = SMALL | {"train-fn": "outsider:train"}
    imported = Path(deployment.environment["IMPORTED"])
    run = deployment.submit("not-by-the-server", **asked)
    assert run.process.wait(600) != 0
    assert "train-fn" in run.log and "outsider:train" in run.log and "policy" in run.log
    assert list(imported.iterdir()) == []
    policies = [deployment.folder / machine / "policy.toml" for machine in ("server", STATION)]
    before = [path.read_text() for path in policies]
    try:
        for path in policies:
            path.write_text(tomli_w.dumps({"code": {"allowed": ["outsider:train"]}}))
        run = deployment.submit("not-by-the-clients", **asked)
        assert run.process.wait(600) != 0
    finally:
        for path, text in zip(policies, before, strict=True):
            path.write_text(text)
    said = next(line for line in run.log.splitlines() if "left out: station 0" in line)
    assert "client 0" in said and "train-fn: the run asks for 'outsider:train'" in said
    assert {path.name for path in imported.iterdir()} <= {"server", STATION}
