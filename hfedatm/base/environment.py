"""Environment variables that configure a deployed process."""

import os
from pathlib import Path

PRELOAD = "HFEDATM_PRELOAD"
"""Environment variable of a deployed node: the modules that its work needs."""

HELPER = "HFEDATM_HELPER"
"""Environment variable of a deployed node: the folder of its helper (`hfedatm.deploy.prefork`)."""

APP = "HFEDATM_APP"
"""Environment variable of a deployed node: the installed ClientApp, as ``module:name``."""

POLICY = "HFEDATM_POLICY"
"""Environment variable of a deployed process: the file with its owner's policy."""


def state_root(root: str | Path | None = None) -> Path:
    """Return the folder in which a node keeps its files."""
    return Path(root or os.environ.get("HFEDATM_STATE") or Path.home() / ".cache/hfedatm/state")
