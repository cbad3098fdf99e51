"""The style of figures, and their conversion to SVG that follows the page's light or dark colours.

Figures are drawn in placeholder colours; in the SVG each becomes a CSS variable of the page. The
palette is Okabe and Ito's, which colour-blind readers can tell apart; lines that belong together
also differ in dash or marker, so nothing depends on colour alone.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, MUTED, GRID, CARD = "#010203", "#040506", "#070809", "#0a0b0c"
SERIES = tuple(f"#0d0e{number:02x}" for number in range(16, 23))
MARKERS = "osD^vPX"
DASHES = ("solid", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))

_VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid", CARD: "card"} | {
    colour: f"c{number}" for number, colour in enumerate(SERIES, start=1)
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "hfedatm",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "text.parse_math": False,  # names and reasons are plain text, even with a $ in them
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "ytick.major.size": 0,
    "lines.linewidth": 2.0,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "image.interpolation": "none",
}


@contextmanager
def figure(width: float, height: float) -> Iterator[Figure]:
    """Return an empty figure in the report's style; sizes are in inches of 72 px."""
    with mpl.rc_context(_STYLE):
        yield Figure(figsize=(width, height), layout="constrained")


def to_svg(drawn: Figure, title: str) -> str:
    """Return a figure as inline SVG that takes its colours from the page."""
    text = io.StringIO()
    with mpl.rc_context(_STYLE):
        drawn.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var(--{variable})")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(
        r' id="(?:figure|axes|patch|text|line2d|matplotlib\.axis|xtick|ytick)_?\d*"', "", svg
    )
    label = title.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def colour(number: int) -> str:
    """Return the placeholder colour of a series."""
    return SERIES[number % len(SERIES)]


def bare(axes: Axes) -> Axes:
    """Remove ticks, frame and grid, for pictures and matrices."""
    axes.grid(False)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)
    return axes
