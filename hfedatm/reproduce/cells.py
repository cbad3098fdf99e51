"""A cell is one run of one configuration; a finished cell is a JSON file and is never run again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfedatm.results import read_rounds
from hfedatm.settings import Settings, resolve

# Where and how a run is carried out; none of these changes what it computes.
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
KEPT_OF_ROUND = (
    "round",
    "loss",
    "source",
    "unseen",
    "moved",
    "seconds",
    "train_seconds",
    "merge_seconds",
    "bytes_up",
    "privacy",
    "kept",
)


@dataclass(frozen=True)
class Cell:
    """One configuration."""

    given: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Cell:
        """Make a cell from what a user would give to ``hfedatm run``."""
        return cls(tuple(sorted(given.items())))

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting that changes what is computed."""
        config = resolve(dict(self.given)).as_config()
        return {key: value for key, value in config.items() if key not in ELSEWHERE}

    @property
    def key(self) -> str:
        """Hash of the settings that differ from their defaults.

        A setting that is added later, with a default that changes nothing, keeps the cells that
        were run before it.
        """
        defaults = Settings().as_config()
        chosen = {k: v for k, v in self.settings.items() if v != defaults[k]}
        text = json.dumps(chosen, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class Store:
    """The folder of finished cells, and of those at work."""

    def __init__(self, folder: Path) -> None:
        self.cells, self.work = folder / "cells", folder / "unfinished"

    def load(self, cell: Cell) -> dict[str, Any] | None:
        """Return a finished cell's result; one made under other defaults does not count."""
        path = self.cells / f"{cell.key}.json"
        if not path.is_file():
            return None
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        now = cell.settings
        return result if all(now.get(k, v) == v for k, v in result["settings"].items()) else None

    def run(self, cell: Cell) -> dict[str, Any]:
        """Run a cell, from where it was stopped if it was, and keep its result."""
        from hfedatm.runtime.local import run_locally

        folder = self.work / cell.key
        folder.mkdir(parents=True, exist_ok=True)
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
        with (folder / "log").open("a") as log, contextlib.redirect_stdout(log):
            run_locally(given)
        result = self._result(cell, run)
        self._write(self.cells / f"{cell.key}.json", result)
        shutil.rmtree(folder)
        return result

    def _result(self, cell: Cell, run: Path) -> dict[str, Any]:
        rounds = read_rounds(run)
        config = json.loads((run / "config.json").read_text(encoding="utf-8"))
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        return {
            "settings": cell.settings,
            "versions": config["versions"],
            "last": summary["last"],
            "best_by_source": summary["best_by_source"],
            "failures": summary["failures"],
            "rounds": [
                {key: record[key] for key in KEPT_OF_ROUND if key in record}
                | {"gram_bytes_up": _total(record, "gram-bytes-up")}
                | {"gram_seconds": _total(record, "gram-seconds")}
                for record in rounds
            ],
        }

    @staticmethod
    def _write(path: Path, result: Mapping[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        part.replace(path)


def _total(record: Mapping[str, Any], name: str) -> float:
    return sum(station.get(name, 0) for station in record.get("per_station", []))
