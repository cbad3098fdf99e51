"""``hfedatm scaffold``: the three tiers as containers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def scaffold(
    stations: Annotated[int, typer.Option(min=1, help="How many stations.")] = 2,
    clients: Annotated[int, typer.Option(min=1, help="How many clients each station has.")] = 2,
    tiers: Annotated[
        str, typer.Option(help="A deeper tree, children per level: 2x2x3; replaces both numbers.")
    ] = "",
    host: Annotated[
        str, typer.Option(help="Name or address at which other machines reach the server.")
    ] = "",
    port: Annotated[int, typer.Option(help="Port of the server's gateway on that host.")] = 9443,
    only: Annotated[str, typer.Option(help="Write one machine's part: server, station-1, …")] = "",
    folder: Annotated[Path, typer.Option(help="Where to write.")] = Path("."),
) -> None:
    """Write Compose files for stations and clients, and the secrets and policies that are missing.

    Certificates and node keys are in the folder secrets, a policy for every machine in policies.

    For example:

      hfedatm scaffold --stations 3 --clients 4

      hfedatm scaffold --stations 3 --host fl.example.org --only station-1

      hfedatm scaffold --tiers 2x2x3
    """
    from hfedatm.deploy import compose
    from hfedatm.deploy.tree import sizes_of

    sizes = sizes_of(tiers, stations, clients)
    deeper = sizes if len(sizes) > 2 else ()
    deployment = compose.Deployment(sizes[0], sizes[-1], host, port, only, deeper)
    for path in compose.write_compose(folder, deployment):
        typer.echo(f"wrote {path}")
    for path in compose.write_policies(folder / "policies", deployment):
        typer.echo(f"wrote {path}")
    compose.write_user(folder)
    if (folder / "secrets/ca.key").exists() or not (folder / "secrets").exists():
        compose.write_secrets(folder / "secrets", deployment)
        typer.echo(f"certificates and node keys: {folder / 'secrets'}")
    else:  # this machine has only the secrets that the operator handed out
        typer.echo(f"kept {folder / 'secrets'}: the authority's key is not here")
