"""What is wrong with a machine is found, with the cure."""

import json
import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer

import psutil
import pytest
from typer.testing import CliRunner

import hfedatm.doctor
from hfedatm.base.trust import writing
from hfedatm.base.versions import own_version
from hfedatm.cli.main import typer_app
from hfedatm.deploy import certificates, machines
from hfedatm.doctor import Patient, examine, installation, this_container


@pytest.fixture
def patient(tmp_path):
    """Return a healthy machine with a link and a node."""
    authority, folder = tmp_path / "secrets", tmp_path / "secrets" / "station-1"
    certificates.make_authority(authority)
    certificates.make_link_certificate(authority, folder, ["station-1", "localhost"])
    certificates.make_task_key(folder)
    (authority / "server").mkdir()
    certificates.make_task_key(authority / "server")
    certificates.enrol(authority, folder, "station-1", "server", 0)
    state = tmp_path / "station-1"
    state.mkdir()
    writing.write(state / "policy.toml", "")
    return Patient("station-1", state, folder, state / "policy.toml")


def bad(patient):
    return [f for f in examine(patient) if f.state != "good"]


def only(patient, state="bad"):
    [found] = bad(patient)
    assert (found.state, bool(found.cure)) == (state, True)
    return found.what


def test_a_healthy_machine(patient):
    assert bad(patient) == []
    said = " ".join(f.what for f in examine(patient))
    assert "station-1, number 0 of server" in said and "policy" in said and "GB free" in said


def test_the_installation_that_passes_the_tests_is_good():
    assert {f.state for f in installation()} == {"good"}


@pytest.mark.parametrize(
    ("left", "state", "said"),
    [(timedelta(days=10), "warning", "ends in"), (timedelta(seconds=-1), "bad", "ended on")],
)
def test_the_end_of_a_certificate(patient, monkeypatch, left, state, said):
    monkeypatch.setattr(certificates, "LIFETIME", left)
    authority = patient.secrets.parent
    certificates.issue_node_certificate(authority, patient.secrets, "station-1", "server", 0)
    assert said in only(patient, state)


def test_another_authority(patient, tmp_path):
    certificates.make_authority(tmp_path / "other")
    certificates.make_link_certificate(tmp_path / "other", tmp_path / "link", ["station-1"])
    (patient.secrets / "link.pem").write_bytes((tmp_path / "link" / "link.pem").read_bytes())
    assert "was not issued by the authority" in only(patient)


def test_a_key_that_does_not_belong(patient, tmp_path):
    certificates.make_node_key(patient.secrets.parent, tmp_path)
    (patient.secrets / "node").write_bytes((tmp_path / "node").read_bytes())
    assert "another key than node" in only(patient)


@pytest.mark.parametrize("file", ["link.key", "node", "tasks.key"])
def test_a_key_that_others_can_read(patient, file):
    os.chmod(patient.secrets / file, 0o644)
    assert f"{file} can be read by others" in only(patient)


@pytest.mark.parametrize("file", ["ca.pem", "link.pem", "node.pem"])
def test_damaged_files(patient, file):
    (patient.secrets / file).write_text("nothing")
    assert file in only(patient)


def test_a_policy_with_a_mistake(patient):
    patient.policy.write_text("[privcy]\n")
    assert "privcy" in only(patient)


def test_a_full_disk(patient, monkeypatch):
    monkeypatch.setattr(hfedatm.doctor, "LEAST_FREE", 10**18)
    assert "GB free" in only(patient)


@pytest.fixture
def server(request):
    """Return the address of a server whose clock is off by so many seconds."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response_only(200)
            off, version = (
                request.param if isinstance(request.param, tuple) else (request.param, "")
            )
            self.send_header("Date", formatdate(time.time() + off, usegmt=True))
            if version:
                self.send_header("hfedatm-version", version)
            self.end_headers()

        def log_message(self, *_):
            pass

    made = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield f"127.0.0.1:{made.server_port}"
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.mark.parametrize(
    ("server", "state"), [((0, ""), []), ((3600, ""), ["bad"])], indirect=["server"]
)
def test_the_clock_of_the_other_side(patient, server, state):
    plain = Patient("p", patient.state, None, patient.policy, (server,))
    found = bad(plain)
    assert [f.state for f in found] == state
    assert all("clock" in f.what and "NTP" in f.cure for f in found)


@pytest.mark.parametrize(
    ("server", "state"), [((0, own_version()), []), ((0, "99.0.0"), ["bad"])], indirect=["server"]
)
def test_the_version_of_the_other_side(patient, server, state):
    plain = Patient("p", patient.state, None, patient.policy, (server,))
    assert [f.state for f in bad(plain)] == state
    assert all("99.0.0" in f.what and f.cure for f in bad(plain))


def test_a_container_knows_its_own_parts_and_whom_it_must_reach(patient, monkeypatch):
    """A node runs beside the doctor; its command line says where it connects to."""
    assert this_container() is None
    for name, path in (
        ("STATE", patient.state),
        ("SECRETS", patient.secrets),
        ("POLICY", patient.policy),
    ):
        monkeypatch.setattr(f"hfedatm.deploy.container.{name}", path)
    wait = "import sys; print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", wait, "--superlink", "127.0.0.1:9", "--port", "1"]
    node = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        node.stdout.readline()
        assert "127.0.0.1:9" in this_container().reach
        done = CliRunner().invoke(typer_app, ["doctor", "--json"])
    finally:
        node.communicate()
    found = json.loads(done.stdout)["this machine"]
    assert any("station-1, number 0 of server" in f["what"] for f in found)
    assert any(f["what"].startswith("127.0.0.1:9") and f["state"] == "bad" for f in found)


def test_nobody_answers(patient):
    plain = Patient("p", patient.state, None, patient.policy, ("127.0.0.1:9",))
    assert "127.0.0.1:9" in only(plain)


def test_the_command_looks_at_all_machines_and_processes(patient, tmp_path):
    machines.write_connections(tmp_path / "operator", {"station-1": "127.0.0.1:9"}, None)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    me = psutil.Process()
    noted = {"station-1-link": [me.pid, me.create_time()], "station-1-gateway": [gone.pid, 1.0]}
    (tmp_path / "processes.json").write_text(json.dumps(noted))
    done = CliRunner().invoke(typer_app, ["doctor", "--folder", str(tmp_path), "--json"])
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert set(found) == {"installation", "processes", "station-1"}
    assert [f["state"] for f in found["processes"]] == ["good", "bad"]
    shown = CliRunner().invoke(typer_app, ["doctor", "--folder", str(tmp_path)])
    assert "station-1-gateway is dead" in shown.stdout and "127.0.0.1:9" in shown.stdout


def test_one_machine_by_its_paths(patient):
    given = ["--folder", patient.state, "--secrets", patient.secrets, "--policy", patient.policy]
    done = CliRunner().invoke(typer_app, ["doctor", *map(str, given)])
    assert done.exit_code == 0, done.stdout
