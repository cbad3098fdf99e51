"""Low-rank adapters (LoRA, Hu et al., 2021, arXiv:2106.09685), by the package ``peft``.

A Linear layer ``W`` becomes ``W + s B A`` with a frozen ``W``, a trained ``A`` of ``rank`` rows, a
trained ``B`` of ``rank`` columns, which starts at zero, and ``s = alpha / rank``.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from hfedatm_core.factor_names import FIRST, SECOND
from hfedatm_core.freezing import blocks

ATTENTION = ("query", "value", "q", "v", "query_proj", "value_proj", "q_proj", "v_proj", "in_proj")
LORA = "lora"


@dataclass(frozen=True)
class LoraOptions:
    """The shape of adapters, and where they are.

    Attributes
    ----------
    rank
        Rows of ``A`` and columns of ``B``.
    alpha
        The product is multiplied by ``alpha / rank``.
    targets
        Names of the Linear layers that get one, joined by ``+``: the last part of their names, as
        ``query+value``. Empty for queries and values of attention, ``all`` for every Linear layer
        but the head.
    last
        Only layers in this many blocks before the head; 0 for all of them. What comes before the
        first adapter is computed once.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: str = ""
    last: int = 0

    def __post_init__(self) -> None:
        """Refuse adapters without a shape."""
        if self.rank < 1 or not self.alpha > 0 or self.last < 0:
            raise ValueError(
                "rank must be at least 1, alpha positive and last not negative, not "
                f"rank={self.rank}, alpha={self.alpha}, last={self.last}"
            )


def is_lora(train_only: str) -> bool:
    """Tell whether a choice of what is trained means adapters."""
    return train_only.strip().lower() == LORA


def add_adapters(model: nn.Module, options: LoraOptions) -> None:
    """Give a model's Linear layers adapters; fresh ones come from torch's random generator.

    Raises
    ------
    ModuleNotFoundError
        If ``peft`` is not installed.
    ValueError
        If no layer is meant, or a layer is narrower than the rank.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ModuleNotFoundError(
            "train-only=lora needs peft: pip install 'hfedatm[lora]' on every node"
        ) from None
    chosen = _targets(model, options)
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,  # type: ignore[arg-type]
        target_modules=chosen,
        lora_dropout=0.0,
        bias="none",
    )
    inject_adapter_in_model(config, model)  # freezes everything besides the adapters
    model.get_submodule(_head(model)).requires_grad_(True)


def adapter_modules(model: nn.Module) -> list[str]:
    """Return the modules that are trained: both factors of every adapter, and the head."""
    factors = [name for name, _ in model.named_modules() if name.endswith((FIRST, SECOND))]
    return [*(name for name in factors if name.rpartition(".")[2] in (FIRST, SECOND)), _head(model)]


def _head(model: nn.Module) -> str:
    return blocks(model)[-1]


def _targets(model: nn.Module, options: LoraOptions) -> list[str]:
    every = blocks(model)
    head, before = every[-1], every[:-1]
    inside = tuple(f"{name}." for name in (before[-options.last :] if options.last else before))
    linear = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and f"{name}.".startswith(inside)
    }
    if options.targets == "all":
        found = list(linear)
    else:
        wanted = options.targets.split("+") if options.targets else ATTENTION
        found = [name for name in linear if name.rpartition(".")[2] in wanted]
    if not found:
        leaves = sorted({name.rpartition(".")[2] for name in linear})
        raise ValueError(
            f"no Linear layer before {head} is called {options.targets or ' or '.join(ATTENTION)}; "
            f"there are: {', '.join(leaves) or 'none'}"
        )
    for name in found:
        if options.rank > min(linear[name].weight.shape):
            raise ValueError(
                f"rank={options.rank} is more than {name} has, {tuple(linear[name].weight.shape)}"
            )
    return found
