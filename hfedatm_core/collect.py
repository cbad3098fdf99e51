"""Collect the Gram matrices of a model's layer inputs in one evaluation pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hfedatm_core.gram import FactorGram, Gram, PackedGram
from hfedatm_core.packing import FactorStack, add_outer, pack
from hfedatm_core.sharing import regroup

Inputs = Tensor | Mapping[str, Tensor]
Batch = tuple[Inputs, Any]

# Rows multiplied at once: enough for a full-speed product, small beside the activations.
_CHUNK = 8192


def forward(model: nn.Module, inputs: Inputs) -> Tensor:
    """Call ``model`` on a tensor, or on a mapping by keyword, and return its logits."""
    logits: Tensor = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    return logits


def collect_grams(
    model: nn.Module,
    batches: Iterable[Batch],
    max_dim: int = 4096,
    rank: int = 256,
    *,
    clip: float | None = None,
    max_batches: int | None = None,
    conv: bool = False,
    bias: bool = False,
) -> dict[str, Gram]:
    """Return ``G = (1/n) Σ x xᵀ`` over all input rows ``x`` of every Linear layer.

    One forward pass in evaluation mode without gradients; the model's modes are restored and the
    hooks removed, also after an error. Tokens that ``attention_mask`` marks as padding do not
    count. Layers that always see the same input tensor (query, key and value of one attention
    block) share one :class:`Gram` object. A layer that is never called has no entry.

    Parameters
    ----------
    model
        The model, called by :func:`forward`.
    batches
        Pairs ``(inputs, targets)``; targets are not used.
    max_dim
        Widest layer with a packed triangle; above it the factor form is used.
    rank
        Number of rows of the factor form.
    clip
        Scale the rows of every example together to ``Σ_t ‖x_t‖² ≤ clip²``, for privacy.
    max_batches
        Stop after that many batches.
    conv
        Also collect for ungrouped ``Conv2d`` layers, over their unfolded patches.
    bias
        Append a constant 1 to the inputs of layers with a bias, so that RegMean merges the bias
        together with the weight (a Gram of ``in_features + 1``).
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be positive, got {clip}")
    taps = _taps(model, conv=conv, bias=bias)
    kinds: dict[object, list[str]] = {}
    for name, tap in taps.items():
        kinds.setdefault(tap.kind, []).append(name)
    # All layers that could share a Gram start together and part when their inputs differ.
    groups = {tuple(names): _Sum(max_dim, rank) for names in kinds.values()}
    modes = [(module, module.training) for module in model.modules()]
    recorder = _Recorder(taps)
    try:
        model.eval()
        with torch.no_grad():
            for inputs, _ in islice(batches, max_batches):
                seen = recorder.run(model, inputs)
                signatures = {name: tuple(map(id, calls)) for name, calls in seen.items()}
                groups = regroup(groups, signatures, lambda total, _: total.copy())
                for group, total in groups.items():
                    if calls := seen.get(group[0]):
                        for rows in taps[group[0]].rows(calls, inputs, clip):
                            total.add(rows)
    finally:
        recorder.remove()
        for module, training in modes:
            module.training = training
    grams: dict[str, Gram] = {}
    for group in list(groups):
        total = groups.pop(group)  # one full matrix is freed as soon as it is packed
        if total.count:
            grams |= dict.fromkeys(group, total.gram())
    return {name: grams[name] for name in taps if name in grams}


@dataclass(frozen=True)
class _Tap:
    """How the input of one layer becomes rows."""

    name: str
    module: nn.Linear | nn.Conv2d
    augment: bool
    padding: tuple[int, int] = (0, 0)

    @property
    def kind(self) -> object:
        """What two layers must have in common to share a Gram."""
        if isinstance(self.module, nn.Linear):
            return (self.module.in_features, self.augment)
        m = self.module
        return (m.in_channels, m.kernel_size, m.stride, self.padding, m.dilation, self.augment)

    def rows(self, calls: list[Tensor], inputs: Inputs, clip: float | None) -> Iterator[Tensor]:
        """Yield the rows of all calls of one forward pass, masked, augmented and clipped."""
        mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
        if clip is None:
            for x in calls:
                for part in self._patches(x):
                    flat = part.reshape(-1, part.shape[-1])
                    if mask is not None and _is_token_wise(part, mask):
                        flat = flat[mask.reshape(-1).bool()]
                    yield self._augmented(flat)
            return
        size = len(next(iter(inputs.values())) if isinstance(inputs, Mapping) else inputs)
        examples = [self._examples(x, size, mask) for x in calls]
        norms = sum(part.square().sum((1, 2)) for part, _ in examples)
        scale = (clip / torch.as_tensor(norms).sqrt().clamp(min=clip)).view(-1, 1, 1)
        for part, valid in examples:
            yield (part * scale)[valid]

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
        """Return rows as examples × rows × features, and which of them are no padding."""
        x = torch.cat(list(self._patches(x)))
        count = x.numel() // x.shape[-1]
        if count % size or (x.ndim > 2 and len(x) != size):
            raise ValueError(
                f"layer '{self.name}': cannot tell which rows of an input of shape "
                f"{tuple(x.shape)} belong to which of the {size} examples, as clipping requires"
            )
        rows = self._augmented(x.reshape(size, count // size, x.shape[-1]))
        valid = torch.ones(rows.shape[:2], dtype=torch.bool, device=rows.device)
        if mask is not None and _is_token_wise(x, mask):
            valid = mask.bool()
        return rows * valid[..., None], valid


class _Recorder:
    """Forward pre-hooks that remember the inputs of the tapped layers during one forward pass.

    Only after the pass is it known which layers shared an input, so the inputs are held until then,
    which is less than a training step of the same batch holds. Where the model overwrites them in
    place, copies are held.
    """

    def __init__(self, taps: Mapping[str, _Tap]) -> None:
        self._calls: dict[str, list[tuple[Tensor, Tensor, int]]] = {}
        self._copies: dict[tuple[int, int], Tensor] = {}
        # The first pass keeps copies, to learn whether the model overwrites layer inputs in place.
        self._copying = True
        self._handles = [
            tap.module.register_forward_pre_hook(self._hook(name), with_kwargs=True)
            for name, tap in taps.items()
        ]

    def run(self, model: nn.Module, inputs: Inputs) -> dict[str, list[Tensor]]:
        """Return the inputs of every layer that was called, in order of the calls."""
        self._calls, self._copies = {}, {}
        forward(model, inputs)
        calls, self._calls, self._copies = self._calls, {}, {}
        changed = [
            name
            for name, items in calls.items()
            if any(x._version != version for x, _, version in items)
        ]
        if changed and not self._copying:
            raise RuntimeError(
                f"the input of layer '{changed[0]}' was overwritten in place in this batch but not "
                "in the first one; make the operation that follows the layer out-of-place"
            )
        self._copying = bool(changed)
        return {name: [kept for _, kept, _ in items] for name, items in calls.items()}

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> Any:
        def record(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            x = args[0] if args else kwargs["input"]
            kept = x
            if self._copying:
                key = (id(x), x._version)
                if key not in self._copies:
                    self._copies[key] = x.clone()
                kept = self._copies[key]
            self._calls.setdefault(name, []).append((x, kept, x._version))

        return record


class _Sum:
    """Running ``Σ x xᵀ``: a full matrix of which only the upper triangle counts, or a factor."""

    def __init__(self, max_dim: int, rank: int) -> None:
        self.count = 0
        self._max_dim = max_dim
        self._rank = rank
        self._matrix: Tensor | None = None
        self._stack: FactorStack | None = None
        self._diagonal: Tensor | None = None

    def add(self, rows: Tensor) -> None:
        if not len(rows):
            return
        self.count += len(rows)
        dim = rows.shape[1]
        if dim <= self._max_dim:
            if self._matrix is None:
                self._matrix = rows.new_zeros(dim, dim)
            add_outer(self._matrix, rows)
            return
        if self._stack is None or self._diagonal is None:
            self._stack = FactorStack(self._rank)
            self._diagonal = rows.new_zeros(dim)
        self._diagonal += rows.square().sum(0)
        self._stack.push(rows)

    def gram(self) -> Gram:
        if self._matrix is not None:
            return PackedGram(pack(self._matrix).div_(self.count), self.count)
        assert self._stack is not None and self._diagonal is not None
        factor = self._stack.factor(self._rank)
        scale = self.count**-0.5
        diagonal = self._diagonal / self.count
        return FactorGram(factor * scale, diagonal, self.count, self._rank)

    def copy(self) -> _Sum:
        copy = _Sum(self._max_dim, self._rank)
        copy.count = self.count
        copy._matrix = None if self._matrix is None else self._matrix.clone()
        copy._diagonal = None if self._diagonal is None else self._diagonal.clone()
        copy._stack = None if self._stack is None else self._stack.copy()
        return copy


def _taps(model: nn.Module, *, conv: bool, bias: bool) -> dict[str, _Tap]:
    taps: dict[str, _Tap] = {}
    for name, module in model.named_modules():
        augment = bias and getattr(module, "bias", None) is not None
        if isinstance(module, nn.Linear):
            taps[name] = _Tap(name, module, augment)
        elif conv and isinstance(module, nn.Conv2d) and module.groups == 1:
            padding = _symmetric_padding(module)
            if padding is not None:
                taps[name] = _Tap(name, module, augment, padding)
    return taps


def _symmetric_padding(module: nn.Conv2d) -> tuple[int, int] | None:
    """Return the zero padding per side, or ``None`` where patches cannot be unfolded with one."""
    if module.padding_mode != "zeros":
        return None
    if not isinstance(module.padding, str):
        return (int(module.padding[0]), int(module.padding[1]))
    if module.padding == "valid":
        return (0, 0)
    total = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
    return None if total[0] % 2 or total[1] % 2 else (total[0] // 2, total[1] // 2)


def _is_token_wise(x: Tensor, mask: Tensor) -> bool:
    """Tell whether ``x`` has one row per token of ``mask`` (batch × tokens)."""
    if mask.ndim != 2:
        return False
    return x.shape[:-1] == mask.shape or (x.ndim == 2 and len(x) == mask.numel())
