"""``hfedatm run``: three tiers in this process, without Ray, SuperLink or network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from hfedatm.settings import SettingsError


def run(
    assignments: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE...", help="Settings, e.g. rounds=3 lr=0.1"),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="YAML file of settings.", exists=True, dir_okay=False),
    ] = None,
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
    given: dict[str, Any] = {}
    if config:
        loaded = yaml.safe_load(config.read_text(encoding="utf-8")) or {}
        if not isinstance(loaded, dict):
            raise SettingsError(f"{config}: must hold 'key: value' lines")
        given |= {str(key): value for key, value in loaded.items()}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise SettingsError(f"got {assignment!r}; write settings as key=value")
        given[key.strip()] = value.strip()
    return given
