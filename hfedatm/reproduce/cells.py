"""Cells of a table: one run of one configuration; a finished cell is a line in a file."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfedatm.base.resolving import as_config, resolve
from hfedatm.base.results import read_rounds
from hfedatm.base.round_record import RoundRecord
from hfedatm.base.settings import Settings
from hfedatm.reproduce.runfile import append_run, read_runs

# Settings of where and how a run is carried out; none of them changes its result.
ELSEWHERE = (
    "preset",
    "output",
    "run-name",
    "resume",
    "data-dir",
    "device",
    "threads",
    "client-timeout",
    "station-timeout",
    "join-timeout",
    "max-reply-mb",
    "track",
    "diagnostics",
)
RENAMED = {("reference", "first"): "auto"}
"""Defaults of earlier versions, and the default that means the same in the same tree."""
KEPT_OF_ROUND = (
    "round",
    "loss",
    "unseen",
    "moved",
    "seconds",
    "train_seconds",
    "merge_seconds",
    "bytes_up",
    "privacy",
    "kept",
)
KEPT_OF_SOURCE = ("accuracy", "loss")


@dataclass(frozen=True)
class Cell:
    """One configuration."""

    given: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Cell:
        """Make a cell from the settings that a user would give to ``hfedatm run``."""
        return cls(tuple(sorted(given.items())))

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting that changes the result."""
        config = as_config(resolve(dict(self.given)))
        return {key: value for key, value in config.items() if key not in ELSEWHERE}

    @property
    def key(self) -> str:
        """Hash of the settings that differ from their defaults.

        If a later version adds a setting whose default changes nothing, earlier cells keep their
        hash.
        """
        defaults = as_config(Settings())
        chosen = {k: v for k, v in self.settings.items() if v != defaults[k]}
        text = json.dumps(chosen, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Store:
    """Finished cells, one per line in the files of a folder, and the folder of unfinished cells.

    Tables share cells: a cell is found in any file of the folder, and a new one is added to
    ``file``.
    """

    file: Path
    work: Path
    timed: bool = False
    """Whether seconds count: then no cell shares work with another."""

    @classmethod
    def of(cls, table: str, output: Path, runs: Path | None = None, timed: bool = False) -> Store:
        """Return the store of a table that is written to ``output``."""
        return cls((runs or output / "runs") / f"{table}.jsonl", output / "unfinished", timed)

    def finished(self, cells: Iterable[Cell]) -> dict[Cell, dict[str, Any]]:
        """Return the results of finished cells; a result with other defaults does not count."""
        runs: dict[str, list[dict[str, Any]]] = {}
        for file in sorted(self.file.parent.glob("*.jsonl")):
            for run in read_runs(file):
                if self.timed and run.get("reused"):
                    continue
                runs.setdefault(run["key"], []).append(run)
        found = {}
        for cell in cells:
            for run in runs.get(cell.key, []):
                if _agrees(run["settings"], cell.settings):
                    found[cell] = run
        return found

    def run(self, cell: Cell, shared: Path | None = None) -> dict[str, Any]:
        """Run a cell, continue it if it was stopped, and store its result.

        Cells with the same folder ``shared`` share what their clients do alike.
        """
        folder = self.work / cell.key
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "log").open("a") as log:
            fcntl.flock(log, fcntl.LOCK_EX)  # another table may run the same cell
            result = self.finished([cell]).get(cell)
            if result is None:
                with contextlib.redirect_stdout(log):
                    result = self._run(cell, folder, shared)
                append_run(self.file, result)
        shutil.rmtree(folder, ignore_errors=True)
        return result

    def _run(self, cell: Cell, folder: Path, shared: Path | None) -> dict[str, Any]:
        from client_app.app import app
        from hfedatm.reproduce.sharing import SharedWork
        from hfedatm.runtime.local import run_locally

        run = folder / "run"
        started = (run / "config.json").is_file()
        given = (
            {"resume": str(run)}
            if started
            else {
                **dict(cell.given),
                "output": str(folder),
                "run-name": "run",
                "threads": 1,
            }
        )
        os.environ["HFEDATM_STATE"] = str(folder / "state")
        if shared is None:
            run_locally(given)
            return self._result(cell, run)
        clients = SharedWork(app, shared)
        run_locally(given, clients)
        return self._result(cell, run) | ({"reused": clients.reused} if clients.reused else {})

    def _result(self, cell: Cell, run: Path) -> dict[str, Any]:
        config = json.loads((run / "config.json").read_text(encoding="utf-8"))
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        return {
            "key": cell.key,
            "settings": cell.settings,
            "versions": config["versions"],
            "last": summary["last"],
            "best_by_source": summary["best_by_source"],
            "failures": summary["failures"],
            "rounds": [_round(record) for record in read_rounds(run)],
        }


def _agrees(stored: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    return all(now.get(key, v) in (v, RENAMED.get((key, v), v)) for key, v in stored.items())


def _round(record: RoundRecord) -> dict[str, Any]:
    line = record.to_dict()
    source = line.get("source") or {}
    kept = {
        **{key: line[key] for key in KEPT_OF_ROUND if key in line},
        **({"source": {k: source[k] for k in KEPT_OF_SOURCE if k in source}} if source else {}),
        "gram_bytes_up": sum(station.gram_bytes_below for station in record.per_station),
        "gram_seconds": sum(station.gram_seconds for station in record.per_station),
    }
    return {key: _short(value) for key, value in kept.items()}


def _short(value: Any) -> Any:
    """Round numbers to nine digits: no table shows more, and the repository's size is limited."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, Mapping):
        return {key: _short(each) for key, each in value.items()}
    return value
