"""Turn finished cells into the numbers of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hfedatm.reproduce.cells import Cell, Store
from hfedatm.reproduce.statistics import Estimate, estimate, paired_p, significant
from hfedatm.reproduce.tables import Table

MEAN = "mean"
Measure = Callable[[Mapping[str, Any]], float | None]
Numbers = dict[tuple[str, str, str, int], float]
"""(row, group, column, seed) -> value."""


@dataclass(frozen=True)
class Entry:
    """One place in a printed table."""

    estimate: Estimate | None
    marked: bool = False
    paper: float | None = None


@dataclass(frozen=True)
class Panel:
    """A printed table: one measure of all cells."""

    caption: str
    columns: list[tuple[str, str]]
    rows: dict[str, dict[tuple[str, str], Entry]]


def unseen(selection: str) -> Measure:
    """Return the measure "accuracy on the unseen domain, in percent, of the selected model"."""

    def measure(cell: Mapping[str, Any]) -> float | None:
        chosen = cell[selection]
        value = chosen and chosen["unseen_accuracy"]
        return None if value is None else 100 * value

    return measure


def per_round(*path: str, scale: float = 1.0) -> Measure:
    """Return the measure "mean over rounds of a number in the round's record"."""

    def measure(cell: Mapping[str, Any]) -> float | None:
        values = []
        for record in cell["rounds"]:
            value: Any = record
            for name in path:
                value = value.get(name, {}) if isinstance(value, Mapping) else {}
            if isinstance(value, int | float):
                values.append(value * scale)
        return sum(values) / len(values) if values else None

    return measure


def overhead(cell: Mapping[str, Any]) -> float | None:
    """Return by how many percent Grams and merging lengthen a round, within one run."""
    added = sum(r.get("gram_seconds", 0) + r.get("merge_seconds", 0) for r in cell["rounds"])
    total = sum(r["seconds"] for r in cell["rounds"])
    return 100 * added / (total - added) if total > added else None


ACCURACY: dict[str, Measure] = {
    "Accuracy on the unseen domain (%), model of the last round": unseen("last"),
    "Accuracy on the unseen domain (%), model of the round with the best source validation": unseen(
        "best_by_source"
    ),
}
MEASURES: dict[str, dict[str, Measure]] = {
    "latency": {
        "Seconds per round": per_round("seconds"),
        "of which until all stations have answered": per_round("train_seconds"),
        "of which Grams, all clients together": per_round("gram_seconds"),
        "of which merging": per_round("merge_seconds"),
        "Grams and merging over the rest of the same run (%)": overhead,
    },
    "communication": {
        "kB per round from clients to stations": per_round("bytes_up", "clients", scale=1e-3),
        "of which Grams": per_round("gram_bytes_up", scale=1e-3),
        "kB per round from stations to the server": per_round("bytes_up", "stations", scale=1e-3),
    },
}


def panels(table: Table, store: Store, paper: Mapping[str, Any] | None = None) -> list[Panel]:
    """Return the printed tables; an entry is empty unless all of its cells are finished."""
    finished = store.finished(table.cells())
    cells = {
        (row, group, column, seed): chosen(table.choices(row, group, column, seed), finished)
        for row in table.all_rows
        for group, columns in table.columns.items()
        for column in columns
        for seed in table.seeds
    }
    found = []
    for caption, measure in MEASURES.get(table.name, ACCURACY).items():
        values = {key: measure(cell) for key, cell in cells.items() if cell is not None}
        numbers = {key: value for key, value in values.items() if value is not None}
        found.append(_panel(table, caption, numbers, paper or {}))
    return found


def chosen(
    choices: Sequence[Cell], finished: Mapping[Cell, Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    """Return the result with the best source validation of its last model; None before all end."""
    found = [finished[cell] for cell in choices if cell in finished]
    if len(found) < len(choices):
        return None
    return max(found, key=lambda run: run["last"].get("source_accuracy") or 0.0)


def _panel(table: Table, caption: str, numbers: Numbers, paper: Mapping[str, Any]) -> Panel:
    places: list[tuple[str, str]] = []
    rows: dict[str, dict[tuple[str, str], Entry]] = {row: {} for row in table.all_rows}
    for group, columns in table.columns.items():
        names = [*columns, MEAN] if len(columns) > 1 else list(columns)
        for name in names:
            places.append((group, name))
            within = list(columns) if name == MEAN else [name]
            p_values = {
                row: _compare(table, numbers, row, table.baseline(row), group, within)
                for row in table.rows
                if row != table.baseline(row)
            }
            marked = significant(p_values)
            for row in table.all_rows:
                known = _published(paper.get(row, {}).get(group, {}), name, within)
                values = _by_seed(table, numbers, row, group, within)
                rows[row][group, name] = Entry(estimate(values), row in marked, known)
    return Panel(caption, places, rows)


def _published(figures: Mapping[str, float], name: str, within: list[str]) -> float | None:
    """Return the published figure of a place; a mean that is not printed follows from its parts."""
    if name in figures:
        return figures[name]
    parts = [figures[column] for column in within if column in figures]
    return sum(parts) / len(parts) if len(parts) == len(within) else None


def _by_seed(
    table: Table, numbers: Numbers, row: str, group: str, columns: list[str]
) -> list[float]:
    """Return the mean over columns for every seed whose columns are all finished."""
    found = []
    for seed in table.seeds:
        values = [numbers.get((row, group, column, seed)) for column in columns]
        if all(value is not None for value in values):
            found.append(sum(v for v in values if v is not None) / len(values))
    return found


def _compare(
    table: Table, numbers: Numbers, row: str, baseline: str, group: str, columns: list[str]
) -> float | None:
    """Return the p-value of the test paired over seeds and columns."""
    keys = [(group, column, seed) for column in columns for seed in table.seeds]
    pairs = [
        (numbers[row, *key], numbers[baseline, *key])
        for key in keys
        if (row, *key) in numbers and (baseline, *key) in numbers
    ]
    return paired_p([a for a, _ in pairs], [b for _, b in pairs])


def paper_values(path: Path | None, table: Table, dataset: str) -> Mapping[str, Any]:
    """Return published figures, ``table -> dataset -> row -> group -> column -> percent``."""
    if path is None or not path.is_file():
        return {}
    loaded = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    found: Mapping[str, Any] = (loaded.get(table.name) or {}).get(dataset) or {}
    return found
