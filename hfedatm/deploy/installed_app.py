"""A deployed node runs the ClientApp that is installed on it, whatever app a run brings along.

Flower unpacks the app of a run on every node and imports what its manifest names: whoever may start
a run could run any code. Our runs bring no code, so a node needs none of it. The two steps have no
public switch; if Flower renames them this fails, and the node does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module

from flwr.clientapp import ClientApp

APP = "HFEDATM_APP"
"""Environment variable of a deployed node: the installed ClientApp, as ``module:name``."""


def run_installed_app_only() -> None:
    """From now on this process runs no app but the installed one."""
    runtime = import_module("flwr.supernode.runtime.run_clientapp")
    for name in ("install_from_fab", "get_load_client_app_fn"):
        if not callable(getattr(runtime, name, None)):
            raise RuntimeError(f"this version of Flower has no {name}: no app can be kept out")
    runtime.install_from_fab = _unpack_nothing  # type: ignore[attr-defined]
    runtime.get_load_client_app_fn = _load_installed  # type: ignore[attr-defined]


def _unpack_nothing(*_: object, **__: object) -> None:
    return None


def _load_installed(*_: object, **__: object) -> Callable[..., ClientApp]:
    return lambda *_: installed_app()


def installed_app() -> ClientApp:
    """Return the ClientApp that the owner of this node chose."""
    module, _, name = os.environ[APP].partition(":")
    app = getattr(import_module(module), name)
    if not isinstance(app, ClientApp):
        raise TypeError(f"{APP}: {os.environ[APP]} is not a ClientApp")
    return app
