"""A table for people that describes a merge layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

from hfedatm_core.merge_report import LayerQuality, Merged


@dataclass(frozen=True)
class LayerRow:
    """One layer of a merged model.

    Attributes
    ----------
    layer, shape
        Name of the layer and shape of its weight.
    aligned
        Whether its output channels were brought into the reference's order.
    moved
        Channels that changed places, over all models.
    how
        ``"regmean"`` or ``"averaged"``.
    frozen, averaged
        The reason why the layer was not aligned, and why it was not merged by RegMean; empty if
        it was.
    before, after
        Distance of a channel from the reference's, before and after the alignment; 0 means equal.
        With filters it is the mean squared distance of normalised filters, 2 if unrelated, per
        tensor that writes the channels. For networks that were trained apart, with Grams, it is 1
        less the correlation of the channels' outputs.
    """

    layer: str
    shape: tuple[int, ...]
    aligned: bool
    moved: int
    how: str
    frozen: str
    averaged: str
    before: float
    after: float


def layer_rows(merged: Merged) -> list[LayerRow]:
    """Return a row for every layer with a weight matrix, in the order of the model."""
    groups = {m.tensor: group for group in merged.graph.groups for m in group.producers}
    stations = [s for name, s in merged.report.stations.items() if name != merged.report.reference]
    rows = []
    for layer, merging in merged.report.layers.items():
        group = groups.get(f"{layer}.weight")
        reports = [s[group.name] for s in stations if group is not None and group.name in s]
        quality = merged.report.quality.get(layer, LayerQuality())
        count = len(reports) * (group.size if group is not None else 0)
        why_not = "" if reports else _why_unaligned(merged, layer, known=group is not None)
        before, after = sum(r.identity_cost for r in reports), sum(r.cost for r in reports)
        rows.append(
            LayerRow(
                layer=layer,
                shape=tuple(merged.state[f"{layer}.weight"].shape),
                aligned=bool(reports),
                moved=sum(report.moved for report in reports),
                how=merging.how,
                frozen=why_not,
                averaged=merging.reason,
                before=_unlike(quality.correlation_before, before, count),
                after=_unlike(quality.correlation_after, after, count),
            )
        )
    return rows


def _unlike(correlation: float | None, cost: float, count: int) -> float:
    if correlation is not None:
        return 1.0 - correlation
    return cost / count if count else 0.0


def _why_unaligned(merged: Merged, layer: str, known: bool) -> str:
    frozen = merged.graph.frozen
    if known:
        return "not in the scope of the alignment"
    if not merged.graph.groups and len(frozen) == 1:  # the whole network could not be recorded
        return next(iter(frozen.values()))
    return frozen.get(layer, "its channels are not understood")
