"""Names of built-in modules, found without importing them.

Nothing here imports torch: ``hfedatm settings`` and a press of Tab must not take seconds.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path


def built_in_names(package: str, defines: str = "class ") -> list[str]:
    """Return the names of a package's modules whose source text contains ``defines``."""
    return sorted(
        path.stem.replace("_", "-")
        for path in built_in_files(package)
        if defines in path.read_text(encoding="utf-8")
    )


def built_in_files(package: str) -> list[Path]:
    """Return the module files of a package; each file defines one built-in."""
    found = (path for folder in _folders(package) for path in sorted(folder.glob("*.py")))
    return [path for path in found if path.stem not in ("__init__", "base")]


def _folders(package: str) -> list[Path]:
    if package in sys.modules:
        return [Path(folder) for folder in sys.modules[package].__path__]
    top, *inside = package.split(".")
    spec = find_spec(top)  # imports nothing; a submodule's spec would import its parent
    return [Path(folder, *inside) for folder in (spec and spec.submodule_search_locations) or []]
