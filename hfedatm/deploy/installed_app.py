"""A deployed node runs the ClientApp that is installed on it, whatever app a run brings along.

Flower unpacks the app of a run on every node and imports the modules in its manifest: anyone who
may start a run could run any code. Our runs bring no code, so a node need not load a run's app.
"""

from __future__ import annotations

import os
from importlib import import_module

from flwr.clientapp import ClientApp

from hfedatm.base.environment import APP
from hfedatm.flower_internals import load_no_app_but


def run_installed_app_only() -> None:
    """Make this process run only the installed app from now on."""
    load_no_app_but(installed_app)


def installed_app() -> ClientApp:
    """Return the ClientApp that the owner of this node chose."""
    module, _, name = os.environ[APP].partition(":")
    app = getattr(import_module(module), name)
    if not isinstance(app, ClientApp):
        raise TypeError(f"{APP}: {os.environ[APP]} is not a ClientApp")
    return app
