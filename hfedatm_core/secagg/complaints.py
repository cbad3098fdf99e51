"""Who lies, when some clients say that the shares of others are false."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def blame(complaints: Mapping[int, Sequence[int]]) -> dict[int, str]:
    """Return whom to leave out so that nobody complains about anybody who stays, and why.

    A complaint has two ends, and either may lie. Whoever is at the end of most of them is left out
    first: a dealer whose shares several refuse, or a client that refuses the shares of several. If
    one stands against one, whoever complains is left out: it either lies, or is the only one whose
    share is false and so nobody needs it. One liar therefore costs one client.

    Parameters
    ----------
    complaints
        Of each client that answered, those whose shares it refuses.
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
