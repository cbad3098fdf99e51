"""``hfedatm settings``: every key, its default and what it means."""

from __future__ import annotations

import json

import typer
from rich.console import Console
from rich.table import Table

from hfedatm.base.settings import describe
from hfedatm.cli.arguments import AsJson


def settings(
    as_json: AsJson = False,
) -> None:
    """List every setting with its default, what is allowed and what it means.

    For example:

      hfedatm settings

      hfedatm settings --json
    """
    rows = describe()
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table("key", "default", "allowed", "meaning")
    for row in rows:
        table.add_row(row["key"], repr(row["default"]), row["allowed"], row["meaning"])
    Console().print(table)
