"""Parts that the text models share: a wrapper that returns logits, and checks of the data."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hfedatm_core.data.base import DataSpec
from hfedatm_core.models.base import require_kind
from hfedatm_core.pretrained import from_hub

# The sizes of the random models for tests.
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "pad_token_id": 0,
}


class TextClassifier(nn.Module):
    """A sequence classifier of transformers that maps ids and mask to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the logits, ``batch x classes``."""
        logits: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits


def pretrained_classifier(
    name: str, spec: DataSpec, weights: str, position_offset: int = 0
) -> nn.Module:
    """Build a classifier on pretrained weights.

    Parameters
    ----------
    name
        The model's name, for messages.
    spec
        The data.
    weights
        A folder, an installed package, or a hub id.
    position_offset
        Positions the model reserves before the first token.
    """
    require_kind(spec, "text", name)
    refuse_hashed(spec, name, weights)
    model = from_hub("AutoModelForSequenceClassification", weights, num_labels=spec.num_classes)
    check_sizes(spec, name, model.config, position_offset)
    return TextClassifier(model)


def tiny_classifier(name: str, spec: DataSpec, architecture: Mapping[str, Any]) -> nn.Module:
    """Build a small random classifier; ``architecture`` completes `TINY` for transformers."""
    import transformers

    require_kind(spec, "text", name)
    sizes: dict[str, Any] = {"vocab_size": spec.vocab_size, "num_labels": spec.num_classes}
    config = transformers.AutoConfig.for_model(**{**TINY, **architecture, **sizes})
    classifiers: Any = transformers.AutoModelForSequenceClassification
    return TextClassifier(classifiers.from_config(config))


def refuse_hashed(spec: DataSpec, name: str, weights: str) -> None:
    """Refuse ids of the hash tokenizer, which mean nothing to a pretrained model."""
    if spec.tokenizer == "hash":
        raise ValueError(
            f"model {name!r} is pretrained, but the texts were tokenised by hashing; set the data "
            f"set's option tokenizer={weights}"
        )


def check_sizes(spec: DataSpec, name: str, config: Any, position_offset: int = 0) -> None:
    """Refuse more ids than the model has embeddings for, or longer texts than it has positions."""
    if spec.vocab_size is not None and spec.vocab_size > config.vocab_size:
        raise ValueError(
            f"model {name!r} knows {config.vocab_size} token ids, the tokenizer "
            f"{spec.tokenizer!r} has {spec.vocab_size}; use the model's own tokenizer"
        )
    longest = config.max_position_embeddings - position_offset
    if spec.input_shape[0] > longest:
        raise ValueError(
            f"model {name!r} takes at most {longest} tokens, the data set's max_length is "
            f"{spec.input_shape[0]}"
        )
