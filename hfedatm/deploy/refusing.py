"""The gateway's refusal of withdrawn keys, from the moment that their list changes."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from hfedatm.base.trust import revocation
from hfedatm.flower_internals import PUBLIC_KEY_HEADER


class Withdrawn:
    """The withdrawn keys in a folder of secrets; none without a folder."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._seen: tuple[int, int] | None = None
        self._keys: dict[str, str] = {}

    def refuses(self, headers: Mapping[str, str]) -> str | None:
        """Return the name of the node whose withdrawn key signed a request; None for others.

        A header that is no key is for the SuperLink to refuse.
        """
        keys = self._current()
        if not keys:
            return None
        try:
            text = base64.b64decode(headers.get(PUBLIC_KEY_HEADER, ""), validate=True)
            key = serialization.load_pem_public_key(text)
        except (ValueError, TypeError, binascii.Error, UnsupportedAlgorithm):
            return None
        return keys.get(revocation.fingerprint(key))

    def _current(self) -> dict[str, str]:
        if self._folder is None:
            return {}
        try:
            stat = (self._folder / revocation.FILE).stat()
        except OSError:
            return {}
        state = (stat.st_mtime_ns, stat.st_ino)
        if state != self._seen:
            self._keys, self._seen = revocation.revoked(self._folder), state
        return self._keys
