"""RoBERTa-base (Liu et al., 2019) from transformers."""

from torch import nn

from hfedatm_core.data.base import DataSpec
from hfedatm_core.models.text import pretrained_classifier, tiny_classifier


def build(
    spec: DataSpec, *, weights: str = "FacebookAI/roberta-base", tiny: bool = False
) -> nn.Module:
    """Build RoBERTa-base with a classification head.

    Parameters
    ----------
    spec
        The data, tokenised by the tokenizer that belongs to ``weights``.
    weights
        A local folder, or a hub id.
    tiny
        A small random model of the same architecture instead, for tests.
    """
    if not tiny:
        # RoBERTa's first position is its padding id, 1, plus one.
        return pretrained_classifier("roberta-base", spec, weights, position_offset=2)
    positions = spec.input_shape[0] + 1
    return tiny_classifier(
        "roberta-base", spec, {"model_type": "roberta", "max_position_embeddings": positions}
    )
