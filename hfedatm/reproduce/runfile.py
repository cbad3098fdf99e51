"""A file with one finished run per line, to which several processes may add."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from hfedatm.base.errors import UserError
from hfedatm_files import sync_folder


def read_runs(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the runs of a file; a last line without a newline was cut off and is skipped."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                run = json.loads(line)
                run["key"], run["settings"]  # noqa: B018 - what makes a line a run
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
    line = json.dumps(run, sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n"
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed
        file.truncate(_end_of_last_line(file))
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)  # so that a new file's name is on the disk, too


def _end_of_last_line(file: BinaryIO) -> int:
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - 65536)
        file.seek(start)
        if (found := file.read(end - start).rfind(b"\n")) >= 0:
            return start + found + 1
        end = start
    return 0
