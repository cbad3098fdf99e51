"""Read the folders of runs, finished or still going: what `watch`, `report` and `compare` share."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal
from zipfile import ZipFile

import numpy as np

from hfedatm.base.errors import UserError
from hfedatm.base.results import read_json, read_rounds
from hfedatm.base.settings import Settings
from hfedatm.base.text import printable

Status = Literal["finished", "running", "silent"]
MOST_DIAGNOSTICS = 500_000_000  # bytes of one round, unpacked
_NEEDED: dict[str, tuple[Any, float]] = {
    "rounds": (int, 2**31),
    "stations": (int, 2**31),
    "clients-per-station": (int, 2**31),
    "client-fraction": (int | float, 1),
}
PATIENCE = 4  # a round that takes this many times the longest so far is no longer expected
GRACE = 300.0  # seconds before a first or short round is given up


@dataclass(frozen=True)
class Run:
    """One run's folder, as it is on disk now."""

    path: Path
    config: dict[str, Any]
    rounds: list[dict[str, Any]]
    summary: dict[str, Any] | None

    @property
    def name(self) -> str:
        """The folder's name."""
        return printable(self.path.name)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by the keys users write."""
        settings: dict[str, Any] = self.config["settings"]
        return settings

    @property
    def total(self) -> int:
        """Rounds the run is to have."""
        return int(self.settings["rounds"])

    @property
    def idle(self) -> float:
        """Seconds since something was written."""
        files = [p for p in self.path.glob("*.json*") if p.is_file()]
        return max(0.0, time.time() - max(p.stat().st_mtime for p in files))

    @property
    def status(self) -> Status:
        """Whether the run is done, expected to go on, or has been silent for too long."""
        if self.summary is not None:
            return "finished"
        longest = max((r["seconds"] for r in self.rounds), default=0.0)
        return "running" if self.idle < max(GRACE, PATIENCE * longest) else "silent"

    @property
    def seconds_left(self) -> float | None:
        """Time the missing rounds will take, by the latest ones; None before the first."""
        if self.summary is not None:
            return 0.0
        latest = [r["seconds"] for r in self.rounds[-5:]]
        if not latest:
            return None
        each = sum(latest) / len(latest)
        return max(0.0, each * (self.total - len(self.rounds)) - self.idle)

    @cached_property
    def diagnostics(self) -> dict[int, dict[str, np.ndarray]]:
        """Arrays the server kept, by round."""
        found = {}
        for path in sorted((self.path / "diagnostics").glob("round-*.npz")):
            try:
                found[int(path.stem.removeprefix("round-"))] = _read_arrays(path)
            except Exception as error:  # NumPy and zipfile raise errors of many classes
                why = printable(error)
                raise UserError(f"{path} cannot be read ({why}); delete it to go on") from None
        return found

    def curve(self, *keys: str) -> list[tuple[int, float]]:
        """Return ``(round, value)`` of the rounds that have the value at this path."""
        points = []
        for record in self.rounds:
            value: Any = record
            for key in keys:
                value = value.get(key) if isinstance(value, dict) else None
            if isinstance(value, int | float):
                points.append((int(record["round"]), float(value)))
        return points


def read_run(where: str | Path) -> Run:
    """Read a run's folder; a bare name is looked for in ``results``."""
    path = find_run(where)
    summary = path / "summary.json"
    config = read_json(path / "config.json")
    if not isinstance(config.get("settings"), dict):
        raise UserError(f"{path / 'config.json'} has no 'settings': it is not a run's")
    config["settings"] = _settings(config["settings"], path / "config.json")
    return Run(path, config, read_rounds(path), read_json(summary) if summary.is_file() else None)


def _settings(stored: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return settings of any version: text and numbers, and those that all views need in range."""
    settings = {}
    for key, value in stored.items():
        if not (value is None or isinstance(value, str | int | float)):
            raise UserError(f"{path}: {printable(key, 80)} is neither text nor a number")
        settings[printable(key)] = printable(value, 2000) if isinstance(value, str) else value
    for key, (kind, most) in _NEEDED.items():
        value = settings.setdefault(key, Settings().as_config()[key])
        if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value <= most:
            raise UserError(f"{path}: {key} = {printable(value, 80)} is not plausible")
    return settings


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    with ZipFile(path) as archive:
        entries = archive.infolist()
    if sum(entry.file_size for entry in entries) > MOST_DIAGNOSTICS or len(entries) > 10_000:
        raise ValueError("it is larger than anything a run keeps")
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


def find_run(where: str | Path) -> Path:
    """Return the folder of a run given by path or, in ``results``, by name."""
    for path in (Path(where).expanduser(), Path("results") / where):
        if (path / "config.json").is_file():
            return path.resolve()
    path = Path(where).expanduser()
    if not path.is_dir():
        raise UserError(f"run: there is no folder {path} and no run results/{where}")
    inside = [p.parent.name for p in _runs_in(path)]
    hint = f"; it holds the runs {', '.join(inside[:5])}" if inside else ""
    raise UserError(f"run: {path} is not a run's folder (it has no config.json){hint}")


def newest_run(folder: Path = Path("results")) -> Path:
    """Return the run that was started last in a folder of runs."""
    runs = _runs_in(folder)
    if not runs:
        raise UserError(f"run: there is no run in {folder.resolve()}; start one with 'hfedatm run'")
    return runs[-1].parent.resolve()


def _runs_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/config.json"), key=lambda path: path.stat().st_mtime)
