"""Whether the process that writes a run's folder is still alive."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from hfedatm.base.text import printable
from hfedatm_files import write_text

FILE = "process.json"
PROGRESS = "progress.json"


@dataclass(frozen=True)
class Writer:
    """The process that works on a run, and why it stopped, if it did."""

    host: str
    pid: int
    created: float
    stopped: str = ""

    @classmethod
    def here(cls, stopped: str = "") -> Writer:
        """Return this process."""
        return cls(platform.node(), os.getpid(), psutil.Process().create_time(), stopped)

    @classmethod
    def of(cls, folder: Path) -> Writer | None:
        """Return the process that a run's folder names; None if it names none."""
        try:
            said = json.loads((folder / FILE).read_text(encoding="utf-8"))
            stopped = printable(said.get("stopped", ""))
            return cls(str(said["host"]), int(said["pid"]), float(said["created"]), stopped)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
            return None

    def is_same(self, other: Writer) -> bool:
        """Return whether both are one process; a pid alone is used again."""
        alike = (self.host, self.pid) == (other.host, other.pid)
        return alike and abs(self.created - other.created) < 1.0

    def has_ended(self) -> bool | None:
        """Return whether the process is gone; None if it cannot be seen from here."""
        if self.host != platform.node():
            return None
        try:
            process = psutil.Process(self.pid)
            # A zombie has ended, but its parent has not looked yet.
            other = abs(process.create_time() - self.created) >= 1.0
            return bool(other or process.status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True
        except (psutil.Error, ValueError, OverflowError):
            return None


def announce(folder: Path) -> None:
    """Note which process works on a run."""
    _write(folder, Writer.here())


def say_stopped(folder: Path, why: str) -> None:
    """Note that this process ends before the run does."""
    _write(folder, Writer.here(why))


def withdraw(folder: Path) -> None:
    """Remove the note, because the run is finished."""
    (folder / FILE).unlink(missing_ok=True)
    (folder / PROGRESS).unlink(missing_ok=True)


def taken_over(folder: Path) -> bool:
    """Return whether another process has announced itself since this one did.

    A stopped run may be resumed before its old process has noticed; that one must not write.
    """
    writer = Writer.of(folder)
    return writer is not None and not writer.is_same(Writer.here())


def lives(folder: Path) -> bool:
    """Return whether the process that works on a run is on this machine and has not ended."""
    writer = Writer.of(folder)
    return writer is not None and not writer.stopped and writer.has_ended() is False


def why_stopped(folder: Path) -> str | None:
    """Return why an unfinished run has stopped, or None while that is not known.

    A process on another machine, or in a container, cannot be checked.
    """
    writer = Writer.of(folder)
    if writer is None:
        return None
    if writer.stopped:
        return writer.stopped
    return "its process has ended" if writer.has_ended() else None


def _write(folder: Path, writer: Writer) -> None:
    said = {key: value for key, value in asdict(writer).items() if value != ""}
    write_text(folder / FILE, json.dumps(said) + "\n")
