"""Detect user files that hide our tiers: Flower's templates use the same names for single files."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from hfedatm.base.errors import UserError

TIERS = ("client_app", "station_app", "server_app")


def require_own_tiers() -> None:
    """Raise an error with the remedy if a user's file hides our package of the same name.

    Python itself would only report ``'client_app' is not a package``.
    """
    ours = Path(__file__).resolve().parents[2]
    for name in TIERS:
        spec = find_spec(name)
        found = Path(spec.origin).resolve() if spec and spec.origin else None
        if found != ours / name / "__init__.py":
            raise UserError(
                f"{found or name} has the name of HFedATM's package {name!r} and hides it: give "
                f"your file another name, such as my_{name}.py (and in pyproject.toml, "
                "[tool.flwr.app.components], if it is named there)"
            )
