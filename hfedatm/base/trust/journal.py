"""Journal of the tasks a node was given: one content per step, answered once.

A task that is delivered twice gets the first reply again. The node refuses a second task for the
same step with other content, and a task whose reply it has deleted. The journal forgets a step when
its task can no longer be replayed.
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
_FORGET_AFTER = 24 * 3600.0  # after a task has expired and so cannot be replayed


class SecondTask(ValueError):
    """A step was asked for before, with other content or too long ago."""


@dataclass
class Entry:
    """A step under way: set ``reply`` to keep it."""

    reply: RecordDict | None = None


class Journal:
    """The steps of one node.

    Parameters
    ----------
    folder
        Where the steps are kept; by default beside the node's memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or state_root() / "journal"

    @contextmanager
    def step(self, key: str, digest: str, expires: float, *, keep: bool = True) -> Iterator[Entry]:
        """Do one step; another request for the same step waits.

        Parameters
        ----------
        key, digest
            The name of the step, and the hash of the task's content.
        expires
            When the task stops being valid, in seconds since the epoch.
        keep
            Whether the journal keeps the reply; otherwise a repeated task is passed on again, to a
            process that keeps replies.

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
            self._forget(steps)
            yield entry
            if keep and entry.reply is not None and not answered:
                # No wait for the disk: after a crash the node does the step again.
                recordfile.save(entry.reply, path, durable=False)
                with steps:
                    steps.execute("UPDATE steps SET done = 1 WHERE key = ?", [key])
                self._drop_old_replies()

    def _open(self) -> sqlite3.Connection:
        steps = sqlite3.connect(self._folder / "steps.db", timeout=60)
        steps.execute(
            "CREATE TABLE IF NOT EXISTS steps "
            "(key TEXT PRIMARY KEY, digest TEXT, done INTEGER, expires REAL)"
        )
        return steps

    def _forget(self, steps: sqlite3.Connection) -> None:
        """Forget the steps whose tasks have expired, answered or not."""
        over = [time.time() - _FORGET_AFTER]
        keys = steps.execute("SELECT key FROM steps WHERE expires < ?", over).fetchall()
        for (key,) in keys:
            # Nobody waits for this lock: an expired task is refused before it takes the lock.
            for kind in ("lock", "reply"):
                (self._folder / f"{key}.{kind}").unlink(missing_ok=True)
        if keys:
            with steps:
                steps.execute("DELETE FROM steps WHERE expires < ?", over)

    def _drop_old_replies(self) -> None:
        replies = sorted(
            self._folder.glob("*.reply"), key=lambda path: path.stat().st_mtime, reverse=True
        )
        for path in replies[KEPT_REPLIES:]:
            path.unlink(missing_ok=True)
            path.with_suffix(".lock").unlink(missing_ok=True)
