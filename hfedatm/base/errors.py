"""The error that a user can fix: shown as one message, without a traceback."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

PLUGGED: set[str] = set()
"""Top-level names of the modules that settings named: a user's code, wherever it is installed."""

_OURS = tuple(
    f"{Path(__file__).resolve().parents[2] / package}/"
    for package in (
        "client_app",
        "hfedatm",
        "hfedatm_core",
        "hfedatm_files",
        "server_app",
        "station_app",
    )
)
_LIBRARIES = tuple(
    f"{Path(sysconfig.get_path(kind)).resolve()}/"
    for kind in ("stdlib", "platstdlib", "purelib", "platlib")
)


class UserError(Exception):
    """A mistake that the person who started the run can fix; the message says how."""


def explain(error: BaseException) -> str:
    """Return kind, message and place of an error in one line.

    The place is the innermost line of the user's code, or else of ours. The line of a library that
    noticed the error would not tell the user what to fix.
    """
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, UserError | SyntaxError):  # these messages already name the place
        return text
    place = _place(error.__traceback__)
    return f"{text} ({place})" if place else text


def _place(trace: TracebackType | None) -> str:
    found: dict[str, str] = {}  # owner of the code -> its innermost line
    for frame, line in traceback.walk_tb(trace):
        path = frame.f_code.co_filename
        if path.startswith("<frozen"):
            continue
        name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        resolved = str(Path(path).resolve())
        if name in PLUGGED or not resolved.startswith(_OURS + _LIBRARIES):
            owner = "user"
        else:
            owner = "ours" if resolved.startswith(_OURS) else "library"
        found[owner] = f"{frame.f_code.co_name}, {Path(path).name}:{line}"
    return next((found[owner] for owner in ("user", "ours", "library") if owner in found), "")
