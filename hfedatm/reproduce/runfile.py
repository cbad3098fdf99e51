"""A file with one finished run per line, to which several processes may add.

Runs of one table differ in few settings. So a line names only the settings that differ from those
of the file's first run, and this run's key as ``like``; versions likewise.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from hfedatm.base.errors import UserError
from hfedatm_files import sync_folder

SHARED = ("settings", "versions")


def read_runs(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the runs of a file; a last line without a newline was cut off and is skipped."""
    whole: dict[str, Mapping[str, Any]] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                run = json.loads(line)
                key, _ = run["key"], run["settings"]
                if (like := run.pop("like", None)) is None:
                    whole[key] = run
                else:
                    run |= {part: {**whole[like][part], **run[part]} for part in SHARED}
            except (ValueError, TypeError, KeyError):
                raise UserError(
                    f"{path}, line {number}: this is not a run; delete the line, and the same "
                    "command runs it again"
                ) from None
            yield run


def append_run(path: Path, run: Mapping[str, Any]) -> None:
    """Add a run; when this returns, its line is on the disk.

    One process writes at a time. A partial line of a killed process is removed first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed
        file.truncate(_end_of_last_line(file))
        first = next(read_runs(path), None)
        kept = run if first is None else _without(run, first)
        line = json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n"
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)  # so that a new file's name is on the disk, too


def _without(run: Mapping[str, Any], first: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the run without what it shares with the first; as it is, if it lacks some of that."""
    if any(
        part not in first or not run.get(part, {}).keys() >= first[part].keys() for part in SHARED
    ):
        return run
    own = {
        part: {k: v for k, v in run[part].items() if k not in first[part] or first[part][k] != v}
        for part in SHARED
    }
    return {**run, **own, "like": first["key"]}


def _end_of_last_line(file: BinaryIO) -> int:
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - 65536)
        file.seek(start)
        if (found := file.read(end - start).rfind(b"\n")) >= 0:
            return start + found + 1
        end = start
    return 0
