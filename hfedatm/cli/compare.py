"""``hfedatm compare``: how runs differ, and which run is better on which score."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hfedatm.base.errors import UserError
from hfedatm.base.text import printable
from hfedatm.cli.arguments import AsJson
from hfedatm.cli.completion import complete_run


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(help="Folders or names of two or more runs.", autocompletion=complete_run),
    ],
    as_json: AsJson = False,
) -> None:
    """Show in which settings runs differ and which run wins on which score.

    Runs that differ only in their seed are put together: their scores are shown as mean and 95 %
    confidence interval, and a win counts as sure when chance explains it in fewer than 5 % of
    cases (paired by seed where the seeds are the same).

    For example:

      hfedatm compare results/avg results/hfedatm

      hfedatm compare avg-0 avg-1 avg-2 hfedatm-0 hfedatm-1 hfedatm-2 --json
    """
    from hfedatm.runs import read_run

    found = [read_run(run) for run in runs]
    if len({run.path for run in found}) < 2:
        raise UserError("compare: name at least two different runs")
    for run in found:
        if not run.rounds:
            raise UserError(f"compare: {run.name} has no finished round yet")
    table = describe(found)
    if as_json:
        typer.echo(json.dumps(table, indent=2))
    else:
        _show(table)


def describe(found: list[Any]) -> dict[str, Any]:
    """Return the comparison as plain data."""
    from hfedatm.comparison import differing, group, numbers, p_value, scores
    from hfedatm.runs import measure_of

    groups = group(found)
    accuracies, others = scores(found), numbers(found)
    rows = []
    for name, score in (*accuracies.items(), *others.items()):
        estimates = [g.estimate(score) for g in groups]
        means = {i: estimate.mean for i, estimate in enumerate(estimates) if estimate}
        if not means:
            continue
        order = sorted(means, key=lambda i: -means[i])
        chance = p_value(groups[order[0]], groups[order[1]], score) if len(order) > 1 else None
        rows.append(
            {
                "score": name,
                "percent": name in accuracies,
                "values": [
                    None
                    if e is None
                    else {"mean": e.mean, "half_width": e.half_width, "runs": len(e.values)}
                    for e in estimates
                ],
                # It is unknown whether a larger value of a plugged-in number is better.
                "winner": order[0] if name in accuracies and _ahead(estimates, order) else None,
                "p_value": chance,
                "sure": chance is not None and chance < 0.05,
            }
        )
    return {
        "settings": {"runs": [run.name for run in found], "differing": differing(found)},
        "groups": [{"label": g.label, "runs": [run.name for run in g.runs]} for g in groups],
        "measure": measure_of(found),
        "scores": rows,
    }


def _ahead(estimates: list[Any], order: list[int]) -> bool:
    return len(order) > 1 and estimates[order[0]].mean > estimates[order[1]].mean


def _show(table: dict[str, Any]) -> None:
    console = Console()
    runs, different = table["settings"]["runs"], table["settings"]["differing"]
    if different:
        shown = Table(
            "setting", *map(escape, runs), title="Settings that differ", title_justify="left"
        )
        for key, values in different.items():
            shown.add_row(escape(key), *(escape(printable(value)) for value in values))
        console.print(shown)
    else:
        console.print("The runs have the same settings.")
    letters = [chr(ord("A") + number) for number in range(len(table["groups"]))]
    for letter, members in zip(letters, table["groups"], strict=True):
        names = escape(f"{printable(members['label'])}: {', '.join(members['runs'])}")
        console.print(f"[bold]{letter}[/] {names}")
    columns = [
        f"{letter} (n={len(g['runs'])})" for letter, g in zip(letters, table["groups"], strict=True)
    ]
    shown = Table(
        f"{escape(table['measure'])} in %, numbers as they are",
        *columns,
        "better",
        title="Who wins where",
        title_justify="left",
    )
    for row in table["scores"]:
        shown.add_row(
            escape(printable(row["score"])),
            *(_cell(value, row["percent"]) for value in row["values"]),
            _verdict(row, letters),
            style="bold" if row["sure"] else None,
        )
    console.print(shown)
    if all(row["p_value"] is None for row in table["scores"]) and len(letters) > 1:
        console.print("Single runs say nothing about chance: repeat them with other seeds.")


def _verdict(row: dict[str, Any], letters: list[str]) -> str:
    if sum(value is not None for value in row["values"]) < 2:
        return "-"
    equal = "equal" if row["percent"] else "?"
    winner = equal if row["winner"] is None else letters[row["winner"]]
    return winner if row["p_value"] is None else f"{winner} (p={row['p_value']:.3f})"


def _cell(value: dict[str, Any] | None, percent: bool) -> str:
    if value is None:
        return "-"
    mean, half = value["mean"], value["half_width"]
    if not percent:
        return f"{mean:.4g}" + ("" if half is None else f" ± {half:.2g}")
    return f"{100 * mean:.1f}" + ("" if half is None else f" ± {100 * half:.1f}")
