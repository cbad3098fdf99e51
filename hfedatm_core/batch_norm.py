"""Statistics of BatchNorm, merged as those of one data set made of several."""

from __future__ import annotations

from torch import Tensor

from hfedatm_core.tensors import State

_MEAN, _VARIANCE = "running_mean", "running_var"


def to_second_moments(state: State) -> dict[str, Tensor]:
    """Replace each running variance by the second moment ``E x² = Var x + (E x)²``.

    Second moments of parts add up to that of the whole. Variances do not: their mean leaves out
    how far the means of the parts lie apart, which is what domains differ in.
    """
    moments = {key: state[key].double() + state[mean].double() ** 2 for key, mean in _pairs(state)}
    return {**state, **moments}


def to_variances(moments: State) -> dict[str, Tensor]:
    """Undo :func:`to_second_moments`; a variance gets the type of its mean."""
    variances = {
        key: (moments[key] - moments[mean].double() ** 2).clamp(min=0).to(moments[mean].dtype)
        for key, mean in _pairs(moments)
    }
    return {**moments, **variances}


def _pairs(state: State) -> list[tuple[str, str]]:
    """Return the names of every variance and its mean."""
    named = [(key, key.removesuffix(_VARIANCE) + _MEAN) for key in state if key.endswith(_VARIANCE)]
    return [(variance, mean) for variance, mean in named if mean in state]
