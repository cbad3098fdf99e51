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

_MAX_DIM, _RANK = 4096, 256  # as in collect_grams


class LayerPairs:
    """Sums over a layer's inputs in ``merged`` and its outputs, with their norm, in ``own``.

    A context manager: at its end the networks have their hooks removed and their modes restored.
    """

    def __init__(
        self,
        merged: nn.Module,
        own: nn.Module,
        graph: ChannelGraph,
        layers: Collection[str] | None,
    ) -> None:
        known = find_layer_inputs(merged, conv=True, bias=True, full=True)
        unknown = sorted(set(layers or ()) - known.keys())
        if unknown:
            raise ValueError(f"no Linear layer or convolution to measure: {', '.join(unknown)}")
        self._layers = {n: x for n, x in known.items() if layers is None or n in layers}
        self._networks = merged, own
        self._behind = {norm.layer: norm.name for norm in graph.norms}
        self._grams: dict[str, InputSum] = {}
        self._products: dict[str, Tensor] = {}
        self._squares: dict[str, Tensor] = {}

    def __enter__(self) -> LayerPairs:
        merged, own = self._networks
        self._modes = [(m, m.training) for net in (merged, own) for m in net.modules()]
        self._entered: dict[str, list[Tensor]] = {}
        self._left: dict[str, list[Tensor]] = {}
        self._handles: list[RemovableHandle] = []
        for name in self._layers:
            before = merged.get_submodule(name)
            after = own.get_submodule(self._behind.get(name, name))
            self._handles += [
                before.register_forward_pre_hook(
                    _keep_input(self._entered, name), with_kwargs=True
                ),
                after.register_forward_hook(_keep_output(self._left, name)),
            ]
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
            calls, outputs = self._entered.get(name, []), self._left.get(name, [])
            if len(calls) != len(outputs):
                raise ValueError(f"layer '{name}' is not called equally often in both networks")
            for x, y in zip(calls, outputs, strict=True):
                self._add(name, layer, x, _flat(layer, x, y, mask), inputs)

    def result(self) -> tuple[dict[str, Gram], dict[str, Tensor], dict[str, Tensor]]:
        """Return the means of ``u uᵀ``, ``y uᵀ`` and ``y²`` by layer."""
        counts = {name: total.count for name, total in self._grams.items()}
        return (
            {name: total.gram() for name, total in self._grams.items()},
            {name: total / counts[name] for name, total in self._products.items()},
            {name: total / counts[name] for name, total in self._squares.items()},
        )

    def _run(self, inputs: Inputs) -> None:
        self._entered.clear()
        self._left.clear()
        with torch.no_grad():
            for network in self._networks:
                forward(network, inputs)

    def _add(
        self, name: str, layer: LayerInput, x: Tensor, outputs: Tensor, inputs: Inputs
    ) -> None:
        total = self._grams.setdefault(name, InputSum(_MAX_DIM, _RANK, layer.groups))
        done = 0
        for rows in layer.rows([x], inputs, None):
            part = outputs[done : done + len(rows)].to(rows.dtype)
            done += len(rows)
            total.add(rows)
            _add_to(self._products, name, _product(layer, part, rows))
        _add_to(self._squares, name, outputs.double().square().sum(0))


def _flat(layer: LayerInput, x: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
    """Return the outputs, a row for every row of the layer's input."""
    y = y.movedim(1, -1) if isinstance(layer.module, nn.Conv2d) else y
    rows = y.reshape(-1, y.shape[-1])
    masked = mask is not None and isinstance(layer.module, nn.Linear) and is_token_wise(x, mask)
    return rows[mask.reshape(-1).bool()] if masked and mask is not None else rows


def _product(layer: LayerInput, outputs: Tensor, rows: Tensor) -> Tensor:
    """Return ``Σ y uᵀ``; in a grouped convolution ``u`` is the input of the filter's group."""
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
