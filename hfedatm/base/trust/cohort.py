"""Members of a secure sum: the nodes that the operator enrolled below one station."""

from __future__ import annotations

from hfedatm.base.records import Task
from hfedatm.base.trust.enrolment import EnrolmentError, Identity, read_certificate
from hfedatm_core.secagg.directory import Verify


def step_of(task: Task) -> str:
    """Return the name of a task's step; the replies of a step are summed only once."""
    return f"{task.run}/{task.round}.{task.station_round}/{task.kind}"


def verify_peers(own: Identity | None) -> Verify | None:
    """Return a client's check for enrolled peers; None if nodes are not enrolled.

    The check refuses invented peers, and the station, which is enrolled but is not a peer.
    """
    return None if own is None else _below(own.above)


def verify_members() -> Verify | None:
    """Return a station's check for its enrolled clients; None if nodes are not enrolled."""
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
