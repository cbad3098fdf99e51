"""Suggest a station for every client from the class counts that clients send: EARA, deployed.

A deployed client belongs to the station that it is connected to, and no run moves it. So a run with
``station-assignment=suggest`` trains nothing: it asks for class counts and says who should connect
where.
"""

from __future__ import annotations

import logging
from typing import Any

from flwr.serverapp import Grid
from torch import Tensor

from hfedatm.base.building import load_data
from hfedatm.base.counting import ask_below
from hfedatm.base.errors import UserError
from hfedatm.base.records import Task
from hfedatm.base.results import RunFolder
from hfedatm.base.round_record import Failure
from hfedatm_core.data import eara
from hfedatm_files import write_text
from server_app.scores import summarise

log = logging.getLogger("hfedatm")
FILE = "class-counts.csv"


def suggest(folder: RunFolder, stations: Grid) -> dict[str, Any]:
    """Ask, suggest and write; return the summary."""
    settings = folder.settings
    classes = load_data(settings).spec.num_classes
    log.info("HFedATM: asks the clients for their numbers of examples by class; trains nothing")
    task = Task("count", settings, 1, run=folder.id)
    table, failures = ask_below(stations, task, 0, 0, classes)
    for failure in failures:
        log.info("  %s: %s", failure.node, failure.reason)
    clients = table.sum(1).nonzero().flatten().tolist()
    if not clients:
        raise UserError(f"no client has told its class counts{_first(failures)}")
    counts = table[clients].numpy()
    write_text(folder.path / FILE, _csv(clients, table[clients]))
    each = settings.clients_per_station
    now = [client // each for client in clients]
    chosen = eara.assign(counts, [each] * settings.stations, [now]).tolist()
    found: dict[str, Any] = {"stations": [], "now": [], "unknown": len(failures)}
    for name, at in (("now", now), ("stations", chosen)):
        for station in range(settings.stations):
            own = [i for i, place in enumerate(at) if place == station]
            kl = float(eara.divergence(counts[own].sum(0)))
            found[name].append({"clients": [clients[i] for i in own], "divergence": kl})
    for station, (old, new) in enumerate(zip(found["now"], found["stations"], strict=True)):
        log.info(
            "  station %d: clients %s, KL to even classes %.4f (now %s, %.4f)",
            station,
            _listed(new["clients"]),
            new["divergence"],
            _listed(old["clients"]),
            old["divergence"],
        )
    log.info("Class counts: %s", folder.path / FILE)
    summary = {**summarise([]), "suggestion": found}
    folder.finish(summary)
    return summary


def _csv(clients: list[int], counts: Tensor) -> str:
    head = ",".join(f"class {number}" for number in range(counts.shape[1]))
    rows = [
        f"client {client},{','.join(map(str, row))}"
        for client, row in zip(clients, counts.tolist(), strict=True)
    ]
    return "\n".join([f"client,{head}", *rows, ""])


def _listed(clients: list[int]) -> str:
    return " ".join(map(str, clients)) or "none"


def _first(failures: list[Failure]) -> str:
    return "".join(f"; {f.node}: {f.reason}" for f in failures[:1])
