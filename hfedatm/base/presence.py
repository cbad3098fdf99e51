"""Whether the process that writes a run's folder is still alive."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import psutil

from hfedatm.base.text import printable
from hfedatm_files import write_text

FILE = "process.json"
PROGRESS = "progress.json"


def announce(folder: Path) -> None:
    """Note which process works on a run."""
    _write(folder, {})


def say_stopped(folder: Path, why: str) -> None:
    """Note that this process ends before the run does."""
    _write(folder, {"stopped": why})


def withdraw(folder: Path) -> None:
    """Remove the note, because the run is finished."""
    (folder / FILE).unlink(missing_ok=True)
    (folder / PROGRESS).unlink(missing_ok=True)


def why_stopped(folder: Path) -> str | None:
    """Return why an unfinished run has stopped, or None while that is not known.

    A process on another machine, or in a container, cannot be checked.
    """
    try:
        said = json.loads((folder / FILE).read_text(encoding="utf-8"))
        host, pid, created = str(said["host"]), int(said["pid"]), float(said["created"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if "stopped" in said:
        return printable(said["stopped"])
    if host != platform.node():
        return None
    try:
        there = abs(psutil.Process(pid).create_time() - created) < 1.0
    except psutil.NoSuchProcess:
        there = False
    except (psutil.Error, ValueError, OverflowError):
        return None
    return None if there else "its process has ended"


def _write(folder: Path, more: dict[str, str]) -> None:
    process = psutil.Process()
    said = {"host": platform.node(), "pid": os.getpid(), "created": process.create_time()}
    write_text(folder / FILE, json.dumps({**said, **more}) + "\n")
