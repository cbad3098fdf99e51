"""`hfedatm topology`: who holds what."""

import json

from helpers import SMALL, small_settings, tiny_data

from client_app.data import client_data


def arguments(**changes):
    return [f"{key}={value}" for key, value in {**SMALL, **changes}.items()]


def test_every_source_example_is_somewhere_once(hfedatm):
    done = hfedatm("topology", *arguments(**{"lambda": 0.3}), "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    data = tiny_data()
    assert found["unseen"] == {"domain": "c", "examples": len(data.domains["c"])}
    totals: dict[str, int] = {}
    for station in found["stations"]:
        for client in station["clients"]:
            for domain, count in client["domains"].items():
                totals[domain] = totals.get(domain, 0) + count
    assert totals == {"a": len(data.domains["a"]), "b": len(data.domains["b"])}


def test_clients_hold_what_they_will_train_on(hfedatm):
    found = json.loads(hfedatm("topology", *arguments(), "--json").stdout)
    clients = [client for station in found["stations"] for client in station["clients"]]
    settings = small_settings()
    for client in clients:
        data = client_data(settings, client["client"], {})
        held = len(data.train) + sum(map(len, data.validation))
        assert held == sum(client["domains"].values())


def test_the_drawing_names_all_nodes(hfedatm):
    shown = hfedatm("topology", *arguments()).stdout
    for node in ("server", "station 0", "station 1", "client 0", "client 3"):
        assert node in shown


TREE = [a for a in arguments() if not a.startswith(("stations=", "clients-per-station="))]


def test_a_deeper_tree_is_drawn_level_by_level(hfedatm):
    shown = hfedatm("topology", *TREE, "tiers=2x1x2").stdout.splitlines()
    stations = [line.index("station 1") for line in shown if "station 1" in line]
    [client] = [line.index("client 3") for line in shown if "client 3" in line]
    assert len(stations) == 2 and stations[0] < stations[1] < client


def test_a_deeper_tree_has_the_clients_of_the_flat_one(hfedatm):
    found = json.loads(hfedatm("topology", *TREE, "tiers=2x1x2", "--json").stdout)
    flat = json.loads(hfedatm("topology", *arguments(), "--json").stdout)
    lowest = [station for region in found["stations"] for station in region["stations"]]
    assert lowest == flat["stations"]
