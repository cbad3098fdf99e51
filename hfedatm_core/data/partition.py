"""Heterogeneous partitioning: how many samples of every domain each client gets."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt


def heterogeneous_partition(
    domain_sizes: Sequence[int], num_clients: int, lam: float
) -> npt.NDArray[np.int64]:
    """Return the number of samples per domain (rows) and client (columns).

    With the set ``D_c`` of domains that client ``c`` owns,

        n_{d,c}(λ) = λ n_d / C + (1 − λ) · 1[d ∈ D_c] · n_d / |{c' : d ∈ D_c'}|

    rounded by largest remainder so that every sample is used exactly once. ``λ = 0`` is pure (no
    client sees a domain it does not own); ``λ = 1`` is uniform to within one sample, per domain
    and in total. Ownership: with at least as many clients as domains every domain gets one client,
    and each further client goes to the domain with the most samples per client; with fewer
    clients the domains go, largest first, to the client with the fewest samples.

    Parameters
    ----------
    domain_sizes
        Samples per domain, ``n_d``.
    num_clients
        Number of clients ``C``.
    lam
        Mixing ``λ`` in ``[0, 1]``.

    References
    ----------
    Bai et al., "Benchmarking Algorithms for Federated Domain Generalization",
    arXiv:2307.04942.
    """
    sizes = [int(size) for size in domain_sizes]
    if not sizes or min(sizes) < 0 or any(s != t for s, t in zip(sizes, domain_sizes, strict=True)):
        raise ValueError(
            f"domain_sizes must be whole numbers ≥ 0, at least one; got {domain_sizes}"
        )
    if num_clients < 1:
        raise ValueError(f"num_clients must be at least 1, got {num_clients}")
    if not 0.0 <= lam <= 1.0:
        raise ValueError(f"lam must lie in [0, 1], got {lam}")
    owners = _owners(sizes, num_clients)
    mixing = Fraction(lam)  # exact arithmetic: equal remainders must compare equal
    counts = np.zeros((len(sizes), num_clients), dtype=np.int64)
    loads = [0] * num_clients
    for domain, size in enumerate(sizes):
        common = mixing * size / num_clients
        own = common + (1 - mixing) * Fraction(size, len(owners[domain]))
        quotas = [own if client in owners[domain] else common for client in range(num_clients)]
        shares = [int(quota) for quota in quotas]
        # Largest remainder first; among equals the owners (at λ = 1 there are none), then the
        # clients with the fewest samples so far.
        order = sorted(
            (shares[client] - quota, mixing < 1 and client not in owners[domain], load, client)
            for client, (quota, load) in enumerate(zip(quotas, loads, strict=True))
        )
        for *_, client in order[: size - sum(shares)]:
            shares[client] += 1
        counts[domain] = shares
        loads = [load + share for load, share in zip(loads, shares, strict=True)]
    return counts


def _owners(sizes: Sequence[int], num_clients: int) -> list[set[int]]:
    """Return the clients that own each domain."""
    if num_clients >= len(sizes):
        owners = [{domain} for domain in range(len(sizes))]
        for client in range(len(sizes), num_clients):
            crowded = max(range(len(sizes)), key=lambda d: Fraction(sizes[d], len(owners[d])))
            owners[crowded].add(client)
        return owners
    owners = [set() for _ in sizes]
    loads = [0] * num_clients
    for domain in sorted(range(len(sizes)), key=lambda d: -sizes[d]):
        client = min(range(num_clients), key=loads.__getitem__)
        owners[domain].add(client)
        loads[client] += sizes[domain]
    return owners
