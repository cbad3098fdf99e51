"""The table of hyper-parameters, and other files of settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from hfedatm.base.settings import SettingsError


def load_presets() -> dict[str, dict[str, Any]]:
    """Rows of the table of hyper-parameters; a row may be ``based-on`` another."""
    path = _table_path()
    table = read_yaml(path).get("presets", {})

    def row(name: str, *above: str) -> dict[str, Any]:
        if name not in table or name in above:
            raise SettingsError(
                f"{path}: preset {above[-1]!r} is based on {name!r}, "
                f"which {'leads back to it' if name in above else 'is not there'}"
            )
        own = dict(table[name] or {})
        base = own.pop("based-on", None)
        return {**(row(base, *above, name) if base else {}), **own}

    return {name: row(name) for name in table}


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the ``key: value`` lines of a YAML file."""
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from None
    if not isinstance(loaded, dict):
        raise SettingsError(f"{path}: must hold 'key: value' lines")
    return {str(key): value for key, value in loaded.items()}


def _table_path() -> Path:
    package = Path(__file__).parents[1]
    # An installed wheel carries the folder inside the package; a checkout and a FAB beside it.
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "master-table.yaml").is_file():
            return folder / "master-table.yaml"
    raise SettingsError("configs/master-table.yaml is missing: reinstall hfedatm")
