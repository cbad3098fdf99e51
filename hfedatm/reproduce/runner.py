"""Run the missing cells of a table, several at a time, and estimate the remaining time."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field

from rich.console import Console

from hfedatm.base.errors import UserError
from hfedatm.base.parent import end_with_parent
from hfedatm.base.resolving import resolve
from hfedatm.base.settings import Settings
from hfedatm.reproduce.cells import Cell, Store
from hfedatm.reproduce.sharing import can_share, trajectory

Group = tuple[Cell, ...]
Failures = dict[Cell, str]


@dataclass
class Outcome:
    """The number of cells that ended, and the failed cells with their reasons."""

    finished: int = 0
    failed: dict[Cell, str] = field(default_factory=dict)


def run_cells(cells: Sequence[Cell], store: Store, jobs: int, console: Console) -> Outcome:
    """Run the missing cells; cells that are finished when this is stopped are kept."""
    finished = store.finished(cells)
    missing = [cell for cell in cells if cell not in finished]
    console.print(f"{len(cells)} cells, {len(cells) - len(missing)} of them done", highlight=False)
    outcome = Outcome()
    total = sum(map(_work, missing))
    started, done = time.monotonic(), 0.0
    for cell, error in _each(missing, store, jobs):
        done += _work(cell)
        outcome.finished += 1
        if error:
            outcome.failed[cell] = error
        seconds = time.monotonic() - started
        left = seconds / done * (total - done)
        console.print(
            f"[{outcome.finished}/{len(missing)}] {_name(cell)}"
            f"{'  FAILED: ' + error if error else ''}  "
            f"{_duration(seconds)} gone, about {_duration(left)} left",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    return outcome


def _each(cells: Sequence[Cell], store: Store, jobs: int) -> Iterator[tuple[Cell, str]]:
    """Yield each cell as it ends, with the reason if it failed."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by the workers when they import torch
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=end_with_parent)
    waiting: dict[Future[Failures], Group] = {}
    try:
        for cell in {_data_of(cell): cell for cell in cells}.values():
            pool.submit(_load, cell).result()  # report missing data once, not per cell
        for group in _groups(cells, store):
            waiting[pool.submit(_run, store, group)] = group
            if len(waiting) < jobs:
                continue
            yield from _ended(waiting)
        while waiting:
            yield from _ended(waiting)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _ended(waiting: dict[Future[Failures], Group]) -> Iterator[tuple[Cell, str]]:
    for future in wait(waiting, return_when=FIRST_COMPLETED).done:
        group = waiting.pop(future)
        lost = future.exception()  # of the process; those of cells are returned
        failed = future.result() if lost is None else dict.fromkeys(group, _reason(lost))
        for cell in group:
            yield cell, failed.get(cell, "")


def _groups(cells: Sequence[Cell], store: Store) -> list[Group]:
    """Return the cells in groups whose clients do the same work; a timed cell is alone."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        settings = None if store.timed else _settings(cell)
        shares = settings is not None and can_share(settings)
        found.setdefault(trajectory(settings) if shares and settings else cell.key, []).append(cell)
    return [tuple(group) for group in found.values()]


def _settings(cell: Cell) -> Settings | None:
    """Return the settings of a cell; None if they are wrong, which its run will say."""
    try:
        return resolve(dict(cell.given))
    except UserError:
        return None


def _run(store: Store, group: Group) -> Failures:
    """Run the cells of a group one after the other; return the reasons of those that failed."""
    shared = store.work / f"shared-{group[0].key}" if len(group) > 1 else None
    failed = {}
    for cell in group:
        try:
            store.run(cell, shared)
        except Exception as error:
            failed[cell] = _reason(error)
    if shared:
        shutil.rmtree(shared, ignore_errors=True)
    return failed


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _load(cell: Cell) -> None:
    from hfedatm.base.building import load_data

    load_data(resolve(dict(cell.given)))


def _data_of(cell: Cell) -> tuple[str, str, str]:
    s = resolve(dict(cell.given))
    return s.dataset, s.dataset_params, s.data_dir


def _work(cell: Cell) -> float:
    """Return a measure of a cell's duration, its weight in the estimate."""
    s = resolve(dict(cell.given))
    return float(s.rounds * s.station_rounds * s.local_epochs)


def _name(cell: Cell) -> str:
    given = dict(cell.given)
    words = ("server-rule", "client-method", "rule-params", "lambda", "target-domain", "seed")
    return f"{cell.key}  " + " ".join(f"{k}={given[k]}" for k in words if k in given)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
