"""``hfedatm renew``, ``revoke`` and ``replace``: certificates and keys of a running deployment."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from hfedatm.base.errors import UserError
from hfedatm.cli.arguments import STATE, DeploymentFolder

Secrets = Annotated[
    Path | None,
    typer.Option(help="The operator's secrets; default: those of the deployment, else ./secrets."),
]
Node = Annotated[str, typer.Argument(help="Name of a node, such as station-1-client-2.")]


def renew(
    days: Annotated[int, typer.Option(min=0, help="Renew what ends within so many days.")] = 60,
    folder: DeploymentFolder = STATE,
    secrets: Secrets = None,
) -> None:
    """Renew certificates that end soon; running processes take them without a restart.

    For example:

      hfedatm renew

      hfedatm renew --secrets secrets --days 900
    """
    from hfedatm.deploy import renewal

    there = _secrets(folder, secrets)
    changed = list(renewal.renew(there, timedelta(days=days)))
    for path in changed:
        typer.echo(f"renewed {path}")
    machines = sorted({path.parent.name for path in changed if path.parent != there})
    if machines:
        typer.echo(f"bring their folders to the machines that are elsewhere: {', '.join(machines)}")
    else:
        typer.echo(f"nothing ends within {days} days")


def revoke(node: Node, folder: DeploymentFolder = STATE, secrets: Secrets = None) -> None:
    """Shut a node out at once: its key is refused from now on, also in a run that goes on.

    For example:

      hfedatm revoke station-1-client-2

      hfedatm revoke station-1 --secrets secrets
    """
    from hfedatm.deploy import node_keys

    there = _secrets(folder, secrets)
    fingerprint, link = node_keys.revoke(there, node)
    _tell_link(folder, there, link, fingerprint)
    typer.echo(f"revoked {node}; the gateway of {link} refuses its key")
    _elsewhere(there, folder, f"bring {there / link / 'revoked'} to the machine of {link}")


def replace(node: Node, folder: DeploymentFolder = STATE, secrets: Secrets = None) -> None:
    """Give a node a new key in its old place and revoke the old one.

    The node works again as soon as it is started with its new folder of secrets.

    For example:

      hfedatm replace station-1-client-2
    """
    from hfedatm.deploy import local, node_keys

    there = _secrets(folder, secrets)
    fingerprint, link = node_keys.replace(there, node)
    if _tell_link(folder, there, link, fingerprint):
        local.restart_node(folder.resolve(), node, link)
    typer.echo(f"{node} has a new key; the old one is refused")
    _elsewhere(there, folder, f"bring {there / node} to {node}, and {there / link} to {link}")


def _secrets(folder: Path, given: Path | None) -> Path:
    for path in [given] if given else [folder / "secrets", Path("secrets")]:
        if path.is_dir():
            return path.resolve()
    raise UserError(f"there are no secrets in {folder} or ./secrets: name their folder, --secrets")


def _tell_link(folder: Path, secrets: Path, link: str, fingerprint: str) -> bool:
    """Withdraw a key from a link that `hfedatm up` started; others look at their secrets."""
    from hfedatm.deploy.registration import Registration

    if not _started_here(folder, secrets):
        return False
    Registration(link, folder.resolve() / "operator").withdraw(fingerprint)
    return True


def _elsewhere(secrets: Path, folder: Path, what: str) -> None:
    if not _started_here(folder, secrets):
        typer.echo(f"if it is elsewhere: {what}")


def _started_here(folder: Path, secrets: Path) -> bool:
    return secrets == (folder / "secrets").resolve()
