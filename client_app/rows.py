"""Refuse to send Grams of so few rows that these could be reconstructed."""

from __future__ import annotations

from collections.abc import Mapping

from hfedatm.base.errors import UserError
from hfedatm.base.settings import Settings
from hfedatm_core import Gram


def require_rows(grams: Mapping[str, Gram], settings: Settings) -> None:
    """Raise `UserError` for a Gram of fewer rows than ``gram-min-rows``."""
    for layer, gram in grams.items():
        if gram.rows < settings.gram_min_rows:
            raise UserError(
                f"the Gram of {layer} is made of {gram.rows} rows, fewer than gram-min-rows = "
                f"{settings.gram_min_rows}: so few can be reconstructed. Give this client more "
                "examples, or turn on privacy.mechanism"
            )
