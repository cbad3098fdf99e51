"""What a client keeps of the secure sums it takes part in, on its own disk.

Of the sum under way: its keys, the shares of its peers and its reply. Of every step it ever put
into a sum: among whom, and the list of survivors it signed. A step may be summed again, as after a
crash of the station, among the same clients and to the same list only: the difference of two sums
over different clients would be the reply of one of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from hfedatm_core.secagg import SecureAggregationError, SecureClient
from hfedatm_files import PRIVATE, write_bytes


@dataclass
class Claim:
    """What binds a client in one step; empty until its masked reply has left.

    Attributes
    ----------
    session
        The sum that was begun last.
    cohort
        Hash of the names of the clients among which its masked reply left.
    survivors
        Hash of the names on the list it signed.
    """

    session: str = ""
    cohort: str = ""
    survivors: str = ""

    def bind(self, what: str, names: Iterable[str]) -> None:
        """Hold a client to ``names`` from now on, or refuse others than before."""
        found = hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()
        if getattr(self, what) not in ("", found):
            raise SecureAggregationError(
                f"this step was summed before, with another {what}: the difference of the two "
                "sums would tell of single clients"
            )
        setattr(self, what, found)


class KeptSums:
    """The secure sums of one client in one run.

    Every exchange happens under `lock` from reading to writing, so that of two messages for one
    stage, also in two processes, only one is answered.

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
                "this secure sum was begun before; a new one has a new name"
            )
        claim.session = session
        self._state.unlink(missing_ok=True)
        np.save(self._vector, vector)
        self.keep(claim, client)
        self.write(client)

    def read(self) -> SecureClient:
        """Return the state of the sum under way."""
        try:
            state = self._state.read_bytes()
        except FileNotFoundError:
            raise SecureAggregationError("this client has no secure sum under way") from None
        return SecureClient.from_bytes(state)

    def write(self, client: SecureClient) -> None:
        """Keep the state; called before an answer leaves, so that no stage is answered twice."""
        write_bytes(self._state, client.to_bytes(), mode=PRIVATE)

    def vector(self) -> npt.NDArray[np.float64]:
        """Return the reply that waits to be masked."""
        vector: npt.NDArray[np.float64] = np.load(self._vector, allow_pickle=False)
        return vector

    def forget_vector(self) -> None:
        """Remove the reply once it is masked."""
        self._vector.unlink()

    def claim(self, client: SecureClient) -> Claim:
        """Return what binds the client in its step."""
        path = self._claim_path(client)
        if not path.is_file():
            return Claim()
        return Claim(**json.loads(path.read_text(encoding="utf-8")))

    def keep(self, claim: Claim, client: SecureClient) -> None:
        """Keep what binds the client; called before what it is about leaves."""
        write_bytes(self._claim_path(client), json.dumps(asdict(claim)).encode(), mode=PRIVATE)

    def _claim_path(self, client: SecureClient) -> Path:
        name = hashlib.sha256(client.step.encode()).hexdigest()[:32]
        return self._folder / f"{name}.step"
