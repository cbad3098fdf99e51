"""A client's privacy ledger on its own disk: what it has released, never taken back.

A round that is done again is a second release, so unlike other memory the ledger is not set back
when a run resumes. It is written before a reply leaves, whole or not at all.

On a deployed node the account belongs to the data: one file per folder (or embedded data set),
which no run, client number or station chooses. It has an entry for every run, and a total.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from filelock import FileLock

from hfedatm.base.errors import UserError
from hfedatm_core.privacy.accounting import Ledger
from hfedatm_files import write_text

ACCOUNTS = ".accounts"
"""Folder of the accounts of data; no run can have this name."""


MOST_RUNS, MOST_KINDS = 2000, 64
"""How much of the past an account keeps apart; the total keeps all of it in any case."""


def compact(total: Ledger) -> Ledger:
    """Return a ledger of at most `MOST_KINDS` kinds of releases that spends at least as much.

    Whoever sends settings chooses the noise and the batch, and every kind of release takes time to
    account for. Releases of all examples become one, exactly; of the others those that are most
    alike are counted as if each had the weaker noise and the larger batch of the two.
    """
    if len(total.releases) <= MOST_KINDS:
        return total
    full = {key: n for key, n in total.releases.items() if key[1] == 1.0}
    rest = sorted((rate, sigma, n) for (sigma, rate), n in total.releases.items() if rate < 1.0)
    while len(rest) >= MOST_KINDS:
        gaps = [abs(math.log(a[0] / b[0])) + abs(math.log(a[1] / b[1])) for a, b in pairwise(rest)]
        at = gaps.index(min(gaps))
        (_, weak, n), (rate, other, m) = rest[at : at + 2]
        rest[at : at + 2] = [(rate, min(weak, other), n + m)]
    kept = Ledger()
    if full:
        kept.spend_gaussian(1 / math.sqrt(math.fsum(n / s**2 for (s, _), n in full.items())))
    for rate, sigma, n in rest:
        kept.spend_dp_sgd(sigma, rate, n)
    return kept


@dataclass
class Account:
    """The releases of the run so far, the noise multiplier that was fixed for it, and the total.

    ``total`` is what all runs together have released of one example.
    """

    ledger: Ledger = field(default_factory=Ledger)
    sigma: float | None = None
    total: Ledger = field(default_factory=Ledger)


class LedgerFile:
    """The account of one client in one run, where the person who runs it owns all of the data.

    Parameters
    ----------
    folder
        The client's folder for this run.
    """

    what = "this client"

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
            return self._account(json.loads(self._path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self._path} is not readable ({error}), so what {self.what} has spent is "
                "unknown; it takes part in no further round"
            ) from error

    def write(self, account: Account) -> None:
        """Replace the account; on disk when this returns."""
        write_text(self._path, json.dumps(self._state(account)))

    def _account(self, state: dict[str, Any]) -> Account:
        ledger = Ledger.from_dict(state["ledger"])
        return Account(ledger, state["sigma"], ledger)

    def _state(self, account: Account) -> dict[str, Any]:
        return {"sigma": account.sigma, "ledger": account.ledger.to_dict()}


class DataLedgerFile(LedgerFile):
    """The account of an owner's data over all runs, as one of the runs sees it.

    Parameters
    ----------
    root
        Folder of all that the node keeps.
    data
        Which data: what the owner has named, nothing that a message says.
    run
        Name of the run; it chooses an entry, and adds to the total like every other.
    """

    what = "this node's data"

    def __init__(self, root: Path, data: str, run: str) -> None:
        digest = hashlib.sha256(data.encode()).hexdigest()[:32]
        self._path = root / ACCOUNTS / f"{digest}.json"
        self._data, self._run = data, run

    def _account(self, state: dict[str, Any]) -> Account:
        if state["data"] != self._data:
            raise ValueError("it is the account of other data")
        total = Ledger.from_dict(state["total"])
        own = state["runs"].get(self._run)
        if own is None:
            return Account(total=total)
        return Account(Ledger.from_dict(own["ledger"]), own["sigma"], total)

    def _state(self, account: Account) -> dict[str, Any]:
        self.read()  # what cannot be read is not overwritten
        before = json.loads(self._path.read_text("utf-8")) if self._path.is_file() else {}
        others = [item for item in before.get("runs", {}).items() if item[0] != self._run]
        runs = dict([*others[1 - MOST_RUNS :], (self._run, super()._state(account))])
        return {"data": self._data, "total": account.total.to_dict(), "runs": runs}
