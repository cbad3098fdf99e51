"""What `hfedatm scaffold` writes."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hfedatm.base.errors import UserError
from hfedatm.base.trust.policy import Policy
from hfedatm.deploy import certificates
from hfedatm.deploy.compose import FILES, Deployment, write_compose, write_policies, write_secrets

ROOT = Path(__file__).resolve().parents[3]


def services(folder):
    return yaml.safe_load((folder / "docker-compose.yml").read_text())["services"]


def test_the_repository_has_what_scaffold_writes(tmp_path):
    write_compose(tmp_path, Deployment(2, 2))
    for name in FILES:
        assert (tmp_path / name).read_text() == (ROOT / name).read_text(), f"run scaffold: {name}"


@pytest.mark.parametrize("layout", [Deployment(1, 1), Deployment(2, 2), Deployment(3, 5)])
def test_networks_keep_the_tiers_apart(tmp_path, layout):
    write_compose(tmp_path, layout)
    found = services(tmp_path)
    assert list(found) == layout.services
    assert len(found) == 2 + layout.stations * (3 + layout.clients)
    for link, nodes in layout.links.items():
        assert found[link]["networks"] == [f"control-{link}"]
        members = {name for name, s in found.items() if f"control-{link}" in s["networks"]}
        own = {f"{link}-node"} if link != "server" else set()
        assert members == {link, f"{link}-gateway"} | own
        if link != "server":
            for client in nodes:
                assert found[client]["networks"] == [f"fleet-{link}"]
    networks = yaml.safe_load((tmp_path / "docker-compose.yml").read_text())["networks"]
    assert all(network == {"internal": True} for network in networks.values())


def test_every_container_is_confined(tmp_path):
    write_compose(tmp_path, Deployment(2, 1))
    for name, service in services(tmp_path).items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["init"] and service["read_only"] and service["restart"]
        assert service["user"].startswith("${HFEDATM_UID:-1000}")
        assert service["healthcheck"] and "privileged" not in service
        assert all(":/secrets:ro" in v for v in service["volumes"] if "secrets" in v)


def test_partitions_are_numbered_station_by_station(tmp_path):
    write_compose(tmp_path, Deployment(2, 3))
    commands = {n: s["command"] for n, s in services(tmp_path).items() if "-client-" in n}
    assert [command[-1] for command in commands.values()] == [f"partition-id={i}" for i in range(6)]


def test_plain_text_is_only_in_the_override(tmp_path):
    write_compose(tmp_path, Deployment(2, 2))
    assert "INSECURE" not in (tmp_path / "docker-compose.yml").read_text()
    override = yaml.safe_load((tmp_path / "docker-compose.insecure.yml").read_text())
    assert list(override["services"]) == Deployment(2, 2).services


def test_gpus_are_reserved_for_every_client_and_nobody_else(tmp_path):
    layout = Deployment(2, 3)
    write_compose(tmp_path, layout)
    override = yaml.safe_load((tmp_path / "docker-compose.gpu.yml").read_text())["services"]
    reserving = {name for name, service in override.items() if "deploy" in service}
    assert reserving == {name for name in layout.services if "-client-" in name}
    (gpu,) = override["station-2-client-3"]["deploy"]["resources"]["reservations"]["devices"]
    assert gpu["capabilities"] == ["gpu"]
    assert "download.pytorch.org/whl/cpu" not in override["server"]["build"]["args"]["TORCH_INDEX"]


def test_one_machines_part(tmp_path):
    layout = Deployment(2, 1, host="fl.example.org", port=443, only="station-2")
    write_compose(tmp_path, layout)
    found = services(tmp_path)
    assert list(found) == [
        "station-2",
        "station-2-gateway",
        "station-2-node",
        "station-2-client-1",
    ]
    assert "fl.example.org:443" in found["station-2-node"]["command"]
    assert "build" in found["station-2"]
    assert "server-gateway" not in found["station-2-node"]["depends_on"]
    with pytest.raises(UserError, match="only: got 'station-9'"):
        write_compose(tmp_path, Deployment(2, 1, only="station-9"))


def test_every_machine_has_the_policy_of_its_owner_and_no_other(tmp_path):
    layout = Deployment(2, 1)
    write_compose(tmp_path, layout)
    write_policies(tmp_path / "policies", layout)
    for name, service in services(tmp_path).items():
        mounted = [v for v in service["volumes"] if "policy" in v]
        if name.endswith("-gateway"):
            assert mounted == []
            continue
        machine = name.removesuffix("-node")
        assert mounted == [f"./policies/{machine}.toml:/policy.toml:ro"]
        assert Policy.load(tmp_path / f"policies/{machine}.toml").code.allowed == ()


def test_a_policy_that_is_there_stays(tmp_path):
    layout = Deployment(1, 1, only="station-1")
    files = write_policies(tmp_path, layout)
    assert [f.name for f in files] == ["station-1.toml", "station-1-client-1.toml"]
    files[1].write_text("[limits]\nepochs = 1\n")
    assert write_policies(tmp_path, layout) == []
    assert Policy.load(files[1]).limits.epochs == 1


def test_secrets_stay_when_a_station_is_added(tmp_path):
    write_secrets(tmp_path, Deployment(1, 1))
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert before.pop(tmp_path / "server/size.json")  # no secret: it says how many there are
    write_secrets(tmp_path, Deployment(2, 2))
    assert all(path.read_bytes() == content for path, content in before.items())
    assert {p.stem for p in (tmp_path / "server/nodes").iterdir()} == {"station-1", "station-2"}
    assert not (tmp_path / "server/node").exists()
    assert not (tmp_path / "station-1-client-1/link.key").exists()


def test_a_station_that_is_taken_out_is_not_enrolled_at_a_new_link(tmp_path):
    write_secrets(tmp_path, Deployment(2, 1))
    write_secrets(tmp_path, Deployment(1, 1))
    assert {p.stem for p in (tmp_path / "server/nodes").iterdir()} == {"station-1"}


def test_another_host_name_gets_into_the_certificate(tmp_path):
    write_secrets(tmp_path, Deployment(1, 1))
    write_secrets(tmp_path, Deployment(1, 1, host="fl.example.org"))
    assert "fl.example.org" in certificates.hosts_of(tmp_path / "server/link.pem")
    assert "fl.example.org" not in certificates.hosts_of(tmp_path / "station-1/link.pem")


DEEP = Deployment(2, 2, tiers=(2, 2, 2))


def test_a_station_of_stations_is_a_node_of_its_parent_and_has_a_link(tmp_path):
    write_compose(tmp_path, DEEP)
    found = services(tmp_path)
    assert list(found) == DEEP.services
    assert len(found) == 2 + 6 * 3 + 8
    node = found["station-2-1-node"]
    assert node["command"][3] == "station-2-gateway:8000"
    assert node["command"][-1] == "partition-id=2"
    assert node["networks"] == ["control-station-2-1", "fleet-station-2"]
    assert found["station-2-node"]["networks"] == ["control-station-2", "fleet-server"]
    clients = {n: s["command"][-1] for n, s in found.items() if "-client-" in n}
    assert list(clients.values()) == [f"partition-id={i}" for i in range(8)]
    assert found["station-2-1-client-2"]["networks"] == ["fleet-station-2-1"]


def test_every_link_of_a_tree_has_secrets_and_its_nodes_verify_it(tmp_path):
    write_secrets(tmp_path, DEEP)
    assert {p.stem for p in (tmp_path / "station-2/nodes").glob("*.pub")} == {
        "station-2-1",
        "station-2-2",
    }
    for link in DEEP.links:
        assert (tmp_path / link / "tasks.key").exists() and (tmp_path / link / "link.pem").exists()
    keys = [(tmp_path / name / "tasks.pub").read_bytes() for name in ("station-2", "station-2-1")]
    assert keys[0] != keys[1]


def test_one_machine_has_a_region_with_all_below(tmp_path):
    part = Deployment(2, 2, "fl.example.org", 443, "station-1", (2, 2, 2))
    write_compose(tmp_path, part)
    assert [n for n in services(tmp_path) if n.endswith("-node")] == [
        "station-1-node",
        "station-1-1-node",
        "station-1-2-node",
    ]
    assert services(tmp_path)["station-1-node"]["command"][3] == "fl.example.org:443"
    with pytest.raises(UserError, match="runs on its machine"):
        write_compose(tmp_path, Deployment(2, 2, "x", 443, "station-1-1", (2, 2, 2)))


def test_a_health_check_imports_little():
    """Every container runs one each 30 seconds, and each 5 seconds while it starts."""
    script = "import sys, hfedatm.deploy.container; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout
    assert "hfedatm.deploy.machines" in loaded.split()
    assert not {"flwr", "torch", "pydantic", "numpy"} & set(loaded.split())
