"""The mathematics of HFedATM: alignment by optimal transport, RegMean, averaging, partitioning."""

from hfedatm_core.alignment import Alignment, align
from hfedatm_core.averaging import MeanAccumulator, weighted_mean
from hfedatm_core.channels import ChannelGraph
from hfedatm_core.collect import Batch, collect_grams, forward
from hfedatm_core.gram import FactorGram, Gram, PackedGram
from hfedatm_core.gram_sum import GramAccumulator
from hfedatm_core.layers import LayerReport
from hfedatm_core.merging import GroupReport, Merged, MergeReport, Update, merge
from hfedatm_core.partition import heterogeneous_partition
from hfedatm_core.regmean import RegMeanAccumulator, regmean
from hfedatm_core.sharing import grams_nbytes, pack_grams, unpack_grams
from hfedatm_core.taps import Inputs

__all__ = [
    "Alignment",
    "Batch",
    "ChannelGraph",
    "FactorGram",
    "Gram",
    "GramAccumulator",
    "GroupReport",
    "Inputs",
    "LayerReport",
    "MeanAccumulator",
    "MergeReport",
    "Merged",
    "PackedGram",
    "RegMeanAccumulator",
    "Update",
    "align",
    "collect_grams",
    "forward",
    "grams_nbytes",
    "heterogeneous_partition",
    "merge",
    "pack_grams",
    "regmean",
    "unpack_grams",
    "weighted_mean",
]
