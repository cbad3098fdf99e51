"""Refining and a second look in real processes: the model of one process, killed nodes."""

import os
import signal
from pathlib import Path

import pytest
import torch
from deployment import Deployment, wait_until
from helpers import lines_of
from safetensors.torch import load_file

from hfedatm.runtime.local import run_locally

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]

PLUGINS = Path(__file__).parent / "plugins"
LOOK = {
    "stations": 2,
    "clients-per-station": 2,
    "rounds": 1,
    "station-rounds": 1,
    "local-epochs": 1,
    "batch-size": 64,
    "model": "slow_look:build",
    "station-start": "own",
    "station-assignment": "mixed",
    "rule-params": "refine=true,refine_layers=2,second_look=always,look_passes=2,profiles=true",
    "diagnostics": False,
    "device": "cpu",
    "join-timeout": 900,
    "threads": 1,
}
SLOW = "station-1-client-2"


@pytest.fixture(scope="module")
def faults(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory, faults):
    made = Deployment(
        tmp_path_factory.mktemp("deploy"),
        allowed=["slow_look:build"],
        privacy={"refine": True, "second-look": True, "class-profiles": True},
        FAULTS=str(faults),
        PYTHONPATH=os.pathsep.join([str(PLUGINS), *filter(None, [os.environ.get("PYTHONPATH")])]),
    )
    try:
        made.up()
        yield made
    finally:
        made.down()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The model that the same settings give in one process."""
    folder = tmp_path_factory.mktemp("here")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PLUGINS))
        patch.setenv("HFEDATM_STATE", str(folder / "memory"))
        run_locally({**LOOK, "output": str(folder), "run-name": "here"})
    return load_file(folder / "here/last.safetensors")


def paused(faults) -> int:
    """Wait until the slow client is in the middle of its work; return that process's id."""
    file = faults / f"paused-{SLOW}"
    wait_until(lambda: file.exists() and file.read_text(), f"{SLOW} pauses")
    found = int(file.read_text())
    file.unlink()
    return found


def assert_same(run, model):
    found = load_file(run.folder / "last.safetensors")
    assert found.keys() == model.keys()
    for name, tensor in model.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)


def test_the_same_model_as_in_one_process(deployment, undisturbed):
    run = deployment.submit("look", **LOOK)
    (only,) = run.wait()
    assert (only["refined"]["stations"], only["refined"]["exchanges"]) == (2, 3)
    assert (only["second_look"]["stations"], only["second_look"]["passes"]) == (2, 2)
    assert only["failures"] == []
    assert_same(run, undisturbed)


def test_a_client_killed_in_its_look_is_named_and_still_evaluates(deployment, faults):
    (faults / f"pause-{SLOW}").touch()
    run = deployment.submit("client-killed", **LOOK)
    os.kill(paused(faults), signal.SIGKILL)
    (faults / f"pause-{SLOW}").unlink()
    (only,) = run.wait()
    [failure] = only["failures"]
    assert failure["node"] == "station 0, client 1" and "killed by signal 9" in failure["reason"]
    assert only["second_look"]["reason"] == "" and only["second_look"]["passes"] == 2
    evaluated = sum(d["examples"] for d in only["source"]["domains"].values())
    undisturbed = lines_of(deployment.output / "look")[0]["source"]["domains"]
    assert evaluated == sum(d["examples"] for d in undisturbed.values())


def test_a_client_killed_in_an_exchange_is_named_and_the_others_refine(deployment, faults):
    """It is asked nothing more about layers, but looks and evaluates with the whole model."""
    (faults / f"pause-refine-{SLOW}").touch()
    run = deployment.submit("client-killed-refining", **LOOK)
    os.kill(paused(faults), signal.SIGKILL)
    (faults / f"pause-refine-{SLOW}").unlink()
    (only,) = run.wait()
    [failure] = only["failures"]
    assert failure["node"] == "station 0, client 1" and "killed by signal 9" in failure["reason"]
    assert (only["refined"]["exchanges"], only["refined"]["stations"]) == (3, 2)
    whole = lines_of(deployment.output / "look")[0]
    assert only["refined"]["examples"] < whole["refined"]["examples"]
    assert only["second_look"]["examples"] == whole["second_look"]["examples"]


@pytest.mark.parametrize("pause", ["pause-refine", "pause"], ids=["exchange", "look"])
def test_a_server_killed_after_the_merge_goes_on_to_the_same_model(
    deployment, faults, undisturbed, pause
):
    (faults / f"{pause}-{SLOW}").touch()
    run = deployment.submit(f"server-killed-{pause}", **LOOK)
    paused(faults)
    family = deployment.process("server-link").children(recursive=True)
    next(p for p in family if "flwr-serverapp" in " ".join(p.cmdline())).kill()
    (faults / f"{pause}-{SLOW}").unlink()
    assert run.process.wait(600) != 0
    (only,) = deployment.submit(f"server-killed-{pause}", resume=run.folder).wait()
    assert only["failures"] == [] and only["second_look"]["passes"] == 2
    assert only["refined"]["exchanges"] == 3
    assert_same(run, undisturbed)
