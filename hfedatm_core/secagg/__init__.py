"""Secure aggregation: a station learns the sum of its clients' vectors and none of the vectors.

The protocol is that of Bonawitz et al. (CCS 2017) with a complete graph, in four stages:

1. *advertise*: every client sends two X25519 public keys;
2. *share*: every client splits a self-mask seed and its masking key into Shamir shares, one for
   each peer, encrypted so that the station only passes them on;
3. *mask*: every client sends its fixed-point vector plus its self mask plus, for every peer, a mask
   that the peer subtracts;
4. *reveal*: for each client that delivered, the others give their shares of its self-mask seed; for
   each client that dropped out, their shares of its masking key. Never both for one client. Any
   ``threshold`` answers are enough.

**Threat model.** The station follows the protocol but is curious, and may collude with fewer than
``2 * threshold - clients`` clients (so that it cannot collect both kinds of shares of one client).
Clients may drop out in any stage. Not covered: a station that tampers with the key directory (it is
not signed, so a station could invent clients and surround a real one with them), a client that
sends wrong numbers or false shares to spoil the sum (false shares are noticed, wrong numbers are
not), and what the sum itself reveals, for which differential privacy exists. Who a client is rests
on the authentication of the transport.

Cost per client: the vector in 8 bytes per number (4 with ``bits=32``), 32 + 32 bytes of keys, about
120 bytes per peer for shares.
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
