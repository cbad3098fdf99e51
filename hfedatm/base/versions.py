"""Which versions of this package work together: those with the same major and minor number.

Patch releases change neither what travels between nodes nor what is computed, so the nodes of a
deployment may differ in them and be upgraded one after the other.
"""

from __future__ import annotations

import re
from importlib.metadata import version

from hfedatm.base.errors import UserError
from hfedatm.base.text import printable

HEADER = "hfedatm-version"
"""Header in which a gateway says its version when it is asked for its health."""
_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})(?:[.a-z+\-].{0,60})?", re.DOTALL)


class WrongVersion(UserError):
    """Two nodes have versions that do not work together; the message says which, and the cure."""


def own_version() -> str:
    """Return the version of this installation."""
    return version("hfedatm")


def check_version(theirs: object, own: str | None = None) -> None:
    """Raise `WrongVersion` unless a node of version ``theirs`` works with this one.

    >>> check_version("0.4.7", own="0.4.0")
    >>> check_version("0.5.0", own="0.4.0")
    Traceback (most recent call last):
    hfedatm.base.versions.WrongVersion: it has hfedatm 0.5.0 and this node 0.4.0: install 0.4.x there
    """  # noqa: E501 (a message is one line)
    own = own or own_version()
    wanted = _series(own)
    if not isinstance(theirs, str):
        raise WrongVersion(f"it does not say its version: install hfedatm {wanted}.x there")
    if _series(theirs) != wanted:
        raise WrongVersion(
            f"it has hfedatm {printable(theirs, 40)} and this node {own}: install {wanted}.x there"
        )


def _series(text: str) -> str:
    found = _VERSION.fullmatch(text)
    return f"{found[1]}.{found[2]}" if found else ""
