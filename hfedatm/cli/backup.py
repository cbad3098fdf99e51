"""``hfedatm backup`` and ``hfedatm restore``: one machine of a deployment in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hfedatm.base.errors import UserError
from hfedatm.cli.arguments import STATE, DeploymentFolder

File = Annotated[Path, typer.Argument(help="The archive, such as server.tar.gz.")]
Name = Annotated[
    str,
    typer.Argument(metavar="[MACHINE]", help="A machine that 'up' started: server, station-1, …"),
]
Secrets = Annotated[Path | None, typer.Option(help="Its secrets, if 'up' did not start it.")]
Policy = Annotated[Path | None, typer.Option(help="Its policy, if 'up' did not start it.")]
Results = Annotated[Path | None, typer.Option(help="Folder of runs' folders, at the server.")]


def backup(
    file: File,
    machine: Name = "",
    folder: DeploymentFolder = STATE,
    secrets: Secrets = None,
    policy: Policy = None,
    results: Results = None,
) -> None:
    """Copy a machine into one file: databases, spool, memory, accounts, policy and secrets.

    The machine may go on working. Keep the file as you keep its secrets.

    For example:

      hfedatm backup station-1.tar.gz station-1

      hfedatm backup server.tar.gz server --results results

      hfedatm backup /backups/b.tar.gz --folder /state --secrets /secrets --policy /policy.toml
    """
    from hfedatm import backup as copying

    parts = _parts(folder, machine, secrets, policy, results)
    number = copying.backup(file, parts)
    typer.echo(f"{number} files of {machine or folder} are in {file}")


def restore(
    file: File,
    machine: Name = "",
    folder: DeploymentFolder = STATE,
    secrets: Secrets = None,
    policy: Policy = None,
    results: Results = None,
    accounts_are_current: Annotated[
        bool,
        typer.Option("--accounts-are-current", help="No run has spent privacy since the backup."),
    ] = False,
) -> None:
    """Write a machine's files from a backup to their places; nothing is overwritten.

    For example:

      hfedatm restore station-1.tar.gz station-1
    """
    from hfedatm import backup as copying
    from hfedatm.deploy.processes import Processes

    alive = [n for n in Processes(folder.resolve()).living() if n.startswith(f"{machine}-")]
    if machine and alive:
        raise UserError(f"{', '.join(alive)}: still alive; end what is to be restored first")
    parts = _parts(folder, machine, secrets, policy, results)
    number = copying.restore(file, parts, accounts_are_current=accounts_are_current)
    typer.echo(f"restored {number} files of {machine or folder}")


def _parts(
    folder: Path, machine: str, secrets: Path | None, policy: Path | None, results: Path | None
) -> dict[str, Path]:
    folder = folder.resolve()
    parts = {"state": folder / machine}
    if machine and not secrets:
        secrets = folder / "secrets" / machine
    if machine == "server":
        parts["operator"] = folder / "operator"
    given = {"secrets": secrets, "policy": policy, "results": results}
    return parts | {name: path.resolve() for name, path in given.items() if path}
