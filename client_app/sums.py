"""A client's records of the secure sums it takes part in, on its own disk.

For the sum under way, the client keeps its keys, the shares of its peers and its reply. For every
step whose reply it ever put into a sum, it keeps the clients of that sum and the list of survivors
it signed. A step may be summed again, for example after a crash of the station, but only among the
same clients and with the same list: the difference between two sums over different clients would
be the reply of one of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from hfedatm_core.secagg import SecureAggregationError, SecureClient
from hfedatm_files import PRIVATE, write_bytes


@dataclass
class Claim:
    """The commitments of a client in one step; empty until its masked reply has left.

    Attributes
    ----------
    session
        Name of the sum that was begun last.
    cohort
        Hash of the names of the clients whose sum its masked reply went into.
    survivors
        Hash of the names on the list it signed.
    """

    session: str = ""
    cohort: str = ""
    survivors: str = ""

    def bind(self, what: str, names: Iterable[str]) -> None:
        """Commit the client to ``names``; refuse names other than those it committed to before."""
        found = hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()
        if getattr(self, what) not in ("", found):
            raise SecureAggregationError(
                f"this step was summed before, with another {what}: the difference of the two "
                "sums would reveal replies of single clients"
            )
        setattr(self, what, found)


class KeptSums:
    """The secure sums of one client in one run.

    Every exchange holds `lock` from reading to writing: if two messages arrive for one stage, even
    in two processes, only one is answered.

    Parameters
    ----------
    folder
        The client's folder of this run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "secure"
        self._state = self._folder / "state"
        self._vector = self._folder / "vector.npy"

    def lock(self) -> FileLock:
        """Keep other processes of this client away."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return FileLock(self._folder / "lock")

    def begin(self, client: SecureClient, vector: npt.NDArray[np.float64]) -> None:
        """Claim the step and keep the reply; an older sum that is still under way ends here."""
        claim, session = self.claim(client), client.session.hex()
        if claim.session == session:
            raise SecureAggregationError(
                "this secure sum was begun before; begin a new one under a new name"
            )
        claim.session = session
        self._state.unlink(missing_ok=True)
        np.save(self._vector, vector)
        self.keep(claim, client)
        self._write(client)

    @contextmanager
    def under_way(self) -> Iterator[SecureClient]:
        """Go on with the sum under way.

        The new state is stored before the answer leaves, so that no stage is answered twice. The
        reply is removed once it is masked.
        """
        with self.lock():
            try:
                state = self._state.read_bytes()
            except FileNotFoundError:
                raise SecureAggregationError("this client has no secure sum under way") from None
            client = SecureClient.from_bytes(state)
            yield client
            self._write(client)
            if client.participants:
                self._vector.unlink(missing_ok=True)

    def vector(self) -> npt.NDArray[np.float64]:
        """Return the reply that waits to be masked."""
        vector: npt.NDArray[np.float64] = np.load(self._vector, allow_pickle=False)
        return vector

    def claim(self, client: SecureClient) -> Claim:
        """Return the client's commitments in this step."""
        path = self._claim_path(client)
        if not path.is_file():
            return Claim()
        return Claim(**json.loads(path.read_text(encoding="utf-8")))

    def keep(self, claim: Claim, client: SecureClient) -> None:
        """Store the client's commitments; call this before the message they concern leaves."""
        write_bytes(self._claim_path(client), json.dumps(asdict(claim)).encode(), mode=PRIVATE)

    def _write(self, client: SecureClient) -> None:
        write_bytes(self._state, client.to_bytes(), mode=PRIVATE)

    def _claim_path(self, client: SecureClient) -> Path:
        name = hashlib.sha256(client.step.encode()).hexdigest()[:32]
        return self._folder / f"{name}.step"
