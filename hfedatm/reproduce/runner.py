"""Run the missing cells of a table, several at a time, and estimate the remaining time."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field

from rich.console import Console

from hfedatm.base.resolving import resolve
from hfedatm.reproduce.cells import Cell, Store


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
    pool = ProcessPoolExecutor(jobs, mp_context=context)
    waiting: dict[Future[None], Cell] = {}
    try:
        for cell in {_data_of(cell): cell for cell in cells}.values():
            pool.submit(_load, cell).result()  # report missing data once, not per cell
        queue = iter(cells)
        for cell in queue:
            waiting[pool.submit(_run, store, cell)] = cell
            if len(waiting) < jobs:
                continue
            yield from _ended(waiting)
        while waiting:
            yield from _ended(waiting)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _ended(waiting: dict[Future[None], Cell]) -> Iterator[tuple[Cell, str]]:
    for future in wait(waiting, return_when=FIRST_COMPLETED).done:
        error = future.exception()
        reason = "" if error is None else f"{type(error).__name__}: {error}"
        yield waiting.pop(future), reason


def _run(store: Store, cell: Cell) -> None:
    store.run(cell)


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
