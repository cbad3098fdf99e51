"""Log lines as JSON, if the operator asks for them: one object per line, with the run it is about.

The three tiers of a run are different processes on different machines, and Flower numbers their
runs apart. A task carries the run's own id, so every tier can write it into its lines.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime

VARIABLE = "HFEDATM_LOG"
"""Environment variable: ``json`` for lines of JSON; inherited by everything a process starts."""
PROCESS = "HFEDATM_PROCESS"
"""Environment variable of a deployed process: its name, such as ``station-1-node``."""
# Flower and uvicorn give these loggers handlers of their own.
_WITH_HANDLERS = ("flwr", "uvicorn", "uvicorn.error", "uvicorn.access", "hfedatm")
_EVERY_REQUEST = "uvicorn.access"

_run = ""  # a process works for one run at a time


def wanted() -> bool:
    """Return whether log lines are to be JSON."""
    return os.environ.get(VARIABLE) == "json"


def about(run: str) -> None:
    """Say which run the lines of this process are about from now on."""
    global _run
    _run = run


def configure() -> None:
    """Make all lines of this process JSON, if that is wanted; may be called again."""
    if not wanted():
        return
    for name in _WITH_HANDLERS:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = name != _EVERY_REQUEST  # nodes ask for work all the time
    logging.getLogger("hfedatm").setLevel(logging.INFO)
    root = logging.getLogger()
    root.handlers[:] = [_JsonLines(logging.INFO)]


class _JsonLines(logging.Handler):
    """Writes to whatever standard error is now: Flower replaces it to upload a run's log."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if not record.getMessage() and not record.exc_info:
                return  # Flower separates its lines by empty ones
            sys.stderr.write(to_line(record) + "\n")
            sys.stderr.flush()
        except Exception:  # as all handlers do: a log that cannot be written ends no work
            self.handleError(record)


def to_line(record: logging.LogRecord) -> str:
    """Return a record as one line of JSON.

    >>> record = logging.LogRecord("hfedatm", logging.INFO, "", 0, "round %d", (3,), None)
    >>> record.created = 0.0
    >>> about("")
    >>> to_line(record)
    '{"time": "1970-01-01T00:00:00.000+00:00", "level": "info", "logger": "hfedatm", "message": "round 3"}'
    """  # noqa: E501 (the line is as long as it is)
    said = {
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
        "level": record.levelname.lower(),
        "logger": record.name,
        "process": os.environ.get(PROCESS, ""),
        "run": _run,
        "message": record.getMessage(),
        "error": logging.Formatter().formatException(record.exc_info) if record.exc_info else "",
    }
    return json.dumps({key: value for key, value in said.items() if value})
