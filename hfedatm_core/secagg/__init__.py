"""Secure aggregation: a station learns the sum of its clients' vectors and none of the vectors.

The protocol is that of Bonawitz et al. (CCS 2017) against active adversaries, with a complete graph
and with shares that can be checked, in six stages:

1. *advertise*: every client sends public keys for shares, masks and signatures, and proves whose
   they are;
2. *share*: every client splits its masking key and the secret of a mask of its own into Shamir
   shares, one for each peer, encrypted so that the station only passes them on, with commitments;
3. *check*: every client says whose shares are false; liars are left out while nobody has sent
   anything;
4. *mask*: every client sends its fixed-point vector plus its own mask plus, for every peer, a mask
   that the peer subtracts;
5. *sign*: every client signs the list of those who delivered, together with the directory it got;
6. *reveal*: only if as many as the threshold signed one list, the others give their shares: of the
   own mask of each client that delivered, of the masking key of each that dropped out. Never both
   for one client. Any ``threshold`` answers are enough.

**Threat model.** The station may do what it likes and collude with fewer than
``2 * threshold - clients`` clients: two lists of survivors, two directories, another threshold,
invented or repeated clients, or a second answer to a stage end in a refusal of the honest clients.
With proofs of identity (``Signer``, ``verify``) the clients of a directory are real; without them,
as in a simulation, they are whom the station names. A client may lie in any message and may drop
out in any stage: it is left out, and the sum of the others comes out as long as ``threshold`` stay.

Not covered: the numbers in a vector, which nobody sees; what the sum itself tells, for which
differential privacy exists; and the differences between sums of different steps.

Cost per client: the vector in 8 bytes per number (4 with ``bits=32``), about 250 bytes per peer for
shares, 64 bytes per client of the threshold for commitments, and per peer some milliseconds for
checking them.
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
