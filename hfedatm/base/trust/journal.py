"""What a node has been asked already: one content per step, answered once and for all.

A task that is delivered twice gets the reply of the first time. A second task for a step that was
asked with other content is refused, as is one whose reply has been forgotten.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from flwr.app import RecordDict

from hfedatm.base.environment import state_root
from hfedatm.base.handover import recordfile

KEPT_REPLIES = 2
_FORGET_AFTER = 24 * 3600.0  # past a task's own time: until then it cannot be replayed


class SecondTask(ValueError):
    """A step was asked for before, in another way or too long ago."""


@dataclass
class Entry:
    """A step under way: set ``reply`` to keep it."""

    reply: RecordDict | None = None


class Journal:
    """The steps of one node.

    Parameters
    ----------
    folder
        Where they are kept; by default beside what the node remembers.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or state_root() / "journal"

    @contextmanager
    def step(self, key: str, digest: str, expires: float, *, keep: bool = True) -> Iterator[Entry]:
        """Do one step; whoever asks for the same one meanwhile waits.

        Parameters
        ----------
        key, digest
            What names the step, and the hash of what is asked.
        expires
            When the task stops being valid, in seconds since the epoch.
        keep
            Whether the reply is kept here; otherwise the same task is done again, by somebody who
            keeps replies.

        Raises
        ------
        SecondTask
            If the step was asked for with other content, or answered so long ago that the reply is
            gone.
        """
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(self._folder / f"{key}.lock"), closing(self._open()) as steps:
            known = steps.execute("SELECT digest, done FROM steps WHERE key = ?", [key]).fetchone()
            if known and known[0] != digest:
                raise SecondTask("this step was asked for before, with other content")
            path = self._folder / f"{key}.reply"
            entry = Entry(recordfile.load(path) if known and known[1] and path.exists() else None)
            if known and known[1] and entry.reply is None:
                raise SecondTask("this step was answered before, and the reply is gone")
            answered = entry.reply is not None
            with steps:
                steps.execute(
                    "INSERT OR IGNORE INTO steps VALUES (?, ?, 0, ?)", [key, digest, expires]
                )
            yield entry
            if keep and entry.reply is not None and not answered:
                # Not waiting for the disk: a node that crashes has it to do again.
                recordfile.save(entry.reply, path, durable=False)
                with steps:
                    steps.execute("UPDATE steps SET done = 1 WHERE key = ?", [key])
                self._forget(steps)

    def _open(self) -> sqlite3.Connection:
        steps = sqlite3.connect(self._folder / "steps.db", timeout=60)
        steps.execute(
            "CREATE TABLE IF NOT EXISTS steps "
            "(key TEXT PRIMARY KEY, digest TEXT, done INTEGER, expires REAL)"
        )
        return steps

    def _forget(self, steps: sqlite3.Connection) -> None:
        replies = sorted(
            self._folder.glob("*.reply"), key=lambda path: path.stat().st_mtime, reverse=True
        )
        for path in replies[KEPT_REPLIES:]:
            path.unlink(missing_ok=True)
            path.with_suffix(".lock").unlink(missing_ok=True)
        with steps:
            steps.execute("DELETE FROM steps WHERE expires < ?", [time.time() - _FORGET_AFTER])
