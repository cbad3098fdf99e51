"""``hfedatm watch``: a live view of a run, from the files it writes."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hfedatm.base.text import labels, names_in, number, printable
from hfedatm.base.tiers import parse
from hfedatm.cli.arguments import OneRun
from hfedatm.runs import Run, latest_run, newest_run, read_run

RECENT = 8  # number of rounds shown
MOST_SHOWN = 8  # most plugged-in numbers shown; those in show-metrics come first
SLOW = 2.0  # a station is slow beyond this multiple of the median


def watch(
    run: OneRun = None,
    once: Annotated[bool, typer.Option("--once", help="Show the state now and return.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the state now as JSON.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    upcoming: Annotated[
        bool, typer.Option("--next", help="Wait for a run that has not begun yet.")
    ] = False,
) -> None:
    """Follow a run: all three tiers, time left, who is slow or failing.

    Waits for the first run if there is none. Exit code: 0 when the run is finished or going on, 1
    when it was stopped, has been silent for too long, or no round changed the model.

    For example:

      hfedatm watch

      hfedatm watch results/demo

      hfedatm watch demo --once

      hfedatm watch --next
    """
    looking = once or as_json
    where: str | Path = run or (newest_run() if looking else _begun(every, upcoming))
    state = read_run(where)
    if as_json:
        typer.echo(json.dumps(describe(state), indent=2))
    elif once:
        Console().print(view(state))
    else:
        state = _follow(where, state, every)
    raise typer.Exit(1 if state.failed or state.status in ("stopped", "silent") else 0)


def _begun(every: float, upcoming: bool) -> Path:
    """Return the newest run; wait for one if there is none, or if the next run is requested."""
    found = before = latest_run()
    if found is None or upcoming:
        with Console().status("waiting for a run to begin; Ctrl-C stops only this view"):
            while found is None or found == before:
                time.sleep(every)
                found = latest_run()
    return found


def _follow(where: Any, state: Run, every: float) -> Run:
    with Live(view(state), refresh_per_second=4, transient=False) as live:
        try:
            while state.status not in ("finished", "stopped"):
                time.sleep(every)
                state = read_run(where)
                live.update(view(state))
        except KeyboardInterrupt:  # ending the view does not harm the run
            pass
    return state


def describe(run: Run) -> dict[str, Any]:
    """Return the state as plain data."""
    last = run.rounds[-1] if run.rounds else None
    return {
        "run": run.name,
        "status": run.status,
        "rounds": {"done": len(run.rounds), "total": run.total},
        "stopped": run.why_stopped,
        "round_at_hand": run.progress,
        "seconds_left": run.seconds_left,
        "seconds_silent": None if run.status == "finished" else run.idle,
        "stations": last and last.stations.model_dump(),
        "tiers": [tier.model_dump() for tier in last.tiers or []] if last else [],
        "clients": last and last.clients.model_dump(),
        "loss": last and last.loss,
        "numbers": last.numbers if last else {},
        "source_accuracy": last and last.source_accuracy,
        "unseen_accuracy": last and last.unseen_accuracy,
        "slow": slow_stations(run),
        "failing": dict(failing(run)),
    }


def slow_stations(run: Run) -> list[str]:
    """Return the stations that took far longer than the median one in the last round."""
    times = {s.name: s.seconds for record in run.rounds[-1:] for s in record.per_station}
    middle = statistics.median(times.values()) if times else 0.0
    return [name for name, seconds in times.items() if seconds > SLOW * middle]


def failing(run: Run) -> Counter[str]:
    """Return how often each node failed in the latest rounds."""
    return Counter(f.node for r in run.rounds[-RECENT:] for f in r.failures)


def view(run: Run) -> RenderableType:
    """Return the view: progress of the tiers, the latest rounds, and the problems."""
    return Group(_title(run), _tiers(run), _rounds(run), *_numbers(run), *_troubles(run))


def _title(run: Run) -> Text:
    colour = {"finished": "green", "running": "cyan"}.get(run.status, "red")
    if run.failed:
        colour = "red"
    left = run.seconds_left
    tail = {
        "finished": ": no round changed the model" if run.failed else "",
        "running": f", about {_clock(left)} left" if left is not None else ", first round",
        "stopped": f": {run.why_stopped}; continue with: hfedatm run resume={run.path}",
        "silent": f", nothing new for {_clock(run.idle)}: is it still running?",
    }[run.status]
    return Text.assemble((run.name, "bold"), "  ", (run.status + tail, colour))


def _tiers(run: Run) -> Table:
    settings, last, now = run.settings, run.rounds[-1] if run.rounds else None, run.progress
    tree = settings.get("tiers")
    top = parse(str(tree))[0] if tree else settings["stations"]
    stations = (last.stations.answered, last.stations.asked) if last else (0, top)
    deeper = list(enumerate((last.tiers or [])[1:] if last else [], start=2))
    per_round = settings["client-fraction"] * settings["clients-per-station"]
    clients = max(1, round(per_round)) * settings["stations"]
    table = Table.grid(padding=(0, 2))
    for name, done, total in (
        ("rounds", len(run.rounds), run.total),
        ("stations", *now.get("stations", stations)),
        *((f"stations, level {n}", t.answered, t.asked) for n, t in deeper if not now),
        *([("trainings", *now["clients"])] if now.get("clients", (0, 0))[1] else []),
        *([] if now else [("clients", last.clients.answered if last else 0, clients)]),
    ):
        table.add_row(
            name, ProgressBar(total=max(1, total), completed=done, width=40), f"{done}/{total}"
        )
    return table


def _rounds(run: Run) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    columns = ("source", "unseen", "moved", "stations", "clients", "up", "time")
    for column in ("round", "loss", *columns):
        table.add_column(column, justify="right", no_wrap=True)
    for record in run.rounds[-RECENT:]:
        sent = record.bytes_up.clients + record.bytes_up.stations
        table.add_row(
            str(record.round),
            "-" if record.loss is None else f"{record.loss:.3f}",
            _percent(record.source_accuracy),
            _percent(record.unseen_accuracy),
            "-" if record.moved is None else str(record.moved),
            " ".join(f"{t.answered}/{t.asked}" for t in record.tiers or [record.stations]),
            str(record.clients.answered),
            f"{sent / 1e6:.1f} MB",
            f"{record.seconds:.1f} s",
            style="red" if record.kept else None,
        )
    return table


def _numbers(run: Run) -> list[RenderableType]:
    """Return the plugged-in numbers, a row each: as columns they would not fit a terminal."""
    asked = names_in(str(run.settings.get("show-metrics", "")))
    shown = list(dict.fromkeys([*labels(asked, run.numbers), *run.numbers]))
    if not shown:
        return []
    table = Table(box=None, padding=(0, 1), header_style="dim")
    table.add_column("round", overflow="fold")
    recent = run.rounds[-RECENT:]
    for record in recent:
        table.add_column(str(record.round), justify="right", no_wrap=True)
    for label in shown[:MOST_SHOWN]:
        values = (number(record.numbers.get(label)) for record in recent)
        table.add_row(Text(printable(label, 40)), *values)
    hidden = f" {len(shown) - MOST_SHOWN} more in rounds.jsonl; show-metrics chooses the first ones"
    return [table, *([Text(hidden, style="dim")] if len(shown) > MOST_SHOWN else [])]


def _troubles(run: Run) -> list[Text]:
    lines = [
        Text(f"slow: {printable(name)} takes more than {SLOW:g} times the median", style="yellow")
        for name in slow_stations(run)
    ]
    reasons = {f.node: f.reason for r in run.rounds[-RECENT:] for f in r.failures}
    for node, count in failing(run).most_common(5):
        why = printable(reasons[node])
        lines.append(Text(f"failing: {printable(node)} ({count}x): {why}", style="red"))
    return lines


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _clock(seconds: float | None) -> str:
    minutes, rest = divmod(round(seconds or 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
