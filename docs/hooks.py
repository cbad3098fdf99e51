"""Parts of the documentation that its build takes from the code, so that the two cannot disagree.

A page with ``<!-- table: settings -->`` gets the table that `TABLES` makes under that name.
Formulas become MathML, which every browser shows without a script from elsewhere.
"""

from __future__ import annotations

import html
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

from hfedatm_core.discovery import available

ROOT = Path(__file__).parent.parent


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put in the tables."""
    return re.sub(r"<!-- table: (\w+) -->", lambda mark: TABLES[mark[1]](), markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Turn formulas into MathML."""

    def mathml(found: re.Match[str]) -> str:
        latex = html.unescape(found["inline"] or found["block"]).strip()
        return convert(latex, display="inline" if found["inline"] else "block")

    pattern = (
        r'<span class="arithmatex">\\\((?P<inline>.*?)\\\)</span>'
        r'|<div class="arithmatex">\\\[(?P<block>.*?)\\\]</div>'
    )
    return re.sub(pattern, mathml, content, flags=re.DOTALL)


def settings_table() -> str:
    """Return every setting."""
    from hfedatm.cli.settings import explained

    return _table(
        ("key", "default", "allowed", "meaning"),
        (
            (f"`{row['key']}`", f"`{row['default']!r}`", f"`{row['allowed']}`", row["meaning"])
            for row in explained([])
        ),
    )


def policy_table() -> str:
    """Return everything a policy may say."""
    from hfedatm.base.trust.policy import fields

    return _table(
        ("key", "without it", "meaning"),
        ((f"`{s}.{key}`", f"`{default}`", meaning) for s, key, default, meaning in fields()),
    )


def presets_table() -> str:
    """Return the settings of every preset, except those that all of the paper's presets share."""
    from hfedatm.base.presets import load_presets

    rows = load_presets()
    common = rows["paper"]

    def own(name: str, row: dict[str, Any]) -> str:
        shown = row if name == "paper" else {k: v for k, v in row.items() if common.get(k) != v}
        return " ".join(f"`{key}={value}`" for key, value in shown.items())

    return _table(("preset", "sets"), ((f"`{n}`", own(n, row)) for n, row in rows.items()))


def commands_list() -> str:
    """Return the help of every command."""
    import typer
    from click import Context

    from hfedatm.cli.main import typer_app

    group: Any = typer.main.get_command(typer_app)
    parts = []
    below = {
        f"{name} {sub}": command
        for name, inner in group.commands.items()
        for sub, command in getattr(inner, "commands", {}).items()
    }
    single = {n: c for n, c in group.commands.items() if not hasattr(c, "commands")}
    for name, command in (single | below).items():
        context = Context(command, info_name=f"hfedatm {name}", parent=None)
        parts.append(f"## hfedatm {name}\n\n```text\n{_help(command, context)}\n```\n")
    return "\n".join(parts)


def classes_of(package: str) -> str:
    """Return the reference of every method or rule of a package."""
    names = [m.name for m in pkgutil.iter_modules([str(ROOT / package)]) if m.name != "base"]
    return "\n".join(f"::: {package.replace('/', '.')}.{name}" for name in names)


def functions_of(package: str, function: str) -> str:
    """Return the reference of every built-in data set or model."""
    module = importlib.import_module(package)
    names = (name.replace("-", "_") for name in available(module, function))
    options = "    options: {heading_level: 3, show_root_full_path: true}"
    return "\n".join(f"::: {package}.{name}.{function}\n{options}" for name in names)


TABLES: dict[str, Callable[[], str]] = {
    "settings": settings_table,
    "policy": policy_table,
    "presets": presets_table,
    "commands": commands_list,
    "methods": lambda: classes_of("client_app/methods"),
    "rules": lambda: classes_of("server_app/rules"),
    "datasets": lambda: functions_of("hfedatm_core.data", "load"),
    "models": lambda: functions_of("hfedatm_core.models", "build"),
}


def _help(command: Any, context: Any) -> str:
    formatter = context.make_formatter()
    formatter.width = 76
    command.format_usage(context, formatter)
    command.format_help_text(context, formatter)
    _write_parameters(command, context, formatter)
    return str(formatter.getvalue()).replace("\\[", "[").rstrip()


def _write_parameters(command: Any, context: Any, formatter: Any) -> None:
    records = [p.get_help_record(context) for p in command.get_params(context)]
    with formatter.section("Arguments and options"):
        formatter.write_dl([record for record in records if record])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines
    )
