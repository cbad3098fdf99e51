"""A Linear head on the mean of a transformer's token vectors, one block after the other.

The blocks are called here and not by the encoder's own code, so that a network can be cut between
any two of them (`hfedatm_core.freezing`): the code of transformers cannot be followed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hfedatm_core.data.base import DataSpec
from hfedatm_core.models.base import require_kind
from hfedatm_core.models.text import TINY, check_sizes, refuse_hashed
from hfedatm_core.pretrained import from_hub

LEAST = torch.finfo(torch.float32).min


class PooledClassifier(nn.Module):
    """A transformer's encoder and a Linear head on the mean of its tokens, padding left out.

    Parameters
    ----------
    encoder
        A model of transformers with ``embeddings`` and ``encoder.layer``.
    num_classes
        Outputs of the head.
    freeze
        Train the head only.
    """

    def __init__(self, encoder: Any, num_classes: int, freeze: bool = False) -> None:
        super().__init__()
        self.encoder = encoder.requires_grad_(not freeze)
        self.freeze = freeze
        self.head = nn.Linear(encoder.config.hidden_size, num_classes)

    def train(self, mode: bool = True) -> PooledClassifier:
        """Switch to training mode; a frozen encoder stays without dropout."""
        super().train(mode)
        if self.freeze:
            self.encoder.eval()
        return self

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the logits, ``batch x classes``."""
        tokens = self.encoder.embeddings(input_ids)
        # Added to the scores of attention, so that no token attends to padding.
        padding = (1.0 - attention_mask[:, None, None, :].float()) * LEAST
        for block in self.encoder.encoder.layer:
            tokens = self.through(block, tokens, padding)
        mask = attention_mask.unsqueeze(-1).float()
        logits: Tensor = self.head((tokens * mask).sum(1) / mask.sum(1).clamp(min=1))
        return logits

    def through(self, block: nn.Module, tokens: Tensor, padding: Tensor) -> Tensor:
        """Return the token vectors behind a block."""
        found: Tensor = block(tokens, padding)
        return found


def pooled_encoder(
    name: str, spec: DataSpec, weights: str, tiny: str = "", position_offset: int = 0
) -> Any:
    """Return the encoder of a pooled classifier.

    Parameters
    ----------
    name
        The model's name, for messages.
    spec
        The data.
    weights
        A folder, an installed package, or a hub id.
    tiny
        An architecture of transformers: a small random encoder of it instead, for tests.
    position_offset
        Positions the model reserves before the first token.
    """
    require_kind(spec, "text", name)
    if tiny:
        import transformers

        positions = spec.input_shape[0] + position_offset
        sizes = {"vocab_size": spec.vocab_size, "max_position_embeddings": positions}
        config = transformers.AutoConfig.for_model(tiny, **{**TINY, **sizes})
        models: Any = transformers.AutoModel
        return models.from_config(config, add_pooling_layer=False)
    refuse_hashed(spec, name, weights)
    encoder = from_hub("AutoModel", weights, add_pooling_layer=False)
    check_sizes(spec, name, encoder.config, position_offset)
    return encoder
