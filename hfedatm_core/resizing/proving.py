"""Prove on a random input that a network keeps its function in a larger shape."""

from __future__ import annotations

import torch
from torch import Tensor

from hfedatm_core.resizing.architecture import Architecture
from hfedatm_core.resizing.depth import blocks
from hfedatm_core.resizing.fitting import Fit
from hfedatm_core.resizing.pairing import NoFit


def prove(fit: Fit) -> None:
    """Compare both networks on a random input, the smaller one brought into the larger shape.

    Whatever the channel graph may have missed (a norm over channels, a product of channels) shows
    here, before anything is merged. If neither network is the larger one in every layer, only the
    blocks that one of them lacks are checked.

    Raises
    ------
    NoFit
        The function is not kept.
    """
    generator = torch.Generator().manual_seed(0)
    fit.up(random_state(fit.station, generator))  # refuses blocks that have no identity
    down = None
    if fit.is_exact:
        small, large = fit.station, fit.target
    else:
        down = fit.down(random_state(fit.target, generator))
        if fit.absent or any(ours > theirs for ours, theirs in fit.sizes.values()):
            return
        small, large = fit.target, fit.station
    start = random_state(small, generator)
    grown = fit.up(start) if down is None else fit.down(start)
    inputs = small.example
    if isinstance(inputs, Tensor) and inputs.is_floating_point():
        inputs = torch.rand(inputs.shape, generator=generator, dtype=torch.float64)
    one, other = small.outputs(start, inputs), large.outputs(grown, inputs)
    scale = float(one.abs().max().clamp(min=1.0))
    if one.shape == other.shape and float((one - other).abs().max()) <= 1e-8 * scale:
        return
    changed = [group for group, (ours, theirs) in fit.sizes.items() if ours != theirs]
    gone = [*fit.lacks, *blocks(fit.extra, set(fit.station.shapes))]
    what = " and ".join(
        part
        for part in (
            f"with the channels of {', '.join(changed)} split" if changed else "",
            f"without {', '.join(gone)}" if gone else "",
        )
        if part
    )
    raise NoFit(
        f"{fit}: {what or 'in the other shape'} the network would not compute the same (norms over "
        "channels and attention are such operations)"
    )


def random_state(arch: Architecture, generator: torch.Generator) -> dict[str, Tensor]:
    """Return random weights of a usual size, and positive variances, in float64."""
    state = {}
    for name, value in arch.model.state_dict().items():
        if not value.is_floating_point():
            state[name] = value
            continue
        drawn = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        if value.dim() > 1:
            drawn /= max(1, value[0].numel()) ** 0.5
        state[name] = drawn.abs() + 0.5 if name.endswith("running_var") else drawn
    return state
