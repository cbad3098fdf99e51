"""``hfedatm reproduce``: a table of results, one command each."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console

from hfedatm.base.errors import UserError
from hfedatm.cli.arguments import Assignments
from hfedatm.cli.completion import complete_table
from hfedatm.cli.run import read_settings

Number = TypeVar("Number", int, float)


def reproduce(
    table: Annotated[
        str,
        typer.Argument(
            help="main, architectures, ablation, rules, hfl, systems, independent, options, past, "
            "latency, communication or privacy.",
            autocompletion=complete_table,
        ),
    ],
    assignments: Assignments = None,
    dataset: Annotated[str, typer.Option(help="Data set.")] = "digits",
    rounds: Annotated[int | None, typer.Option(help="Global rounds.")] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0,1,2",
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, one CPU thread each.")] = 1,
    lambdas: Annotated[str, typer.Option(help="Heterogeneities; default: the table's.")] = "",
    targets: Annotated[str, typer.Option(help="Unseen domains; default: each in turn.")] = "",
    row: Annotated[
        list[str] | None, typer.Option(help="Only this row; may be given several times.")
    ] = None,
    bounds: Annotated[
        bool,
        typer.Option("--bounds", help="Add rows for central training and the best single station."),
    ] = False,
    name: Annotated[
        str, typer.Option(help="Name of the files; default: the table's and the data set's.")
    ] = "",
    output: Annotated[Path, typer.Option(help="Folder of the tables.")] = Path("reproduced"),
    runs: Annotated[
        Path | None,
        typer.Option(help="Folder of the finished runs; default: 'runs' beside the tables."),
    ] = None,
    paper: Annotated[
        Path | None, typer.Option(help="YAML file of published figures to set beside ours.")
    ] = None,
    only_print: Annotated[
        bool, typer.Option("--print", help="Run nothing; print what the finished runs give.")
    ] = False,
) -> None:
    """Run a table of results and set it in type.

    It can be stopped at any time: finished runs are kept, an unfinished one goes on from its last
    round, and the same command continues.

    For example:

      hfedatm reproduce ablation

      hfedatm reproduce main --dataset pacs --rounds 20 --jobs 4 data-dir=~/data
    """
    from hfedatm.reproduce import tables
    from hfedatm.reproduce.cells import Store
    from hfedatm.reproduce.results import panels, paper_values
    from hfedatm.reproduce.runner import run_cells
    from hfedatm.reproduce.typeset import latex, markdown, picture

    given = read_settings(None, assignments or [])
    if rounds is not None:
        given["rounds"] = rounds
    made = tables.make(
        table,
        dataset,
        given,
        _numbers("--seeds", seeds, int),
        _numbers("--lambdas", lambdas, float) or None,
        [name.strip() for name in targets.split(",") if name.strip()] or None,
        row,
        bounds,
    )
    name = name or f"{table}-{dataset}"
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise UserError(f"--name: got {name!r}; write letters, digits, '.', '-' and '_'")
    store = Store.of(name, output, runs, timed=table == "latency")
    failed = {}
    if not only_print:
        failed = run_cells(made.cells(), store, jobs, Console()).failed
    found = panels(made, store, paper_values(paper, made, dataset))
    text = markdown(made, found, _command(), tables.conditions(made))
    stem = output / name
    output.mkdir(parents=True, exist_ok=True)
    Path(f"{stem}.md").write_text(text, encoding="utf-8")
    Path(f"{stem}.tex").write_text(latex(made, found), encoding="utf-8")
    picture(made, found[0], Path(f"{stem}.png"))
    typer.echo(text)
    typer.echo(f"Tables: {stem}.md, .tex, .png")
    if failed:
        lines = [
            f"  {reason} ({', '.join(cell.key for cell in failed if failed[cell] == reason)})"
            for reason in dict.fromkeys(failed.values())
        ]
        reasons = "\n".join(lines)
        raise UserError(f"{len(failed)} runs failed; the same command tries them again\n{reasons}")


def _numbers(option: str, text: str, kind: Callable[[str], Number]) -> list[Number]:
    try:
        return [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UserError(f"{option}: got {text!r}; write numbers separated by commas") from None


def _command() -> str:
    """Return the command as the user typed it, without the paths of data and results."""
    words = [w for w in sys.argv[1:] if not w.startswith("data-dir=")]
    elsewhere = ("--jobs", "--output", "--runs")
    kept = []
    skip = False
    for word in words:
        if skip or word.split("=")[0] in (*elsewhere, "--print"):
            skip = not skip and word in elsewhere
            continue
        kept.append(word)
    return shlex.join(["hfedatm", *kept])
