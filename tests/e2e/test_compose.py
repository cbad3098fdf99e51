"""The three tiers as containers, built and run for real."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hfedatm.deploy import certificates

pytestmark = [pytest.mark.docker, pytest.mark.timeout(3600)]

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "hfedatm-test"
SMALL = {
    "stations": 2,
    "clients-per-station": 2,
    "rounds": 3,
    "station-rounds": 1,
    "local-epochs": 1,
    "batch-size": 64,
    "validation-fraction": 0,
    "device": "cpu",
}
PROBE = """
import socket, sys
for host in sys.argv[1:]:
    try:
        socket.create_connection((host, 8000), 3).close()
        print(host)
    except OSError:
        pass
"""


def docker(*arguments: str, check: bool = True, **options) -> str:
    done = subprocess.run(
        ["docker", *arguments], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL, timeout=2400, **options,
    )  # fmt: skip
    assert not check or done.returncode == 0, done.stdout
    return done.stdout


class Stack:
    """The containers of the repository's Compose file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("docker", "configs", "hfedatm_files", "hfedatm_core", "hfedatm", "client_app",
                     "station_app", "server_app", "pyproject.toml", "README.md", "LICENSE",
                     ".dockerignore", "docker-compose.yml",
                     "docker-compose.insecure.yml"):  # fmt: skip
            source = ROOT / name
            copy = shutil.copytree if source.is_dir() else shutil.copyfile
            copy(source, folder / name)
        self.scaffold()

    def scaffold(self, *arguments: str) -> None:
        hfedatm = Path(sys.executable).with_name("hfedatm")
        subprocess.run([hfedatm, "scaffold", *arguments], cwd=self.folder, check=True, timeout=300)

    def compose(self, *arguments: str, check: bool = True) -> str:
        return docker("compose", "-p", PROJECT, *arguments, check=check, cwd=self.folder)

    def run_in(self, service: str, *command: str, check: bool = True) -> str:
        return self.compose("exec", "-T", service, *command, check=check)

    def submit(self, name: str, **changes: object) -> subprocess.Popen:
        given = [f"{key}={value}" for key, value in (SMALL | changes).items()]
        return subprocess.Popen(
            ["docker", "compose", "-p", PROJECT, "exec", "-T", "server", "hfedatm", "submit",
             *given, f"run-name={name}"],
            cwd=self.folder, text=True, stdin=subprocess.DEVNULL,
            stdout=(self.folder / f"{name}.log").open("w"), stderr=subprocess.STDOUT,
        )  # fmt: skip

    def rounds(self, name: str) -> list[dict]:
        text = self.run_in("server", "cat", f"/state/results/{name}/rounds.jsonl", check=False)
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def in_one_process(**settings: object) -> None:
    """Run in one process with the image's number of threads: RegMean's solve magnifies rounding."""
    hfedatm = Path(sys.executable).with_name("hfedatm")
    given = [f"{key}={value}" for key, value in settings.items()]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([hfedatm, "run", *given], env=environment, check=True, timeout=600)


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    if shutil.which("docker") is None or "Server" not in docker("version", check=False):
        pytest.skip("no Docker engine answers: start one and set DOCKER_HOST")
    made = Stack(tmp_path_factory.mktemp("compose"))
    try:
        made.compose("up", "--build", "--wait")
        yield made
    finally:
        made.compose("down", "--volumes", "--timeout", "5", check=False)


def test_all_are_healthy_confined_and_not_root(stack):
    listed = [json.loads(line) for line in stack.compose("ps", "--format", "json").splitlines()]
    assert len(listed) == 12 and {c["Health"] for c in listed} == {"healthy"}
    for service in ("server", "station-1-gateway", "station-2-client-1"):
        status = stack.run_in(service, "cat", "/proc/self/status")
        assert re.search(r"Uid:\s+(?!0\s)\d+", status)
        assert re.search(r"CapEff:\s+0{16}", status) and re.search(r"NoNewPrivs:\s+1", status)


def test_the_image_has_what_superexec_needs_on_kubernetes(stack):
    stack.run_in("server", "python", "-c", "import kubernetes.client, kubernetes.config")


def test_a_node_reaches_its_own_gateway_and_nothing_else(stack):
    links = ["server", "station-1", "station-2"]
    hosts = [*links, *(f"{link}-gateway" for link in links)]
    reached = {
        service: stack.run_in(service, "python", "-c", PROBE, *hosts).split()
        for service in ("station-1-client-1", "station-2-client-2", "station-1-node")
    }
    assert reached == {
        "station-1-client-1": ["station-1-gateway"],
        "station-2-client-2": ["station-2-gateway"],
        "station-1-node": ["station-1", "server-gateway", "station-1-gateway"],
    }


@pytest.mark.parametrize(
    ("service", "gateway"),
    [("station-1-node", "server-gateway"), ("station-1-client-1", "station-1-gateway")],
)
def test_a_nodes_container_cannot_start_a_run(stack, service, gateway):
    connect = f'[superlink.up]\naddress = "{gateway}:8000"\nroot-certificates = "/secrets/ca.pem"\n'
    script = (
        "from pathlib import Path; from hfedatm.deploy import flower; home = Path('/tmp/home'); "
        f"home.mkdir(exist_ok=True); (home / 'config.toml').write_text({connect!r}); "
        "flower.start_run(flower.write_app(home / 'app', 'server', {}), 'up', home)"
    )
    answer = stack.run_in(service, "python", "-c", script, check=False)
    assert "FlowerError" in answer, answer
    assert "refused /v1/control/" in stack.compose("logs", gateway)


def test_a_run_to_the_end_with_a_station_cut_off_for_a_round(stack, tmp_path):
    """Cut off in round 2, back in round 3; the first round is the same as in process."""
    run = stack.submit("first")
    network, node = f"{PROJECT}_fleet-server", f"{PROJECT}-station-2-node-1"
    _wait_until(lambda: len(stack.rounds("first")) == 1 or run.poll() is not None, "round 1")
    docker("network", "disconnect", network, node)
    _wait_until(lambda: len(stack.rounds("first")) == 2 or run.poll() is not None, "round 2")
    docker("network", "connect", network, node)
    log = stack.folder / "first.log"
    assert run.wait(1800) == 0, log.read_text()
    rounds = stack.rounds("first")
    assert [r["stations"]["answered"] for r in rounds][:2] == [2, 1], rounds
    assert [f["node"] for f in rounds[1]["failures"]] == ["station 1"]
    assert "round   3/3" in log.read_text()


def test_a_station_is_added_and_the_model_equals_the_in_process_run(stack, tmp_path):
    """The running server learns the new station's key; nothing else is touched."""
    # The node that was cut off may still be on its way back, and compose does not wait for it.
    _wait_until(
        lambda: not {"unhealthy", "starting"} & set(re.findall(r"\w+", stack.compose("ps"))),
        "all containers to be healthy",
    )
    before = set(stack.compose("ps", "--quiet").split())
    stack.scaffold("--stations", "3")
    stack.compose("up", "--wait")
    after = set(stack.compose("ps", "--quiet").split())
    assert before < after and len(after - before) == 5
    more = {"stations": 3, "rounds": 1}
    run = stack.submit("same", **more)
    assert run.wait(1800) == 0, (stack.folder / "same.log").read_text()
    (only,) = stack.rounds("same")
    assert (only["clients"]["answered"], only["failures"]) == (6, [])
    stack.compose("cp", "server:/state/results/same", str(tmp_path / "there"))
    in_one_process(**SMALL | more, **{"output": tmp_path, "run-name": "here"})
    here = load_file(tmp_path / "here/last.safetensors")
    there = load_file(tmp_path / "there/last.safetensors")
    for name, tensor in here.items():
        torch.testing.assert_close(there[name], tensor, rtol=0, atol=1e-6)


def test_a_node_with_an_unknown_key_is_refused(stack):
    """A client's container with a key that the station does not know."""
    secrets = stack.folder / "secrets/station-1-client-1"
    kept = (secrets / "node").read_bytes()
    certificates.make_node_key(stack.folder / "secrets", secrets)
    if os.getuid() == 0:
        os.chown(secrets / "node", 1000, 1000)
    try:
        stack.compose("restart", "station-1-client-1")
        _wait_until(
            lambda: "Failed to activate SuperNode" in stack.compose("logs", "station-1-client-1"),
            "the node to be refused",
        )
        assert "it does not know this node's key" in stack.compose("logs", "station-1-gateway")
    finally:
        (secrets / "node").write_bytes(kept)


def _wait_until(condition, what, patience=1200):
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"waited too long for {what}"
        time.sleep(1)
