"""``hfedatm settings``: every key, its default and what it means."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from hfedatm.base.errors import UserError
from hfedatm.cli.arguments import AsJson
from hfedatm.cli.completion import names_for

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="WORD...", help="Only keys that have all these words in name or meaning."
    ),
]
OwnRule = Annotated[
    str | None,
    typer.Option("--rule", help="Explain the parameters of this server rule of yours, too."),
]


def settings(words: Words = None, rule: OwnRule = None, as_json: AsJson = False) -> None:
    """List every setting with its default, what is allowed and what it means.

    For example:

      hfedatm settings

      hfedatm settings gram

      hfedatm settings --rule mylab.rules:Median --json
    """
    rows = explained(words or [], rule)
    if not rows and not as_json:
        from hfedatm_core.discovery import suggest  # late: the core imports torch

        close = suggest(" ".join(words or []), [row["key"] for row in explained([], rule)])
        raise UserError(
            f"no setting has {' and '.join(map(repr, words or []))} in its name or meaning.{close} "
            "'hfedatm settings' lists them all"
        )
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table(Column("key", overflow="fold"), "default", "allowed", "meaning")
    for row in rows:
        table.add_row(row["key"], repr(row["default"]), row["allowed"], row["meaning"])
    Console().print(table)


def explained(words: list[str], rule: str | None = None) -> list[dict[str, Any]]:
    """Return the rows to show, with the names a key accepts and the rules that read it in words."""
    from hfedatm.base.describing import describe  # late: it imports the rules, which import torch

    rows = []
    for row in describe(*([rule] if rule else [])):
        names = names_for(row["key"])
        if names:
            row["allowed"] = " | ".join(names)
        if row["rules"]:
            row["meaning"] += f" (server-rule {_with_variants(row['rules'])})"
        text = f"{row['key']} {row['meaning']}".lower()
        if all(word.lower() in text for word in words):
            rows.append(row)
    return rows


def _with_variants(rules: list[str]) -> str:
    """``hfedatm, hfedatm-no-fot, mine`` -> ``hfedatm and its variants, mine``."""
    families = {name: [r for r in rules if r.startswith(f"{name}-")] for name in rules}
    variants = {variant for found in families.values() for variant in found}
    return ", ".join(
        f"{name} and its variants" if found else name
        for name, found in families.items()
        if name not in variants
    )
