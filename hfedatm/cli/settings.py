"""``hfedatm settings``: every key, its default and what it means."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hfedatm.settings import describe


def settings(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List every setting with its default, what is allowed and what it means."""
    rows = describe()
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table("key", "default", "allowed", "meaning")
    for row in rows:
        table.add_row(row["key"], repr(row["default"]), row["allowed"], row["meaning"])
    Console().print(table)
