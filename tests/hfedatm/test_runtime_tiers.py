"""A tree of stations gives one model in every runtime: here without processes between the nodes."""

from collections.abc import Callable
from threading import Lock

import pytest
from flwr.app import Context, Message, RecordDict
from helpers import SMALL, assert_same_model, lines_of
from test_runtime import FakeLink

import hfedatm.runtime.local as local
from client_app.app import app as client_app
from hfedatm.base.errors import UserError
from hfedatm.base.tiers import levels, places
from hfedatm.base.wire import NodeIdentity
from hfedatm.runtime.find_stations import stations_of
from hfedatm.runtime.roster import Roster
from station_app.app import _Work

GIVEN = {k: v for k, v in SMALL.items() if k not in ("stations", "clients-per-station")}
TURN = Lock()
"""Nodes share torch's random state in this process."""


class Link(FakeLink):
    """A link whose nodes do real work; a node's id is 100 plus its place."""

    def __init__(self, ids: range, work: Callable[[int, Message], Message], tier: str) -> None:
        super().__init__([100 + place for place in ids], tier=tier)
        self._work, self._lock = work, Lock()

    def push_messages(self, messages):
        with self._lock:
            return super().push_messages(messages)

    def work(self, message, context):
        return self._work(message.metadata.dst_node_id - 100, message)


def client(place: int, message: Message) -> Message:
    context = Context(0, place, {}, RecordDict(), {})
    with TURN:
        return client_app(message, context)


class Placed(Roster):
    """A roster that knows the places of a deployment's nodes."""

    def present(self):
        tier = self._grid.tier
        return [NodeIdentity(node, tier, node - 100, 0) for node in self._grid.get_node_ids()]


def deployed(settings, level=0, index=0) -> Link:
    """Return the link of a node, with all that is below it, as a deployment connects them."""
    ids = places(settings, level, index)
    if level == levels(settings):
        return Link(ids, client, "client")
    workers = {station: _Work(deployed(settings, level + 1, station)) for station in ids}

    def work(place: int, message: Message) -> Message:
        return Message(workers[place](message.content), reply_to=message)

    return Link(ids, work, "station")


def run(folder, name, monkeypatch, make=None, **given):
    if make:
        monkeypatch.setattr(local, "local_stations", lambda settings, _=None: make(settings))
    values = GIVEN | {k.replace("_", "-"): v for k, v in given.items()}
    local.run_locally(values | {"output": str(folder), "run-name": name})
    return folder / name


@pytest.mark.parametrize("tree", ["2x2x1", "2x1x2x1"])
def test_every_runtime_gives_the_same_model(tmp_path, monkeypatch, tree):
    given = {"tiers": tree, "station_rounds": 2, "rounds": 2}
    here = run(tmp_path, "here", monkeypatch, **given)
    nodes = Link(range(3), client, "client")  # fewer than clients: they take turns
    simulated = run(
        tmp_path, "simulated", monkeypatch, lambda settings: stations_of(nodes, settings), **given
    )
    assert_same_model(here, simulated)
    monkeypatch.setattr("hfedatm.runtime.roster.Roster", Placed)
    monkeypatch.setattr("hfedatm.runtime.find_stations.Roster", Placed)
    there = run(
        tmp_path,
        "deployed",
        monkeypatch,
        lambda settings: stations_of(deployed(settings), settings),
        **given,
    )
    assert_same_model(here, there)
    assert not any(line["failures"] for line in lines_of(there))


def test_a_run_of_another_tree_than_the_deployment_is_refused_by_its_stations(
    tmp_path, monkeypatch
):
    from hfedatm.base.resolving import resolve

    monkeypatch.setattr("hfedatm.runtime.roster.Roster", Placed)
    monkeypatch.setattr("hfedatm.runtime.find_stations.Roster", Placed)
    other = deployed(resolve(GIVEN | {"tiers": "2x2x1"}))
    with pytest.raises(UserError, match="clients, and connected are stations"):
        run(
            tmp_path,
            "run",
            monkeypatch,
            lambda settings: stations_of(other, settings),
            stations=2,
            clients_per_station=2,
            rounds=1,
        )
