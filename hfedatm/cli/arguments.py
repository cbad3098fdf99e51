"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hfedatm.cli.completion import complete_run, complete_setting

Assignments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE...",
        help="Settings, e.g. rounds=3 lr=0.1; 'hfedatm settings' lists them all.",
        autocompletion=complete_setting,
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="YAML file of settings.", exists=True, dir_okay=False),
]
OneRun = Annotated[
    str | None,
    typer.Argument(
        help="Folder or name of a run; default: the newest.", autocompletion=complete_run
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
STATE = Path(".hfedatm")
"""Where a deployment keeps its state unless the user says otherwise."""
DeploymentFolder = Annotated[
    Path, typer.Option("--folder", help="Where the deployment keeps its state.")
]
