"""``hfedatm report``: a page of figures about one run or several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hfedatm.cli.completion import complete_run


def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            help="Folders or names of runs; default: the newest.", autocompletion=complete_run
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write; default: report.html in the run."),
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Write a self-contained HTML page: accuracy, tiers, alignment, costs, failures, mistakes.

    Several runs are laid over each other.

    For example:

      hfedatm report

      hfedatm report results/demo --open

      hfedatm report fedavg-0 hfedatm-0 -o both.html
    """
    from hfedatm.report import write_report
    from hfedatm.runs import newest_run, read_run

    found = [read_run(run) for run in (runs or [str(newest_run())])]
    path = output or (found[0].path / "report.html" if len(found) == 1 else Path("report.html"))
    write_report(found, path)
    typer.echo(str(path))
    if show:
        typer.launch(path.resolve().as_uri())
