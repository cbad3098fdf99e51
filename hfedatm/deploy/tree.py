"""The machines of a deployment: which stations and clients there are, and whom they work for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hfedatm.base.errors import UserError
from hfedatm.base.tiers import parse

SERVER = "server"


@dataclass(frozen=True)
class Node:
    """A station or a client.

    Attributes
    ----------
    name
        ``station-1``, its second station ``station-1-2``, that one's first client
        ``station-1-2-client-1``.
    above
        The machine that it works for.
    place
        Its number among all nodes of its level, which is its ``partition-id``.
    is_station
        Whether it has a link for nodes of its own.
    """

    name: str
    above: str
    place: int
    is_station: bool


def nodes(sizes: Sequence[int], above: str = SERVER, index: int = 0) -> Iterator[Node]:
    """Yield every node below one machine, each before its own children."""
    first, *deeper = sizes
    for number in range(first):
        place = index * first + number
        name = f"{above}-client-{number + 1}"
        if deeper:
            name = f"station-{number + 1}" if above == SERVER else f"{above}-{number + 1}"
        yield Node(name, above, place, bool(deeper))
        if deeper:
            yield from nodes(deeper, name, place)


def sizes_of(tiers: str, stations: int, clients: int) -> tuple[int, ...]:
    """Return the numbers of children per level that a user asks for."""
    if not tiers:
        return stations, clients
    try:
        sizes = parse(tiers, "--tiers")
    except ValueError as error:
        raise UserError(str(error)) from None
    if len(sizes) < 2:
        raise UserError(f"--tiers: got {tiers!r}; a tree needs stations and clients: 3x4")
    return sizes
