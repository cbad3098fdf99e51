"""``hfedatm doctor``: what is wrong with a deployment, seen from this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from hfedatm.cli.arguments import STATE, AsJson, DeploymentFolder

_MARKS = {"good": "[green]good[/]   ", "warning": "[yellow]warning[/]", "bad": "[red]bad[/]    "}


def doctor(
    folder: DeploymentFolder = STATE,
    secrets: Annotated[
        Path | None, typer.Option(help="Secrets of one machine that 'up' did not start.")
    ] = None,
    policy: Annotated[Path | None, typer.Option(help="That machine's policy.")] = None,
    reach: Annotated[
        list[str] | None, typer.Option(help="HOST:PORT that it must reach; several times.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check certificates, keys, policy, disk, clock, versions and reachability; say what to fix.

    Exit code: 0 when all is good, 1 when something is bad.

    For example:

      hfedatm doctor

      hfedatm doctor --folder /state --secrets /secrets --policy /policy.toml --reach gateway:8000
    """
    from hfedatm.doctor import Patient, examine, installation, patients, processes, this_container

    folder = folder.resolve()
    found = {"installation": list(installation())}
    if secrets is not None or policy is not None or reach:
        file = policy or folder / "policy.toml"
        there = [Patient("this machine", folder, secrets, file, tuple(reach or ()))]
    elif not (folder / "operator").is_dir() and (inside := this_container()):
        there = [inside]
    else:
        there = patients(folder)
        found["processes"] = list(processes(folder))
    found |= {patient.name: list(examine(patient)) for patient in there}
    if as_json:
        typer.echo(json.dumps({name: [vars(f) for f in each] for name, each in found.items()}))
    else:
        console = Console(soft_wrap=True, highlight=False)
        for name, findings in found.items():
            console.print(f"[bold]{escape(name)}[/]")
            for each in findings:
                cure = f"; {each.cure}" if each.cure else ""
                console.print(f"  {_MARKS[each.state]} {escape(each.what)}[dim]{escape(cure)}[/]")
    bad = any(each.state == "bad" for findings in found.values() for each in findings)
    raise typer.Exit(1 if bad else 0)
