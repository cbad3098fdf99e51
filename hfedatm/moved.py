"""Old import paths still work for one minor version, with a deprecation notice.

Whoever imports a module by an old name gets the module itself: classes are the same objects.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "client_app.methods.base": "hfedatm.contracts",
    "client_app.wrapper": "hfedatm.contracts",
    "server_app.rules.base": "hfedatm.contracts",
    "hfedatm.tracking": "server_app.tracking",
    "hfedatm.tracking.base": "hfedatm.contracts",
    "hfedatm.assembly": "hfedatm.base.building",
    "hfedatm.errors": "hfedatm.base.errors",
    "hfedatm.plugins": "hfedatm.base.plugins",
    "hfedatm.records": "hfedatm.base.records",
    "hfedatm.results": "hfedatm.base.results",
    "hfedatm.settings": "hfedatm.base.settings",
}
"""What examples and documentation once imported, and where it is now."""


class _OldNames(MetaPathFinder, Loader):
    """Asked last, and so only for modules that nobody else finds."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to load a module that moved."""
        return ModuleSpec(name, self) if name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make the module that `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of the new name in the place of the old one."""
        old = module.__name__
        notice = f"{old} is deprecated; import from {MOVED[old]}"
        warnings.warn(notice, DeprecationWarning, stacklevel=2)
        sys.modules[old] = import_module(MOVED[old])


def keep_old_names() -> None:
    """From now on old names are found."""
    if not any(isinstance(finder, _OldNames) for finder in sys.meta_path):
        sys.meta_path.append(_OldNames())
