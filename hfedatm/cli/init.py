"""``hfedatm init``: a project to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def init(
    folder: Annotated[Path, typer.Argument(help="Folder to make; its name names the project.")],
) -> None:
    """Write a starter project with a model, data and a client method of its own.

    It runs at once, by 'hfedatm run' and by 'flwr run'.

    For example:

      hfedatm init my-federation

      cd my-federation && hfedatm run --config config.yaml
    """
    from hfedatm.starter import write_project

    for path in write_project(folder):
        typer.echo(f"  {path}")
    typer.echo(f"\nNext: cd {folder} && hfedatm run --config config.yaml")
