"""Completions that the shell offers on Tab: settings with their values, runs, tables.

Nothing here imports torch: a key press must not take seconds.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import typer

from hfedatm.base.built_ins import built_in_files, built_in_names
from hfedatm.base.options import as_key, rows_of
from hfedatm.base.presets import load_presets
from hfedatm.base.settings import Settings, keys

# Setting -> package whose modules it names, and the text that such a module contains.
BUILT_IN = {
    "dataset": ("hfedatm_core.data", "def load("),
    "model": ("hfedatm_core.models", "def build("),
    "client-method": ("client_app.methods", "class "),
    "server-rule": ("server_app.rules", "class "),
    "robust-clients": ("hfedatm_core.robust.rules", "class "),
    "robust-stations": ("hfedatm_core.robust.rules", "class "),
    "task": ("hfedatm_core.tasks", "class "),
    "augment": ("hfedatm_core.augmentations", "def augment("),
    "metrics": ("hfedatm_core.metrics", "class "),
    "track": ("server_app.tracking", "class "),
}


def complete_setting(ctx: typer.Context, incomplete: str) -> list[str]:
    """Offer keys, and after ``key=`` its values.

    Bash treats ``=`` as a separate word, and click drops it if it is the last word. In bash the key
    is therefore among the earlier words, and only the text after ``=`` may be offered.
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
    if names := names_for(key):
        return names
    allowed, default = _rows().get(key, ("", ""))
    if " | " in allowed:
        return allowed.split(" | ")
    if allowed == "boolean":
        return ["true", "false"]
    return [default] if default else []


def names_for(key: str) -> list[str]:
    """Return the built-in names, if the setting takes a name."""
    if key == "preset":
        return sorted(load_presets())
    return built_in_names(*BUILT_IN[key]) if key in BUILT_IN else []


def complete_run(incomplete: str) -> list[str]:
    """Offer the runs of ``results``, by name and by folder."""
    names = sorted(path.parent.name for path in Path("results").glob("*/config.json"))
    offers = [*names, *(f"results/{name}" for name in names)]
    return [offer for offer in offers if offer.startswith(incomplete)]


def complete_table(incomplete: str) -> list[str]:
    """Offer the tables that can be reproduced."""
    from hfedatm.reproduce.rows import TABLES

    return [name for name in TABLES if name.startswith(incomplete)]


def _rows() -> dict[str, tuple[str, str]]:
    rows = {row["key"]: (row["allowed"], str(row["default"])) for row in rows_of(Settings)}
    return {key: rows[key] for key in keys()} | dict(_of_rules())


def _of_rules() -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the settings that the files of built-in rules declare, without importing them."""
    for path in built_in_files("server_app.rules"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.AnnAssign(
                    target=ast.Name(id=name),
                    annotation=kind,
                    value=ast.Call(args=[default, *_], keywords=said),
                ) if any(word.arg == "setting" for word in said):
                    allowed = "boolean" if ast.unparse(kind) == "bool" else ""
                    if isinstance(kind, ast.Subscript):  # Literal["one", "other"]
                        allowed = " | ".join(ast.literal_eval(kind.slice))
                    yield as_key(name), (allowed, str(ast.literal_eval(default)))
