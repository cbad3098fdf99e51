"""The numbers of stations and clients of a deployment, recorded once when it is made."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hfedatm.base.errors import UserError
from hfedatm_files import write_text

MOUNTED = Path("/secrets")
"""Folder in a server's container that `hfedatm scaffold` writes the size into.

An environment variable would restart the server, and everything that depends on it, whenever a
station is added.
"""
_FILE = "size.json"
_KEYS = ("stations", "clients-per-station")


def note(folder: Path, *sizes: int) -> None:
    """Write the children per level of a deployment into its operator's folder, or the server's."""
    write_text(folder / _FILE, json.dumps(sizes) + "\n")


def sized(given: Mapping[str, Any], operator: Path) -> dict[str, Any]:
    """Return the settings of a run with the size of the deployment it is for.

    Raises
    ------
    UserError
        If the settings name another size, or if no size is known.
    """
    if given.get("resume"):  # a resumed run keeps its own settings
        return dict(given)
    found = read(operator)
    if found is None:
        missing = [key for key in _KEYS if not given.get(key) and not given.get("tiers")]
        if missing:
            raise UserError(
                f"{missing[0]}: the size of this deployment is unknown; give "
                f"{' and '.join(missing)}"
            )
        return dict(given)
    tree = "x".join(map(str, found))
    meant = {
        "stations": math.prod(found[:-1]),
        "clients-per-station": found[-1],
        **({"tiers": tree} if len(found) > 2 or given.get("tiers") else {}),
    }
    for key, number in meant.items():
        asked = str(given.get(key, "")).strip()
        if asked and asked != str(number if key != "tiers" else tree):
            up = (
                f"{found[0]} stations of {found[1]} clients" if len(found) == 2 else f"tiers={tree}"
            )
            raise UserError(
                f"{key}: got {asked}, and the deployment that is up has {up}; leave the key out, "
                "or start another deployment"
            )
    return {**given, **meant}


def read(operator: Path) -> tuple[int, ...] | None:
    """Return the noted children per level; None if nobody has noted them."""
    for file in (operator / _FILE, MOUNTED / _FILE):
        if file.is_file():
            return tuple(int(number) for number in json.loads(file.read_text(encoding="utf-8")))
    return None
