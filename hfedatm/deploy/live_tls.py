"""A server's certificate that is renewed while the server runs.

A renewed certificate replaces two files one after the other. The server looks at them now and then
and takes a pair that fits; connections that are open keep the old one.
"""

from __future__ import annotations

import logging
import ssl
import threading
from pathlib import Path

log = logging.getLogger("uvicorn.error")

LOOK_EVERY = 10.0
"""Seconds between two looks at the files."""


class LiveCertificate:
    """Keeps the certificate of a TLS context equal to its files.

    Parameters
    ----------
    context
        A server's context that has loaded the files already.
    certificate, key
        The files, PEM.
    """

    def __init__(self, context: ssl.SSLContext, certificate: Path, key: Path) -> None:
        self._context, self._files = context, (certificate, key)
        self._seen = self._state()

    def look(self) -> bool:
        """Load the files if they have changed and fit each other; return whether they were."""
        now = self._state()
        if now is None or now == self._seen:
            return False
        try:
            # Into another context first: a pair that does not fit must not spoil the one in use.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*self._files)
            self._context.load_cert_chain(*self._files)
        except (OSError, ssl.SSLError) as error:
            log.warning("the new certificate %s cannot be used yet: %s", self._files[0], error)
            return False
        self._seen = now
        log.info("took the renewed certificate %s", self._files[0])
        return True

    def watch(self) -> None:
        """Look again and again, in a thread that ends with the process."""
        pause = threading.Event()

        def look() -> None:
            while not pause.wait(LOOK_EVERY):
                self.look()

        threading.Thread(target=look, name="certificate", daemon=True).start()

    def _state(self) -> list[tuple[int, int]] | None:
        try:
            return [(stat.st_mtime_ns, stat.st_ino) for stat in (f.stat() for f in self._files)]
        except OSError:
            return None
