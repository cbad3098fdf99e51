"""``hfedatm policy``: what the owner of a node allows a run to do with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hfedatm.base.environment import POLICY
from hfedatm.base.errors import UserError
from hfedatm.base.trust.policy import Policy, fields, toml_value, value_of
from hfedatm.cli.arguments import Assignments

policy = typer.Typer(
    no_args_is_help=True, help="Write, explain and check what a node's owner allows a run to do."
)

File = Annotated[Path, typer.Argument(help="The policy's file.")]


@policy.command("init")
def init(file: File = Path("policy.toml")) -> None:
    """Write a policy with every key explained: built-ins only, generous limits.

    For example:

      hfedatm policy init

      hfedatm policy init /etc/hfedatm/policy.toml
    """
    from hfedatm.base.trust.writing import write

    if not write(file):
        raise UserError(f"policy {file}: exists; edit it, or choose another name")
    typer.echo(f"wrote {file}")


@policy.command("show")
def show(
    file: Annotated[
        Path | None, typer.Argument(help="The policy's file; default: the one in force here.")
    ] = None,
) -> None:
    """Explain a policy field by field.

    For example:

      hfedatm policy show

      hfedatm policy show policy.toml
    """
    if file is None and POLICY not in os.environ:
        typer.echo(
            f"{POLICY} is not set: here the person who starts a run is the owner, and "
            "everything is allowed"
        )
        return
    found = Policy.load(file or os.environ[POLICY])
    table = Table(
        "key", "here", "without it", "meaning", title=escape(str(file or os.environ[POLICY]))
    )
    for section, key, default, meaning in fields():
        value = value_of(found, section, key)
        shown = "no limit" if value is None else toml_value(value)
        row = (f"{section}.{key}", shown if shown != default else "", default, meaning)
        table.add_row(*map(escape, row))
    Console().print(table)


@policy.command("check")
def check(file: File, assignments: Assignments = None) -> None:
    """Say whether a policy is well-formed and a run with these settings would be obeyed.

    Exit code: 0 when the run would be obeyed; 2 when it would be refused, with the node's reason.

    For example:

      hfedatm policy check policy.toml

      hfedatm policy check policy.toml local-epochs=20 train-fn=mytraining:train
    """
    from hfedatm.base.resolving import resolve
    from hfedatm.base.trust.checking import check as check_policy
    from hfedatm.cli.run import read_settings

    found = Policy.load(file)
    if not assignments:
        typer.echo(f"{file} is a policy")
        return
    settings = resolve(read_settings(None, assignments))
    for kind in ("train", "evaluate"):
        check_policy(found, settings, kind, grams=_sends_grams(settings.server_rule))
    typer.echo(f"{file}: a run with these settings would be obeyed")


def _sends_grams(rule: str) -> bool:
    """Return whether a rule asks for Grams; assume so for plug-ins, which are not imported here."""
    from hfedatm.base.building import build_rule
    from hfedatm.base.settings import Settings

    return True if ":" in rule else build_rule(Settings(server_rule=rule)).needs_grams
