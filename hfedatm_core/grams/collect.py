"""Collect the Gram matrices of a model's layer inputs in one evaluation pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from hfedatm_core.grams.by_layer import regroup
from hfedatm_core.grams.gram import FactorGram, Gram, PackedGram
from hfedatm_core.grams.grouped import GroupedGram
from hfedatm_core.grams.layer_inputs import LayerInput, find_layer_inputs
from hfedatm_core.grams.low_rank import FactorStack
from hfedatm_core.grams.triangle import add_outer, pack
from hfedatm_core.inputs import Batch, Inputs, forward


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
    full: bool = False,
    groups: bool = True,
) -> dict[str, Gram]:
    """Return ``G = (1/n) Σ x xᵀ`` over all input rows ``x`` of every Linear layer.

    The model makes one forward pass in evaluation mode without gradients; afterwards its modes are
    restored and the hooks removed, also after an error. Tokens that ``attention_mask`` marks as
    padding do not count. Layers that always read the same input tensor (query, key and value of one
    attention block) share one :class:`Gram` object. A layer that is never called has no entry.

    Parameters
    ----------
    model
        The model, called by :func:`forward`.
    batches
        Pairs ``(inputs, targets)``; targets are not used.
    max_dim
        Largest width of a layer with a packed triangle; wider layers use the factor form.
    rank
        Number of rows of the factor form.
    clip
        Scale the rows of every example together to ``Σ_t ‖x_t‖² ≤ clip²``, for privacy. The Gram is
        then float64, and an example with values that are not finite counts as zeros.
    max_batches
        Stop after this number of batches.
    conv
        Also collect Grams of ungrouped ``Conv2d`` layers, over their unfolded patches.
    bias
        Append a constant 1 to the inputs of layers with a bias, so that RegMean merges the bias
        together with the weight (a Gram of ``in_features + 1``).
    full
        Collect all Grams that :func:`merge_apart` needs for networks that were trained apart: of
        all convolutions (of grouped ones, one per group) and of all Linear layers, each with the
        constant input.
    groups
        Whether ``full`` includes grouped convolutions.
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be positive, got {clip}")
    layers = find_layer_inputs(model, conv=conv, bias=bias, full=full, groups=groups)
    if clip is not None and any(layer.groups > 1 for layer in layers.values()):
        raise ValueError("Grams of convolutions in groups are never clipped")
    kinds: dict[object, list[str]] = {}
    for name, layer in layers.items():
        kinds.setdefault(layer.kind, []).append(name)
    # Layers that could share a Gram start in one group, which is split when their inputs differ.
    sums = {
        tuple(names): InputSum(max_dim, rank, layers[names[0]].groups) for names in kinds.values()
    }
    modes = [(module, module.training) for module in model.modules()]
    recorder = _Recorder(layers)
    try:
        model.eval()
        with torch.no_grad():
            for inputs, _ in islice(batches, max_batches):
                seen = recorder.run(model, inputs)
                signatures = {name: tuple(map(id, calls)) for name, calls in seen.items()}
                sums = regroup(sums, signatures, lambda total, _: total.copy())
                for group, total in sums.items():
                    if calls := seen.get(group[0]):
                        for rows in layers[group[0]].rows(calls, inputs, clip):
                            total.add(rows)
    finally:
        recorder.remove()
        for module, training in modes:
            module.training = training
    grams: dict[str, Gram] = {}
    for group in list(sums):
        total = sums.pop(group)  # frees each full matrix as soon as it is packed
        if total.count:
            grams |= dict.fromkeys(group, total.gram())
    return {name: grams[name] for name in layers if name in grams}


class _Recorder:
    """Forward pre-hooks that remember the inputs of the measured layers during one forward pass.

    Only after the pass is it known which layers shared an input, so the recorder keeps the inputs
    until then. They take less memory than a training step on the same batch. If the model
    overwrites inputs in place, the recorder keeps copies.
    """

    def __init__(self, layers: Mapping[str, LayerInput]) -> None:
        self._calls: dict[str, list[tuple[Tensor, Tensor, int]]] = {}
        self._copies: dict[tuple[int, int], Tensor] = {}
        # The first pass keeps copies, to learn whether the model overwrites layer inputs in place.
        self._copying = True
        self._handles = [
            layer.module.register_forward_pre_hook(self._hook(name), with_kwargs=True)
            for name, layer in layers.items()
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
        """Remove the hooks from the model."""
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


class InputSum:
    """Running ``Σ x xᵀ``: a full matrix of which only the upper triangle is valid, or a factor.

    A grouped convolution has one full matrix for each group of channels.
    """

    def __init__(self, max_dim: int, rank: int, groups: int) -> None:
        self.count = 0
        self._groups = groups
        self._max_dim = max_dim
        self._rank = rank
        self._matrix: Tensor | None = None
        self._stack: FactorStack | None = None
        self._diagonal: Tensor | None = None

    def add(self, rows: Tensor) -> None:
        """Add rows of features, as :meth:`LayerInput.rows` yields them."""
        if not len(rows):
            return
        self.count += len(rows)
        if self._groups > 1:
            self._add_groups(rows)
            return
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

    def _add_groups(self, rows: Tensor) -> None:
        """Add rows of all channels, group by group; the last entry of a row is the constant."""
        constant = rows[:, -1:].expand(len(rows), self._groups)
        parts = rows[:, :-1].reshape(len(rows), self._groups, -1)
        parts = torch.cat([parts, constant[..., None]], dim=2).transpose(0, 1)
        product = parts.transpose(1, 2) @ parts
        self._matrix = product if self._matrix is None else self._matrix.add_(product)

    def gram(self) -> Gram:
        """Return the mean; the full matrix is packed."""
        if self._matrix is not None and self._groups > 1:
            return GroupedGram(self._matrix / self.count, self.count)
        if self._matrix is not None:
            return PackedGram(pack(self._matrix).div_(self.count), self.count)
        assert self._stack is not None and self._diagonal is not None
        factor = self._stack.factor(self._rank)
        scale = self.count**-0.5
        diagonal = self._diagonal / self.count
        return FactorGram(factor * scale, diagonal, self.count, self._rank)

    def copy(self) -> InputSum:
        """Return an independent copy."""
        copy = InputSum(self._max_dim, self._rank, self._groups)
        copy.count = self.count
        copy._matrix = None if self._matrix is None else self._matrix.clone()
        copy._diagonal = None if self._diagonal is None else self._diagonal.clone()
        copy._stack = None if self._stack is None else self._stack.copy()
        return copy
