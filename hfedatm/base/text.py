"""Text from elsewhere, made safe to show: one line, no control characters, a limited length."""

from __future__ import annotations

LIMIT = 200
"""Characters of a reason or a name that people are shown."""


def printable(text: object, limit: int = LIMIT) -> str:
    r"""Return ``text`` as at most ``limit`` characters that a terminal, log or page only shows.

    Newlines, escape sequences, and characters that are invisible or change the direction of
    writing become escapes such as ``\n`` and ``\x1b``; what was escaped once stays as it is.
    """
    given = text if isinstance(text, str) else _shown(text)
    # Cut first: 100 MB of text must not be looked at to show a line of it.
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii")
        for c in given[: limit + 1]
    )
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def _shown(value: object) -> str:
    try:
        return str(value)
    except Exception:  # such as an integer of more digits than Python writes
        return f"a value of type {type(value).__name__}"
