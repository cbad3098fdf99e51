"""``hfedatm up``, ``down``, ``submit``: the three tiers as real Flower processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hfedatm.base.errors import UserError
from hfedatm.cli.arguments import Assignments, ConfigFile

Folder = Annotated[Path, typer.Option(help="Where the deployment keeps its state.")]
STATE = Path(".hfedatm")


def up(
    stations: Annotated[int, typer.Option(min=1, help="How many stations.")] = 2,
    clients: Annotated[int, typer.Option(min=1, help="How many clients each station has.")] = 2,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS, no node keys.")] = False,
    first_port: Annotated[int, typer.Option(help="First of the ports to use.")] = 9500,
    patience: Annotated[float, typer.Option(help="Seconds until all must be up.")] = 300.0,
    policy: Annotated[
        Path | None, typer.Option(help="What every node allows; default: built-ins only.")
    ] = None,
    folder: Folder = STATE,
) -> None:
    """Start server, stations and clients as processes on this machine.

    For example:

      hfedatm up --stations 2 --clients 3

      hfedatm submit rounds=3 && hfedatm down

      hfedatm up --policy policy.toml
    """
    from hfedatm.deploy import local

    folder = folder.resolve()
    layout = local.plan(folder, stations, clients, insecure=insecure, first_port=first_port)
    local.up(folder, layout, patience=patience, policy=policy)
    typer.echo(f"up: 1 server, {stations} stations, {stations * clients} clients; logs in {folder}")


def down(folder: Folder = STATE) -> None:
    """End exactly the processes that 'hfedatm up' started.

    For example:

      hfedatm down
    """
    from hfedatm.deploy.processes import Processes

    for name in Processes(folder.resolve()).down():
        typer.echo(f"ended {name}")


def submit(
    assignments: Assignments = None,
    config: ConfigFile = None,
    folder: Folder = STATE,
) -> None:
    """Start a run on a deployment and show its log to the end.

    The deployment itself knows how many stations and clients it has.

    Exit code: 0 when the run completed, 1 when it ended in another way, 2 when it cannot start.

    For example:

      hfedatm submit rounds=3

      hfedatm submit --config my.yaml server-rule=avg
    """
    from hfedatm.cli.run import read_settings
    from hfedatm.deploy import flower, size

    given = read_settings(config, assignments or [])
    # The run works in the SuperLink's folder: a relative path would lead there.
    given["output"] = str(Path(given.get("output") or "results").expanduser().resolve())
    home = folder.resolve() / "operator"
    if not (home / "config.toml").exists():
        raise UserError(f"{folder} holds no deployment: start one with `hfedatm up`")
    given = size.sized(given, home)
    app = flower.write_app(home / "app", "server", given)
    run_id = flower.start_run(app, "server", home)
    status, details = flower.follow(run_id, "server", home)
    if status != "finished:completed":
        sys.exit(f"hfedatm: run {run_id} ended as {status}: {details}")
