"""What every uvicorn server of a process does besides serving: renewed certificates, JSON lines.

Flower starts its servers itself and has no option for either.
"""

from __future__ import annotations

from pathlib import Path

import uvicorn

from hfedatm.base import logs
from hfedatm.deploy.live_tls import LiveCertificate


def prepare() -> None:
    """Make the servers that this process starts follow their certificates and log as wanted."""
    _watch_certificates()
    if logs.wanted():
        _keep_json()


def _watch_certificates() -> None:
    load = uvicorn.Config.load

    def load_and_watch(config: uvicorn.Config) -> None:
        load(config)
        if config.ssl and config.ssl_certfile and config.ssl_keyfile:
            files = Path(config.ssl_certfile), Path(str(config.ssl_keyfile))
            LiveCertificate(config.ssl, *files).watch()

    uvicorn.Config.load = load_and_watch  # type: ignore[assignment, method-assign]


def _keep_json() -> None:
    """Configure the log again whenever uvicorn has configured it."""
    configure = uvicorn.Config.configure_logging

    def configure_both(config: uvicorn.Config) -> None:
        configure(config)
        logs.configure()

    uvicorn.Config.configure_logging = configure_both  # type: ignore[assignment, method-assign]
    logs.configure()
