"""Text from elsewhere, made safe to show: one line, no control characters, a limited length."""

from __future__ import annotations

from collections.abc import Iterable

LIMIT = 200
"""Most characters that are shown of a reason or a name."""


def printable(text: object, limit: int = LIMIT) -> str:
    r"""Return at most ``limit`` characters of ``text``, safe to show in a terminal, log or page.

    Newlines, escape sequences, and characters that are invisible or change the direction of writing
    become escapes such as ``\n`` and ``\x1b``; text that is already escaped stays as it is.
    """
    given = text if isinstance(text, str) else _shown(text)
    # Cut first: showing a line must not read 100 MB of text.
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii")
        for c in given[: limit + 1]
    )
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def _shown(value: object) -> str:
    try:
        return str(value)
    except Exception:  # for example an integer with more digits than Python prints
        return f"a value of type {type(value).__name__}"


def number(value: float | None) -> str:
    """Return a number of any size in a form that people can read."""
    return "-" if value is None else f"{value:.4g}"


def names_in(setting: str) -> tuple[str, ...]:
    """Return the names in a setting that lists names, separated by commas."""
    return tuple(filter(None, (name.strip() for name in setting.split(","))))


def labels(asked: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the labels of the numbers that ``show-metrics`` asks for.

    A metric of the evaluation has two labels, ``source f1`` and ``unseen f1``; a name that no round
    has is its own label.
    """
    known = list(known)
    found = [
        [label for label in known if label in (name, f"source {name}", f"unseen {name}")] or [name]
        for name in asked
    ]
    return list(dict.fromkeys(label for some in found for label in some))
