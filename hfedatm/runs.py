"""Read the folders of runs, finished or not: shared code of `watch`, `report` and `compare`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal
from zipfile import ZipFile

import numpy as np

from hfedatm.base import presence, tiers
from hfedatm.base.app_home import home_of, project_of
from hfedatm.base.errors import UserError
from hfedatm.base.results import read_json, read_rounds
from hfedatm.base.round_record import ACCURACY, RoundRecord
from hfedatm.base.settings import Settings
from hfedatm.base.text import printable

Status = Literal["finished", "running", "stopped", "silent"]
MOST_DIAGNOSTICS = 500_000_000  # bytes of one round, unpacked
_NEEDED: dict[str, tuple[Any, float]] = {
    "rounds": (int, 2**31),
    "stations": (int, 2**31),
    "clients-per-station": (int, 2**31),
    "client-fraction": (int | float, 1),
}
_TIERS = ("stations", "clients")
PATIENCE = 4  # a round counts as lost after this many times the longest round so far
GRACE = 300.0  # seconds before a first or short round counts as lost


@dataclass(frozen=True)
class Run:
    """One run's folder, as it is on disk now."""

    path: Path
    config: dict[str, Any]
    rounds: list[RoundRecord]
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
        """Planned number of rounds."""
        return int(self.settings["rounds"])

    @property
    def idle(self) -> float:
        """Seconds since something was written."""
        files = [p for p in self.path.glob("*.json*") if p.is_file()]
        return max(0.0, time.time() - max(p.stat().st_mtime for p in files))

    @property
    def status(self) -> Status:
        """Whether the run is finished, going on, stopped early, or silent for too long."""
        if self.summary is not None:
            return "finished"
        if self.why_stopped is not None:
            return "stopped"
        longest = max((r.seconds for r in self.rounds), default=0.0)
        return "running" if self.idle < max(GRACE, PATIENCE * longest) else "silent"

    @property
    def failed(self) -> bool:
        """Whether the run has ended and no round changed the model."""
        return self.summary is not None and bool(self.rounds) and all(r.kept for r in self.rounds)

    @cached_property
    def why_stopped(self) -> str | None:
        """Why an unfinished run has stopped; None while it may go on."""
        return presence.why_stopped(self.path) if self.summary is None else None

    @cached_property
    def progress(self) -> dict[str, tuple[int, int]]:
        """Finished stations and client trainings of the current round, each with its total."""
        try:
            said = read_json(self.path / presence.PROGRESS)
            if self.status != "running" or int(said["round"]) != len(self.rounds) + 1:
                return {}
            return {tier: (int(said[tier][0]), int(said[tier][1])) for tier in _TIERS}
        except (UserError, ValueError, KeyError, TypeError, IndexError):
            return {}

    @property
    def seconds_left(self) -> float | None:
        """Estimated time of the remaining rounds, from the latest rounds; None before the first."""
        if self.summary is not None:
            return 0.0
        latest = [r.seconds for r in self.rounds[-5:]]
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
                raise UserError(f"{path} cannot be read ({why}); delete it to continue") from None
        return found

    @property
    def domains(self) -> list[str]:
        """Source domains for which any round has scores."""
        return sorted({name for r in self.rounds if r.source for name in r.source.domains})

    @property
    def numbers(self) -> list[str]:
        """Names of the plugged-in numbers that any round has."""
        return sorted({name for r in self.rounds for name in r.numbers})

    @property
    def unseen_domain(self) -> str | None:
        """The domain that is never trained on, once a round has evaluated on it."""
        return next((r.unseen.domain for r in self.rounds if r.unseen), None)

    def curve(self, value: Callable[[RoundRecord], float | None]) -> list[tuple[int, float]]:
        """Return ``(round, value)`` of the rounds that have the value."""
        points = ((record.round, value(record)) for record in self.rounds)
        return [(number, float(found)) for number, found in points if found is not None]

    def domain_curve(self, domain: str) -> list[tuple[int, float]]:
        """Return ``(round, accuracy)`` of the rounds that have scores of a source domain."""

        def accuracy(record: RoundRecord) -> float | None:
            found = record.source.domains.get(domain) if record.source else None
            return found.accuracy if found else None

        return self.curve(accuracy)


def measure_of(runs: Sequence[Run]) -> str:
    """Return the name of what the runs' scores measure; runs of several tasks have only scores."""
    found = {record.measure for run in runs for record in run.rounds[-1:]}
    return printable(found.pop(), 40) if len(found) == 1 else "score" if found else ACCURACY


def read_run(where: str | Path) -> Run:
    """Read a run's folder; a bare name is looked for in ``results``."""
    path = find_run(where)
    summary = path / "summary.json"
    config = read_json(path / "config.json")
    if not isinstance(config.get("settings"), dict):
        raise UserError(f"{path / 'config.json'} has no 'settings', so it is not a run's")
    config["settings"] = _settings(config["settings"], path / "config.json")
    return Run(path, config, read_rounds(path), read_json(summary) if summary.is_file() else None)


def _settings(stored: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return settings of any version: text or numbers; those that all views need are in range."""
    settings = {}
    for key, value in stored.items():
        if not (value is None or isinstance(value, str | int | float)):
            raise UserError(f"{path}: {printable(key, 80)} is neither text nor a number")
        settings[printable(key)] = printable(value, 2000) if isinstance(value, str) else value
    for key, (kind, most) in _NEEDED.items():
        value = settings.setdefault(key, Settings().model_dump(by_alias=True)[key])
        if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value <= most:
            raise UserError(f"{path}: {key} = {printable(value, 80)} is not plausible")
    if settings.get("tiers"):
        try:
            tiers.parse(str(settings["tiers"]))
        except ValueError as error:
            raise UserError(f"{path}: {printable(error, 200)}") from None
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
    for path in (Path(where).expanduser(), *(folder / where for folder in _folders())):
        if (path / "config.json").is_file():
            return path.resolve()
    path = Path(where).expanduser()
    if not path.is_dir():
        raise UserError(f"run: there is no folder {path} and no run results/{where}")
    inside = [p.parent.name for p in _runs_in(path)]
    hint = f"; it holds the runs {', '.join(inside[:5])}" if inside else ""
    raise UserError(f"run: {path} is not a run's folder (it has no config.json){hint}")


def newest_run() -> Path:
    """Return the newest run of those that belong to the current folder."""
    if (found := latest_run()) is None:
        here = Path("results").resolve()
        raise UserError(f"run: there is no run in {here}; start one with 'hfedatm run'")
    return found


def latest_run() -> Path | None:
    """Return the newest run like `newest_run`, or None if there is no run yet."""
    runs = _runs_in(*_folders())
    return runs[-1].parent.resolve() if runs else None


def _folders() -> list[Path]:
    """Return the folders of runs that belong here, including those that Flower ran elsewhere."""
    app = project_of(Path.cwd())
    return [Path("results"), *([home_of(app) / "results"] if app else [])]


def _runs_in(*folders: Path) -> list[Path]:
    runs = [path for folder in folders for path in folder.glob("*/config.json")]
    return sorted(runs, key=lambda path: path.stat().st_mtime)
