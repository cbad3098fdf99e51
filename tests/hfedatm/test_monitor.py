"""Health and metrics of a machine, as Prometheus would read them."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import tomli_w
import yaml
from helpers import run_small
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from hfedatm.base.trust.policy import Policy
from hfedatm.deploy import certificates
from hfedatm.monitor import Machine, application

ROOT = Path(__file__).parents[2]


@pytest.fixture
def deployment(tmp_path):
    """Return the folder of a deployment with one living and one dead process."""
    folder = tmp_path / "state"
    (folder / "station-1" / "spool").mkdir(parents=True)
    (folder / "station-1" / "spool" / "1-ab.request").touch()
    accounts = folder / "station-1-client-1" / "memory" / ".accounts"
    accounts.mkdir(parents=True)
    for name, left in (("a", 3.5), ("b", 1.25)):
        (accounts / f"{name}.json").write_text(json.dumps({"epsilon-left": left}))
    (accounts / "broken.json").write_text("{")
    me = psutil.Process()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    noted = {"server-link": [me.pid, me.create_time()], "station-1-node": [gone.pid, 1.0]}
    (folder / "processes.json").write_text(json.dumps(noted))
    return folder


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    made = run_small(folder, rounds=2, **{"privacy.mechanism": "client", "privacy.epsilon": 8})
    made.rename(folder / 'one"\n\\')  # a folder from elsewhere may have any name
    return folder


def ask(deployment, *results):
    return TestClient(application(Machine(deployment, results)))


def values(deployment, *results):
    answer = ask(deployment, *results).get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_health_names_the_dead(deployment):
    answer = ask(deployment).get("/health")
    assert (answer.status_code, answer.json()) == (503, {"dead": ["station-1-node"], "alive": 1})
    noted = json.loads((deployment / "processes.json").read_text())
    del noted["station-1-node"]
    (deployment / "processes.json").write_text(json.dumps(noted))
    assert ask(deployment).get("/health").status_code == 200


def test_the_machine(deployment):
    found = values(deployment)
    assert found["hfedatm_process_up", ("process", "server-link")] == 1
    assert found["hfedatm_process_up", ("process", "station-1-node")] == 0
    assert found["hfedatm_process_memory_bytes", ("process", "server-link")] > 1e6
    assert found["hfedatm_jobs", ("machine", "station-1")] == 1
    assert found["hfedatm_epsilon_left", ("machine", "station-1-client-1")] == 1.25


def test_a_run_whatever_its_name(deployment, results):
    [folder] = results.iterdir()
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    found = values(deployment, results)
    [name] = {labels["run"] for labels in map(lambda key: dict(key[1:]), found) if "run" in labels}
    run = ("run", name)
    assert found["hfedatm_rounds_total", run] == found["hfedatm_rounds_planned", run] == 2
    assert found["hfedatm_run", run, ("state", "finished")] == 1
    for tier in ("clients", "stations"):
        sent = sum(line["bytes_up"][tier] for line in lines)
        assert found["hfedatm_bytes_up_total", run, ("tier", tier)] == sent
    answered = found["hfedatm_replies_total", ("outcome", "answered"), run, ("tier", "clients")]
    assert answered == sum(line["clients"]["answered"] for line in lines)
    accuracy = found["hfedatm_accuracy", ("on", "unseen"), run]
    assert accuracy == pytest.approx(lines[-1]["unseen"]["accuracy"])
    assert found["hfedatm_epsilon_spent", run] == lines[-1]["privacy"]["epsilon"]


def test_a_folder_that_is_being_written_is_left_out(deployment, results, tmp_path):
    shutil.copytree(results, tmp_path / "more")
    (tmp_path / "more" / "half").mkdir()
    (tmp_path / "more" / "half" / "config.json").write_text("{")
    assert ask(deployment, tmp_path / "more").get("/metrics").status_code == 200


def test_the_dashboard_and_the_alerts_ask_for_metrics_that_exist(deployment, results):
    certificates.make_authority(deployment / "secrets")
    certificates.make_node_key(deployment / "secrets", deployment / "secrets" / "server")
    names = {key[0] for key in values(deployment, results)}
    dashboard = json.loads((ROOT / "deploy/monitoring/dashboard.json").read_text())
    asked = expressions() + [variable["query"] for variable in dashboard["templating"]["list"]]
    used = {name for text in asked for name in re.findall(r"hfedatm_\w+", text)}
    assert used and used <= names


def test_a_private_client_tells_how_much_is_left(tmp_path, monkeypatch):
    """What the policy allows less what the account has spent."""
    policy = tmp_path / "policy.toml"
    allowed = ["helpers:tiny_data", "helpers:tiny_net"]
    limits = {"least-mechanism": "example", "total-epsilon": 50.0}
    policy.write_text(tomli_w.dumps({"code": {"allowed": allowed}, "privacy": limits}))
    monkeypatch.setenv("HFEDATM_POLICY", str(policy))
    monkeypatch.setenv("HFEDATM_STATE", str(tmp_path / "state" / "memory"))
    assert Policy.current().privacy.total_epsilon == 50.0
    run_small(tmp_path, rounds=1, **{"privacy.mechanism": "example", "privacy.epsilon": 2})
    left = Machine(tmp_path / "state").epsilon_left()
    assert list(left) == ["state"] and 0 < left["state"] < 50


def test_certificates_and_disk(deployment, tmp_path):
    authority = deployment / "secrets"
    certificates.make_authority(authority)
    certificates.make_link_certificate(authority, authority / "server", ["localhost"])
    (authority / "server" / "broken.pem").write_text("nothing")
    found = values(deployment)
    days = found["hfedatm_certificate_days_left", ("machine", "server")]
    assert days == pytest.approx(certificates.LIFETIME.days, abs=0.1)  # the authority's is longer
    assert found["hfedatm_disk_free_bytes", ("folder", str(deployment))] > 0


def expressions():
    """Return every expression of the dashboard, with its variable filled in, and of the alerts."""
    dashboard = json.loads((ROOT / "deploy/monitoring/dashboard.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    alerts = yaml.safe_load((ROOT / "deploy/monitoring/alerts.yaml").read_text())
    asked += [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    return [expression.replace("$run", ".*") for expression in asked]


def test_panels_do_not_overlap_and_have_a_title():
    dashboard = json.loads((ROOT / "deploy/monitoring/dashboard.json").read_text())
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    cells = [
        (x, y)
        for panel in dashboard["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    assert all(panel["title"] for panel in dashboard["panels"])


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool (of Prometheus) is not here")
def test_prometheus_itself_accepts_alerts_expressions_and_metrics(deployment, results, tmp_path):
    def promtool(*arguments, **more):
        done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, **more)
        assert done.returncode == 0, done.stdout + done.stderr

    promtool("test", "rules", str(ROOT / "deploy/monitoring/alerts_test.yaml"))
    rules = [{"record": f"r:{i}", "expr": each} for i, each in enumerate(expressions())]
    (tmp_path / "rules.yaml").write_text(
        yaml.safe_dump({"groups": [{"name": "g", "rules": rules}]})
    )
    promtool("check", "rules", str(tmp_path / "rules.yaml"))
    promtool("check", "metrics", input=ask(deployment, results).get("/metrics").text)
