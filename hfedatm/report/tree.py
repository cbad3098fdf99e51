"""The tree of a run: server, levels of stations, clients, and who failed in the last round."""

from __future__ import annotations

import math

from matplotlib.axes import Axes

from hfedatm.base.round_record import RoundRecord
from hfedatm.base.tiers import parse
from hfedatm.report.style import CARD, GRID, INK, MUTED, SERIES, bare, figure, to_svg

MOST_NODES = 120
"""Most nodes of a level that are drawn one by one."""
FAILED = SERIES[5]


def draw(tiers: str, record: RoundRecord) -> str | None:
    """Draw a tree of more than one level of stations; a node that failed is crossed."""
    try:
        sizes = parse(tiers)
    except ValueError:
        return None
    if len(sizes) < 3:
        return None
    failed = {place for failure in record.failures for place in [_place(failure.node)] if place}
    counts = [1, *(math.prod(sizes[: level + 1]) for level in range(len(sizes)))]
    answered = [t.answered for t in record.tiers or []]
    with figure(9.2, 0.85 * len(counts) + 0.3) as drawn:
        axes = bare(drawn.subplots())
        axes.set(xlim=(-0.3, 1.02), ylim=(-len(counts) + 0.5, 0.5))
        axes.set_xticks([])
        axes.set_yticks([])
        for level, count in enumerate(counts):
            if level:
                _links(axes, level, counts)
            _nodes(axes, level, count, failed)
            _label(axes, level, counts, answered, record)
        return to_svg(drawn, f"The tree of the run, {tiers}")


def _links(axes: Axes, level: int, counts: list[int]) -> None:
    if counts[level] > MOST_NODES:
        return
    each = counts[level] // counts[level - 1]
    for node in range(counts[level]):
        ends = [_x(node // each, counts[level - 1]), _x(node, counts[level])]
        axes.plot(ends, [1 - level, -level], color=GRID, linewidth=1.0, zorder=1)


def _nodes(axes: Axes, level: int, count: int, failed: set[tuple[int, int]]) -> None:
    if count > MOST_NODES:  # one bar for all
        axes.plot([0.0, 1.0], [-level, -level], color=INK, linewidth=5, solid_capstyle="butt")
        return
    for node in range(count):
        lost = (level, node) in failed
        axes.plot(
            [_x(node, count)],
            [-level],
            "X" if lost else "o",
            color=FAILED if lost else INK,
            markeredgecolor=CARD,
            markersize=9 if lost else 7,
            zorder=3,
        )


def _label(
    axes: Axes, level: int, counts: list[int], answered: list[int], record: RoundRecord
) -> None:
    count, clients = counts[level], level == len(counts) - 1
    text = "server" if not level else f"{count} clients" if clients else f"{count} stations"
    if clients:
        text += f"\n{record.clients.answered} answered"
    elif level and level <= len(answered):
        text += f"\n{answered[level - 1]} answered"
    axes.text(-0.29, -level, text, va="center", ha="left", fontsize=9, color=MUTED)


def _x(node: int, count: int) -> float:
    return (node + 0.5) / count


def _place(path: str) -> tuple[int, int] | None:
    """Return level and number of the last node of a path such as ``station 1, client 4``."""
    parts = path.split(", ")
    kind, _, number = parts[-1].partition(" ")
    if kind not in ("station", "client") or not number.isdigit() or len(number) > 9:
        return None
    return len(parts), int(number)
