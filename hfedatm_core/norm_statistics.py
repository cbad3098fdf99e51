r"""Measure a merged model's BatchNorm statistics on examples, as moments that can be pooled.

A statistic is sent relative to the model's own running mean :math:`\mu_0` and variance
:math:`\sigma_0^2`. With :math:`s_0^2 = \sigma_0^2 + \epsilon` and :math:`z = (x - \mu_0) / s_0`,
the moments of a BatchNorm's input :math:`x` are

.. math:: a = E\,z, \qquad q = E\,z^2 \ge a^2 ,

one pair per channel. They are (0, 1) up to :math:`\epsilon` if the running statistics are right.
Their mean over nodes, weighted by examples, is that of the united examples, and gives

.. math:: \mu = \mu_0 + s_0 a, \qquad \sigma^2 = s_0^2 (q - a^2) .
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hfedatm_core.inputs import Batch, forward
from hfedatm_core.tensors import State

_EPSILON = 1e-5
_CHUNK = 2**20  # numbers that are converted to float64 at a time


def norm_moments(
    model: nn.Module, batches: Iterable[Batch], *, by_batch: bool = True
) -> tuple[dict[str, Tensor], int]:
    """Return the moments of every BatchNorm's input by its name, and the number of examples.

    Each entry is a float64 tensor ``[a, q]`` of shape 2 × channels. The inputs of a later BatchNorm
    depend on the correction of all earlier ones. In a first pass a BatchNorm therefore normalises
    by the batch, as in training, which is about what it will do once its statistics are right: the
    moments of BatchNorms behind no other are exact, the others depend on the batches. Later passes
    (``by_batch=False``) use the running statistics. Each of them makes the moments exact for those
    BatchNorms before which all statistics are. Dropout stays off, and the model does not change.
    Normalising by the batch, a batch of one example has no variance and is skipped.

    Raises
    ------
    ValueError
        If no batch has two examples.
    """
    norms = {name: module for name, module in model.named_modules() if _is_tracked(module)}
    sums = {name: _Sums(norm) for name, norm in norms.items()}
    modes = [(module, module.training) for module in model.modules()]
    handles = [norm.register_forward_pre_hook(sums[name]) for name, norm in norms.items()]
    examples = 0
    try:
        model.eval()
        for norm in norms.values() if by_batch else ():
            norm.train()
            norm.track_running_stats = False  # normalise by the batch and keep nothing of it
        with torch.no_grad():
            for inputs, _ in batches:
                tensor = inputs if isinstance(inputs, Tensor) else next(iter(inputs.values()))
                if len(tensor) > (1 if by_batch else 0):
                    forward(model, inputs)
                    examples += len(tensor)
    finally:
        for handle in handles:
            handle.remove()
        for norm in norms.values():
            norm.track_running_stats = True
        for module, training in modes:
            module.training = training
    if not examples:
        raise ValueError("measuring BatchNorm statistics needs a batch of two examples or more")
    return {name: one.moments() for name, one in sums.items() if one.rows}, examples


def unchanged_moments(moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the moments of running statistics that are right, in the shape of ``moments``."""
    return {
        name: torch.stack([torch.zeros_like(m[0]), torch.ones_like(m[1])])
        for name, m in moments.items()
    }


def with_moments(state: State, moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the running statistics that these moments give; other tensors are not returned."""
    found: dict[str, Tensor] = {}
    for name, (mean, second) in moments.items():
        centre, scale = _standard(state[f"{name}.running_mean"], state[f"{name}.running_var"])
        variance = scale.square() * (second - mean.square()).clamp(min=0)
        for key, value in (("running_mean", centre + scale * mean), ("running_var", variance)):
            found[f"{name}.{key}"] = value.to(state[f"{name}.{key}"].dtype)
    return found


class _Sums:
    """Collects the sums of one BatchNorm's inputs; called by a hook."""

    def __init__(self, norm: nn.Module) -> None:
        mean, variance = norm.running_mean, norm.running_var
        assert isinstance(mean, Tensor) and isinstance(variance, Tensor)
        self._centre, self._scale = _standard(mean, variance)
        self._sums = torch.zeros(2, len(mean), dtype=torch.float64)
        self.rows = 0

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        x: Tensor = inputs[0].detach()
        x = x.transpose(0, 1).flatten(1)  # channels × rows
        for part in torch.split(x, max(1, _CHUNK // len(x)), dim=1):
            z = (part.cpu().double() - self._centre[:, None]) / self._scale[:, None]
            self._sums[0] += z.sum(1)
            self._sums[1] += z.square().sum(1)
        self.rows += x.shape[1]

    def moments(self) -> Tensor:
        return self._sums / self.rows


def _standard(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Return the centre and the scale by which inputs are made comparable."""
    return mean.cpu().double(), (variance.cpu().double() + _EPSILON).sqrt()


def _is_tracked(module: nn.Module) -> bool:
    if not isinstance(module, nn.modules.batchnorm._BatchNorm):
        return False
    return isinstance(module.running_mean, Tensor) and module.track_running_stats
