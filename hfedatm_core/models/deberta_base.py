"""DeBERTa-base (He et al., 2021) from transformers."""

from torch import nn

from hfedatm_core.data.base import DataSpec
from hfedatm_core.models.text import pretrained_classifier, tiny_classifier


def build(
    spec: DataSpec, *, weights: str = "microsoft/deberta-base", tiny: bool = False
) -> nn.Module:
    """Build DeBERTa-base with a classification head.

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
        return pretrained_classifier("deberta-base", spec, weights)
    architecture = {
        "model_type": "deberta",
        "max_position_embeddings": spec.input_shape[0],
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "type_vocab_size": 0,
    }
    return tiny_classifier("deberta-base", spec, architecture)
