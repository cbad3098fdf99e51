"""A client's privacy ledger on its own disk: what it has released, never taken back.

A round that is done again is a second release, so unlike other memory the ledger is not set back
when a run resumes. It is written before a reply leaves, whole or not at all.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock

from hfedatm.errors import UserError
from hfedatm_core.privacy.accounting import Ledger


@dataclass
class Account:
    """The releases so far, and the noise multiplier that was fixed for the run."""

    ledger: Ledger = field(default_factory=Ledger)
    sigma: float | None = None


class LedgerFile:
    """The account of one client in one run.

    Parameters
    ----------
    folder
        The client's folder for this run.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "privacy.json"

    def lock(self) -> FileLock:
        """Keep other processes of this client away while reading and writing."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(self._path.with_suffix(".lock"))

    def read(self) -> Account:
        """Return the account; empty before the first release."""
        if not self._path.is_file():
            return Account()
        try:
            state = json.loads(self._path.read_text(encoding="utf-8"))
            return Account(Ledger.from_dict(state["ledger"]), state["sigma"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self._path} is not readable ({error}), so what this client has spent is "
                "unknown; it takes part in no further round of this run"
            ) from error

    def write(self, account: Account) -> None:
        """Replace the account; on disk when this returns."""
        part = self._path.with_suffix(f".{os.getpid()}.part")
        with part.open("w", encoding="utf-8") as file:
            json.dump({"sigma": account.sigma, "ledger": account.ledger.to_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self._path)
