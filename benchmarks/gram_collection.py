"""The time of collecting Grams, relative to a plain forward pass on the same data.

LeNet-5 is measured whole; RoBERTa-base with two of its twelve equal blocks and random weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from measure import Figure, details, options, paired, publish
from torch import Tensor, nn
from workloads import DIGITS

from hfedatm_core import collect_grams, forward
from hfedatm_core.models import lenet5

COMPARED = "forward pass in evaluation mode, no gradients"


class Roberta(nn.Module):
    """RoBERTa with a classification head, called as our text models are."""

    def __init__(self, hidden: int, blocks: int) -> None:
        super().__init__()
        from transformers import RobertaConfig, RobertaForSequenceClassification

        config = RobertaConfig(
            vocab_size=1000,
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=blocks,
            num_attention_heads=hidden // 16,
            max_position_embeddings=200,
        )
        self.network = RobertaForSequenceClassification(config)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return logits."""
        return self.network(input_ids=input_ids, attention_mask=attention_mask).logits


def plain(model: nn.Module, batches: list[Any]) -> None:
    model.eval()
    with torch.no_grad():
        for inputs, _ in batches:
            forward(model, inputs)


def compare(name: str, model: nn.Module, batches: list[Any], limit: float, repeats: int) -> Figure:
    pair = paired(lambda: collect_grams(model, batches), lambda: plain(model, batches), repeats)
    return Figure(name, pair["ratio"], limit, COMPARED, details=details(pair))


def main(given: Sequence[str] | None = None) -> None:
    chosen = options(__doc__, given)
    torch.manual_seed(0)
    images = [
        (torch.randn(32, *DIGITS.input_shape), None) for _ in range(2 if chosen.smoke else 32)
    ]
    hidden, tokens = (48, 8) if chosen.smoke else (768, 128)
    text = [
        (
            {
                "input_ids": torch.randint(5, 1000, (16, tokens)),
                "attention_mask": torch.ones(16, tokens, dtype=torch.long),
            },
            None,
        )
        for _ in range(1 if chosen.smoke else 4)
    ]
    figures = [
        compare(
            "Gram collection, LeNet-5", lenet5.build(DIGITS), images, 1.4, 2 if chosen.smoke else 31
        ),
        compare(
            "Gram collection, RoBERTa-base layers",
            Roberta(hidden, 2),
            text,
            2.0,
            1 if chosen.smoke else 5,
        ),
    ]
    publish(__file__, figures, chosen)


if __name__ == "__main__":
    main()
