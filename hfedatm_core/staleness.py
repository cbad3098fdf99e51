"""Late updates: bring an update that started from an older model to the current one.

With ``w`` the current model, ``w_s`` the one that the update started from, and ``t`` the number of
models published since, the update counts as

    w + (1 + t)^-a (w_e - w_s),

so that a mean of such updates is FedBuff's step (Nguyen et al., "Federated Learning with Buffered
Asynchronous Aggregation", arXiv:2106.06639) with the polynomial factor of FedAsync (Xie et al.,
"Asynchronous Federated Optimization", arXiv:1903.03934).
"""

from __future__ import annotations

from hfedatm_core.tensors import State

_STATISTICS = ("running_mean", "running_var")


def discount(late: int, power: float) -> float:
    """Return ``(1 + late)^-power``, the factor of an update that is so many rounds late."""
    return float((1 + late) ** -power)


def rebased(state: State, start: State, current: State, factor: float) -> State:
    """Return ``current + factor (state - start)``.

    Statistics of BatchNorm are no steps: they move from the current ones towards the station's by
    the factor, so that no variance becomes negative. Counts stay those of the station.
    """
    found = {}
    for name, value in state.items():
        now = current[name]
        if not value.is_floating_point():
            found[name] = value
        elif name.endswith(_STATISTICS):
            found[name] = now.lerp(value, factor)
        else:
            found[name] = now + factor * (value - start[name])
    return found
