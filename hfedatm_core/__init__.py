"""The mathematics of HFedATM: alignment by optimal transport, RegMean, averaging, partitioning."""

from hfedatm_core.apart.merging import merge_apart
from hfedatm_core.apart.refining import (
    Answers,
    OwnedNetwork,
    collect_answers,
    fit_layers,
    refine,
)
from hfedatm_core.averaging import MeanAccumulator, weighted_mean
from hfedatm_core.channels.graph import ChannelGraph
from hfedatm_core.checkpoints import (
    merge_checkpoints,
    read_state,
    refine_checkpoints,
    write_state,
)
from hfedatm_core.data.partition import heterogeneous_partition
from hfedatm_core.fot.alignment import Alignment, GroupReport, align
from hfedatm_core.fot.options import AlignmentOptions
from hfedatm_core.grams.by_layer import grams_nbytes, pack_grams, unpack_grams
from hfedatm_core.grams.collect import collect_grams
from hfedatm_core.grams.gram import FactorGram, Gram, PackedGram
from hfedatm_core.grams.sums import GramAccumulator
from hfedatm_core.inputs import Batch, Inputs, forward
from hfedatm_core.merge_report import Merged, MergeReport
from hfedatm_core.merge_table import LayerRow, layer_rows
from hfedatm_core.merging import merge
from hfedatm_core.profiles import Profiles, collect_profiles
from hfedatm_core.regmean.closed_form import RegMeanAccumulator, regmean
from hfedatm_core.regmean.layers import LayerReport
from hfedatm_core.tiers import Combined, combine
from hfedatm_core.update import Update

__all__ = [
    "Alignment",
    "AlignmentOptions",
    "Answers",
    "Batch",
    "ChannelGraph",
    "Combined",
    "FactorGram",
    "Gram",
    "GramAccumulator",
    "GroupReport",
    "Inputs",
    "LayerReport",
    "LayerRow",
    "MeanAccumulator",
    "MergeReport",
    "Merged",
    "OwnedNetwork",
    "PackedGram",
    "Profiles",
    "RegMeanAccumulator",
    "Update",
    "align",
    "collect_answers",
    "collect_grams",
    "collect_profiles",
    "combine",
    "fit_layers",
    "forward",
    "grams_nbytes",
    "heterogeneous_partition",
    "layer_rows",
    "merge",
    "merge_apart",
    "merge_checkpoints",
    "pack_grams",
    "read_state",
    "refine",
    "refine_checkpoints",
    "regmean",
    "unpack_grams",
    "weighted_mean",
    "write_state",
]
