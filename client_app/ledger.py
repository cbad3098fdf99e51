"""A client's privacy ledger on its own disk: all it has released; no entry is ever taken back.

A repeated round is a second release, so unlike other memory the ledger is not set back when a run
resumes. The client writes it, whole or not at all, before a reply leaves.

On a deployed node the account belongs to the data: there is one file per folder (or embedded data
set), and no run, client number or station chooses it. It has an entry for every run, and a total.
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
"""How many runs and kinds of releases an account lists separately; the total counts them all."""


def compact(total: Ledger) -> Ledger:
    """Return a ledger of at most `MOST_KINDS` kinds of releases that spends at least as much.

    The sender of the settings chooses the noise and the batch size, and the accounting takes time
    for every kind of release. Releases of all examples are combined into one, exactly. Of the other
    kinds, the two most alike are combined: both count with the weaker noise and the larger batch.
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

    ``total`` holds the releases of all runs together, as they concern one example; ``left`` is the
    epsilon that the owner's policy still allows, for those who watch the node.
    """

    ledger: Ledger = field(default_factory=Ledger)
    sigma: float | None = None
    total: Ledger = field(default_factory=Ledger)
    left: float | None = None


class LedgerFile:
    """The account of one client in one run whose data all belong to the person who runs it.

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
        """Replace the account; the new one is on disk when this returns."""
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
        Folder in which the node keeps all its files.
    data
        Name of the data as the owner gave it; nothing in a message changes it.
    run
        Name of the run; it chooses an entry, and every run adds to the total.
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
        self.read()  # raises if the file is unreadable, so that it is not overwritten
        before = json.loads(self._path.read_text("utf-8")) if self._path.is_file() else {}
        others = [item for item in before.get("runs", {}).items() if item[0] != self._run]
        runs = dict([*others[1 - MOST_RUNS :], (self._run, super()._state(account))])
        state = {"data": self._data, "total": account.total.to_dict(), "runs": runs}
        return state if account.left is None else {**state, "epsilon-left": account.left}
