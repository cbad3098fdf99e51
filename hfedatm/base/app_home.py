"""Where the results of a Flower App go when a SuperLink of another project runs it.

`flwr run .` uses one SuperLink for all projects, and a run works in the folder in which that
SuperLink was started, which may be another project's. A relative results path would lead there.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path


def project_of(folder: Path) -> str | None:
    """Return the id, ``publisher/name``, of the Flower App in a project folder."""
    try:
        found = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
        return f"{found['tool']['flwr']['app']['publisher']}/{found['project']['name']}"
    except (OSError, ValueError, KeyError, TypeError):
        return None


def home_of(app: str) -> Path:
    """Return an app's own folder, beside the other files that Flower keeps for this user."""
    flower = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr")
    return flower / "hfedatm" / app.replace("/", ".")


def output_of(app: str, output: str) -> Path:
    """Return where a run of this app writes: its project's folder, or else the app's own folder."""
    asked = Path(output or "results").expanduser()
    if asked.is_absolute() or not app or project_of(Path.cwd()) == app:
        return asked
    return home_of(app) / asked
