"""``hfedatm assign``: suggest stations for clients, from their numbers of examples by class."""

from __future__ import annotations

import csv
import json
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hfedatm.base.errors import UserError
from hfedatm.cli.arguments import STATE, AsJson, DeploymentFolder
from hfedatm.cli.deploy import submit

MOST_LINES = 100_000
MOST_COUNT = 1e12


def assign(
    given: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="COUNTS.CSV | KEY=VALUE...",
            help="CSV file: a line per client with its name and its examples of each class; with "
            "--ask, settings of the question, such as the data set.",
        ),
    ] = None,
    ask: Annotated[
        bool, typer.Option("--ask", help="Ask the clients of a deployment for their counts.")
    ] = False,
    stations: Annotated[
        int, typer.Option(min=0, help="Number of stations; --ask knows it from the deployment.")
    ] = 0,
    capacity: Annotated[
        str, typer.Option(help="Most clients of each station: one number, or one per station.")
    ] = "",
    as_json: AsJson = False,
    folder: DeploymentFolder = STATE,
) -> None:
    """Suggest a station for every client, so that each station has all classes alike (EARA).

    Nodes with data of their own belong to the station they connect to, and no run moves them: plan
    the deployment by their class counts. With --ask a run asks the clients of a deployment, whose
    owners must allow it (privacy.class-counts); it trains nothing, prints the suggestion, and
    writes class-counts.csv into its results folder. Otherwise give such a file; its first line
    names the columns.

    For example:

      hfedatm assign --ask dataset=mylab.data:load

      hfedatm assign counts.csv --stations 3 --capacity 5
    """
    if ask:
        if stations or capacity or as_json:
            raise UserError(
                "--stations, --capacity and --json are for a file: pass the class-counts.csv that "
                "--ask writes"
            )
        submit([*(given or []), "station-assignment=suggest"], folder=folder)
        return
    if len(given or []) != 1 or not stations:
        raise UserError("give one file of class counts and --stations, or --ask a deployment")
    _assign_by(Path((given or [])[0]), stations, capacity, as_json)


def _assign_by(path: Path, stations: int, capacity: str, as_json: bool) -> None:
    import numpy as np

    from hfedatm_core.data import eara

    names, classes, table = read_counts(path)
    limits = _capacities(capacity, stations, len(names))
    try:
        chosen = eara.assign(table, limits)
    except ValueError as error:
        raise UserError(f"--capacity: {error}") from None
    found: list[dict[str, Any]] = [
        {
            "station": station,
            "clients": [name for name, at in zip(names, chosen, strict=True) if at == station],
            "divergence": float(eara.divergence(np.asarray(table)[chosen == station].sum(0))),
        }
        for station in range(stations)
    ]
    if as_json:
        typer.echo(json.dumps({"classes": classes, "stations": found}, indent=2))
        return
    shown = Table("station", "clients", "KL to even classes")
    for one in found:
        shown.add_row(str(one["station"]), ", ".join(one["clients"]), f"{one['divergence']:.4f}")
    Console().print(shown)


def read_counts(path: Path) -> tuple[list[str], list[str], list[list[float]]]:
    """Return the names of clients and classes, and the counts by client."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = [line for line in islice(csv.reader(file), MOST_LINES + 1) if line]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if len(lines) < 2 or len(lines) > MOST_LINES or len(lines[0]) < 3:
        raise UserError(
            f"{path}: write 'client' and two or more classes in the first line, and then a line "
            f"per client, {MOST_LINES} at most"
        )
    names = [line[0].strip() for line in lines[1:]]
    if len(set(names)) != len(names):
        raise UserError(f"{path}: a client is named twice")
    return names, lines[0][1:], [_row(path, line, len(lines[0])) for line in lines[1:]]


def _row(path: Path, line: list[str], width: int) -> list[float]:
    try:
        values = [float(value) for value in line[1:]]
    except ValueError:
        values = []
    if len(line) != width or not all(0 <= v <= MOST_COUNT and v == int(v) for v in values):
        raise UserError(f"{path}: client {line[0]!r} needs {width - 1} whole numbers ≥ 0")
    return values


def _capacities(text: str, stations: int, clients: int) -> list[int]:
    try:
        given = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        given = [-1]
    if not given:
        return [-(-clients // stations)] * stations
    given = given * stations if len(given) == 1 else given
    if len(given) != stations or min(given) < 0:
        raise UserError(f"--capacity: got {text!r}; write one number, or {stations} with commas")
    return given
