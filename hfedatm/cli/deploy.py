"""``hfedatm up``, ``down``, ``submit``: the three tiers as real Flower processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from hfedatm.cli.arguments import STATE, Assignments, ConfigFile, DeploymentFolder
from hfedatm.cli.runs import operator_of


def up(
    stations: Annotated[int, typer.Option(min=1, help="How many stations.")] = 2,
    clients: Annotated[int, typer.Option(min=1, help="How many clients each station has.")] = 2,
    tiers: Annotated[
        str, typer.Option(help="A deeper tree, children per level: 2x2x3; replaces both numbers.")
    ] = "",
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS, no node keys.")] = False,
    first_port: Annotated[int, typer.Option(help="First of the ports to use.")] = 9500,
    patience: Annotated[float, typer.Option(help="Seconds until all must be up.")] = 300.0,
    policy: Annotated[
        Path | None, typer.Option(help="What every node allows; default: built-ins only.")
    ] = None,
    json_logs: Annotated[
        bool, typer.Option("--json-logs", help="Log lines of JSON, with the run they are about.")
    ] = False,
    folder: DeploymentFolder = STATE,
) -> None:
    """Start server, stations and clients as processes on this machine.

    For example:

      hfedatm up --stations 2 --clients 3

      hfedatm submit rounds=3 && hfedatm down

      hfedatm up --policy policy.toml

      hfedatm up --tiers 2x2x3
    """
    from hfedatm.base import logs
    from hfedatm.deploy import local
    from hfedatm.deploy.tree import sizes_of

    if json_logs:
        os.environ[logs.VARIABLE] = "json"  # inherited by all that is started
    folder = folder.resolve()
    sizes = sizes_of(tiers, stations, clients)
    layout = local.plan(folder, *sizes, insecure=insecure, first_port=first_port)
    local.up(folder, layout, patience=patience, policy=policy)
    stations = len(layout.links) - 1
    number = len(layout.nodes) - stations
    typer.echo(f"up: 1 server, {stations} stations, {number} clients; logs in {folder}")


def down(
    patience: Annotated[
        float, typer.Option(help="Seconds in which processes may end by themselves.")
    ] = 10.0,
    folder: DeploymentFolder = STATE,
) -> None:
    """End exactly the processes that 'hfedatm up' started.

    For example:

      hfedatm down
    """
    from hfedatm.deploy.processes import Processes

    for name in Processes(folder.resolve()).down(patience):
        typer.echo(f"ended {name}")


def submit(
    assignments: Assignments = None,
    config: ConfigFile = None,
    patience: Annotated[
        float, typer.Option(help="Seconds for which the server's SuperLink may be away.")
    ] = 120.0,
    folder: DeploymentFolder = STATE,
) -> None:
    """Start a run on a deployment and show its log to the end.

    The deployment itself knows how many stations and clients it has.

    Exit code: 0 when the run completed, 1 when it ended in another way, 2 when it cannot start.

    For example:

      hfedatm submit rounds=3

      hfedatm submit --config my.yaml server-rule=avg
    """
    from hfedatm import submissions
    from hfedatm.cli.run import read_settings
    from hfedatm.deploy import flower, size

    given = read_settings(config, assignments or [])
    # The run works in the SuperLink's folder: a relative path would lead there.
    given["output"] = str(Path(given.get("output") or "results").expanduser().resolve())
    home = operator_of(folder)
    run_id = submissions.submit(home, size.sized(given, home))
    status, details = flower.follow(run_id, "server", home, patience)
    if status != "finished:completed":
        goes_on = submissions.how_to_resume(home, run_id)
        sys.exit(f"hfedatm: run {run_id} ended as {status}: {details}{goes_on}")
