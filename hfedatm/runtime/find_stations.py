"""Turn a Flower Grid into a Grid whose nodes are stations, in a simulation or a deployment."""

from __future__ import annotations

import logging

from flwr.serverapp import Grid

from client_app.data import shares_of
from hfedatm.base.errors import UserError
from hfedatm.base.settings import Settings
from hfedatm.base.tiers import children
from hfedatm.base.wire import NodeIdentity
from hfedatm.runtime.mapped import MappedGrid
from hfedatm.runtime.roster import LiveGrid, Roster
from hfedatm.runtime.stations import LocalStationsGrid, station_tree
from station_app.station import run_station

log = logging.getLogger("hfedatm")


def stations_of(grid: Grid, settings: Settings) -> Grid:
    """Return the Grid of stations behind ``grid``.

    Each node says whether it is a station or a client. Clients are the nodes of a simulation: they
    are divided among stations that run in this process.
    """
    roster = Roster(grid)
    expected = children(settings, 0)
    nodes = roster.wait_for(expected, settings.join_timeout)
    if nodes[0].tier == "station":
        log.info("deployment: %d of %d stations connected", len(nodes), expected)
        return LiveGrid(grid, roster, awaits_return=True)
    return _divide(grid, nodes, settings)


def _divide(grid: Grid, nodes: list[NodeIdentity], settings: Settings) -> LocalStationsGrid:
    clients = settings.num_clients
    if any(node.tier != "client" for node in nodes):
        raise UserError(
            "some nodes are stations and some are clients: connect only stations to the server"
        )
    shares_of(settings)  # refuse an impossible division before any client does
    if len(nodes) >= clients:
        log.info("simulation: %d clients on a node each", clients)
    else:
        log.info("simulation: %d clients take turns on %d nodes", clients, len(nodes))
    node_of = {client: nodes[client % len(nodes)].node_id for client in range(clients)}
    return station_tree(
        run_station, settings, lambda ids: MappedGrid(grid, {c: node_of[c] for c in ids})
    )
