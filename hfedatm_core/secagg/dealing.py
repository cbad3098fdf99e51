"""The two secrets that every client splits among its peers, and its commitments to them."""

from __future__ import annotations

from hfedatm_core.secagg import shamir
from hfedatm_core.secagg.directory import Directory
from hfedatm_core.secagg.edwards import POINT_BYTES
from hfedatm_core.secagg.errors import SecureAggregationError

BOTH_BYTES = 2 * shamir.SHARE_BYTES
"""Bytes of two shares: of a client's mask key, and of the secret of its own mask."""


def read_commitments(
    data: bytes, directory: Directory, dealer: int
) -> tuple[shamir.Commitments, shamir.Commitments]:
    """Return a dealer's commitments to its mask key and to the secret of its own mask."""
    half = directory.threshold * POINT_BYTES
    what = f"the shares of client {dealer}"
    key = shamir.Commitments.from_bytes(data[:half], directory.threshold, what)
    if data[:POINT_BYTES] != directory.members[dealer].mask_key:
        raise SecureAggregationError(f"{what} are of another key than it advertised")
    return key, shamir.Commitments.from_bytes(data[half:], directory.threshold, what)


def shares_fit(
    both: bytes, point: int, commitments: bytes, directory: Directory, dealer: int
) -> bool:
    """Tell whether two shares fit the commitments of their dealer."""
    try:
        key, seed = read_commitments(commitments, directory, dealer)
    except SecureAggregationError:
        return False
    cut = shamir.SHARE_BYTES
    fits = len(both) == BOTH_BYTES and key.allow(both[:cut], point)
    return fits and seed.allow(both[cut:], point)
