"""What the shell offers on Tab: settings with their values, runs, tables.

Nothing here imports torch: a key press must not take seconds.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import typer

from hfedatm.base.settings import describe, load_presets

# What a setting names: a module in this folder of that package, which has this in its text.
BUILT_IN = {
    "dataset": ("hfedatm_core", "data", "def load("),
    "model": ("hfedatm_core", "models", "def build("),
    "client-method": ("client_app", "methods", "class "),
    "server-rule": ("server_app", "rules", "class "),
    "robust-clients": ("hfedatm_core", "robust/rules", "class "),
    "robust-stations": ("hfedatm_core", "robust/rules", "class "),
    "track": ("server_app", "tracking", "class "),
}


def complete_setting(ctx: typer.Context, incomplete: str) -> list[str]:
    """Offer keys, and after ``key=`` its values.

    Bash takes ``=`` for a word of its own, which click drops when it is the last: there the key is
    among the words before, and only what follows ``=`` is to be offered.
    """
    before = [str(word) for word in ctx.params.get("assignments") or []]
    if before[-1:] == ["="]:
        before.pop()
    if before and before[-1] in _rows():
        return [value for value in values_of(before[-1]) if value.startswith(incomplete)]
    key, equals, _ = incomplete.partition("=")
    offers = (
        [f"{key}={value}" for value in values_of(key)] if equals else [f"{k}=" for k in _rows()]
    )
    return [offer for offer in offers if offer.startswith(incomplete)]


def values_of(key: str) -> list[str]:
    """Return the values a setting can have, if they can be listed; else its default."""
    if key == "preset":
        return sorted(load_presets())
    if key in BUILT_IN:
        return _built_in(*BUILT_IN[key])
    allowed, default = _rows().get(key, ("", ""))
    if " | " in allowed:
        return allowed.split(" | ")
    if allowed == "boolean":
        return ["true", "false"]
    return [default] if default else []


def complete_run(incomplete: str) -> list[str]:
    """Offer the runs of ``results``, by name and by folder."""
    names = sorted(path.parent.name for path in Path("results").glob("*/config.json"))
    offers = [*names, *(f"results/{name}" for name in names)]
    return [offer for offer in offers if offer.startswith(incomplete)]


def complete_table(incomplete: str) -> list[str]:
    """Offer the tables that can be reproduced."""
    from hfedatm.reproduce.tables import TABLES

    return [name for name in TABLES if name.startswith(incomplete)]


def _rows() -> dict[str, tuple[str, str]]:
    return {row["key"]: (row["allowed"], str(row["default"])) for row in describe()}


def _built_in(package: str, folder: str, defines: str) -> list[str]:
    spec = find_spec(package)  # of the package above, which is found without being imported
    folders = [Path(place) / folder for place in (spec and spec.submodule_search_locations) or []]
    return sorted(
        path.stem.replace("_", "-")
        for place in folders
        for path in place.glob("*.py")
        if path.stem not in ("__init__", "base") and defines in path.read_text(encoding="utf-8")
    )
