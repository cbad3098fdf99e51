"""Old import paths still work for one minor version, with a deprecation notice.

Importing an old name returns the module itself, so its classes are the same objects.
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
    "server_app.rules.fedrc": "server_app.rules.fedrc_weights",
    "hfedatm.tracking": "server_app.tracking",
    "hfedatm.tracking.base": "hfedatm.contracts",
    "hfedatm.assembly": "hfedatm.base.building",
    "hfedatm.errors": "hfedatm.base.errors",
    "hfedatm.plugins": "hfedatm.base.plugins",
    "hfedatm.records": "hfedatm.base.records",
    "hfedatm.results": "hfedatm.base.results",
    "hfedatm.settings": "hfedatm.base.settings",
}
"""Modules that examples and documentation once imported -> their new names."""


class _OldNames(MetaPathFinder, Loader):
    """Python asks this finder last, so only for modules that no other finder has."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module that has moved."""
        return ModuleSpec(name, self) if name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make the module that `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Replace the old module by the module of the new name."""
        old = module.__name__
        notice = f"{old} is deprecated; import from {MOVED[old]}"
        warnings.warn(notice, DeprecationWarning, stacklevel=2)
        sys.modules[old] = import_module(MOVED[old])


def keep_old_names() -> None:
    """Let imports of old names succeed from now on."""
    if not any(isinstance(finder, _OldNames) for finder in sys.meta_path):
        sys.meta_path.append(_OldNames())
