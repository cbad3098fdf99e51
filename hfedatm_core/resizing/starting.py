"""A first model that all stations share, whatever the shapes of their networks."""

from __future__ import annotations

import torch
from torch import Tensor

from hfedatm_core.resizing.fitting import Fit
from hfedatm_core.tensors import State

DIFFERENCE = 0.5
"""How much the first weights of copies differ, as a share of the spread of the weights."""


def split_start(fit: Fit, target: State, station: State) -> dict[str, Tensor]:
    r"""Return first weights of the target from which the station starts with its own.

    With ``U`` for `Fit.up`, ``D`` for `Fit.down`, and fresh weights ``t`` and ``s`` of both,

    .. math:: U s + c\, (t - U D t), \qquad c = \tfrac12 \operatorname{std}(U s) /
        \operatorname{std}(t) .

    So the target is the station's network, split, and the rest makes the copies differ. The
    station's start is ``D`` of it, which is ``s``. If channels of fresh weights were joined
    instead, both networks would compute unrelated functions, and what one learns would not help the
    other. Vectors (biases, norms) are split only.
    """
    shared, joined = fit.up(station), fit.up(fit.down(target))
    start = dict(target)
    for name in fit.pairs:
        value, split = target[name], shared[name]
        start[name] = split.to(value.dtype)
        spread = float(value.std()) if value.dim() > 1 else 0.0
        if spread > 0:
            factor = DIFFERENCE * float(split.std()) / spread
            start[name] = start[name] + factor * (value - joined[name])
    return start


def calm_start(fit: Fit, state: State) -> dict[str, Tensor]:
    """Return the target's first weights, with the blocks that a station lacks as the identity.

    The function of the target is then, from the start, one that the station's network can compute.
    The last step of a residual branch is set to zero (the scale of its BatchNorm, or its weight),
    which leaves every other weight of the branch as it is: so the branch can learn. A layer between
    others becomes the identity, which can learn, too.
    """
    changed = dict(state)
    absent = set(fit.absent)
    normed = {norm.layer: norm.name for norm in fit.target.graph.norms}
    for name, value in fit.identities().items():
        layer, _, tensor = name.rpartition(".")
        adds = any(
            {m.tensor for m in group.producers} - absent
            for group in fit.target.graph.groups
            if name in {m.tensor for m in group.producers}
        )
        weight = state[name].dim() > 1 and tensor == "weight"
        if weight and not bool(value.any()):  # of a residual block
            if adds and layer in normed:
                for part in ("weight", "bias"):
                    last = f"{normed[layer]}.{part}"
                    changed[last] = torch.zeros_like(state[last])
            elif adds:
                changed[name] = torch.zeros_like(state[name])
                if f"{layer}.bias" in state:
                    changed[f"{layer}.bias"] = torch.zeros_like(state[f"{layer}.bias"])
        elif weight:
            changed[name] = value.to(state[name].dtype)
            if f"{layer}.bias" in state:
                changed[f"{layer}.bias"] = torch.zeros_like(state[f"{layer}.bias"])
    return changed
