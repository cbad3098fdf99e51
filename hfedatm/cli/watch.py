"""``hfedatm watch``: a live view of a run, from the files it writes."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hfedatm.base.text import printable
from hfedatm.cli.arguments import OneRun
from hfedatm.runs import Run, newest_run, read_run

RECENT = 8  # rounds shown
SLOW = 2.0  # times the median station


def watch(
    run: OneRun = None,
    once: Annotated[bool, typer.Option("--once", help="Show the state now and return.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the state now as JSON.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Follow a run: all three tiers, time left, who is slow or failing.

    Exit code: 0 when the run is finished or going on, 1 when it has been silent for too long.

    For example:

      hfedatm watch

      hfedatm watch results/demo

      hfedatm watch demo --once
    """
    where = run or newest_run()
    state = read_run(where)
    if as_json:
        typer.echo(json.dumps(describe(state), indent=2))
    elif once:
        Console().print(view(state))
    else:
        state = _follow(where, state, every)
    raise typer.Exit(1 if state.status == "silent" else 0)


def _follow(where: Any, state: Run, every: float) -> Run:
    with Live(view(state), refresh_per_second=4, transient=False) as live:
        try:
            while state.status != "finished":
                time.sleep(every)
                state = read_run(where)
                live.update(view(state))
        except KeyboardInterrupt:  # looking away does not harm the run
            pass
    return state


def describe(run: Run) -> dict[str, Any]:
    """Return the state as plain data."""
    last = run.rounds[-1] if run.rounds else {}
    return {
        "run": run.name,
        "status": run.status,
        "rounds": {"done": len(run.rounds), "total": run.total},
        "seconds_left": run.seconds_left,
        "seconds_silent": None if run.status == "finished" else run.idle,
        "stations": last.get("stations"),
        "clients": last.get("clients"),
        "loss": last.get("loss"),
        "source_accuracy": last.get("source", {}).get("accuracy"),
        "unseen_accuracy": last.get("unseen", {}).get("accuracy"),
        "slow": slow_stations(last),
        "failing": dict(failing(run)),
    }


def slow_stations(record: dict[str, Any]) -> list[str]:
    """Return the stations that took far longer than the median one."""
    times = {s["name"]: s.get("seconds", 0.0) for s in record.get("per_station", [])}
    middle = statistics.median(times.values()) if times else 0.0
    return [name for name, seconds in times.items() if seconds > SLOW * middle]


def failing(run: Run) -> Counter[str]:
    """Return how often each node failed in the latest rounds."""
    return Counter(f["node"] for r in run.rounds[-RECENT:] for f in r["failures"])


def view(run: Run) -> RenderableType:
    """Return what is shown: progress of the tiers, the latest rounds, and what is wrong."""
    return Group(_title(run), _tiers(run), _rounds(run), *_troubles(run))


def _title(run: Run) -> Text:
    colour = {"finished": "green", "running": "cyan", "silent": "red"}[run.status]
    left = run.seconds_left
    tail = {
        "finished": "",
        "running": f", about {_clock(left)} left" if left is not None else ", first round",
        "silent": f", nothing new for {_clock(run.idle)}: is it still there?",
    }[run.status]
    return Text.assemble((run.name, "bold"), "  ", (run.status + tail, colour))


def _tiers(run: Run) -> Table:
    settings, last = run.settings, run.rounds[-1] if run.rounds else {}
    stations = last.get("stations", {"answered": 0, "asked": settings["stations"]})
    per_round = settings["client-fraction"] * settings["clients-per-station"]
    clients = max(1, round(per_round)) * settings["stations"]
    table = Table.grid(padding=(0, 2))
    for name, done, total in (
        ("rounds", len(run.rounds), run.total),
        ("stations", stations["answered"], stations["asked"]),
        ("clients", int(last.get("clients", {}).get("answered", 0)), clients),
    ):
        table.add_row(
            name, ProgressBar(total=max(1, total), completed=done, width=40), f"{done}/{total}"
        )
    return table


def _rounds(run: Run) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for column in (
        "round",
        "loss",
        "source",
        "unseen",
        "moved",
        "stations",
        "clients",
        "up",
        "time",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for record in run.rounds[-RECENT:]:
        sent = record["bytes_up"]["clients"] + record["bytes_up"]["stations"]
        table.add_row(
            str(record["round"]),
            f"{record['loss']:.3f}" if "loss" in record else "-",
            _percent(record.get("source")),
            _percent(record.get("unseen")),
            str(record.get("moved", "-")),
            f"{record['stations']['answered']}/{record['stations']['asked']}",
            str(record["clients"]["answered"]),
            f"{sent / 1e6:.1f} MB",
            f"{record['seconds']:.1f} s",
            style="red" if "kept" in record else None,
        )
    return table


def _troubles(run: Run) -> list[Text]:
    lines = [
        Text(f"slow: {printable(name)} takes more than {SLOW:g} times the median", style="yellow")
        for name in slow_stations(run.rounds[-1] if run.rounds else {})
    ]
    reasons = {f["node"]: f["reason"] for r in run.rounds[-RECENT:] for f in r["failures"]}
    for node, count in failing(run).most_common(5):
        why = printable(reasons[node])
        lines.append(Text(f"failing: {printable(node)} ({count}x): {why}", style="red"))
    return lines


def _percent(scores: dict[str, float] | None) -> str:
    return "-" if not scores else f"{100 * scores['accuracy']:.1f} %"


def _clock(seconds: float | None) -> str:
    minutes, rest = divmod(round(seconds or 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
