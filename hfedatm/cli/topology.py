"""``hfedatm topology``: draw the tiers of a run that has not started yet."""

from __future__ import annotations

import json
from typing import Any

import typer
from rich.console import Console
from rich.tree import Tree

from hfedatm.cli.arguments import AsJson, Assignments, ConfigFile
from hfedatm.cli.run import read_settings


def topology(
    assignments: Assignments = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Draw server, stations and clients, and how many examples of which domain each client holds.

    For example:

      hfedatm topology

      hfedatm topology stations=5 clients-per-station=4 lambda=0.1

      hfedatm topology preset=pacs-lenet5 data-dir=~/data --json
    """
    from hfedatm.base.building import load_data, target_domain
    from hfedatm.base.resolving import resolve

    settings = resolve(read_settings(config, assignments or []))
    data = load_data(settings)
    target = target_domain(settings, data)
    described = {
        "unseen": {"domain": target, "examples": len(data.domains[target])},
        "stations": tiers(settings),
    }
    if as_json:
        typer.echo(json.dumps(described, indent=2))
    else:
        Console().print(_draw(described, settings))


def tiers(settings: Any) -> list[dict[str, Any]]:
    """Return the stations and their clients with the examples of each domain."""
    from client_app.data import shares_of

    each = settings.clients_per_station
    clients = [
        {"client": number, "domains": {name: len(indices) for name, indices in share.items()}}
        for number, share in enumerate(shares_of(settings, settings.data_dir))
    ]
    return [
        {"station": station, "clients": clients[station * each : (station + 1) * each]}
        for station in range(settings.stations)
    ]


def _draw(described: dict[str, Any], settings: Any) -> Tree:
    unseen = described["unseen"]
    tree = Tree(
        f"[bold]server[/] ({settings.server_rule}; tests on [bold]{unseen['domain']}[/], "
        f"{unseen['examples']} examples nobody trains on)"
    )
    for station in described["stations"]:
        total = sum(sum(c["domains"].values()) for c in station["clients"])
        branch = tree.add(f"[bold cyan]station {station['station']}[/]  {total} examples")
        for client in station["clients"]:
            mix = ", ".join(f"{name}: {count}" for name, count in client["domains"].items())
            branch.add(f"client {client['client']}  [dim]{mix}[/]")
    return tree
