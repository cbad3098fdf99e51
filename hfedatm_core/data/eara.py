"""EARA (Abdellatif et al., 2022): assign clients so that every station sees all classes alike.

With the class counts ``n_i`` of client ``i``, station ``e`` has the class distribution ``p_e``, its
clients' counts together divided by their sum. Clients are assigned such that

    sum_e KL(p_e || uniform),     KL(p || uniform) = log C + sum_c p_c log p_c

is small for ``C`` classes, while no station gets more clients than its capacity.

The publication solves a mixed-integer problem with the bandwidth, energy and delay of radio links
as further limits, by relaxing it and rounding. Here the only limit is a number of clients per
station, and the search is local: clients are placed one by one, those with the most examples
first, where the sum grows least; then pairs of clients swap stations while that lowers the sum.
Stations are filled as evenly as their capacities allow, because a sum over stations would
otherwise be lowest with all clients at one of them.

Abdellatif et al., "Communication-Efficient Hierarchical Federated Learning for IoT Heterogeneous
Systems with Imbalanced Data", arXiv:2107.06548.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.float64]
Stations = npt.NDArray[np.int64]
"""The station of each client."""

_LEAST_GAIN = 1e-12
"""A swap must gain more than rounding does, so that the search ends."""


def divergence(counts: npt.ArrayLike) -> Counts:
    """Return KL(p || uniform) of class counts in the last axis; 0 where there are no examples."""
    given = np.asarray(counts, dtype=np.float64)
    totals = given.sum(-1, keepdims=True)
    p = np.divide(given, totals, out=np.zeros_like(given), where=totals > 0)
    logs = np.log(p, out=np.zeros_like(p), where=p > 0)
    found: Counts = np.where(totals[..., 0] > 0, np.log(given.shape[-1]) + (p * logs).sum(-1), 0.0)
    return found


def total_divergence(counts: npt.ArrayLike, stations: Stations, number: int) -> float:
    """Return the sum of the stations' divergences."""
    return float(divergence(_totals(np.asarray(counts, np.float64), stations, number)).sum())


def assign(
    counts: npt.ArrayLike, capacities: Sequence[int], starts: Iterable[Sequence[int]] = ()
) -> Stations:
    """Return the station of each client.

    Parameters
    ----------
    counts
        Examples by client (rows) and class (columns).
    capacities
        The most clients of each station.
    starts
        Other assignments to improve, each with a station per client; the result is no worse.
    """
    given = np.asarray(counts, dtype=np.float64)
    if given.ndim != 2 or not given.size or not np.isfinite(given).all() or (given < 0).any():
        raise ValueError("class counts must be a table of numbers ≥ 0: a row per client")
    sizes = _sizes(len(given), capacities)
    improved = [
        _swapped(given, np.asarray(start, np.int64), len(sizes))
        for start in (_greedy(given, sizes), *starts)
    ]
    return min(improved, key=lambda found: total_divergence(given, found, len(sizes)))


def _sizes(clients: int, capacities: Sequence[int]) -> list[int]:
    """Return the clients of each station: as even as the capacities allow."""
    if clients > sum(capacities) or min(capacities, default=0) < 0:
        raise ValueError(f"{clients} clients do not fit into stations of {list(capacities)} places")
    sizes = [0] * len(capacities)
    for _ in range(clients):
        free = [e for e, most in enumerate(capacities) if sizes[e] < most]
        sizes[min(free, key=lambda e: (sizes[e], e))] += 1
    return sizes


def _totals(counts: Counts, stations: Stations, number: int) -> Counts:
    totals = np.zeros((number, counts.shape[1]))
    np.add.at(totals, stations, counts)
    return totals


def _greedy(counts: Counts, sizes: Sequence[int]) -> Stations:
    totals, left = np.zeros((len(sizes), counts.shape[1])), np.array(sizes)
    stations = np.zeros(len(counts), np.int64)
    for client in np.argsort(-counts.sum(1), kind="stable"):
        growth = divergence(totals + counts[client]) - divergence(totals)
        growth[left == 0] = np.inf
        chosen = int(np.argmin(growth))
        stations[client], left[chosen] = chosen, left[chosen] - 1
        totals[chosen] += counts[client]
    return stations


def _swapped(counts: Counts, stations: Stations, number: int) -> Stations:
    """Swap pairs of clients while that lowers the sum of the divergences."""
    stations, totals = stations.copy(), _totals(counts, stations, number)
    improving = True
    while improving:
        improving = False
        for i, own in enumerate(counts):
            here, there = stations[i], stations
            gain = divergence(totals[here]) + divergence(totals[there])
            gain -= divergence(totals[here] - own + counts) + divergence(
                np.maximum(totals[there] - counts + own, 0)  # a difference of counts may round
            )
            gain[there == here] = -np.inf
            j = int(np.argmax(gain))
            if gain[j] > _LEAST_GAIN:
                stations[i], stations[j] = stations[j], here
                totals = _totals(counts, stations, number)
                improving = True
    return stations
