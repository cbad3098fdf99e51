"""How many stations and clients a deployment has is said once, when it is brought up."""

import pytest
import yaml

from hfedatm.base.errors import UserError
from hfedatm.deploy import compose, local, size


@pytest.fixture
def operator(tmp_path):
    size.note(tmp_path, 1, 2)
    return tmp_path


def test_a_run_gets_the_size_of_the_deployment(operator):
    found = size.sized({"rounds": "3"}, operator)
    assert found == {"rounds": "3", "stations": 1, "clients-per-station": 2}
    assert size.sized({"stations": "1", "clients-per-station": 2}, operator)["stations"] == 1


@pytest.mark.parametrize("given", [{"stations": "4"}, {"clients-per-station": 3}])
def test_another_size_is_refused(operator, given):
    with pytest.raises(UserError, match="the deployment that is up has 1 stations of 2 clients"):
        size.sized(given, operator)


def test_a_resumed_run_keeps_its_own(operator):
    assert size.sized({"resume": "results/x"}, operator) == {"resume": "results/x"}


def test_a_container_is_told_by_a_file_and_a_new_station_restarts_nothing(tmp_path, monkeypatch):
    """Compose starts a container anew if anything about it changes."""
    services = []
    for stations in (2, 3):
        made = compose.Deployment(stations, 5)
        compose.write_secrets(tmp_path / "secrets", made)
        compose.write_compose(tmp_path, made)
        text = (tmp_path / "docker-compose.yml").read_text()
        services.append(yaml.safe_load(text)["services"])
    monkeypatch.setattr(size, "MOUNTED", tmp_path / "secrets" / "server")
    assert size.sized({}, tmp_path) == {"stations": 3, "clients-per-station": 5}
    before, after = services
    assert {name: after[name] for name in before} == before
    assert len(after) - len(before) == 8  # link, gateway, node and five clients


def test_where_nobody_says_it_the_run_must(tmp_path):
    with pytest.raises(UserError, match="give stations and clients-per-station"):
        size.sized({"rounds": 3}, tmp_path)
    given = {"stations": 2, "clients-per-station": 2}
    assert size.sized(given, tmp_path) == given


def test_up_notes_the_size(tmp_path, monkeypatch):
    """Nothing is started: what would wait for the first process notes what is there by then."""
    layout = local.plan(tmp_path, 2, 3, insecure=True)

    class Started(Exception):
        pass

    def stop(*_):
        raise Started

    monkeypatch.setattr("hfedatm.deploy.local._check_ports", lambda _: None)
    monkeypatch.setattr("hfedatm.deploy.processes.Processes.start", stop)
    with pytest.raises(Started):
        local.up(tmp_path, layout)
    assert size.sized({}, tmp_path / "operator") == {"stations": 2, "clients-per-station": 3}


def test_a_run_gets_the_tree_of_the_deployment(tmp_path):
    size.note(tmp_path, 2, 2, 3)
    found = {"stations": 4, "clients-per-station": 3, "tiers": "2x2x3"}
    assert size.sized({}, tmp_path) == found
    assert size.sized({"tiers": "2x2x3"}, tmp_path) == found
    for given in ({"tiers": "2x3x2"}, {"stations": 2}):
        with pytest.raises(UserError, match="the deployment that is up has tiers=2x2x3"):
            size.sized(given, tmp_path)


def test_a_tree_is_refused_by_a_deployment_of_two_tiers(operator):
    with pytest.raises(UserError, match="tiers: got 1x1x2.* has 1 stations of 2 clients"):
        size.sized({"tiers": "1x1x2"}, operator)
