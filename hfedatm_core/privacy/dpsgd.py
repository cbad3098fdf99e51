"""DP-SGD through Opacus: which models it can take, and how a training step becomes private.

Opacus computes and clips the gradient of every example. Its noise and its batch sampling normally
come from torch's generator, which a run seeds with a number everybody knows; here both come from
:class:`~hfedatm_core.privacy.noise.NoiseSource`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from opacus.utils.module_utils import trainable_modules
from opacus.validators import ModuleValidator
from torch import Tensor, nn

from hfedatm_core.privacy.noise import NoiseSource


class UnsupportedLayerError(ValueError):
    """A model has layers that mix examples, so that no gradient belongs to one example."""


def check_opacus_model(model: nn.Module) -> None:
    """Raise :class:`UnsupportedLayerError` naming every layer Opacus cannot take, and the fix."""
    complaints = []
    for name, module in trainable_modules(model):
        validator = ModuleValidator.VALIDATORS.get(type(module))
        if validator is not None and validator(module):
            fixable = type(module) in ModuleValidator.FIXERS
            fix = "fix-model=true replaces it" if fixable else "choose another model"
            complaints.append(f"  {name or '<model>'} ({type(module).__name__}): {fix}")
    if complaints:
        raise UnsupportedLayerError(
            "dp-sgd needs a gradient per example, which these layers do not have:\n"
            + "\n".join(complaints)
        )


def fix_model(model: nn.Module) -> nn.Module:
    """Return a copy with BatchNorm replaced by GroupNorm, the same on every tier.

    The new layers start at weight one and bias zero and use no randomness, so server, stations and
    clients that fix the same model get the same parameters under the same names.
    """
    fixed: nn.Module = ModuleValidator.fix(model)
    fixed.train(model.training)
    check_opacus_model(fixed)
    return fixed


class PrivateOptimizer(DPOptimizer):  # type: ignore[misc]
    """Opacus' optimizer with noise from a cryptographic source."""

    noise_multiplier: float

    def __init__(self, optimizer: torch.optim.Optimizer, source: NoiseSource, **kwargs: object):
        super().__init__(optimizer, **kwargs)
        self._source = source

    def add_noise(self) -> None:
        """Put the clipped sum plus N(0, (sigma * clip)^2) into every gradient."""
        sigma: float = self.noise_multiplier
        self.noise_multiplier = 0.0  # Opacus then only moves the clipped sum into place
        super().add_noise()
        self.noise_multiplier = sigma
        for parameter in self.params:
            noise = self._source.normal(parameter.numel()) * (sigma * self.max_grad_norm)
            parameter.grad += torch.from_numpy(noise).view_as(parameter).to(parameter.grad)


def make_private(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    sigma: float,
    clip: float,
    expected_batch_size: float,
    source: NoiseSource,
) -> tuple[GradSampleModule, PrivateOptimizer]:
    """Wrap a model and its optimizer for DP-SGD.

    Train the wrapped model as usual (mean loss, ``zero_grad``, ``backward``, ``step``) on the
    batches of :func:`poisson_batches`, then record
    ``ledger.spend_dp_sgd(sigma, sample_rate, steps)`` and call ``wrapped.remove_hooks()``; the
    weights are trained in ``model`` itself.

    Parameters
    ----------
    model, optimizer
        The optimizer must hold the model's parameters.
    sigma
        Noise multiplier, from :func:`~hfedatm_core.privacy.accounting.calibrate_sigma`.
    clip
        Bound on the norm of each example's gradient.
    expected_batch_size
        ``sample_rate`` x number of examples; the divisor of the noised sum.
    source
        Where the noise comes from.
    """
    check_opacus_model(model)
    wrapped = GradSampleModule(model.train(), loss_reduction="mean")
    private = PrivateOptimizer(
        optimizer,
        source,
        noise_multiplier=sigma,
        max_grad_norm=clip,
        expected_batch_size=expected_batch_size,
    )
    return wrapped, private


def poisson_batches(
    examples: int, sample_rate: float, steps: int, source: NoiseSource
) -> Iterator[Tensor]:
    """Yield ``steps`` index batches in which every example is with probability ``sample_rate``.

    This sampling is what the accountant assumes. A batch may be empty and must be trained on all
    the same: its step is pure noise, and to leave it out would tell that it was empty.
    """
    if not 0 < sample_rate <= 1:
        raise ValueError(f"the sample rate must be in (0, 1], got {sample_rate}")
    for _ in range(steps):
        yield torch.from_numpy((source.uniform(examples) < sample_rate).nonzero()[0])
