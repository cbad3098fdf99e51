"""Run two networks on the same data: inputs of one network's layers, outputs of the other's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hfedatm_core.channels.graph import ChannelGraph
from hfedatm_core.grams.collect import InputSum
from hfedatm_core.grams.gram import Gram
from hfedatm_core.grams.layer_inputs import LayerInput, find_layer_inputs, is_token_wise
from hfedatm_core.inputs import Inputs, forward


class LayerPairs:
    """Sums over a layer's inputs in ``merged``, and its outputs, with their norm, in both networks.

    A context manager: at its end the networks have their hooks removed and their modes restored.
    """

    def __init__(
        self,
        merged: nn.Module,
        own: nn.Module,
        graph: ChannelGraph,
        layers: Collection[str] | None,
        max_dim: int = 4096,
        rank: int = 256,
    ) -> None:
        known = find_layer_inputs(merged, conv=True, bias=True, full=True)
        unknown = sorted(set(layers or ()) - known.keys())
        if unknown:
            raise ValueError(f"no Linear layer or convolution to measure: {', '.join(unknown)}")
        self._layers = {n: x for n, x in known.items() if layers is None or n in layers}
        self._networks = merged, own
        self._form = max_dim, rank
        self._behind = {norm.layer: norm.name for norm in graph.norms}
        self._grams: dict[str, InputSum] = {}
        self._residuals: dict[str, Tensor] = {}
        self._moments: dict[str, Tensor] = {}

    def __enter__(self) -> LayerPairs:
        merged, own = self._networks
        self._modes = [(m, m.training) for net in (merged, own) for m in net.modules()]
        self._entered: dict[str, list[Tensor]] = {}
        self._left: tuple[dict[str, list[Tensor]], ...] = ({}, {})
        self._handles: list[RemovableHandle] = []
        for name in self._layers:
            before = merged.get_submodule(name)
            hook = _keep_input(self._entered, name)
            self._handles.append(before.register_forward_pre_hook(hook, with_kwargs=True))
            for network, left in zip((merged, own), self._left, strict=True):
                after = network.get_submodule(self._behind.get(name, name))
                self._handles.append(after.register_forward_hook(_keep_output(left, name)))
        merged.eval()
        own.eval()
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        for module, training in self._modes:
            module.training = training

    def order(self, inputs: Inputs) -> list[str]:
        """Return the layers in the order of the forward pass, without those it does not call."""
        self._run(inputs)
        return list(self._entered)

    def add(self, inputs: Inputs) -> None:
        """Add one batch to the sums."""
        self._run(inputs)
        mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
        for name, layer in self._layers.items():
            calls = self._entered.get(name, [])
            ours, theirs = (left.get(name, []) for left in self._left)
            if not len(calls) == len(ours) == len(theirs):
                raise ValueError(f"layer '{name}' is not called equally often in both networks")
            for x, *outputs in zip(calls, ours, theirs, strict=True):
                pair = [_flat(layer, x, y, mask) for y in outputs]
                self._add(name, layer, x, (pair[0], pair[1]), inputs)

    def result(self) -> tuple[dict[str, Gram], dict[str, Tensor], dict[str, Tensor]]:
        """Return the means of ``u uᵀ``, ``(y - z) uᵀ`` and ``y``, ``y²``, ``(y - z)²`` by layer."""
        counts = {name: total.count for name, total in self._grams.items()}
        return (
            {name: total.gram() for name, total in self._grams.items()},
            {name: total / counts[name] for name, total in self._residuals.items()},
            {name: total / counts[name] for name, total in self._moments.items()},
        )

    def _run(self, inputs: Inputs) -> None:
        self._entered.clear()
        for left in self._left:
            left.clear()
        with torch.no_grad():
            for network in self._networks:
                forward(network, inputs)

    def _add(
        self,
        name: str,
        layer: LayerInput,
        x: Tensor,
        outputs: tuple[Tensor, Tensor],
        inputs: Inputs,
    ) -> None:
        total = self._grams.setdefault(name, InputSum(*self._form, layer.groups))
        merged, own = outputs
        # The difference first: products of two large outputs would cancel in their last digits.
        missing, done = own - merged, 0
        for rows in layer.rows([x], inputs, None):
            part = missing[done : done + len(rows)].to(rows.dtype)
            done += len(rows)
            total.add(rows)
            _add_to(self._residuals, name, _product(layer, part, rows))
        own, missing = own.double(), missing.double()
        sums = [own.sum(0), own.square().sum(0), missing.square().sum(0)]
        _add_to(self._moments, name, torch.stack(sums))


def _flat(layer: LayerInput, x: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
    """Return the outputs, a row for every row of the layer's input."""
    y = y.movedim(1, -1) if isinstance(layer.module, nn.Conv2d) else y
    rows = y.reshape(-1, y.shape[-1])
    masked = mask is not None and isinstance(layer.module, nn.Linear) and is_token_wise(x, mask)
    return rows[mask.reshape(-1).bool()] if masked and mask is not None else rows


def _product(layer: LayerInput, outputs: Tensor, rows: Tensor) -> Tensor:
    """Return ``Σ r uᵀ``; in a grouped convolution ``u`` is the input of the filter's group."""
    if layer.groups == 1:
        return outputs.T @ rows
    parts = rows[:, :-1].reshape(len(rows), layer.groups, -1)
    constant = rows[:, -1:].expand(len(rows), layer.groups)
    parts = torch.cat([parts, constant[..., None]], dim=2)
    grouped = outputs.reshape(len(outputs), layer.groups, -1)
    return torch.einsum("rge,rgd->ged", grouped, parts).flatten(0, 1)


def _add_to(sums: dict[str, Tensor], name: str, value: Tensor) -> None:
    value = value.double().cpu()
    sums[name] = sums[name] + value if name in sums else value


def _keep_input(seen: dict[str, list[Tensor]], name: str) -> Callable[..., None]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A copy: the network may overwrite the tensor in place.
        seen.setdefault(name, []).append((args[0] if args else kwargs["input"]).clone())

    return hook


def _keep_output(seen: dict[str, list[Tensor]], name: str) -> Callable[..., None]:
    def hook(_: nn.Module, __: object, output: Tensor) -> None:
        seen.setdefault(name, []).append(output.clone())

    return hook
