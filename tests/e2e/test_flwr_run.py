"""`flwr run .` with Ray, SuperLink and all: the same model as in process; failures are failures."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from helpers import failures_of, last_model, lines_of

from hfedatm.runtime.local import run_locally
from hfedatm.starter import write_project

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "stations": 2,
    "clients-per-station": 2,
    "rounds": 2,
    "station-rounds": 2,
    "local-epochs": 1,
    "batch-size": 64,
    "device": "cpu",
}


class Flower:
    """The ``flwr`` command with a home, ports and a SuperLink of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.control, self.http = _free_ports(2)
        self.environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(home),
            "FLWR_LOCAL_CONTROL_API_PORT": str(self.control),
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(self.http),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }

    def __call__(self, *arguments: str) -> str:
        done = subprocess.run(
            ["flwr", *arguments], cwd=ROOT, env=self.environment, text=True, timeout=1000,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        return done.stdout

    def run(self, *options: str, **settings: object) -> str:
        given = {key.replace("_", "-"): value for key, value in settings.items()}
        config = " ".join(f"{key}={json.dumps(value)}" for key, value in (SMALL | given).items())
        return self("run", ".", "--stream", "-c", config, *options)

    def runs(self) -> list[dict]:
        """Return the runs, newest first."""
        listed = self("list", "--format", "json")
        runs = json.loads(listed[listed.index("{") :])["runs"]
        return sorted(runs, key=lambda run: run["pending-at"], reverse=True)

    def start(self) -> None:
        """Start the SuperLink as `flwr run` would, but without its limit of 15 s."""
        folder = self.home / "local-superlink"
        folder.mkdir()
        self.link = subprocess.Popen(
            [
                Path(sys.executable).parent / "flower-superlink",
                "--insecure", "--simulation", "--isolation", "subprocess",
                "--control-api-address", f"127.0.0.1:{self.control}", "--host", "127.0.0.1",
                "--port", str(self.http), "--log-file", str(folder / "superlink.log"),
                "--database", str(folder / "state.db"),
            ],
            env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self.link.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.http), timeout=1).close()
                return
            except OSError:
                time.sleep(0.5)
        pytest.fail(f"no SuperLink: {(folder / 'superlink.log').read_text()}")

    def stop(self) -> None:
        """End the SuperLink and whatever it started, by their ids."""
        family = [*psutil.Process(self.link.pid).children(recursive=True), self.link]
        for member in family:
            with suppress(psutil.NoSuchProcess):  # it ended by itself
                member.terminate()
        self.link.wait(timeout=30)
        for member in psutil.wait_procs(family[:-1], timeout=20)[1]:
            member.kill()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture(scope="module")
def flower(tmp_path_factory):
    if shutil.which("flwr", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("the flwr command is not installed beside this Python")
    command = Flower(tmp_path_factory.mktemp("flwr-home"))
    try:
        command.start()
        yield command
    finally:
        command.stop()


@pytest.fixture(scope="module")
def in_process(tmp_path_factory):
    """The run everything is compared with."""
    folder = tmp_path_factory.mktemp("in-process")
    run_locally(SMALL | {"output": str(folder), "run-name": "run", "client-method": "fedsr"})
    return folder / "run"


@pytest.mark.parametrize(
    "options, says",
    [
        ((), "4 clients take turns on 2 nodes"),
        (("--federation-config", "num-supernodes=12"), "4 clients on a node each"),
    ],
    ids=["2 nodes", "12 nodes"],
)
def test_simulation_gives_the_model_of_the_in_process_run(
    flower, in_process, tmp_path, options, says
):
    shown = flower.run(*options, output=str(tmp_path), run_name="run", client_method="fedsr")
    folder = tmp_path / "run"
    assert (folder / "summary.json").is_file(), shown
    assert says in shown
    assert shown.count("| stations 2/2 | clients 4 |") == 2, "one line per round"
    assert f"Results: {folder}" in shown
    assert flower.runs()[0]["status"] == "finished:completed"
    assert failures_of(folder) == []
    expected, found = last_model(in_process), last_model(folder)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    accuracies = [[r["unseen"]["accuracy"] for r in lines_of(f)] for f in (in_process, folder)]
    assert accuracies[0] == accuracies[1]


@pytest.mark.parametrize(
    "given",
    [
        {"server-rule": "fedhisyn", "rule-params": "spread=100", "client-method": "fedsr"},
        {"server-rule": "sfedhp"},
        {"server-rule": "fedrc-clusters", "station-assignment": "eara"},
        {"server-rule": "avg", "client-method": "elcfs"},
        {"station-models": "0=lenet5(width=0.5)", "station-assignment": "mixed"},
        {"rule-params": "buffer=1,station_seconds=1:2.5", "rounds": 4, "station-rounds": 1},
        {
            "server-rule": "mtgc",
            "tiers": "2x2x1",
            "station-rounds": "2x1",
            "stations": 4,
            "clients-per-station": 1,
        },
        {"train-only": "lora", "lora-params": "rank=2,targets=all", "lr": 0.1},
    ],
    ids=[
        "fedhisyn",
        "sfedhp",
        "fedrc-clusters",
        "elcfs",
        "station-models",
        "buffer",
        "mtgc-tree",
        "adapters",
    ],
)
def test_other_systems_give_the_model_of_one_process(flower, tmp_path, given):
    flower.run(output=str(tmp_path), run_name="flower", **given)
    run_locally(SMALL | given | {"output": str(tmp_path), "run-name": "here"})
    assert failures_of(tmp_path / "flower") == []
    expected, found = last_model(tmp_path / "here"), last_model(tmp_path / "flower")
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_refining_and_a_second_look_give_the_model_of_one_process(flower, tmp_path):
    """Nodes keep the model from one message to the next, in whatever process."""
    given = {
        "rounds": 1,
        "model-params": "batch_norm=true",
        "station-start": "own",
        "station-assignment": "mixed",
        "rule-params": "refine=true,refine_layers=2,second_look=auto,look_passes=2",
    }
    shown = flower.run(output=str(tmp_path), run_name="flower", **given)
    assert "refined by 2 stations in 3 exchanges" in shown, shown
    assert "second look by 2 stations in 2 passes" in shown, shown
    run_locally(SMALL | given | {"output": str(tmp_path), "run-name": "here"})
    assert failures_of(tmp_path / "flower") == []
    expected, found = last_model(tmp_path / "here"), last_model(tmp_path / "flower")
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_a_refused_run_says_why_and_is_a_failed_run(flower, tmp_path):
    shown = flower.run(output=str(tmp_path), lr=-1.0)
    assert "hfedatm: lr: got -1.0; input should be greater than 0" in shown
    assert flower.runs()[0]["status"] == "finished:failed"
    assert list(tmp_path.iterdir()) == []


def test_private_and_secure_sums_come_out_the_same(flower, tmp_path):
    """Keys, shares and masks pass through Ray actors, each message in whatever process."""
    given = {
        "rounds": 1,
        "secure-aggregation": True,
        "gram-weights": "examples",
        "privacy.mechanism": "example",
        "privacy.epsilon": 4.0,
        "privacy.insecure-dp-seed": 1,
    }
    shown = flower.run(output=str(tmp_path), run_name="flower", **given)
    assert "eps 4 of 4" in shown, shown
    run_locally(SMALL | given | {"output": str(tmp_path), "run-name": "here"})
    assert failures_of(tmp_path / "flower") == []
    expected, found = last_model(tmp_path / "here"), last_model(tmp_path / "flower")
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_the_starter_project_runs_at_once_and_keeps_its_results(flower, tmp_path):
    """The SuperLink was started in this repository, which is another project."""
    project = tmp_path / "my-hospital"
    write_project(project)
    given = 'rounds=1 station-rounds=1 local-epochs=1 run-name="first"'
    shown = flower("run", str(project), "--stream", "-c", given)
    folder = flower.home / "hfedatm/my-hospital.my-hospital/results/first"
    assert f"results: {folder}" in shown.split("round ")[0], shown  # said before round 1
    assert f"Results: {folder}" in shown
    assert flower.runs()[0]["status"] == "finished:completed"
    assert failures_of(folder) == []
    assert "my_hospital.model:build" in shown  # the project's own model, not a built-in one


MANIFEST = """
[project]
name = "somebodys-app"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "somebody"
flwr-version-target = "1.41.0"
fab-include = ["**/*.py"]

[tool.flwr.app.components]
serverapp = "theirs.app:server_app"
clientapp = "theirs.app:client_app"

[tool.flwr.app.config]
num-server-rounds = 2
local-epochs = 1
"""


@pytest.mark.parametrize("tiers", ["", ", three tiers"], ids=["two tiers", "three tiers"])
def test_an_app_that_is_not_ours_gets_the_merge(flower, tmp_path, tiers):
    """The difference that the documentation shows, applied to a project as `flwr new` makes it."""
    page = (ROOT / "docs" / "howto" / "flower-app.md").read_text(encoding="utf-8")
    shown = page.split(f'title="pytorch_app.py{tiers}"\n')[1].split("```")[0]
    source = (ROOT / "tests" / "flower_apps" / "pytorch_app.py").read_text(encoding="utf-8")
    for part in shown.split("@@\n"):
        old, new = (line[1:] for line in part.splitlines())
        assert old in source
        source = source.replace(old, new)
    source = source.replace("final_model.pt", str(tmp_path / "final.pt"))
    (tmp_path / "project" / "theirs").mkdir(parents=True)
    (tmp_path / "project" / "pyproject.toml").write_text(MANIFEST)
    (tmp_path / "project" / "theirs" / "__init__.py").write_text("")
    (tmp_path / "project" / "theirs" / "app.py").write_text(source)
    said = flower("run", str(tmp_path / "project"), "--stream")
    assert said.count("hfedatm: merged 2 models") == 2, said
    assert said.count("2 of 4 layers by RegMean") == 2
    assert flower.runs()[0]["status"] == "finished:completed"
    final = torch.load(tmp_path / "final.pt", weights_only=True)
    assert all(torch.isfinite(value).all() for value in final.values())
