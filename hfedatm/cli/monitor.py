"""``hfedatm monitor``: health and metrics of this machine, for Prometheus."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hfedatm.cli.arguments import STATE, DeploymentFolder


def monitor(
    folder: DeploymentFolder = STATE,
    results: Annotated[
        list[Path] | None, typer.Option(help="Folder of runs' folders; may be given several times.")
    ] = None,
    secrets: Annotated[
        list[Path] | None, typer.Option(help="Secrets outside of the deployment's folder.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to answer at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to answer at.")] = 9464,
) -> None:
    """Answer /health and /metrics (Prometheus' text format) for the processes of this machine.

    For example:

      hfedatm monitor --results results

      hfedatm monitor --folder /state --results /state/results --secrets /secrets
    """
    import uvicorn

    from hfedatm.monitor import Machine, application

    machine = Machine(
        folder.resolve(),
        tuple(path.resolve() for path in results or [Path("results")]),
        tuple(path.resolve() for path in secrets or []),
    )
    typer.echo(f"metrics: http://{host}:{port}/metrics")
    uvicorn.run(application(machine), host=host, port=port, log_level="warning")
