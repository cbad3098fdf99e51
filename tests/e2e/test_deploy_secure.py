"""Secure aggregation between real SuperNodes: a client is killed when its peers count on it."""

import contextlib
import os

import psutil
import pytest
import torch
from deployment import Deployment, wait_until
from safetensors.torch import load_file

from client_app.client import LocalWork
from hfedatm.runtime.local import run_locally
from hfedatm_core.secagg import SecureClient

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]

SMALL = {
    "stations": 1,
    "clients-per-station": 3,
    "rounds": 1,
    "station-rounds": 1,
    "local-epochs": 1,
    "batch-size": 64,
    "validation-fraction": 0,
    "diagnostics": False,
    "device": "cpu",
}
DOOMED, OTHER = "station-1-client-2", "station-1-client-1"


@pytest.fixture
def deployment(tmp_path):
    made = Deployment(tmp_path / "deploy", stations=1, clients=3)
    made.output.mkdir(parents=True)
    try:
        made.up()
        yield made
    finally:
        made.down()


def test_a_client_killed_after_its_masks_are_shared(deployment, tmp_path, monkeypatch):
    """Its peers have added masks for it; with their shares the station takes those off again."""
    run = deployment.submit("dropped", **SMALL, **{"secure-aggregation": True})
    wait_until(lambda: stage(deployment, DOOMED) == "mask", "it has shared its secrets")
    block(secure_folder(deployment, DOOMED) / "vector.npy")
    wait_until(lambda: stage(deployment, OTHER) == "sign", "another has sent its vector")
    kill(deployment, DOOMED)
    (only,) = run.wait()
    assert only["clients"]["answered"] == 2
    assert [failure["node"] for failure in only["failures"]] == ["station 0, client 1"]

    monkeypatch.setattr(LocalWork, "train", all_but_client_1(LocalWork.train))
    run_locally({**SMALL, "output": str(tmp_path), "run-name": "without-it"})
    expected = load_file(tmp_path / "without-it/last.safetensors")
    found = load_file(run.folder / "last.safetensors")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-6)


def all_but_client_1(train):
    def train_or_fail(work):
        if work.task.client == 1:
            raise RuntimeError("gone")
        return train(work)

    return train_or_fail


def secure_folder(deployment, machine):
    """Where a client keeps what it needs between the stages; None before the first."""
    return next((deployment.folder / machine / "memory").glob("*/*/secure"), None)


def stage(deployment, machine) -> str:
    """Return which stage of the protocol a client would answer next."""
    folder = secure_folder(deployment, machine)
    if folder is None or not (folder / "state").exists():
        return ""
    return SecureClient.from_bytes((folder / "state").read_bytes()).stage


def block(file) -> None:
    """Make whoever opens the file wait for ever."""
    pipe = file.with_name("pipe")
    os.mkfifo(pipe)
    pipe.replace(file)


def kill(deployment, machine) -> None:
    """SIGKILL a client's node and the processes that work for it, which are not its children."""
    home = str(deployment.folder / machine / "node-home")
    deployment.kill(f"{machine}-node")
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("FLWR_HOME") == home:
                process.kill()
