"""``hfedatm``: one file per command; this one only puts them together."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from hfedatm.base.errors import UserError
from hfedatm.cli import (
    assign,
    audit,
    backup,
    check,
    compare,
    deploy,
    doctor,
    export,
    grams,
    init,
    keys,
    merge,
    monitor,
    policy,
    report,
    reproduce,
    run,
    runs,
    scaffold,
    settings,
    topology,
    watch,
)
from hfedatm.runtime.own_tiers import require_own_tiers

typer_app = typer.Typer(
    name="hfedatm",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Hierarchical federated domain generalisation on Flower.",
)


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(
            f"hfedatm {version('hfedatm')}, flwr {version('flwr')}, torch {version('torch')}"
        )
        raise typer.Exit


@typer_app.callback()
def options(
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=_say_version, is_eager=True, help="Show the versions and exit."
        ),
    ] = False,
) -> None:
    """Hierarchical federated domain generalisation on Flower."""


typer_app.command("init")(init.init)
typer_app.command("run")(run.run)
typer_app.command("check")(check.check)
typer_app.command("watch")(watch.watch)
typer_app.command("report")(report.report)
typer_app.command("compare")(compare.compare)
typer_app.command("export")(export.export)
typer_app.command("merge")(merge.merge)
typer_app.command("grams")(grams.grams)
typer_app.command("audit")(audit.audit)
typer_app.command("topology")(topology.topology)
typer_app.command("assign")(assign.assign)
typer_app.command("settings")(settings.settings)
typer_app.command("reproduce")(reproduce.reproduce)
typer_app.command("up")(deploy.up)
typer_app.command("down")(deploy.down)
typer_app.command("submit")(deploy.submit)
typer_app.command("runs")(runs.runs)
typer_app.command("stop")(runs.stop)
typer_app.command("backup")(backup.backup)
typer_app.command("restore")(backup.restore)
typer_app.command("renew")(keys.renew)
typer_app.command("revoke")(keys.revoke)
typer_app.command("replace")(keys.replace)
typer_app.command("doctor")(doctor.doctor)
typer_app.command("monitor")(monitor.monitor)
typer_app.command("scaffold")(scaffold.scaffold)
typer_app.add_typer(policy.policy, name="policy")


def app() -> None:
    """Run the command; a user's mistake ends in one message and exit code 2."""
    sys.path.append("")  # 'mymodel:build' may be a file in the current folder
    try:
        require_own_tiers()
        typer_app()
    except UserError as error:
        print(f"hfedatm: {error}", file=sys.stderr)
        sys.exit(2)
