"""Divide domains over clients, clients over stations, and validation within a client."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from hfedatm_core.data.base import DomainData
from hfedatm_core.data.eara import assign
from hfedatm_core.data.partition import heterogeneous_partition

Shares = list[dict[str, Tensor]]


def client_shares(
    data: DomainData, source_domains: Sequence[str], num_clients: int, lam: float, seed: int
) -> Shares:
    """Divide the source domains over the clients by heterogeneous partitioning.

    Parameters
    ----------
    data
        The data set.
    source_domains
        The domains to divide; the target domain is not among them.
    num_clients
        Number of clients over all stations.
    lam
        0: every client holds its own domains only; 1: all clients hold the same mixture.
    seed
        Decides which client gets which examples of a domain. The shuffling of a domain does not
        depend on the other source domains.

    Returns
    -------
    list
        For each client the indices it holds, by domain. Every example is used exactly once.
    """
    names = [data.key(name) for name in source_domains]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"source domains must be given once each, got {list(source_domains)}")
    total = sum(len(data.domains[name]) for name in names)
    if num_clients > total:
        raise ValueError(
            f"{num_clients - total} of {num_clients} clients would hold no examples; use fewer "
            f"clients for the {total} examples of {', '.join(names)}"
        )
    counts = heterogeneous_partition([len(data.domains[n]) for n in names], num_clients, lam)
    shares: Shares = [{} for _ in range(num_clients)]
    for name, row in zip(names, counts, strict=True):
        # Hash seed and name, because torch's generator uses only the lowest 32 bits of a seed.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
        order = torch.randperm(len(data.domains[name]), generator=generator)
        for share, indices in zip(shares, torch.split(order, [int(n) for n in row]), strict=True):
            if len(indices):
                share[name] = indices.clone()
    empty = [client for client, share in enumerate(shares) if not share]
    if empty:
        raise ValueError(
            f"{len(empty)} of {num_clients} clients would hold no examples (the first is client "
            f"{empty[0]}); use fewer clients for the {total} examples of {', '.join(names)}"
        )
    return shares


def station_order(
    shares: Sequence[Mapping[str, Tensor]],
    num_stations: int,
    mode: Literal["domain", "mixed", "eara"] = "domain",
    class_counts: Tensor | None = None,
) -> list[list[int]]:
    """Assign the clients to stations of equal size.

    Clients are ordered by the domain they hold most of. ``domain`` cuts that order into
    consecutive pieces, so that clients of one domain share stations; ``mixed`` deals the clients
    out in turn, so that every station gets as many domains as possible. ``eara`` looks at classes
    instead of domains: it makes every station's classes as even as it can, from ``class_counts``,
    the examples by client (rows) and class.

    Returns
    -------
    list
        For each station the sorted numbers of its clients.
    """
    if num_stations < 1 or not shares or len(shares) % num_stations:
        raise ValueError(
            f"{len(shares)} clients cannot be divided evenly over {num_stations} stations"
        )
    if mode not in ("domain", "mixed", "eara"):
        raise ValueError(f"station assignment must be 'domain', 'mixed' or 'eara', not {mode!r}")

    def main_domain(client: int) -> str:
        share = shares[client]
        return min(share, key=lambda name: (-len(share[name]), name), default="")

    ordered = sorted(range(len(shares)), key=lambda client: (main_domain(client), client))
    size = len(shares) // num_stations
    mixed = [sorted(ordered[station::num_stations]) for station in range(num_stations)]
    if mode == "mixed":
        return mixed
    if mode == "domain":
        return [sorted(ordered[start : start + size]) for start in range(0, len(ordered), size)]
    if class_counts is None:
        raise ValueError("station assignment 'eara' needs the class counts of the clients")
    start = [next(e for e, held in enumerate(mixed) if c in held) for c in range(len(shares))]
    chosen = assign(class_counts.numpy(), [size] * num_stations, [start]).tolist()
    return [[c for c, at in enumerate(chosen) if at == e] for e in range(num_stations)]


def split_validation(groups: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Split a client's examples into training and validation, evenly over groups of examples.

    ``groups`` has one number per example, such as its class (`LearningTask.strata`).

    Validation gets ``m = round(fraction * n)`` of the ``n`` examples: they are shuffled, sorted by
    group, and every ``n/m``-th is taken. So each group gives ``fraction`` of its examples, up to
    one more or less, even if groups are too small to be rounded one by one.

    Returns
    -------
    tuple
        Sorted indices for training and for validation.
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"the validation fraction must be in [0, 1), not {fraction}")
    size = len(groups)
    count = min(round(fraction * size), size - 1) if size else 0
    if count <= 0:
        return torch.arange(size), torch.empty(0, dtype=torch.long)
    shuffled = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    in_order = shuffled[torch.argsort(groups[shuffled], stable=True)]
    chosen = torch.zeros(size, dtype=torch.bool)
    chosen[in_order[(2 * torch.arange(count) + 1) * size // (2 * count)]] = True
    return (~chosen).nonzero().flatten(), chosen.nonzero().flatten()
