"""A spool: a directory through which two processes hand each other work.

The files of a job share a stem: ``.request`` (written by the process that asks), then ``.result``
or ``.error`` (written by the process that serves). Every file appears by rename, so no reader sees
it half written, and an answered job is never done again.

The process that serves the spool holds a lock on its ``lease`` file. The kernel releases the lock
as soon as that process ends, however it ends, so a dead server is noticed at once and two living
servers can never serve the same spool.
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
"""Most characters of the reason why a job has no result."""


class HandoverError(UserError):
    """A job was not done; the message is meant for the log of the process that asked."""


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
        """Return the result, or raise the error that was written instead."""
        try:
            if self.error.exists():
                with self.error.open("rb") as file:
                    reason = file.read(MOST_REASON).decode(errors="replace")
                raise HandoverError(reason)
            return recordfile.load(self.result)
        except (OSError, recordfile.BadRecords) as error:
            raise HandoverError(f"the answer cannot be read: {printable(error)}") from None

    def finish(self, content: RecordDict) -> None:
        """Write the result."""
        recordfile.save(content, self.result)
        _remove(self.request)

    def fail(self, reason: str) -> None:
        """Write the reason why there is no result."""
        write_text(self.error, printable(reason, MOST_REASON))
        _remove(self.request)


class Spool:
    """The jobs of one node, and the lease of the process that does them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lease = folder / "lease"

    def submit(self, run_id: int, message_id: str, content: RecordDict) -> Job:
        """Put a job into the spool, unless it is already there or answered.

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
            _remove(request)  # its server died after it answered and before it removed the request
        return None

    def forget(self, keep: int = 2) -> None:
        """Delete all but the newest `keep` answers, and half-written ones of killed processes."""
        answers = [*self.folder.glob("*.result"), *self.folder.glob("*.error")]
        answers.sort(key=_age)
        # Keep half-written requests: they are being written, or the next message withdraws them.
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
            # `served` takes the lock for an instant, which must not turn a new server away.
            for _ in range(20):
                if held := _lock(file):
                    break
                time.sleep(0.05)
            yield held


def _age(path: Path) -> float:
    """Return a sort key that grows with a file's age; a deleted file counts as the oldest."""
    try:
        return -path.stat().st_mtime
    except OSError:
        return 0.0


def _remove(path: Path) -> None:
    """Remove the file or folder at a job's path."""
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
