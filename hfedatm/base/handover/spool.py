"""A spool: a directory through which two processes hand each other work.

The files of a job share a stem: ``.request`` (written by the process that asks), then ``.result``
or ``.error`` (written by the process that serves). Every file appears by rename, so no reader sees
it half written, and an answered job is never done again.

The process that serves the spool holds a lock on its ``lease`` file. The kernel releases the lock
as soon as that process ends, however it ends, so a dead server is noticed at once and two living
servers can never serve the same spool. In the same way, the process that asks holds a lock on the
``.asking`` file of its job: a request for which nobody waits any more is withdrawn. So several runs
can use one spool at once; their jobs queue.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
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


def explain_disk(error: OSError) -> str:
    """Return why a file could not be written, without the name of the file."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk of this station is full: free some space in its spool"
    return f"a file of this station's spool cannot be written: {error.strerror}"


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
    def asking(self) -> Path:
        """The file on which the process that waits for the answer holds a lock."""
        return self.stem.with_suffix(".asking")

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Show, until the block ends, that this process waits for the answer."""
        while True:
            with self.asking.open("a") as file:
                fcntl.flock(file, fcntl.LOCK_SH)
                if _is_at(file, self.asking):  # else it was withdrawn between the two lines above
                    yield
                    return

    def withdraw(self) -> bool:
        """Remove the request if nobody waits for its answer; return whether nobody does."""
        with self.asking.open("a") as file:
            if not _lock(file):
                return False
            _remove(self.request)
            self.asking.unlink(missing_ok=True)
            return True

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
        text = printable(reason, MOST_REASON)
        try:
            write_text(self.error, text)
        except OSError:  # a full disk: the request makes room for the reason
            os.truncate(self.request, 0)
            write_text(self.error, text)
        finally:
            _remove(self.request)

    @property
    def lost(self) -> bool:
        """Whether the job has neither a request nor an answer any more."""
        return not self.request.exists() and not self.done


class Spool:
    """The jobs of one node, and the lease of the process that does them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lease = folder / "lease"

    @contextmanager
    def submit(self, run_id: int, message_id: str, content: RecordDict) -> Iterator[Job]:
        """Put a job into the spool, unless it is there or answered, and wait for it in the block.

        When the block ends, or this process does, nobody waits for the job any more.
        """
        # The id comes over the network and becomes a file name: only its digest is used.
        digest = hashlib.sha256(message_id.encode()).hexdigest()[:24]
        job = Job(self.folder / f"{run_id}-{digest}")
        with job.wait():
            if not job.done and not job.request.exists():
                try:
                    recordfile.save(content, job.request)
                except OSError as error:
                    raise HandoverError(explain_disk(error)) from None
            yield job

    def waiting(self) -> Job | None:
        """Return the oldest job that has no answer and for which somebody waits."""
        for request in sorted(self.folder.glob("*.request"), key=_age, reverse=True):
            job = Job(request.with_suffix(""))
            if job.done:  # its server died after it answered and before it removed the request
                _remove(request)
            elif not job.withdraw():
                return job
        return None

    def forget(self, keep: int = 2) -> None:
        """Delete all but the newest `keep` answers of those for which nobody waits.

        Also delete what killed processes have left.
        """
        answers = [*self.folder.glob("*.result"), *self.folder.glob("*.error")]
        for path in sorted(answers, key=_age)[keep:]:
            if Job(path).withdraw():
                _remove(path)
        for path in half_written(self.folder):
            # Whoever writes a request waits for its answer.
            job = Job(path.with_name(path.name.partition(".")[0]))
            if ".request." not in path.name or job.withdraw():
                _remove(path)
        for path in self.folder.glob("*.asking"):
            job = Job(path)
            if not job.done and not job.request.exists():
                job.withdraw()

    @property
    def served(self) -> bool:
        """Whether a living process holds the lease."""
        with self._lease.open("a") as file:
            return not _lock(file)

    @contextmanager
    def starting(self) -> Iterator[bool]:
        """Hold the right to start a server; yields False while another process starts one."""
        with (self.folder / "starting").open("a") as file:
            yield _lock(file)

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


def _is_at(file: IO[str], path: Path) -> bool:
    """Return whether an open file is the one that has this name now."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
