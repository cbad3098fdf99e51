"""The text a run prints: a header, one line per round, a table at the end."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hfedatm.base.privacy_settings import statement
from hfedatm.base.round_record import ACCURACY, Privacy, Refined, RoundRecord, SecondLook
from hfedatm.base.settings import Settings
from hfedatm.base.text import labels, names_in, number, printable
from hfedatm.base.tiers import is_deep, levels, rounds_at
from hfedatm_core.data import DomainData
from hfedatm_core.discovery import suggest


def header(
    settings: Settings, target: str, data: DomainData, folder: Path, done: int, grams: bool
) -> str:
    """Return the header of a run; ``grams`` tells whether clients send Gram matrices."""
    sources = ", ".join(name for name in data.domains if name != target) or "what the sites hold"
    nodes = f"{settings.stations} stations x {settings.clients_per_station} clients"
    if is_deep(settings):
        nodes = f"a tree of {settings.tiers}: {nodes}"
    rounds = [rounds_at(settings, level) for level in range(1, levels(settings) + 1)]
    lines = [
        f"HFedATM: {nodes}, {settings.rounds} rounds x {' x '.join(map(str, rounds))} station "
        f"rounds x {settings.local_epochs} epochs",
        f"  {settings.dataset}: trains on {sources}; {target} is never seen",
        f"  {settings.model}, trained by {settings.train_fn or settings.client_method}, "
        f"{settings.server_rule} at the server, "
        f"seed {settings.seed}",
        f"  privacy: {statement(settings, grams)}",
        f"  results: {folder}",
    ]
    if done:
        lines.append(f"  resuming after round {done}")
    return "\n".join(lines)


def round_line(record: RoundRecord, settings: Settings) -> str:
    """Return the line of one round."""
    up, shown = record.bytes_up, labels(names_in(settings.show_metrics), record.numbers)
    parts = [
        f"round {record.round:>3}/{settings.rounds}",
        "stations "
        + " ".join(f"{t.answered}/{t.asked}" for t in record.tiers or [record.stations]),
        f"clients {record.clients.answered}",
        "loss -" if record.loss is None else f"loss {record.loss:.3f}",
        *(f"{printable(label)} {number(record.numbers.get(label))}" for label in shown),
        f"source {_percent(record.source_accuracy)}",
        f"unseen {_percent(record.unseen_accuracy)}",
        f"moved {record.moved or 0}",
        f"up {size(up.clients)} clients, {size(up.stations)} stations",
        f"{record.seconds:.1f} s",
    ]
    if record.privacy:
        parts.insert(-1, _spent(record.privacy))
    if refined := record.refined:
        parts.append(_refined(refined))
    if look := record.second_look:
        parts.append(_looked(look))
    if record.kept:
        parts.append(f"MODEL KEPT: {printable(record.kept)}")
    if record.taken_back:
        parts.append(f"TAKEN BACK: {printable(record.taken_back)}")
    return " | ".join(parts)


def unknown_numbers(record: RoundRecord, settings: Settings) -> list[str]:
    """Return a line for each name in ``show-metrics`` that no number of this round has."""
    known = list(record.numbers)
    plain = [label.removeprefix("source ").removeprefix("unseen ") for label in known]
    there = ", ".join(map(printable, dict.fromkeys(plain))) or "none"
    return [
        f"show-metrics: round {record.round} has no number {printable(name)!r}; it has: {there}."
        f"{suggest(name, plain)}"
        for name in names_in(settings.show_metrics)
        if not set(labels([name], known)) & set(known)
    ]


def _refined(found: Refined) -> str:
    how = f"refined by {found.stations} stations in {found.exchanges} exchanges"
    if not found.reason:
        return how
    why = printable(found.reason)
    if not found.exchanges:
        return f"NOT REFINED: {why}"
    return f"{how}, NOT IN ALL {found.asked}: {why}"


def _looked(look: SecondLook) -> str:
    why = f": {printable(look.reason)}" if look.reason else ""
    if why and not look.passes:
        return f"NO SECOND LOOK{why}"
    often = f" in {look.passes} passes" if look.passes > 1 else ""
    stopped = f", NO PASS {look.passes + 1}{why}" if why else ""
    return f"second look by {look.stations} stations{often}{stopped}"


def outcome(summary: Mapping[str, Any], rounds: Sequence[RoundRecord], folder: Path) -> str:
    """Return the table at the end; its last line names the results folder."""
    up = summary["bytes_up"]
    table = Table(title="Result", title_justify="left")
    measure = printable(rounds[-1].measure) if rounds else ACCURACY
    for column in ("model", "round", f"source {measure}", f"unseen-domain {measure}"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, key in (("last", "last"), ("best by source validation", "best_by_source")):
        if scores := summary[key]:
            table.add_row(
                name,
                str(scores["round"]),
                _percent(scores["source_accuracy"]),
                _percent(scores["unseen_accuracy"]),
            )
    text = io.StringIO()
    console = Console(file=text, width=100)
    console.print(table)
    console.print(
        f"{len(rounds)} rounds in {summary['seconds']:.1f} s; up {size(up['clients'])} from "
        f"clients and {size(up['stations'])} from stations; {summary['failures']} failures",
        highlight=False,
    )
    return f"{text.getvalue()}Results: {folder}"


def size(count: float) -> str:
    """Return bytes as people read them."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def _spent(privacy: Privacy) -> str:
    spent = f"eps {privacy.epsilon:.3g}"
    return f"{spent} of {privacy.budget:g}" if privacy.budget else spent


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
