"""A spool: a directory through which two processes hand each other work.

One job is up to three files that share a stem: ``.request`` (written by who wants it done), then
``.result`` or ``.error`` (written by who did it). Every file appears by rename, so none is ever
seen half written, and an answered job is never done again.

Whoever serves the spool holds a lock on its ``lease`` file. The kernel releases the lock the moment
that process ends, however it ends, so a dead server is noticed at once and two living ones can
never serve the same spool.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from flwr.app import RecordDict

from hfedatm.base.errors import UserError
from hfedatm.base.handover import recordfile
from hfedatm.base.text import printable
from hfedatm_files import half_written, write_text

MOST_REASON = 4000
"""Characters of the reason why a job has no result."""


class HandoverError(UserError):
    """A job was not done; the text is meant for the log of whoever asked."""


@dataclass(frozen=True)
class Job:
    """One message's work, with its answer once there is one."""

    stem: Path

    @property
    def request(self) -> Path:
        """The file with the message's content."""
        return self.stem.with_suffix(".request")

    @property
    def result(self) -> Path:
        """The file with the answer."""
        return self.stem.with_suffix(".result")

    @property
    def error(self) -> Path:
        """The file that says why there is no answer."""
        return self.stem.with_suffix(".error")

    @property
    def done(self) -> bool:
        """Whether the job has been answered."""
        return self.result.exists() or self.error.exists()

    def answer(self) -> RecordDict:
        """Return the result, or raise the error that was left in its place."""
        try:
            if self.error.exists():
                with self.error.open("rb") as file:
                    reason = file.read(MOST_REASON).decode(errors="replace")
                raise HandoverError(reason)
            return recordfile.load(self.result)
        except (OSError, recordfile.BadRecords) as error:
            raise HandoverError(f"the answer cannot be read: {printable(error)}") from None

    def finish(self, content: RecordDict) -> None:
        """Leave the result."""
        recordfile.save(content, self.result)
        _remove(self.request)

    def fail(self, reason: str) -> None:
        """Leave the reason why there is no result."""
        write_text(self.error, printable(reason, MOST_REASON))
        _remove(self.request)


class Spool:
    """The jobs of one node and the lease of whoever does them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lease = folder / "lease"

    def submit(self, run_id: int, message_id: str, content: RecordDict) -> Job:
        """Put a job into the spool, unless it is there or answered already.

        A node handles one message at a time, so a new message means that nobody waits for the
        older requests any more; they are withdrawn.
        """
        # The id comes over the network and becomes a file name: only its digest is used.
        digest = hashlib.sha256(message_id.encode()).hexdigest()[:24]
        job = Job(self.folder / f"{run_id}-{digest}")
        for other in self.folder.glob("*.request*"):
            if other != job.request:
                _remove(other)
        if not job.done and not job.request.exists():
            recordfile.save(content, job.request)
        return job

    def waiting(self) -> Job | None:
        """Return a job that has no answer yet."""
        for request in self.folder.glob("*.request"):
            job = Job(request.with_suffix(""))
            if not job.done:
                return job
            _remove(request)  # its server ended between answering and tidying up
        return None

    def forget(self, keep: int = 2) -> None:
        """Delete all answers but the newest `keep`, and half-written ones of a killed process."""
        answers = [*self.folder.glob("*.result"), *self.folder.glob("*.error")]
        answers.sort(key=_age)
        # A half-written request is one that is being made, or is withdrawn by the next.
        half = [path for path in half_written(self.folder) if ".request." not in path.name]
        for path in answers[keep:] + half:
            _remove(path)

    @property
    def served(self) -> bool:
        """Whether a living process holds the lease."""
        with self._lease.open("a") as file:
            return not _lock(file)

    @contextmanager
    def lease(self) -> Iterator[bool]:
        """Hold the lease; yields False if another process has it."""
        with self._lease.open("a") as file:
            # `served` looks by locking for an instant, which must not turn an heir away.
            for _ in range(20):
                if held := _lock(file):
                    break
                time.sleep(0.05)
            yield held


def _age(path: Path) -> float:
    """Return what is larger the older a file is; one that has just gone is the oldest."""
    try:
        return -path.stat().st_mtime
    except OSError:
        return 0.0


def _remove(path: Path) -> None:
    """Remove what lies at a job's place, whatever somebody has put there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
