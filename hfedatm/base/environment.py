"""Environment variables by which a deployed process is told what it is."""

import os
from pathlib import Path

PRELOAD = "HFEDATM_PRELOAD"
"""Of a deployed node: the modules that its work needs."""


def state_root(root: str | Path | None = None) -> Path:
    """Return the folder of all that a node keeps."""
    return Path(root or os.environ.get("HFEDATM_STATE") or Path.home() / ".cache/hfedatm/state")
