"""Rings of clients, clusters and exchanged amplitudes between real processes."""

import os
import signal
from pathlib import Path

import pytest
import torch
from deployment import Deployment
from faults.staging import pause, paused, reasons, release
from helpers import Saboteur
from safetensors.torch import load_file

import hfedatm.runtime.local as local
from client_app.data import class_counts, shares_of
from hfedatm.base.building import load_data
from hfedatm.base.records import Task
from hfedatm.base.resolving import resolve
from hfedatm.cli.assign import read_counts
from hfedatm.runtime.local import run_locally
from server_app.rules.fedhisyn import grouped_by_time, hops_of, simulated_time

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]

SMALL = {
    "stations": 1,
    "clients-per-station": 3,
    "rounds": 2,
    "station-rounds": 1,
    "local-epochs": 1,
    "batch-size": 64,
    "device": "cpu",
    "seed": 4,  # with which two of the three clients pass models around a ring
}
RING = {"server-rule": "fedhisyn", "rule-params": "spread=100,speeds=simulated"}
ALLOWED = {"class-counts": True, "amplitudes": True, "model-to-peers": True}
PLUGINS = Path(__file__).parent / "plugins"


@pytest.fixture(scope="module")
def faults(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory, faults):
    made = Deployment(
        tmp_path_factory.mktemp("deploy"),
        1,
        3,
        privacy=ALLOWED,
        allowed=["faulty:train"],
        FAULTS=str(faults),
        PYTHONPATH=os.pathsep.join([str(PLUGINS), *filter(None, [os.environ.get("PYTHONPATH")])]),
    )
    try:
        made.up()
        yield made
    finally:
        made.down()


@pytest.mark.parametrize(
    "given",
    [
        RING,
        {"server-rule": "fedrc-clusters"},
        {"server-rule": "avg", "client-method": "elcfs"},
        {"server-rule": "sfedhp"},
    ],
    ids=["fedhisyn", "fedrc-clusters", "elcfs", "sfedhp"],
)
def test_the_model_is_that_of_one_process(deployment, tmp_path, request, given):
    name = request.node.callspec.id
    rounds = deployment.submit(name, **SMALL, **given).wait()
    assert all(line["failures"] == [] for line in rounds)
    run_locally(SMALL | given | {"output": str(tmp_path), "run-name": "here"})
    there = load_file(deployment.output / name / "last.safetensors")
    here = load_file(tmp_path / "here/last.safetensors")
    assert here.keys() == there.keys()
    for tensor, value in here.items():
        assert torch.allclose(there[tensor], value, rtol=1e-5, atol=1e-6), tensor


def test_a_client_that_dies_in_the_ring_is_skipped(deployment, faults, tmp_path, monkeypatch):
    times = {client: simulated_time(SMALL["seed"], client, 100) for client in range(3)}
    ring = grouped_by_time(times, 2)[0]
    assert len(ring) == 2 and hops_of(ring, times, 3) > 2, "somebody must follow the dead client"
    given = SMALL | RING | {"rounds": 1, "train-fn": "faulty:train"}
    machine = f"station-1-client-{ring[0] + 1}"
    pause(faults, machine, training=2)  # it has trained once, and its model has been passed on
    run = deployment.submit("dies-in-the-ring", **given)
    os.kill(paused(faults, machine), signal.SIGKILL)
    release(faults)
    (line,) = run.wait()
    assert "killed by signal 9" in reasons(line, f"station 0, client {ring[0]}")[0]
    assert line["clients"]["answered"] == 2 and len(line["failures"]) == 1

    def dead_in_the_ring(message, reply):
        if Task.from_record(message.content["task"]).hop:
            raise RuntimeError("dead")
        return reply

    monkeypatch.syspath_prepend(str(PLUGINS))
    monkeypatch.setenv("FAULTS", str(faults))
    monkeypatch.setenv("HFEDATM_STATE", str(tmp_path / "here/state"))
    monkeypatch.setattr(local, "client_app", Saboteur(dead_in_the_ring, {ring[0]}))
    run_locally(given | {"output": str(tmp_path), "run-name": "here"})
    there = load_file(run.folder / "last.safetensors")
    for tensor, value in load_file(tmp_path / "here/last.safetensors").items():
        torch.testing.assert_close(there[tensor], value, rtol=1e-5, atol=1e-6)


def test_class_counts_come_by_message_and_suggest_stations(deployment):
    place = ("--folder", str(deployment.folder), f"output={deployment.output}")
    done = deployment.hfedatm("assign", "--ask", "device=cpu", "run-name=counts", "seed=4", *place)
    assert done.returncode == 0, done.stdout + deployment.logs()
    assert "station 0: clients 0 1 2, KL to even classes" in done.stdout
    settings = resolve({"stations": 1, "clients-per-station": 3, "seed": 4})
    data = load_data(settings)
    expected = [class_counts(settings, data, share).tolist() for share in shares_of(settings)]
    assert read_counts(deployment.output / "counts/class-counts.csv")[2] == expected


def test_measured_times_group_the_clients(deployment):
    rounds = deployment.submit("measured", **SMALL, **{"server-rule": "fedhisyn"}).wait()
    assert [line["clients"]["answered"] for line in rounds] == [3, 3]
    assert all(line["failures"] == [] and not line.get("kept") for line in rounds)
