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

      hfedatm topology tiers=2x2x3

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
    """Return the stations and their children, down to the clients with the examples they hold.

    ``divergence`` is the Kullback-Leibler divergence of a station's classes from even ones, for a
    station with clients.
    """
    import torch

    from client_app.data import class_counts, shares_of
    from hfedatm.base.building import load_data
    from hfedatm.base.learning import find_task
    from hfedatm.base.tiers import has_lowest, places
    from hfedatm_core.data.eara import divergence

    each, shares = settings.clients_per_station, shares_of(settings, settings.data_dir)
    clients = [
        {"client": number, "domains": {name: len(indices) for name, indices in share.items()}}
        for number, share in enumerate(shares)
    ]
    lowest: list[dict[str, Any]] = [
        {"station": station, "clients": clients[station * each : (station + 1) * each]}
        for station in range(settings.stations)
    ]
    if find_task(settings.task).has_classes:
        data = load_data(settings, settings.data_dir)
        counts = torch.stack([class_counts(settings, data, share) for share in shares])
        by_station = counts.reshape(settings.stations, each, -1).sum(1)
        for one, value in zip(lowest, divergence(by_station.numpy()), strict=True):
            one["divergence"] = float(value)

    def below(level: int, index: int) -> list[dict[str, Any]]:
        own = places(settings, level, index)
        if has_lowest(settings, level):
            return lowest[own.start : own.stop]
        return [{"station": one, "stations": below(level + 1, one)} for one in own]

    return below(0, 0)


def _unevenness(station: dict[str, Any]) -> str:
    """Return how far a station's classes are from even, if there are classes."""
    found = station.get("divergence")
    return "" if found is None else f", KL to even classes {found:.3f}"


def _draw(described: dict[str, Any], settings: Any) -> Tree:
    unseen = described["unseen"]
    tree = Tree(
        f"[bold]server[/] ({settings.server_rule}; tests on [bold]{unseen['domain']}[/], "
        f"{unseen['examples']} examples nobody trains on)"
    )
    _draw_stations(tree, described["stations"])
    return tree


def _draw_stations(tree: Tree, stations: list[dict[str, Any]]) -> None:
    for station in stations:
        name = f"[bold cyan]station {station['station']}[/]"
        branch = tree.add(f"{name}  {_examples(station)} examples{_unevenness(station)}")
        _draw_stations(branch, station.get("stations", []))
        for client in station.get("clients", []):
            mix = ", ".join(f"{name}: {count}" for name, count in client["domains"].items())
            branch.add(f"client {client['client']}  [dim]{mix}[/]")


def _examples(station: dict[str, Any]) -> int:
    below = sum(_examples(child) for child in station.get("stations", []))
    return below + sum(sum(c["domains"].values()) for c in station.get("clients", []))
