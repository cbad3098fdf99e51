"""The Flower apps of `flwr run`: ``from hfedatm.apps import client, server``."""

from hfedatm.runtime.own_tiers import require_own_tiers

require_own_tiers()

from client_app.app import app as client  # noqa: E402 (what hides it is said first)
from server_app.app import app as server  # noqa: E402

__all__ = ["client", "server"]
