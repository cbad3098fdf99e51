"""Find the liars when some clients report that the shares of others are false."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def blame(complaints: Mapping[int, Sequence[int]]) -> dict[int, str]:
    """Return the clients to exclude so that no complaint remains, each with the reason.

    A complaint involves two clients, and either may lie. The client in the most complaints is
    excluded first: a dealer whose shares several clients refuse, or a client that refuses the
    shares of several dealers. If one client stands against one dealer, the client is excluded: it
    either lies, or holds the only false share, which the others do not need. One liar therefore
    costs one client.

    Parameters
    ----------
    complaints
        For each client that answered, the clients whose shares it refuses.
    """
    pairs = {(by, of) for by, false in complaints.items() for of in false if of in complaints}
    left_out: dict[int, str] = {}
    while pairs:
        counts: dict[int, int] = {}
        for pair in {frozenset(pair) for pair in pairs}:
            for client in pair:
                counts[client] = counts.get(client, 0) + 1
        most = max(counts.values())
        worst = (
            min(client for client, count in counts.items() if count == most)
            if most > 1
            else min(pairs)[0]
        )
        refuse = sorted(by for by, of in pairs if of == worst)
        refused = sorted(of for by, of in pairs if by == worst)
        left_out[worst] = " and ".join(
            [f"clients {refuse} find its shares false"] * bool(refuse)
            + [f"it finds the shares of clients {refused} false"] * bool(refused)
        )
        pairs = {pair for pair in pairs if worst not in pair}
    return left_out
