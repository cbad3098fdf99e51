"""Merge BatchNorm statistics of several data sets into those of the united data set."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hfedatm_core.inputs import Batch, forward
from hfedatm_core.tensors import State

_MEAN, _VARIANCE = "running_mean", "running_var"


def to_second_moments(state: State) -> dict[str, Tensor]:
    """Replace each running variance by the second moment ``E x² = Var x + (E x)²``.

    The second moments of parts average to that of the whole. Variances do not: their mean ignores
    the distance between the means of the parts, in which domains differ.
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


def measure_again(model: nn.Module, batches: Iterable[Batch]) -> int:
    """Replace the running statistics of every BatchNorm by those of these batches.

    The averaged statistics of networks that were trained apart fit neither these networks nor
    their merge. Only BatchNorm layers are put into training mode, so that dropout stays off; the
    modes are restored. A batch of one example has no variance and is skipped.

    Returns
    -------
    int
        The number of batches that were used.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    modes = [(module, module.training) for module in model.modules()]
    used = 0
    try:
        model.eval()
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the mean over all batches
            norm.train()
        with torch.no_grad():
            for inputs, _ in batches:
                tensor = inputs if isinstance(inputs, Tensor) else next(iter(inputs.values()))
                if len(tensor) > 1:
                    forward(model, inputs)
                    used += 1
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for module, training in modes:
            module.training = training
    if not used:
        raise ValueError("measuring BatchNorm again needs a batch of two examples or more")
    return used


def _pairs(state: State) -> list[tuple[str, str]]:
    """Return pairs of names: every running variance and its running mean."""
    named = [(key, key.removesuffix(_VARIANCE) + _MEAN) for key in state if key.endswith(_VARIANCE)]
    return [(variance, mean) for variance, mean in named if mean in state]
