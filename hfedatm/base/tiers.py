"""The tree of a run: how many children the nodes of every level have, and who they are.

The server is level 0, its stations are level 1, and so on; the stations of the last level have
clients. Nodes are numbered per level from 0, in the order of their paths from the server, so the
children of node ``i`` with ``k`` children each are ``i k`` to ``i k + k - 1``. A node's number and
its path determine each other: seeds that are derived from numbers are derived from paths.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hfedatm.base.errors import UserError

if TYPE_CHECKING:
    from hfedatm.base.settings import Settings

DEEPEST = 8
"""Most numbers in ``tiers``."""
_SIZE = re.compile(r"\d{1,7}(x\d{1,7})*")
_PATIENCE = 0.9
"""Share of its parent's patience that a station has with its own stations."""


def parse(text: str, key: str = "tiers") -> tuple[int, ...]:
    """Return the numbers of ``3x4x5``; raises ``ValueError`` that names the key."""
    numbers = tuple(map(int, text.split("x"))) if _SIZE.fullmatch(text) else ()
    if not numbers or min(numbers) < 1 or len(numbers) > DEEPEST:
        raise ValueError(
            f"{key}: got {text!r}; give 1 to {DEEPEST} numbers from 1 on, outermost first, such as "
            "3x4x5"
        )
    return numbers


def expand(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a user's values with the keys that ``tiers`` and ``station-rounds=2x1`` stand for.

    Two numbers in ``tiers`` are the ordinary ``stations`` and ``clients-per-station``.

    Raises
    ------
    ValueError
        A number is malformed, or contradicts another key.
    """
    found = dict(given)
    if tiers := str(found.get("tiers", "")).strip():
        sizes = parse(tiers)
        if len(sizes) < 2:
            raise ValueError(f"tiers: got {tiers!r}; a tree needs stations and clients: 3x4")
        meant = {"stations": math.prod(sizes[:-1]), "clients-per-station": sizes[-1]}
        for key, number in meant.items():
            if str(found.get(key, number)) != str(number):
                raise ValueError(
                    f"{key}: got {found[key]}, and tiers={tiers} makes it {number}; leave it out"
                )
        found |= {**meant, "tiers": "x".join(map(str, sizes)) if len(sizes) > 2 else ""}
    if "inner-rounds" in found:
        found["inner-rounds"] = str(found["inner-rounds"])
    rounds = str(found.get("station-rounds", "")).strip()
    if "x" in rounds:
        *inner, last = parse(rounds, "station-rounds")
        found |= {"station-rounds": last, "inner-rounds": "x".join(map(str, inner))}
    return found


def check_tiers(s: Settings) -> None:
    """Raise ``ValueError`` for a tree that contradicts itself, or cannot do what is asked of it."""
    sizes = branching(s)
    if len(sizes) < 2 or (math.prod(sizes[:-1]), sizes[-1]) != (s.stations, s.clients_per_station):
        raise ValueError(
            f"tiers: got {s.tiers!r}, which is not the tree of stations = {s.stations} lowest "
            f"stations with clients-per-station = {s.clients_per_station}"
        )
    inner = len(sizes) - 2
    if s.inner_rounds and len(parse(s.inner_rounds, "inner-rounds")) != inner:
        raise ValueError(
            f"inner-rounds: got {s.inner_rounds!r}; tiers={s.tiers or 'x'.join(map(str, sizes))} "
            f"has {inner} levels of stations whose children are stations: give one number for each"
        )
    if inner and s.station_start == "own":
        raise ValueError(
            "station-start: got 'own'; stations that did not share a start are matched with each "
            f"other, which only one parent can do, and tiers={s.tiers} has several: choose shared"
        )
    if inner and s.gram_layers == "all":
        raise ValueError(
            "gram-layers: got 'all'; the Grams of all layers are merged by one parent of all "
            f"stations, and tiers={s.tiers} has several: choose linear"
        )


def branching(s: Settings) -> tuple[int, ...]:
    """Return the number of children of the nodes of every level, from the server on."""
    return parse(s.tiers) if s.tiers else (s.stations, s.clients_per_station)


def levels(s: Settings) -> int:
    """Return the number of levels of stations."""
    return len(branching(s)) - 1


def is_deep(s: Settings) -> bool:
    """Return whether the children of some stations are stations."""
    return levels(s) > 1


def is_inner(s: Settings, level: int) -> bool:
    """Return whether the children of the stations of this level are stations."""
    return 0 < level < levels(s)


def has_lowest(s: Settings, level: int) -> bool:
    """Return whether the children of this level's nodes are stations with clients."""
    return level == levels(s) - 1


def require_tier(s: Settings, level: int, found: set[str]) -> None:
    """Raise `UserError` if the connected children of this level's station are of another tier."""
    wanted = "station" if is_inner(s, level) else "client"
    if found != {wanted}:
        raise UserError(
            f"tiers: the run's tree {'x'.join(map(str, branching(s)))} gives a station of level "
            f"{level} {wanted}s, and connected are {' and '.join(f'{t}s' for t in sorted(found))}"
        )


def children(s: Settings, level: int) -> int:
    """Return how many children a node of this level has."""
    return branching(s)[level]


def stations_at(s: Settings, level: int) -> int:
    """Return how many stations a level has."""
    return math.prod(branching(s)[:level])


def clients_below(s: Settings, level: int) -> int:
    """Return how many clients a station of this level has, directly or through other stations."""
    return math.prod(branching(s)[level:])


def places(s: Settings, level: int, index: int) -> range:
    """Return the numbers of the children of node ``index`` of this level."""
    each = children(s, level)
    return range(index * each, (index + 1) * each)


def rounds_at(s: Settings, level: int) -> int:
    """Return how many rounds a station of this level does per round of its parent."""
    if not is_inner(s, level):
        return s.station_rounds
    return parse(s.inner_rounds, "inner-rounds")[level - 1] if s.inner_rounds else 1


def station_rounds_below(s: Settings, level: int) -> int:
    """Return how many station rounds with clients a round of this level's parent comprises."""
    return math.prod(rounds_at(s, below) for below in range(level, levels(s) + 1))


def local_rounds(s: Settings) -> int:
    """Return how many station rounds a global round comprises."""
    return station_rounds_below(s, 1)


def patience(s: Settings, level: int) -> float:
    """Return the seconds that a node of this level waits for its stations.

    A station waits less long than its parent waits for it, so that it can still say who is late.
    """
    rounds = math.prod(rounds_at(s, above) for above in range(1, level + 1))
    return s.station_timeout * _PATIENCE**level / rounds


def path(s: Settings, level: int, index: int) -> tuple[int, ...]:
    """Return the numbers of the stations on the way from the server to this one."""
    found = [index]
    for above in range(level - 1, 0, -1):
        found.insert(0, found[0] // children(s, above))
    return tuple(found)
