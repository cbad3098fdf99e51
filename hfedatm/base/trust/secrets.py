"""Where a deployed process finds the secrets its owner gave it."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = "HFEDATM_SECRETS"
"""Environment variable of a deployed process: the folder with its machine's secrets."""


def secrets_folder() -> Path | None:
    """Return the folder with this machine's secrets; None where nobody has any.

    In a simulation, in one process and in a deployment without TLS there is nobody to tell from
    anybody else.
    """
    folder = os.environ.get(FOLDER)
    return Path(folder) if folder else None
