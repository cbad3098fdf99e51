"""Read, measure, align and merge checkpoints that are files."""

from hfedatm_core.checkpoints.batches import FunctionBatches, ImageBatches, as_batches
from hfedatm_core.checkpoints.files import read_grams, read_state, write_grams, write_state
from hfedatm_core.checkpoints.fitting import load_checkpoint
from hfedatm_core.checkpoints.merging import merge_checkpoints, refine_checkpoints
from hfedatm_core.checkpoints.sources import Network, open_network
from hfedatm_core.checkpoints.unlike import merge_unlike_checkpoints

__all__ = [
    "FunctionBatches",
    "ImageBatches",
    "Network",
    "as_batches",
    "load_checkpoint",
    "merge_checkpoints",
    "merge_unlike_checkpoints",
    "open_network",
    "read_grams",
    "read_state",
    "refine_checkpoints",
    "write_grams",
    "write_state",
]
