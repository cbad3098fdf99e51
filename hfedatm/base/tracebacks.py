"""Whole tracebacks, for the person who started the run.

One line says what went wrong and where; the traceback that belongs to it is kept beside the
results. The traceback of a deployed node stays in the node's own log, because it reveals the
owner's code and folders.
"""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hfedatm.base.environment import POLICY
from hfedatm.base.errors import UserError

FILE = "errors.txt"
LONGEST = 20_000
"""Most characters of a traceback; the last ones are kept because they tell most."""
MOST = 100
"""Most different tracebacks that are kept."""

_log = logging.getLogger("hfedatm.tracebacks")
_debugging = False


def whole(error: BaseException) -> str:
    """Return the traceback of an error; none for a `UserError`, whose message says what to fix."""
    if isinstance(error, UserError) and error.__cause__ is None:
        return ""
    return "".join(traceback.format_exception(error))[-LONGEST:]


def to_send(error: BaseException) -> str:
    """Return the traceback that a reply carries; a deployed node logs it and sends none."""
    text = whole(error)
    if POLICY not in os.environ:
        return text
    if text:
        _log.error(text)
    return ""


def keep(who: str, text: str) -> None:
    """Keep a traceback, except in a deployed process, where other nodes' errors are not stored."""
    if text and POLICY not in os.environ:
        _log.error("%s", text[-LONGEST:], extra={"who": who})


@contextmanager
def kept_in(folder: Path) -> Iterator[None]:
    """Write each traceback into a run's folder once, even if many clients fail in the same way."""
    handler = _EachOnce(folder / FILE)
    _log.addHandler(handler)
    before, _log.propagate = _log.propagate, False
    try:
        yield
    finally:
        _log.propagate = before
        _log.removeHandler(handler)


class _EachOnce(logging.Handler):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._seen: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Append a traceback that is not there yet."""
        text = record.getMessage()
        if text in self._seen or len(self._seen) >= MOST:
            return
        self._seen.add(text)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{getattr(record, 'who', 'this process')}:\n{text.rstrip()}\n\n")


# --- stopping a run at the first error


@contextmanager
def debugging() -> Iterator[None]:
    """Let errors of clients, stations and rules end the run where they are raised."""
    global _debugging
    _debugging = True
    try:
        yield
    finally:
        _debugging = False


def raise_if_debugging(error: BaseException) -> None:
    """Raise an error that would otherwise become a reply."""
    if _debugging:
        raise error


def is_debugging() -> bool:
    """Return whether the first error is to end the run."""
    return _debugging
