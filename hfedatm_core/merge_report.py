"""The result of a merge: the state, and a report of what was done to stations and layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from hfedatm_core.channels.graph import ChannelGraph
from hfedatm_core.fot.alignment import GroupReport
from hfedatm_core.grams.gram import Gram
from hfedatm_core.regmean.layers import LayerReport


@dataclass(frozen=True)
class LayerQuality:
    """The quality of one merged layer of networks that were trained apart.

    Attributes
    ----------
    correlation_before, correlation_after
        Mean correlation of the outputs of matched channels, before and after the alignment;
        ``None`` if no channels were matched.
    variance_before, variance_after
        Variance of the merged layer's outputs, before and after the repair, as a share of the
        variance of the stations' own outputs.
    """

    correlation_before: float | None = None
    correlation_after: float | None = None
    variance_before: float = 1.0
    variance_after: float = 1.0


@dataclass(frozen=True)
class MergeReport:
    """The report of a merge, per station and channel group, and per layer.

    ``unaligned`` gives, for every module whose channels could not be aligned, the reason why they
    were merged in the order they have. For networks that were trained apart, ``quality`` describes
    how well their layers match, and ``lone_norms`` gives, for every BatchNorm that is no part of a
    layer, the reason: its statistics are pooled and fit no network.
    """

    reference: str = ""
    stations: dict[str, dict[str, GroupReport]] = field(default_factory=dict)
    layers: dict[str, LayerReport] = field(default_factory=dict)
    unaligned: dict[str, str] = field(default_factory=dict)
    quality: dict[str, LayerQuality] = field(default_factory=dict)
    lone_norms: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Merged:
    """The merged state, the report, and every station's permutation per channel group.

    For a rule that aligns nothing, only the state is set.

    Channel ``i`` of the merged model is channel ``permutations[station][group][i]`` of the station.
    ``average`` is the weighted mean of the aligned stations, before RegMean. ``graph`` is the given
    channel graph, from which :func:`layer_rows` describes layers. ``grams`` are those of all
    stations together, if the merge was to keep them.
    """

    state: dict[str, Tensor]
    report: MergeReport = field(default_factory=MergeReport)
    permutations: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    average: dict[str, Tensor] = field(default_factory=dict)
    graph: ChannelGraph = field(default_factory=ChannelGraph)
    grams: Mapping[str, Gram] = field(default_factory=dict)

    @property
    def moved(self) -> int:
        """Number of channels that the alignment moved, over all stations and groups."""
        stations = self.report.stations.values()
        return sum(group.moved for groups in stations for group in groups.values())
