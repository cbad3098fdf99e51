"""Who counts in a secure sum: nodes that the operator enrolled below one station."""

from __future__ import annotations

from hfedatm.base.records import Task
from hfedatm.base.trust.enrolment import EnrolmentError, Identity, read_certificate
from hfedatm_core.secagg.directory import Verify


def step_of(task: Task) -> str:
    """Name the work of a task; what came of it is summed once."""
    return f"{task.run}/{task.round}.{task.station_round}/{task.kind}"


def verify_peers(own: Identity | None) -> Verify | None:
    """Return how a client tells enrolled peers from invented ones; None where nobody is enrolled.

    The station is enrolled too, and is not a peer.
    """
    return None if own is None else _below(own.above)


def verify_members() -> Verify | None:
    """Return how this station tells its enrolled clients from others."""
    own = Identity.load()
    return None if own is None else _below(own.name)


def _below(above: str) -> Verify:
    def verify(certificate: bytes, signature: bytes, data: bytes) -> str:
        found = read_certificate(certificate)
        found.check(signature, data)
        if found.above != above:
            raise EnrolmentError(f"{found.name} works for {found.above}, not for {above}")
        return found.name

    return verify
