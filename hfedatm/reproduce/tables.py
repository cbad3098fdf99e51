"""A table: rows x columns x seeds, where each row and each column is a set of settings."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from hfedatm.base.errors import UserError
from hfedatm.base.resolving import resolve
from hfedatm.reproduce.cells import Cell
from hfedatm.reproduce.rows import TABLES, Given, bounding_rows

PRESETS = {
    "digits": "demo",
    "digits4": "digits4-lenet5",
    "pacs": "pacs-lenet5",
    "office-home": "office-home-lenet5",
    "terra-incognita": "terra-incognita-lenet5",
    "amazon": "amazon-minilm",
    "amazon-features": "amazon-features-mlp",
}


@dataclass(frozen=True)
class Table:
    """Rows and columns of settings over seeds.

    ``columns`` maps a group (for example a lambda) to its columns (target domains).
    """

    name: str
    title: str
    rows: dict[str, Given]
    columns: dict[str, dict[str, Given]]
    seeds: tuple[int, ...]
    base: Given
    bounds: dict[str, list[Given]] = field(default_factory=dict)
    """Rows to compare with by eye: of several choices, source validation takes one."""

    @property
    def all_rows(self) -> list[str]:
        """Every row that is printed: those that are tested, then the bounds."""
        return [*self.rows, *self.bounds]

    def baseline(self, row: str) -> str:
        """Return the row to compare with: the same method or model with Avg, or the first row."""
        method, _, rule = row.rpartition(" + ")
        return f"{method} + Avg" if method and rule else next(iter(self.rows))

    def cell(self, row: str, group: str, column: str, seed: int) -> Cell:
        """Return one cell; of a bound, the first choice."""
        return self.choices(row, group, column, seed)[0]

    def choices(self, row: str, group: str, column: str, seed: int) -> list[Cell]:
        """Return the cells of which one stands in this place: a single one, but for bounds."""
        place = {**self.columns[group][column], "seed": seed}
        given = self.bounds.get(row) or [self.rows[row]]
        return [Cell.of({**self.base, **place, **one}) for one in given]

    def cells(self) -> list[Cell]:
        """Return all cells, seed by seed, so that a stopped table is complete for some seeds."""
        found = [
            cell
            for seed in self.seeds
            for group, columns in self.columns.items()
            for column in columns
            for row in self.all_rows
            for cell in self.choices(row, group, column, seed)
        ]
        return list(dict.fromkeys(found))


def make(
    name: str,
    dataset: str,
    given: Given,
    seeds: Sequence[int],
    lambdas: Sequence[float] | None = None,
    targets: Sequence[str] | None = None,
    only: Sequence[str] | None = None,
    bounds: bool = False,
) -> Table:
    """Return a table; ``given`` holds settings of every run, ``only`` the rows to keep.

    With ``bounds`` there are rows for central training and for the best single station.
    """
    if name not in TABLES:
        raise UserError(f"table: got {name!r}; available: {', '.join(TABLES)}")
    if dataset not in PRESETS:
        raise UserError(f"--dataset: got {dataset!r}; available: {', '.join(PRESETS)}")
    title, rows, preferred = TABLES[name]
    base = {"preset": PRESETS[dataset], **given}
    settings = resolve(base)
    if settings.dataset != dataset:
        raise UserError(f"--dataset {dataset}, but the settings say dataset={settings.dataset}")
    domains = targets or _domains(dataset)
    columns = {
        f"λ = {lam:g}": {d: {"lambda": lam, "target-domain": d} for d in domains}
        for lam in (lambdas or preferred)
    }
    found = rows(base)
    if wrong := [label for label in only or () if label not in found]:
        raise UserError(f"--row: got {wrong[0]!r}; available: {'; '.join(found)}")
    chosen = {label: row for label, row in found.items() if not only or label in only}
    beside = bounding_rows(base) if bounds else {}
    return Table(name, title, chosen, columns, tuple(seeds), base, beside)


def conditions(table: Table) -> str:
    """Return a sentence on the first row's settings; labels of other rows say how they differ."""
    s = resolve({**table.base, **next(iter(table.rows.values()))})
    params = f" ({s.dataset_params})" if s.dataset_params else ""
    part = f" (trained: {s.train_only}; the rest is frozen)" if s.train_only else ""
    return (
        f"{s.dataset}{params}, {s.model}{part}, {s.client_method} clients "
        "unless the row says otherwise; "
        f"{s.stations} stations x {s.clients_per_station} clients ({s.station_assignment} order), "
        f"{s.rounds} rounds x {s.station_rounds} station rounds x {s.local_epochs} epochs, "
        f"batch {s.batch_size}, {s.optimizer} lr {s.lr:g} momentum {s.momentum:g}, "
        f"{s.schedule} schedule"
        + ("; every station starts from a model of its own." if s.station_start == "own" else ".")
    )


def _domains(dataset: str) -> list[str]:
    module = importlib.import_module(f"hfedatm_core.data.{dataset.replace('-', '_')}")
    return list(module.DOMAINS)
