"""Three tiers as real Flower processes: the same model as in process, and nobody else gets in."""

import json
import subprocess
import sys

import psutil
import pytest
import torch
from deployment import Deployment, free_ports, wait_until
from safetensors.torch import load_file

from hfedatm.deploy import certificates, flower, machines
from hfedatm.runtime.local import run_locally

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]

SMALL = {
    "stations": 2,
    "clients-per-station": 2,
    "rounds": 2,
    "station-rounds": 2,
    "local-epochs": 1,
    "batch-size": 64,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    made = Deployment(tmp_path_factory.mktemp("deploy"))
    try:
        made.up()
        yield made
    finally:
        made.down()


def test_final_model_equals_the_in_process_run(deployment, tmp_path):
    rounds = deployment.submit("first", **SMALL).wait()
    here = model_here(tmp_path, SMALL)
    assert_close(load_file(deployment.output / "first/last.safetensors"), here)
    assert [r["clients"]["answered"] for r in rounds] == [4, 4]
    assert all(r["failures"] == [] for r in rounds)


def test_secure_aggregation_gives_the_same_model(deployment, tmp_path):
    """The very same as in process; without it, up to rounding, which RegMean's solve magnifies."""
    given = SMALL | {"rounds": 1, "station-rounds": 1, "gram-dtype": "float32"}
    secure = given | {"secure-aggregation": True}
    (only,) = deployment.submit("secure", **secure).wait()
    there = load_file(deployment.output / "secure/last.safetensors")
    assert_close(there, model_here(tmp_path / "secure", secure))
    assert_close(there, model_here(tmp_path / "plain", given), 1e-4)
    assert (only["clients"]["answered"], only["failures"]) == (4, [])


@pytest.mark.parametrize(
    "given",
    [
        {"station-models": "0=lenet5(width=0.5)", "station-assignment": "mixed"},
        {"rule-params": "buffer=1,station_seconds=1:2.5", "rounds": 4, "station-rounds": 1},
    ],
    ids=["station-models", "buffer"],
)
def test_stations_of_their_own_shape_or_pace_give_the_model_of_one_process(
    deployment, tmp_path, request, given
):
    name = request.node.callspec.id
    rounds = deployment.submit(name, **SMALL | given).wait()
    assert all(r["failures"] == [] for r in rounds)
    here = model_here(tmp_path, SMALL | given)
    assert_close(load_file(deployment.output / name / "last.safetensors"), here)
    if name == "buffer":  # under the virtual clock the slow station is merged once, two rounds late
        merged = [{s["name"]: s["late"] for s in r["per_station"]} for r in rounds]
        assert merged == [{"station 0": 0}, {"station 0": 0}, {"station 1": 2}, {"station 0": 1}]


def test_in_real_time_a_merge_does_not_wait_for_all(deployment):
    given = SMALL | {"rule-params": "buffer=1", "rounds": 4, "station-rounds": 1}
    rounds = deployment.submit("real-time", **given).wait()
    assert [r["stations"] for r in rounds] == [{"asked": 1, "answered": 1}] * 4
    assert all(r["failures"] == [] and not r.get("kept") for r in rounds)


def test_class_counts_do_not_leave_a_node_whose_owner_says_nothing(deployment):
    place = ("--folder", str(deployment.folder), f"output={deployment.output}")
    done = deployment.hfedatm("assign", "--ask", "device=cpu", *place)
    assert done.returncode == 1
    assert "no client has told its class counts" in done.stdout, done.stdout
    assert "privacy.class-counts" in done.stdout


def test_adapters_are_merged_as_in_one_process(deployment, tmp_path):
    """Only adapters and the head travel; the server merges the products of their factors."""
    given = SMALL | {"train-only": "lora", "lora-params": "rank=2,targets=all", "lr": 0.1}
    rounds = deployment.submit("adapters", **given).wait()
    there = load_file(deployment.output / "adapters/last.safetensors")
    assert_close(there, model_here(tmp_path, given))
    merged = {n: r["how"] for n, r in rounds[-1]["merge"]["layers"].items() if "lora_" in n}
    assert len(merged) == 4 and set(merged.values()) == {"regmean"}
    assert all(there[f"{name}.weight"].any() for name in merged)  # B started at zero
    assert all(r["failures"] == [] for r in rounds)


def test_two_runs_at_once_end_as_if_each_were_alone(deployment, tmp_path):
    given = [SMALL | {"rounds": 1, "seed": seed} for seed in (1, 2)]
    names = ["at-once-1", "at-once-2"]
    runs = [deployment.submit(name, **each) for name, each in zip(names, given, strict=True)]
    for run, name, each in zip(runs, names, given, strict=True):
        (only,) = run.wait()
        assert (only["clients"]["answered"], only["failures"]) == (4, [])
        there = load_file(deployment.output / name / "last.safetensors")
        assert_close(there, model_here(tmp_path / name, each))
    listed = {run["name"]: run for run in listed_runs(deployment)}
    assert {(listed[n]["state"], listed[n]["rounds"]) for n in names} == {
        ("finished:completed", "1/1")
    }


def test_a_run_is_stopped_and_can_be_resumed(deployment, tmp_path):
    given = SMALL | {"rounds": 60, "station-rounds": 1, "schedule": "constant"}
    run = deployment.submit("stopped", **given)
    wait_until(lambda: (run.folder / "last.safetensors").exists(), "a round is finished")
    said = deployment.hfedatm("stop", "stopped", "--folder", str(deployment.folder))
    assert said.returncode == 0, said.stdout
    assert f"hfedatm submit resume={run.folder}" in said.stdout
    assert run.process.wait(120) == 1
    assert "finished:stopped" in {r["state"] for r in listed_runs(deployment)}
    again = deployment.hfedatm("stop", "stopped", "--folder", str(deployment.folder))
    assert (again.returncode, "is over" in again.stdout) == (2, True)

    rounds = len(run.rounds()) + 1
    deployment.submit("stopped", resume=run.folder, rounds=rounds).wait()
    here = model_here(tmp_path, given | {"rounds": rounds})
    assert_close(load_file(run.folder / "last.safetensors"), here)


def listed_runs(deployment):
    done = deployment.hfedatm("runs", "--json", "--folder", str(deployment.folder))
    assert done.returncode == 0, done.stdout
    return json.loads(done.stdout)


def model_here(folder, given):
    """Return the last model of a run in this process."""
    run_locally({**given, "output": str(folder), "run-name": "here"})
    return load_file(folder / "here/last.safetensors")


def assert_close(there, here, tolerance=1e-6):
    assert here.keys() == there.keys()
    for name, tensor in here.items():
        torch.testing.assert_close(there[name], tensor, rtol=0, atol=tolerance)


def test_a_mistake_in_the_settings_ends_the_run_with_its_reason(deployment):
    run = deployment.submit("mistake", **SMALL | {"target-domain": "46"})
    assert run.process.wait(600) != 0
    assert "target-domain" in run.log and "45" in run.log


@pytest.mark.parametrize("above", ["server", "station-1"])
def test_what_a_node_has_does_not_start_a_run_or_admit_a_node(deployment, tmp_path, above):
    """With the authority's certificate and a node's own key, at its gateway, at either tier."""
    name = "station-1" if above == "server" else f"{above}-client-1"
    node = deployment.folder / "secrets" / name
    port = deployment.layout.gateways[above].port
    machines.write_connections(tmp_path, {"gateway": f"127.0.0.1:{port}"}, str(node / "ca.pem"))
    app = flower.write_app(tmp_path / "app", "server", {"rounds": 1})
    with pytest.raises(flower.FlowerError, match="(?i)403|refused|forbidden|permission|denied"):
        flower.start_run(app, "gateway", tmp_path)
    with pytest.raises(flower.FlowerError):
        flower.register_node(node / "node.pub", "gateway", tmp_path)
    log = (deployment.folder / f"{above}-gateway.log").read_text()
    assert "refused /v1/control/" in log


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("unknown key", "Failed to activate SuperNode"),
        ("no key", "authentication is enabled"),
        ("wrong authority", "CERTIFICATE_VERIFY_FAILED"),
    ],
)
def test_a_strange_node_is_refused_and_the_log_says_so(deployment, tmp_path, case, reason):
    known = deployment.folder / "secrets/station-1"
    own = tmp_path / "own"
    certificates.make_authority(own)
    certificates.make_node_key(own, own / "node-1")
    command = ["flower-supernode", "--superlink"]
    command += [f"127.0.0.1:{deployment.layout.gateways['server'].port}"]
    command += ["--port", str(free_ports(1))]
    command += ["--max-retries", "1", "--root-certificates"]
    command += [str(own / "ca.pem" if case == "wrong authority" else known / "ca.pem")]
    if case != "no key":
        key = known / "node" if case == "wrong authority" else own / "node-1/node"
        command += ["--auth-supernode-private-key", str(key)]
    log = tmp_path / "node.log"
    with log.open("w") as file:
        node = subprocess.Popen(
            command, env=flower.environment(tmp_path), stdout=file, stderr=subprocess.STDOUT
        )
    try:
        assert node.wait(120) != 0
    finally:
        node.kill()
        for process in psutil.process_iter(["cmdline"]):  # its helper, slow to see it go
            if f"--parent-pid {node.pid}" in " ".join(process.info["cmdline"] or []):
                process.kill()
    assert reason in log.read_text(), log.read_text()
    gateway = (deployment.folder / "server-gateway.log").read_text()
    if case == "unknown key":
        assert "it does not know this node's key" in gateway


def test_down_ends_all_of_its_processes_and_no_other(deployment):
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        assert len(deployment.processes.living()) == 3 + 3 + 6
        deployment.down()
        wait_until(lambda: not _of(deployment), f"all have ended: {_of(deployment)}", 30)
        assert bystander.poll() is None
    finally:
        bystander.kill()


def _of(deployment):
    """Return the living processes that mention the deployment's folder, whoever started them."""
    return [
        " ".join(p.info["cmdline"])
        for p in psutil.process_iter(["cmdline", "status"])
        if str(deployment.folder) in " ".join(p.info["cmdline"] or [])
        and p.info["status"] != psutil.STATUS_ZOMBIE
    ]
