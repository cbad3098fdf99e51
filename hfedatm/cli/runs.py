"""``hfedatm runs`` and ``hfedatm stop``: the runs of a deployment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hfedatm.base.errors import UserError
from hfedatm.cli.arguments import STATE, AsJson, DeploymentFolder


def operator_of(folder: Path) -> Path:
    """Return the operator's folder of a deployment."""
    home = folder.resolve() / "operator"
    if not (home / "config.toml").exists():
        raise UserError(f"{folder} holds no deployment: start one with `hfedatm up`")
    return home


def runs(folder: DeploymentFolder = STATE, as_json: AsJson = False) -> None:
    """List the runs of a deployment: state, rounds done, since when, and where the results are.

    For example:

      hfedatm runs

      hfedatm runs --json
    """
    from hfedatm.submissions import submissions

    known = submissions(operator_of(folder))
    if as_json:
        typer.echo(json.dumps([each.plain() for each in known], indent=2))
        return
    table = Table("run", "state", "since", "rounds", "name", "results")
    for each in known:
        table.add_row(each.id, each.state, each.since, each.rounds, each.name, each.results)
    Console().print(table if known else "no run has been submitted: start one by `hfedatm submit`")


def stop(
    run: Annotated[str, typer.Argument(help="Id or name of the run, as 'hfedatm runs' shows it.")],
    after_round: Annotated[
        bool, typer.Option("--after-round", help="Wait until the current round is finished.")
    ] = False,
    folder: DeploymentFolder = STATE,
) -> None:
    """End a run of a deployment; its finished rounds stay, and it can be resumed.

    For example:

      hfedatm stop 1234567890

      hfedatm stop my-run --after-round
    """
    from hfedatm.submissions import stop as stop_run

    stopped = stop_run(operator_of(folder), run, after_round=after_round)
    typer.echo(f"stopped run {stopped.id}, {stopped.rounds or 'before its first round'}")
    if stopped.results:
        typer.echo(f"continue with: hfedatm submit resume={stopped.results}")
