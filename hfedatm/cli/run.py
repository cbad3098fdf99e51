"""``hfedatm run``: three tiers in this process, without Ray, SuperLink or network."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hfedatm.base.presets import read_yaml
from hfedatm.base.settings import SettingsError
from hfedatm.cli.arguments import Assignments, ConfigFile


def run(
    assignments: Assignments = None,
    config: ConfigFile = None,
    debug: Annotated[
        bool, typer.Option("--debug", help="Stop at the first error and show its traceback.")
    ] = False,
    pdb: Annotated[
        bool, typer.Option("--pdb", help="Stop at the first error, in Python's debugger.")
    ] = False,
) -> None:
    """Run a federation in this process.

    For example:

      hfedatm run

      hfedatm run preset=pacs-lenet5 data-dir=~/data rounds=20

      hfedatm run --config my.yaml server-rule=avg

      hfedatm run train-fn=mine:train --pdb
    """
    from hfedatm.runtime.local import run_locally

    given = read_settings(config, assignments or [])
    try:
        if debug or pdb:
            _debug(given, pdb)
        else:
            run_locally(given)
    except KeyboardInterrupt:
        # Working clients are threads, and Python would wait for them; all results are on disk.
        sys.stdout.flush()
        os._exit(130)


def _debug(given: dict[str, Any], post_mortem: bool) -> None:
    """Run until the first error and show its traceback; a `UserError` remains one message."""
    import traceback
    from pdb import post_mortem as debugger

    from hfedatm.base.tracebacks import debugging, whole
    from hfedatm.runtime.local import run_locally

    try:
        with debugging():
            run_locally(given)
    except Exception as error:
        if not whole(error):
            raise
        traceback.print_exception(error)
        if post_mortem:
            first: BaseException = error
            while first.__cause__ is not None:
                first = first.__cause__
            debugger(first.__traceback__)
        raise typer.Exit(1) from None


def read_settings(config: Path | None, assignments: list[str]) -> dict[str, Any]:
    """Return the user's settings: those of the file, overridden by those on the command line."""
    given = read_yaml(config) if config else {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise SettingsError(f"got {assignment!r}; write settings as key=value")
        given[key.strip()] = value.strip()
    return given
