"""Figures over the rounds: accuracy, loss, bytes sent, duration, failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from hfedatm.base.round_record import RoundRecord
from hfedatm.report.style import DASHES, INK, MARKERS, MUTED, colour, figure, to_svg
from hfedatm.runs import Run, measure_of
from server_app.narration import size


def accuracy(runs: Sequence[Run]) -> str:
    """Draw source and unseen-domain accuracy per round, all runs in one figure."""
    with figure(9.2, 3.8) as drawn:
        axes = drawn.subplots()
        for number, run in enumerate(runs):
            unseen, source = (
                run.curve(lambda r: r.unseen_accuracy),
                run.curve(lambda r: r.source_accuracy),
            )
            for dash, (points, what) in enumerate(((unseen, "unseen"), (source, "source"))):
                shade = number if len(runs) > 1 else dash
                label = f"{run.name}, {what}" if len(runs) > 1 else f"{what} domains"
                _line(axes, points, shade, dash, label.replace("unseen domains", "unseen domain"))
        measure = _percent(axes, runs)
        _rounds(axes)
        axes.legend(loc="lower right", ncols=1 if len(runs) < 4 else 2, fontsize=9)
        return to_svg(drawn, f"{measure} per round on source validation and on the unseen domain")


def domain_numbers(run: Run) -> dict[str, int]:
    """Return each domain's colour number, which does not depend on the held-out domain."""
    unseen = {run.unseen_domain} if run.unseen_domain else set()
    return {name: number for number, name in enumerate(sorted({*run.domains, *unseen}))}


def domains(run: Run) -> str | None:
    """Draw the accuracy of every domain per round, if clients reported it."""
    names = run.domains[:40]
    if not names:
        return None
    numbered, unseen = domain_numbers(run), run.unseen_domain
    with figure(9.2, 3.6) as drawn:
        axes = drawn.subplots()
        if unseen:
            number, label = numbered[unseen], f"{unseen} (unseen)"
            points = run.curve(lambda r: r.unseen_accuracy)
            _line(axes, points, number, number // 7, label, 3.2)
        for name in names:
            if name != unseen:
                number = numbered[name]
                _line(axes, run.domain_curve(name), number, number // 7, name, 1.6)
        measure = _percent(axes, [run])
        _rounds(axes)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), title="domain", fontsize=9)
        return to_svg(drawn, f"{measure} per round of every domain")


def numbers(run: Run) -> str | None:
    """Draw every plugged-in number per round, each in a panel of its own scale."""
    names = run.numbers[:12]
    if not names:
        return None
    rows = -(-len(names) // 3)
    with figure(9.2, 0.4 + 2.0 * rows) as drawn:
        panels = drawn.subplots(rows, 3, squeeze=False).ravel()
        for panel, name in zip(panels, names, strict=False):
            _line(panel, run.curve(_number(name)), 0, 0, name)
            panel.set_title(name, fontsize=9)
            _rounds(panel)
        for panel in panels[len(names) :]:
            panel.set_visible(False)
        return to_svg(drawn, "Numbers of training functions, methods and metrics, per round")


def _number(name: str) -> Callable[[RoundRecord], float | None]:
    return lambda record: record.numbers.get(name)


def bytes_sent(run: Run) -> str:
    """Draw the bytes sent up per round, by tier and by content."""
    return _stacked(
        run,
        [
            ("clients, models", lambda r: r.bytes_up.clients - _grams(r)),
            ("clients, Grams", _grams),
            ("stations, both", lambda r: r.bytes_up.stations),
        ],
        "bytes up",
        lambda value, _: size(value),
    )


def seconds(run: Run) -> str:
    """Draw the seconds per round by part; the slowest part comes first."""
    return _stacked(
        run,
        [
            ("stations and clients", lambda r: (r.train_seconds or 0) - (r.merge_seconds or 0)),
            ("merge", lambda r: r.merge_seconds or 0),
            ("evaluation, saving", lambda r: r.seconds - (r.train_seconds or r.seconds)),
        ],
        "seconds",
        lambda value, _: f"{value:g}",
    )


def moved(run: Run) -> str | None:
    """Draw how many channels the alignment moved, per round."""
    points = run.curve(lambda r: r.moved)
    if not points or not any(value for _, value in points):
        return None
    with figure(9.2, 2.2) as drawn:
        axes = drawn.subplots()
        axes.bar([r for r, _ in points], [v for _, v in points], width=0.8, color=colour(0))
        axes.set_ylabel("channels moved")
        _rounds(axes)
        return to_svg(drawn, "Channels moved by the alignment, per round")


def privacy(run: Run) -> str | None:
    """Draw the privacy spent so far, per round."""
    points = run.curve(lambda r: r.privacy.epsilon if r.privacy else None)
    if not points:
        return None
    with figure(9.2, 2.4) as drawn:
        axes = drawn.subplots()
        _line(axes, points, 0, 0, "spent")
        for _, budget in run.curve(lambda r: r.privacy.budget if r.privacy else None)[-1:]:
            axes.axhline(budget, color=colour(1), linestyle=DASHES[1], label="budget")
            axes.legend(loc="lower right", fontsize=9)
        axes.set_ylabel("ε spent")
        axes.set_ylim(bottom=0)
        _rounds(axes)
        return to_svg(drawn, "Privacy spent, per round")


def failures(run: Run) -> str | None:
    """Draw the failures: one row per node, one mark per round."""
    marks = [(r.round, f.node) for r in run.rounds for f in r.failures]
    if not marks:
        return None
    nodes = sorted({node for _, node in marks}, reverse=True)[-30:]
    with figure(9.2, 0.9 + 0.26 * len(nodes)) as drawn:
        axes = drawn.subplots()
        shown = [(number, node) for number, node in marks if node in nodes]
        rounds = [number for number, _ in shown]
        rows = [nodes.index(node) for _, node in shown]
        axes.scatter(rounds, rows, marker="X", s=60, color=colour(1))
        axes.set_yticks(range(len(nodes)), nodes)
        axes.set_ylim(-0.6, len(nodes) - 0.4)
        _rounds(axes, (1, run.total))
        return to_svg(drawn, "Failures per node and round")


def _stacked(
    run: Run,
    parts: Sequence[tuple[str, Callable[[RoundRecord], float]]],
    label: str,
    form: Callable[[float, int | None], str],
) -> str:
    with figure(4.5, 2.9) as drawn:
        axes = drawn.subplots()
        numbers = [r.round for r in run.rounds]
        base = [0.0] * len(numbers)
        for number, (name, value) in enumerate(parts):
            heights = [max(0.0, float(value(r))) for r in run.rounds]
            if any(heights):
                axes.bar(numbers, heights, 0.8, base, color=colour(number), label=name)
                base = [a + b for a, b in zip(base, heights, strict=True)]
        axes.set_ylabel(label)
        axes.yaxis.set_major_formatter(FuncFormatter(form))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        _rounds(axes)
        if any(base):  # nothing was sent where every node failed
            drawn.legend(loc="outside upper left", fontsize=8.5, ncols=3, columnspacing=1.0)
        return to_svg(drawn, f"{label} per round, by part")


def _grams(record: RoundRecord) -> float:
    return float(sum(station.gram_bytes_below for station in record.per_station))


def _line(
    axes: Axes,
    points: Sequence[tuple[int, float]],
    shade: int,
    dash: int,
    label: str,
    width: float = 2.2,
) -> None:
    if not points:
        return
    x, y = zip(*points, strict=True)
    axes.plot(
        x,
        y,
        color=colour(shade),
        linestyle=DASHES[dash % len(DASHES)],
        linewidth=width,
        marker=MARKERS[shade % len(MARKERS)] if len(points) <= 30 else None,
        markersize=4.5,
        label=label,
    )


def _percent(axes: Axes, runs: Sequence[Run]) -> str:
    """Show shares in per cent; return the name of what is shown, for a sentence's start."""
    measure = measure_of(runs)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))
    axes.set_ylabel(measure, color=MUTED)
    return f"{measure[:1].upper()}{measure[1:]}"


def _rounds(axes: Axes, limits: tuple[int, int] | None = None) -> None:
    axes.set_xlabel("global round", color=MUTED)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if limits:
        axes.set_xlim(limits[0] - 0.5, limits[1] + 0.5)
    axes.tick_params(labelcolor=INK, labelsize=9)
