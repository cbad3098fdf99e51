"""Weighted means of model states, one state in memory at a time."""

from __future__ import annotations

from collections.abc import Iterable, Set

import torch
from torch import Tensor

from hfedatm_core.tensors import State, is_finite


class MeanAccumulator:
    """Running weighted mean ``Σ w_k s_k / Σ w_k`` of model states.

    Floating tensors of 16 bits are accumulated in float32; every tensor keeps its type in the
    result. Integer and boolean tensors (such as BatchNorm's ``num_batches_tracked``) get the
    rounded mean.
    """

    def __init__(self) -> None:
        self.weight = 0.0
        self.count = 0
        self._mean: dict[str, Tensor] = {}
        self._missed: dict[str, float] = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def add(
        self,
        state: State,
        weight: float = 1.0,
        name: str | None = None,
        *,
        checked: bool = False,
        absent: Set[str] = frozenset(),
    ) -> None:
        """Add one state; errors call it ``name``, and ``checked`` skips the checks.

        The mean of a tensor in ``absent`` is that of the other states.
        """
        who = name or f"state {self.count}"
        if not 0.0 <= weight < float("inf"):
            raise ValueError(f"{who}: the weight must be finite and ≥ 0, got {weight}")
        if self.count == 0:
            if not checked:
                check_finite(state, who)
            self._dtypes = {key: value.dtype for key, value in state.items()}
            self._mean = {key: _wide(value).clone() for key, value in state.items()}
        else:
            if not checked:
                check_state(state, self._mean, who)
            share = weight / (self.weight + weight) if weight > 0 else 0.0
            for key, mean in self._mean.items():
                if key in absent:
                    continue
                if key in self._missed:  # fewer states than all have had a vote on this tensor
                    have = self.weight - self._missed[key]
                    part = weight / (have + weight) if weight > 0 else 0.0
                    mean.lerp_(_wide(state[key]).to(mean), part)
                    continue
                # With mean += share (value - mean) the mean of equal states is exact.
                mean.lerp_(_wide(state[key]).to(mean), share)
        for key in absent:
            self._missed[key] = self._missed.get(key, 0.0) + weight
        self.weight += weight
        self.count += 1

    def current(self) -> dict[str, Tensor]:
        """Return the mean so far, not a copy: the next state changes it in place."""
        return dict(self._mean)

    def result(self) -> dict[str, Tensor]:
        """Return the mean, as new tensors of the original types; the accumulator is emptied."""
        if self.count == 0:
            raise ValueError("cannot average: no state has been added")
        if self.weight <= 0.0:
            raise ValueError("cannot average: the weights sum to zero")
        means, self._mean, self.count, self.weight = self._mean, {}, 0, 0.0
        return {key: _narrow(mean, self._dtypes[key]) for key, mean in means.items()}


def weighted_mean(states: Iterable[State], weights: Iterable[float]) -> dict[str, Tensor]:
    """Return ``Σ w_k s_k / Σ w_k`` of model states, see :class:`MeanAccumulator`."""
    mean = MeanAccumulator()
    for state, weight in zip(states, weights, strict=True):
        mean.add(state, weight)
    return mean.result()


def between(one: State, other: State, share: float) -> dict[str, Tensor]:
    """Return ``one + share (other - one)``; integer counts are not mixed but taken from ``one``.

    BatchNorm takes the root of a variance, so none becomes negative where ``share > 1``.
    """
    mixed = {
        name: value.lerp(other[name], share) if value.is_floating_point() else value
        for name, value in one.items()
    }
    for name, value in mixed.items():
        if share > 1 and name.endswith("running_var"):
            mixed[name] = value.clamp(min=0)
    return mixed


def check_state(state: State, reference: State, who: str) -> None:
    """Raise a ``ValueError`` unless ``state`` has the reference's tensors and all are finite."""
    missing = [key for key in reference if key not in state]
    extra = [key for key in state if key not in reference]
    if missing or extra:
        raise ValueError(
            f"{who}: the tensors differ from the reference's; missing {missing[:5]}, "
            f"unexpected {extra[:5]}"
        )
    for key, expected in reference.items():
        if state[key].shape != expected.shape:
            raise ValueError(
                f"{who}: tensor '{key}' has shape {tuple(state[key].shape)}, "
                f"expected {tuple(expected.shape)}"
            )
    check_finite(state, who)


def check_finite(state: State, who: str) -> None:
    """Raise a ``ValueError`` that names the first tensor with NaN or infinity."""
    for key, value in state.items():
        if not is_finite(value):
            raise ValueError(
                f"{who}: tensor '{key}' of shape {tuple(value.shape)} holds NaN or infinity"
            )


def _wide(value: Tensor) -> Tensor:
    value = value.detach()
    if value.dtype in (torch.float32, torch.float64) or value.is_complex():
        return value
    return value.float() if value.is_floating_point() else value.double()


def _narrow(mean: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return mean.to(dtype)
    return mean.round().to(dtype)
