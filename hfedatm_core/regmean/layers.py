"""Find the layers that RegMean can merge, and merge them while reading one update at a time."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hfedatm_core.averaging import MeanAccumulator
from hfedatm_core.factor_names import second_factor
from hfedatm_core.grams.by_layer import regroup
from hfedatm_core.grams.gram import Gram
from hfedatm_core.regmean.adapters import factored, product
from hfedatm_core.regmean.closed_form import RegMeanAccumulator, RidgeScale, Solution
from hfedatm_core.tensors import State


@dataclass(frozen=True)
class LayerReport:
    """The method that merged one layer, and the reason for it."""

    how: Literal["regmean", "averaged"]
    reason: str = ""


def weight_layers(state: State) -> list[str]:
    """Return the modules whose ``weight`` has two or more axes."""
    return [
        key.removesuffix(".weight")
        for key, value in state.items()
        if key.endswith(".weight") and value.ndim >= 2
    ]


def check_grams(
    grams: Mapping[str, Gram], state: State, who: str, *, constant: bool = False
) -> None:
    """Raise ``ValueError`` unless every Gram has the width of its layer's weight in ``state``.

    A Gram may have one more feature, the constant input of the layer's bias; with ``constant`` also
    the Gram of a layer without a bias may have it.
    """
    for name, gram in grams.items():
        weight = state.get(f"{name}.weight")
        if weight is None or weight.ndim < 2:
            raise ValueError(f"{who}: there is a Gram of '{name}' but no matrix '{name}.weight'")
        width = weight[0].numel()
        augmented = gram.dim == width + 1 and (constant or f"{name}.bias" in state)
        if gram.dim != width and not augmented:
            raise ValueError(
                f"{who}: the Gram of layer '{name}' has shape {(gram.dim, gram.dim)} but tensor "
                f"'{name}.weight' has shape {tuple(weight.shape)} ({width} inputs)"
            )


class LayerMerger:
    """RegMean over all layers with a Gram; other layers are averaged, and the reason is reported.

    Parameters
    ----------
    reference
        State to whose shapes the updates have been aligned; also the pivot of RegMean.
    """

    def __init__(self, reference: State) -> None:
        self._reference = reference
        self._groups: dict[tuple[str, ...], RegMeanAccumulator] = {}
        self._forms: dict[str, tuple[type[Gram], int]] = {}
        self._averaged: dict[str, str] = {}
        self._ties: dict[str, set[str]] = {}
        self._stations: list[str] = []
        self._unseen: set[str] = set()  # layers that no station so far has
        self._products: dict[str, MeanAccumulator] = {}

    def add(
        self,
        who: str,
        state: State,
        grams: Mapping[str, Gram],
        coefficient: float,
        absent: Set[str] = frozenset(),
        products: State | None = None,
        examples: float | None = None,
    ) -> None:
        """Add the aligned state and Grams of one station; it has no vote on ``absent`` tensors.

        In place of a station, ``products`` add the sums of many (`means`). ``examples`` is the
        station's part in the mean; it is the coefficient if not given.
        """
        lacking = {name.removesuffix(".weight") for name in absent if name.endswith(".weight")}
        fresh = [name for name in grams if not self._stations or name in self._unseen]
        self._unseen = self._unseen & lacking if self._stations else lacking
        self._forms |= {name: (type(grams[name]), grams[name].dim) for name in fresh}
        for name in [*self._forms, *grams]:
            if name in lacking:
                continue
            if name not in self._averaged and (reason := self._obstacle(who, name, grams)):
                self._averaged[name] = reason
        usable = {name: gram for name, gram in grams.items() if name not in self._averaged}
        new = {name: usable[name] for name in fresh if name in usable}
        if not self._stations:
            self._ties = _tied(usable, state)
        if new:
            pivots = {name: _matrix(self._reference, name, gram) for name, gram in new.items()}
            self._groups[tuple(new)] = RegMeanAccumulator(pivots)
        self._ties = {
            name: {key for key in keys if torch.equal(state[key], state[f"{name}.weight"])}
            for name, keys in self._ties.items()
        }
        inputs = {name: id(gram) for name, gram in usable.items()} | dict.fromkeys(lacking, -1)
        groups = regroup(self._groups, inputs, lambda total, part: total.take(part))
        self._groups = {
            group: total
            for group, total in groups.items()
            if group[0] in usable or group[0] in lacking
        }
        for group, total in self._groups.items():
            if group[0] in lacking:
                continue
            gram = usable[group[0]]
            if products:
                total.add_mean({name: products[name] for name in group}, gram, coefficient)
            else:
                total.add({name: _matrix(state, name, gram) for name in group}, gram, coefficient)
        for name, gram in usable.items():
            if second_factor(name, state):
                mean = self._products.setdefault(name, MeanAccumulator())
                part = coefficient if examples is None else examples
                mean.add({name: _matrix(state, name, gram)}, part, who)
        self._stations.append(who)

    def means(self) -> tuple[dict[str, Gram], dict[str, Tensor]]:
        """Return per layer the mean Gram, and the mean product of Gram and move (see `add`)."""
        grams: dict[str, Gram] = {}
        products: dict[str, Tensor] = {}
        for group, total in self._groups.items():
            gram, of_group = total.mean()
            grams |= dict.fromkeys(group, gram)
            products |= of_group
        return grams, products

    def finish(
        self, mean: dict[str, Tensor], ridge: float, ridge_scale: RidgeScale = "mean"
    ) -> dict[str, LayerReport]:
        """Replace the merged layers in ``mean``; return the report of every layer."""
        for name, keys in self._ties.items():
            if keys:
                self._averaged.setdefault(name, f"the weight is tied to '{min(keys)}'")
        reports = {
            name: LayerReport("averaged", self._averaged.get(name, "no station sent a Gram"))
            for name in weight_layers(mean)
        }
        for group in list(self._groups):
            total = self._groups.pop(group)
            layers = [name for name in group if name not in self._averaged]
            if not layers:
                continue
            if len(layers) < len(group):
                total = total.take(layers)
            adapters = {name for name in layers if name in self._products}
            means = {name: self._mean(mean, name) for name in layers}
            solution = total.solve(means, ridge, ridge_scale, keep_total=bool(adapters))
            for name in layers:
                reports[name] = LayerReport(solution.how, solution.reason)
                if solution.how != "regmean":
                    self._averaged[name] = solution.reason
                elif name in adapters:
                    reports[second_factor(name, mean)] = reports[name]
                    _put_adapter(mean, name, solution)
                else:
                    _put(mean, name, solution.weights[name])
        for name, reason in self._averaged.items():
            reports[name] = LayerReport("averaged", reason)
            if not self._ties.get(name):
                warnings.warn(f"layer '{name}' is averaged: {reason}", stacklevel=3)
        return reports

    def _mean(self, mean: State, name: str) -> Tensor:
        """Return the mean of the stations' weights; of an adapter the mean of its products."""
        if name in self._products:
            return self._products[name].result()[name]
        return _matrix(mean, name, self._forms[name][1])

    def _obstacle(self, who: str, name: str, grams: Mapping[str, Gram]) -> str:
        """Return the reason why RegMean cannot merge this layer; empty if it can."""
        if name not in grams:
            return f"no Gram from {who}"
        if name not in self._forms:
            return f"no Gram from {self._stations[0]}"
        gram = grams[name]
        if not gram.is_finite():
            return f"the Gram from {who} is not finite"
        width = self._reference[f"{name}.weight"][0].numel()
        if (type(gram), gram.dim) != self._forms[name] or gram.dim not in (width, width + 1):
            return f"the Gram from {who} has another form or size than the reference"
        return ""


def _matrix(state: State, name: str, gram: Gram | int) -> Tensor:
    """Return the weight as ``out × in``, with the bias as last column for an augmented Gram.

    The weight of an adapter is the product of its factors.
    """
    if second := second_factor(name, state):
        return product(state, name, second)
    dim = gram if isinstance(gram, int) else gram.dim
    weight = state[f"{name}.weight"].detach().flatten(1)
    if weight.shape[1] == dim:
        return weight
    return torch.cat([weight, state[f"{name}.bias"].detach()[:, None]], dim=1)


def _put(state: dict[str, Tensor], name: str, matrix: Tensor) -> None:
    weight = state[f"{name}.weight"]
    width = weight[0].numel()
    state[f"{name}.weight"] = matrix[:, :width].reshape(weight.shape).contiguous()
    if matrix.shape[1] > width:
        state[f"{name}.bias"] = matrix[:, width].contiguous()


def _put_adapter(state: dict[str, Tensor], name: str, solution: Solution) -> None:
    assert solution.total is not None  # it was asked for
    first, second = f"{name}.weight", f"{second_factor(name, state)}.weight"
    merged = solution.weights[name]
    state[first], state[second] = factored(merged, solution.total, solution.shift, state[first])


def _tied(layers: Mapping[str, Gram], state: State) -> dict[str, set[str]]:
    """Return for every layer the other tensors that hold the same numbers as its weight."""
    alike: dict[object, list[str]] = {}
    for key, value in state.items():
        if value.ndim >= 2:
            alike.setdefault((value.shape, *value.flatten()[:8].tolist()), []).append(key)
    ties: dict[str, set[str]] = {}
    for keys in alike.values():
        for key in keys:
            if len(keys) > 1 and key.removesuffix(".weight") in layers:
                ties[key.removesuffix(".weight")] = set(keys) - {key}
    return ties
