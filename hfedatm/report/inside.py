"""Figures of one round's merge and of the model's mistakes, from the saved diagnostics."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from PIL import Image

from hfedatm.report.style import CARD, DASHES, INK, MUTED, bare, colour, figure, to_svg

Arrays = Mapping[str, np.ndarray]
MAP = "cividis"  # a colour map of even lightness, made for colour-blind readers
CHANNELS = 16  # filters per row of pictures
NUMBERS = 12  # largest matrix with a number in every cell


def station_moved_most(arrays: Arrays) -> str | None:
    """Return the station with the most moved channels."""
    moved: dict[str, int] = {}
    for key in _under(arrays, "assignment"):
        station, _ = key.split("/", 1)
        p = arrays[f"assignment/{key}"]
        moved[station] = moved.get(station, 0) + int((p != np.arange(len(p))).sum())
    return max(moved, key=lambda name: moved[name]) if any(moved.values()) else None


def assignment(arrays: Arrays, station: str) -> str | None:
    """Draw the permutations of one station's channel groups as matrices."""
    groups = _under(arrays, f"assignment/{station}")
    moving = [g for g in groups if _moved(arrays[f"assignment/{station}/{g}"])][:4]
    if not moving:
        return None
    with figure(9.2, 2.9) as drawn:
        panels = np.atleast_1d(drawn.subplots(1, len(moving)))
        for axes, group in zip(panels, moving, strict=True):
            p = arrays[f"assignment/{station}/{group}"]
            axes.plot([0, len(p) - 1], [0, len(p) - 1], color=MUTED, linewidth=0.8)
            side = max(1.2, min(8.0, 130 / len(p)))
            axes.plot(
                p, np.arange(len(p)), "s", markersize=side, color=colour(0), markeredgewidth=0
            )
            axes.set(xlim=(-0.5, len(p) - 0.5), ylim=(len(p) - 0.5, -0.5), aspect="equal")
            axes.grid(False)
            axes.tick_params(labelsize=8, labelcolor=INK)
            axes.set_title(f"{group}: {_moved(p)} of {len(p)} moved")
            axes.set_xlabel("channel of the station")
        panels[0].set_ylabel("channel of the reference")
        return to_svg(drawn, f"Assignment of channels, {station}")


def filters(arrays: Arrays, station: str, reference: str | None) -> str | None:
    """Draw a convolution's filters: reference, station before and after, merged model."""
    groups = _under(arrays, f"filters/{station}")
    moving = [g for g in groups if _moved(arrays.get(f"assignment/{station}/{g}"))]
    if not groups:
        return None
    group = (moving or groups)[0]
    before = arrays[f"filters/{station}/{group}"]
    p = arrays.get(f"assignment/{station}/{group}", np.arange(len(before)))
    rows = {f"{station}, as sent": before, f"{station}, aligned": before[p]}
    if reference and f"filters/{reference}/{group}" in arrays and reference != station:
        rows = {f"{reference} (reference)": arrays[f"filters/{reference}/{group}"], **rows}
    rows["merged model"] = arrays[f"merged/{group}"]
    count = min(CHANNELS, len(before))
    mosaic, places = _mosaic([pictures[:count] for pictures in rows.values()])
    with figure(2.0 + 0.45 * count, 0.35 + 0.45 * len(rows)) as drawn:
        axes = bare(drawn.subplots())
        axes.imshow(mosaic)
        axes.set_yticks(places, list(rows), fontsize=9, color=INK)
        axes.tick_params(length=0)
        axes.set_title(f"{group}: the first {count} of {len(before)} filters")
        return to_svg(drawn, f"Filters of {group} before and after alignment")


def spectra(arrays: Arrays) -> str | None:
    """Draw the eigenvalues of every station's Grams, one panel per layer."""
    stations = [str(name) for name in arrays.get("stations", [])]
    layers = list(
        dict.fromkeys(
            key.split("/", 1)[1]
            for key in _under(arrays, "spectrum")
            if len(arrays[f"spectrum/{key}"])
        )
    )
    if not layers:
        return None
    with figure(9.2, 3.0) as drawn:
        panels = np.atleast_1d(drawn.subplots(1, len(layers)))
        for axes, layer in zip(panels, layers, strict=True):
            for number, station in enumerate(stations):
                values = arrays.get(f"spectrum/{station}/{layer}", np.empty(0))
                values = values[values > 1e-9 * values[:1].sum()]
                axes.plot(
                    np.arange(1, len(values) + 1),
                    values,
                    color=colour(number),
                    linewidth=1.6,
                    linestyle=DASHES[(number // 7) % len(DASHES)],
                    label=station if axes is panels[0] else None,
                )
            axes.set(yscale="log", title=layer, xlabel="eigenvalue number")
            axes.minorticks_off()
            axes.tick_params(labelsize=8, labelcolor=INK)
        panels[0].set_ylabel("eigenvalue")
        drawn.legend(loc="outside upper right", ncols=6, fontsize=8.5)
        return to_svg(drawn, "Eigenvalues of the Grams per station")


def distances(arrays: Arrays) -> str | None:
    """Draw how far apart the stations' weights are, before and after alignment."""
    if "distance/before" not in arrays or len(arrays["distance/before"]) < 2:
        return None
    names = [str(name).removeprefix("station ") for name in arrays["stations"]]
    off = ~np.eye(len(names), dtype=bool)
    both = np.concatenate([arrays[f"distance/{when}"][off] for when in ("before", "after")])
    limits = (0.8 * float(both.min()), float(both.max()) or 1.0)
    with figure(7.0, 3.2) as drawn:
        for axes, when in zip(drawn.subplots(1, 2), ("before", "after"), strict=True):
            matrix = arrays[f"distance/{when}"]
            _matrix(axes, np.where(off, matrix, np.nan), names, limits, "{:.3g}")
            axes.set_title(f"{when} alignment: mean {matrix[off].mean():.3g}")
            axes.set_xlabel("station")
        return to_svg(drawn, "Distance between stations before and after alignment")


def confusion(arrays: Arrays) -> str | None:
    """Draw the confusion matrix on the unseen domain, each row in shares of its class."""
    if "confusion" not in arrays:
        return None
    counts = arrays["confusion"].astype(float)
    shares = counts / counts.sum(1, keepdims=True).clip(1)
    names = [str(name) for name in arrays["classes"]]
    side = max(3.2, min(8.0, 0.34 * len(names) + 1.0))
    with figure(side + 0.4, side) as drawn:
        axes = drawn.subplots()
        _matrix(axes, 100 * shares, names, (0.0, 100.0), "{:.0f}")
        axes.set(xlabel="predicted", ylabel="true class", title="per cent of each true class")
        return to_svg(drawn, "Confusion matrix on the unseen domain")


def mistakes(arrays: Arrays, limit: int = 24) -> list[dict[str, str]]:
    """Return misclassified examples: the picture, its class and the model's prediction."""
    if "wrong/images" not in arrays:
        return []
    names = [str(name) for name in arrays["classes"]]
    columns = (arrays[f"wrong/{key}"][:limit] for key in ("images", "targets", "predicted"))
    return [
        {"picture": _png(image), "true": names[int(t)], "predicted": names[int(p)]}
        for image, t, p in zip(*columns, strict=True)
    ]


def _matrix(
    axes: Axes, matrix: np.ndarray, names: list[str], limits: tuple[float, float], form: str
) -> None:
    low, high = limits
    bare(axes).imshow(matrix, cmap=MAP, vmin=low, vmax=high)
    if len(names) <= 40:
        small: dict[str, Any] = {"fontsize": 8, "color": INK}
        axes.set_xticks(range(len(names)), names, rotation=90 if _long(names) else 0, **small)
        axes.set_yticks(range(len(names)), names, **small)
    axes.tick_params(length=0)
    if len(names) > NUMBERS:
        return
    for (i, j), value in np.ndenumerate(matrix):
        if np.isfinite(value) and value:
            shade = "#ffffff" if value < low + 0.55 * (high - low) else "#000000"
            axes.text(j, i, form.format(value), ha="center", va="center", fontsize=7.5, color=shade)
    for place in range(1, len(names)):
        axes.axhline(place - 0.5, color=CARD, linewidth=1.5)
        axes.axvline(place - 0.5, color=CARD, linewidth=1.5)


def _png(image: np.ndarray) -> str:
    """Return a C x H x W byte image as a data URL, enlarged to at least 64 pixels."""
    pixels = image[0] if image.shape[0] == 1 else np.moveaxis(image[:3], 0, -1)
    picture = Image.fromarray(np.ascontiguousarray(pixels))
    if picture.width > 128:
        picture = picture.resize((128, 128 * picture.height // picture.width))
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _mosaic(rows: list[np.ndarray]) -> tuple[np.ndarray, list[float]]:
    """Return all pictures on one transparent sheet, a pixel apart, and the middle of each row."""
    count, _, height, width = rows[0].shape
    sheet = np.zeros((len(rows) * (height + 1) - 1, count * (width + 1) - 1, 4))
    for i, pictures in enumerate(rows):
        for j, picture in enumerate(pictures):
            low, high = float(picture.min()), float(picture.max())
            scaled = np.moveaxis((picture - low) / max(high - low, 1e-12), 0, -1)
            place = sheet[i * (height + 1) :, j * (width + 1) :][:height, :width]
            place[..., :3], place[..., 3] = scaled, 1.0  # a filter of one channel is shown in grey
    return sheet, [i * (height + 1) + (height - 1) / 2 for i in range(len(rows))]


def _moved(p: np.ndarray | None) -> int:
    return 0 if p is None else int((p != np.arange(len(p))).sum())


def _under(arrays: Arrays, prefix: str) -> list[str]:
    return [key[len(prefix) + 1 :] for key in arrays if key.startswith(f"{prefix}/")]


def _long(names: list[str]) -> bool:
    return max(map(len, names), default=0) > 3
