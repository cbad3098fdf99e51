"""What an operator changes while a deployment works: certificates, keys, machines, versions."""

import json
import shutil
import ssl

import pytest
import torch
from cryptography import x509
from deployment import Deployment, wait_until
from safetensors.torch import load_file

from hfedatm.deploy import local
from hfedatm.runtime.local import run_locally

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]

SMALL = {
    "stations": 2,
    "clients-per-station": 2,
    "rounds": 60,
    "station-rounds": 1,
    "local-epochs": 1,
    "batch-size": 64,
    "device": "cpu",
    "schedule": "constant",
    "diagnostics": False,
}
NODE = "station-2-client-2"


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    made = Deployment(tmp_path_factory.mktemp("change"), HFEDATM_LOG="json")
    try:
        made.up()
        yield made
    finally:
        made.down()


def command(deployment, *arguments):
    done = deployment.hfedatm(*arguments, "--folder", str(deployment.folder))
    assert done.returncode == 0, done.stdout + deployment.logs()
    return done.stdout


def stop(deployment, run):
    command(deployment, "stop", run.folder.name, "--after-round")
    run.process.wait(300)


def shown(port):
    """Return the serial number of the certificate that a server shows now."""
    text = ssl.get_server_certificate(("127.0.0.1", port))
    return x509.load_pem_x509_certificate(text.encode()).serial_number


def clients(run):
    return [line["clients"]["answered"] for line in run.rounds()]


def test_certificates_and_keys_change_while_a_run_goes_on(deployment):
    every = {
        **deployment.layout.links,
        **{f"{n}-g": g for n, g in deployment.layout.gateways.items()},
    }
    ports = [process.port for process in every.values()]
    before = [shown(port) for port in ports]
    run = deployment.submit("changing", **SMALL)
    wait_until(lambda: clients(run), "a round is finished")

    assert "renewed" in command(deployment, "renew", "--days", "9999")
    wait_until(
        lambda: not set(before) & {shown(port) for port in ports},
        "every link and gateway shows its new certificate",
    )
    done = len(clients(run))
    wait_until(lambda: len(clients(run)) >= done + 2, "two rounds under new certificates")
    assert set(clients(run)) == {4}, run.rounds()[-1]

    command(deployment, "revoke", NODE)
    # It may have been at work when it was revoked; the round after that begins without it.
    wait_until(lambda: clients(run)[-2:] == [3, 3], "rounds go on without the revoked node")
    log = (deployment.folder / "station-2-gateway.log").read_text()
    assert f"the key of {NODE} is revoked" in log
    [left_out] = run.rounds()[-1]["failures"]
    assert "client" in left_out["node"] and left_out["reason"] == "could not be reached"

    command(deployment, "replace", NODE)
    wait_until(lambda: clients(run)[-1] == 4, "the node is back in its place with its new key")
    stop(deployment, run)
    assert all(line["stations"]["answered"] == 2 for line in run.rounds())


def test_every_process_answers_and_writes_json_under_one_run_id(deployment):
    """After the run above; the id is the one in the run's folder."""
    authority = str(deployment.folder / "secrets" / "ca.pem")
    for name, process in local.processes_of(deployment.folder).items():
        assert local.healthy(process, None if name.endswith("-node") else authority), name
    run = json.loads((deployment.output / "changing" / "config.json").read_text())["id"]
    for name in ("station-1-node", "station-1-client-1-node", "station-2-client-1-node"):
        lines = objects(deployment.folder / f"{name}.log")
        tasks = [line for line in lines if line["logger"] == "hfedatm.tasks"]
        assert tasks and {line["run"] for line in tasks} == {run}
        assert {line["process"] for line in tasks} == {name}
    narrated = objects(deployment.output.with_name("changing.log"))
    assert any(line.get("run") == run and "round" in line["message"] for line in narrated)
    assert any(
        line["logger"] == "uvicorn.error"
        for line in objects(deployment.folder / "server-gateway.log")
    )
    assert command(deployment, "doctor")


def objects(log):
    """Return the lines of a log that are JSON; Flower prints a few words besides."""
    found = []
    for line in log.read_text(errors="replace").splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        found += [value] if isinstance(value, dict) and "logger" in value else []
    return found


def test_an_upgraded_station_and_restored_machines_lose_nothing(deployment, tmp_path):
    """Three rounds with an upgrade and a lost server and station between them, or without."""
    run = deployment.submit("kept", **SMALL)
    wait_until(lambda: clients(run), "a round is finished")
    stop(deployment, run)
    done = len(run.rounds())
    kinds = ("node", "gateway", "link")
    for kind in kinds:  # what an upgrade does: every process of the station ends, and starts anew
        deployment.processes.end(f"station-1-{kind}", patience=60)
    for kind in reversed(kinds):
        deployment.start(f"station-1-{kind}")
        process = local.processes_of(deployment.folder)[f"station-1-{kind}"]
        authority = None if kind == "node" else str(deployment.folder / "secrets" / "ca.pem")
        wait_until(lambda: local.healthy(process, authority), f"{kind} answers")  # noqa: B023
    rounds = deployment.submit("kept", resume=run.folder, rounds=done + 1).wait()
    assert clients(run) == [4] * (done + 1) and rounds[-1]["failures"] == []

    results = ["--results", str(deployment.output)]
    command(deployment, "backup", str(tmp_path / "server.tar.gz"), "server", *results)
    command(deployment, "backup", str(tmp_path / "station.tar.gz"), "station-1")
    deployment.down()
    for lost in ("server", "station-1", "operator", "secrets/server", "secrets/station-1"):
        shutil.rmtree(deployment.folder / lost)
    shutil.rmtree(deployment.output)
    command(deployment, "restore", str(tmp_path / "server.tar.gz"), "server", *results)
    command(deployment, "restore", str(tmp_path / "station.tar.gz"), "station-1")
    deployment.up()
    deployment.submit("kept", resume=run.folder, rounds=done + 2).wait()
    assert clients(run) == [4] * (done + 2)

    given = SMALL | {"rounds": done + 2, "output": str(tmp_path), "run-name": "here"}
    run_locally(given)
    there, here = (load_file(f / "last.safetensors") for f in (run.folder, tmp_path / "here"))
    assert here.keys() == there.keys()
    for name, tensor in here.items():
        torch.testing.assert_close(there[name], tensor, rtol=0, atol=1e-6)
