"""Where to keep what takes long to compute or to unpack."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return the cache folder: ``$HFEDATM_CACHE``, else ``hfedatm`` in the user's cache folder."""
    if chosen := os.environ.get("HFEDATM_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hfedatm"
