"""``hfedatm run``: three tiers in this process, without Ray, SuperLink or network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hfedatm.base.settings import SettingsError, read_yaml
from hfedatm.cli.arguments import Assignments, ConfigFile


def run(
    assignments: Assignments = None,
    config: ConfigFile = None,
) -> None:
    """Run a federation in this process.

    For example:

      hfedatm run

      hfedatm run preset=pacs-lenet5 data-dir=~/data rounds=20

      hfedatm run --config my.yaml server-rule=avg
    """
    from hfedatm.runtime.local import run_locally

    run_locally(read_settings(config, assignments or []))


def read_settings(config: Path | None, assignments: list[str]) -> dict[str, Any]:
    """Return what the user gave: the file's settings, overlaid by those on the command line."""
    given = read_yaml(config) if config else {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise SettingsError(f"got {assignment!r}; write settings as key=value")
        given[key.strip()] = value.strip()
    return given
