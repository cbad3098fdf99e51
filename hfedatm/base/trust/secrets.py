"""Where a deployed process finds the secrets its owner gave it."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = "HFEDATM_SECRETS"
"""Environment variable of a deployed process: the folder with its machine's secrets."""


def secrets_folder() -> Path | None:
    """Return the folder with this machine's secrets; None if there are none.

    A simulation, a run in one process and a deployment without TLS authenticate no nodes.
    """
    folder = os.environ.get(FOLDER)
    return Path(folder) if folder else None
