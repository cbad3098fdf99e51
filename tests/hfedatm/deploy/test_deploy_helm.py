"""The Helm chart of a server, a station and a client is what Kubernetes accepts."""

from pathlib import Path

import pytest
import yaml
from helm_chart import render

from hfedatm.base.trust.policy import Policy
from hfedatm.base.versions import own_version
from hfedatm.deploy import container

kubernetes_validate = pytest.importorskip("kubernetes_validate")

CHART = Path(__file__).resolve().parents[3] / "deploy/helm/hfedatm"
VERSION = "1.31"
ABOVE = "fl.example.org:9443"
ROLES = {
    "server": {},
    "station": {"role": "station", "name": "station-1", "above": ABOVE, "partition": 2},
    "client": {"role": "client", "name": "c", "above": "station-1-gateway:9443", "partition": 1},
    "site": {"role": "client", "name": "c", "above": ABOVE, "dataClaim": "scans"},
}


def objects(role, **more):
    return list(yaml.safe_load_all(render(CHART, **ROLES[role], **more)))


def pod(role, **more):
    (found,) = [o for o in objects(role, **more) if o["kind"] == "StatefulSet"]
    return found["spec"]["template"]["spec"]


def containers(role, **more):
    return {c["name"]: c for c in pod(role, **more)["containers"]}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("monitor", [True, False])
def test_every_object_has_its_schema(role, monitor):
    found = objects(role, monitor=monitor)
    for thing in found:
        kubernetes_validate.validate(thing, VERSION, strict=True)
    kinds = {"ConfigMap", "StatefulSet", "NetworkPolicy"}
    assert {o["kind"] for o in found} - {"Service"} == kinds
    assert any(o["kind"] == "Service" for o in found) == (role in ("server", "station"))


def test_each_role_has_its_processes():
    assert set(containers("server", monitor=False)) == {"link", "gateway"}
    assert set(containers("station")) == {"link", "gateway", "node", "monitor"}
    assert set(containers("client", monitor=False)) == {"node"}


@pytest.mark.parametrize("role", ROLES)
def test_the_image_understands_what_it_is_told(role):
    for name, each in containers(role, monitor=False).items():
        asked = container.arguments().parse_args(each["args"])
        assert asked.kind == name
        probe = each["readinessProbe"]["exec"]["command"]
        assert probe[:3] == ["python", "-m", "hfedatm.deploy.container"]
        checked = container.arguments().parse_args(probe[3:])
        assert (checked.kind, checked.name, checked.port) == ("healthy", name, asked.port)


def test_only_the_pod_itself_reaches_its_link():
    link = container.arguments().parse_args(containers("station")["link"]["args"])
    assert link.host == "127.0.0.1"
    ports = {
        container.arguments().parse_args(c["args"]).port
        for c in containers("station", monitor=False).values()
    }
    assert len(ports) == 3  # the containers of a pod share their ports


def test_a_station_and_a_site_are_configured_as_asked():
    node = container.arguments().parse_args(containers("station")["node"]["args"])
    assert (node.above, node.link, node.link_address) == (ABOVE, "station-1", "localhost:8000")
    assert node.config == ["partition-id=2"]
    site = containers("site")["node"]
    assert container.arguments().parse_args(site["args"]).config == ["data-dir=/data"]
    assert {"name": "data", "mountPath": "/data", "readOnly": True} in site["volumeMounts"]


@pytest.mark.parametrize("role", ROLES)
def test_what_is_mounted_is_there_and_nobody_is_root(role):
    found = pod(role)
    volumes = {v["name"] for v in found["volumes"]} | {"state"}
    assert found["securityContext"]["runAsNonRoot"]
    for each in found["containers"]:
        assert {m["name"] for m in each["volumeMounts"]} <= volumes
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_the_policy_can_be_read(tmp_path):
    (config,) = [o for o in objects("server") if o["kind"] == "ConfigMap"]
    (tmp_path / "policy.toml").write_text(config["data"]["policy.toml"])
    assert Policy.load(tmp_path / "policy.toml").limits.epochs == 1000


def test_the_chart_has_the_version_of_the_package():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == own_version()


def test_what_the_renderer_does_not_know_is_an_error(tmp_path):
    (tmp_path / "templates").mkdir()
    (tmp_path / "values.yaml").write_text("a: 1\n")
    (tmp_path / "templates/x.yaml").write_text("{{ include .Values.a }}")
    with pytest.raises(AssertionError, match="does not know"):
        render(tmp_path)
