"""All three tiers on this machine, for development: the same processes as in containers."""

from __future__ import annotations

import socket
import ssl
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

from hfedatm.deploy import certificates, flower, topology
from hfedatm.deploy.processes import Processes
from hfedatm.deploy.topology import Machine, Process

HOST = "127.0.0.1"


class DeploymentError(RuntimeError):
    """The deployment cannot be brought up."""


def up(
    folder: Path,
    stations: int,
    clients: int,
    *,
    insecure: bool = False,
    first_port: int = 9500,
    patience: float = 120.0,
) -> Processes:
    """Start a server, `stations` stations and `clients` clients each, and wait until all are ready.

    Everything is kept in `folder`: secrets, databases, spools, logs, and ``operator``, the Flower
    home in which every SuperLink is known by its machine's name.
    """
    folder = folder.resolve()
    processes = Processes(folder)
    if living := processes.living():
        raise DeploymentError(f"already up in {folder}: {', '.join(living)}; `hfedatm down` first")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    secrets = None if insecure else folder / "secrets"
    ports = count(first_port)
    names = ["server", *(f"station-{i}" for i in range(1, stations + 1))]
    machines = {name: _machine(folder, secrets, name) for name in names}
    ca_file = None if secrets is None else str(secrets / "ca.pem")
    operator = folder / "operator"

    links = {name: topology.link(machine, next(ports)) for name, machine in machines.items()}
    addresses = {name: f"{HOST}:{link.port}" for name, link in links.items()}
    gateways = {
        name: topology.gateway(machine, next(ports), addresses[name])
        for name, machine in machines.items()
    }
    entrances = {name: f"{HOST}:{gateway.port}" for name, gateway in gateways.items()}
    nodes: dict[str, list[Process]] = {name: [] for name in names}  # by the link they belong to
    keys: list[tuple[Path, str]] = []
    for number, name in enumerate(names[1:]):
        station = machines[name]
        config = {"spool": str(station.state / "spool"), "link": name, "partition-id": number}
        node = topology.node(station, next(ports), entrances["server"], config)
        topology.write_connections(node.home, {name: addresses[name]}, ca_file)
        nodes["server"].append(node)
        keys.append((station.secrets, "server"))
        for local in range(clients):
            client = _machine(folder, secrets, f"{name}-client-{local + 1}")
            config = {"partition-id": number * clients + local}
            config["num-partitions"] = stations * clients
            nodes[name].append(topology.node(client, next(ports), entrances[name], config))
            keys.append((client.secrets, name))
    return processes
