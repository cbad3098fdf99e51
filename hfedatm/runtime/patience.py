"""Wait for a SuperLink that does not answer for a while, and say so if it stays silent."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import httpx

from hfedatm.base.errors import UserError
from hfedatm.base.text import printable

V = TypeVar("V")

AGAIN = 1.0
"""Seconds between two attempts."""


class SilentLink(UserError):
    """A SuperLink has not answered its own run for too long."""


def patiently(ask: Callable[[], V], patience: float) -> V:
    """Return what ``ask`` returns; ask again for ``patience`` seconds if the link is silent.

    Flower asks again by itself, except where a timeout happens while a TLS connection is made.
    """
    heard = time.monotonic()
    while True:
        try:
            return ask()
        except httpx.TransportError as error:
            if time.monotonic() - heard >= patience:
                raise SilentLink(
                    f"it is cut off: its SuperLink has not answered for {patience:g} s: "
                    f"{printable(error) or type(error).__name__}"
                ) from None
            time.sleep(AGAIN)
