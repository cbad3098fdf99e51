"""Secure aggregation: a station learns the sum of its clients' vectors and none of the vectors.

The protocol is that of Bonawitz et al. (CCS 2017) against active adversaries, with a complete graph
and with shares that can be checked, in six stages:

1. *advertise*: every client sends public keys for shares, masks and signatures, and proves that
   they are its own;
2. *share*: every client splits its masking key and the secret of its own mask into Shamir shares,
   one for each peer, encrypted so that the station can only forward them, with commitments;
3. *check*: every client reports the peers whose shares are false; liars are excluded before any
   client has sent its vector;
4. *mask*: every client sends its fixed-point vector plus its own mask plus, for every peer, a mask
   that the peer subtracts;
5. *sign*: every client signs the list of the clients that delivered a vector, together with the
   directory it received;
6. *reveal*: if at least ``threshold`` clients signed the same list, the clients reveal shares: for
   a client that delivered, of its own mask; for a client that dropped out, of its masking key.
   Never both for one client. Any ``threshold`` answers are enough.

**Threat model.** The station may behave arbitrarily and collude with fewer than
``2 * threshold - clients`` clients. If it sends two lists of survivors, two directories or another
threshold, invents or repeats clients, or asks for a second answer to a stage, the honest clients
refuse. With proofs of identity (``Signer``, ``verify``) the clients of a directory are real;
without them, as in a simulation, a client trusts the names that the station gives. A client may lie
in any message and may drop out in any stage: it is excluded, and the station still obtains the sum
of the other clients as long as ``threshold`` of them stay.

The protocol does not check the numbers in a vector, which nobody sees. It does not hide what the
sum itself reveals, which is the task of differential privacy, nor what the difference between the
sums of two steps reveals.

Cost per client: 8 bytes per number of the vector (4 with ``bits=32``), about 250 bytes per peer for
shares, 64 bytes per client of the threshold for commitments, and some milliseconds per peer to
check the commitments.
"""

from hfedatm_core.secagg.aggregator import Aggregator, default_threshold
from hfedatm_core.secagg.client import SecureClient
from hfedatm_core.secagg.errors import SecureAggregationError
from hfedatm_core.secagg.fixed_point import FixedPoint

__all__ = [
    "Aggregator",
    "FixedPoint",
    "SecureAggregationError",
    "SecureClient",
    "default_threshold",
]
