"""Choose the layers of a model to measure, and turn their inputs into rows of a Gram matrix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hfedatm_core.factor_names import is_second_factor
from hfedatm_core.hiding import hidden_names
from hfedatm_core.inputs import Inputs

# Rows multiplied at once: enough for a fast product, and little memory beside the activations.
_CHUNK = 8192


@dataclass(frozen=True)
class LayerInput:
    """Turns the input of one layer into rows."""

    name: str
    module: nn.Linear | nn.Conv2d
    augment: bool
    padding: tuple[int, int] = (0, 0)

    @property
    def groups(self) -> int:
        """Number of groups of channels that the layer reads separately."""
        return 1 if isinstance(self.module, nn.Linear) else self.module.groups

    @property
    def kind(self) -> object:
        """A key that two layers must have in common to share a Gram."""
        if isinstance(self.module, nn.Linear):
            return (self.module.in_features, self.augment)
        if self.groups > 1:  # rows of two layers cannot be stacked: no sharing
            return self.name
        m = self.module
        return (m.in_channels, m.kernel_size, m.stride, self.padding, m.dilation, self.augment)

    def rows(self, calls: list[Tensor], inputs: Inputs, clip: float | None) -> Iterator[Tensor]:
        """Yield the rows of all calls of one forward pass, masked, augmented and clipped."""
        mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
        if clip is None:
            for x in calls:
                for part in self._patches(x):
                    flat = part.reshape(-1, part.shape[-1])
                    if mask is not None and is_token_wise(part, mask):
                        flat = flat[mask.reshape(-1).bool()]
                    yield self._augmented(flat)
            return
        size = len(next(iter(inputs.values())) if isinstance(inputs, Mapping) else inputs)
        examples = [self._examples(x, size, mask) for x in calls]
        norms = torch.as_tensor(sum(part.square().sum((1, 2)) for part, _ in examples)).sqrt()
        finite = torch.isfinite(norms)
        # Slightly below the clip, which rounding must not exceed.
        bound = clip * (1 - 8 * torch.finfo(torch.float64).eps)
        scale = (bound / norms.clamp(min=bound)).view(-1, 1, 1)
        for part, valid in examples:
            yield torch.where(finite.view(-1, 1, 1), part * scale, 0.0)[valid]

    def _patches(self, x: Tensor) -> Iterator[Tensor]:
        """Yield ``x`` with features last, a convolution's patches a few images at a time."""
        x = x if x.dtype == torch.float64 else x.float()
        if isinstance(self.module, nn.Linear):
            yield x
            return
        m = self.module
        rows = 1
        for axis in (0, 1):
            reach = m.dilation[axis] * (m.kernel_size[axis] - 1) + 1
            rows *= (x.shape[2 + axis] + 2 * self.padding[axis] - reach) // m.stride[axis] + 1
        step = max(1, _CHUNK // rows)
        for i in range(0, len(x), step):
            unfolded = F.unfold(x[i : i + step], m.kernel_size, m.dilation, self.padding, m.stride)
            yield unfolded.transpose(1, 2)

    def _augmented(self, rows: Tensor) -> Tensor:
        if not self.augment:
            return rows
        return torch.cat([rows, rows.new_ones(*rows.shape[:-1], 1)], dim=-1)

    def _examples(self, x: Tensor, size: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return examples × rows × features in float64, and a mask of the rows without padding.

        The clip bounds an example's part of a sum only as exactly as the sum is computed, hence
        float64.
        """
        x = torch.cat(list(self._patches(x)))
        x = x.to("cpu" if x.device.type == "mps" else x.device).double()
        count = x.numel() // x.shape[-1]
        if count % size or (x.ndim > 2 and len(x) != size):
            raise ValueError(
                f"layer '{self.name}': cannot tell which rows of an input of shape "
                f"{tuple(x.shape)} belong to which of the {size} examples, as clipping requires"
            )
        rows = self._augmented(x.reshape(size, count // size, x.shape[-1]))
        valid = torch.ones(rows.shape[:2], dtype=torch.bool, device=rows.device)
        if mask is not None and is_token_wise(x, mask):
            valid = mask.bool().to(rows.device)
        return torch.where(valid[..., None], rows, 0.0), valid


def find_layer_inputs(
    model: nn.Module, *, conv: bool, bias: bool, full: bool = False, groups: bool = True
) -> dict[str, LayerInput]:
    """Return the Linear layers and, with ``conv``, the convolutions with zero padding, by name.

    Layers with hidden weights are left out (`hfedatm_core.hiding`): nobody merges them. Of an
    adapter only the first factor is included, whose input is that of the adapted layer. ``full``
    includes all of them, each with the constant input, and with ``groups`` also the grouped
    convolutions.
    """
    layers: dict[str, LayerInput] = {}
    hidden = hidden_names(model)
    for name, module in model.named_modules():
        if is_second_factor(name) or f"{name}.weight" in hidden:
            continue
        augment = full or (bias and getattr(module, "bias", None) is not None)
        if isinstance(module, nn.Linear):
            layers[name] = LayerInput(name, module, augment)
        elif isinstance(module, nn.Conv2d) and (full or conv):
            if module.groups > 1 and not (full and groups):
                continue
            padding = _symmetric_padding(module)
            if padding is not None:
                layers[name] = LayerInput(name, module, augment, padding)
    return layers


def _symmetric_padding(module: nn.Conv2d) -> tuple[int, int] | None:
    """Return the zero padding per side, or ``None`` if patches cannot be unfolded with it."""
    if module.padding_mode != "zeros":
        return None
    if not isinstance(module.padding, str):
        return (int(module.padding[0]), int(module.padding[1]))
    if module.padding == "valid":
        return (0, 0)
    total = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
    return None if total[0] % 2 or total[1] % 2 else (total[0] // 2, total[1] // 2)


def is_token_wise(x: Tensor, mask: Tensor) -> bool:
    """Tell whether ``x`` has one row per token of ``mask`` (batch × tokens)."""
    if mask.ndim != 2:
        return False
    return x.shape[:-1] == mask.shape or (x.ndim == 2 and len(x) == mask.numel())
