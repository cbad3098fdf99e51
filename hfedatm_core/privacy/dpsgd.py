"""DP-SGD through Opacus: check that a model is suitable, and make its training steps private.

Opacus computes the gradient of every example. Its noise and its batch sampling normally come from
torch's generator, which a run seeds with a public number; here both come from
:class:`~hfedatm_core.privacy.noise.NoiseSource`. Clipping, sum and noise are computed in float64,
because the noise does not hide a rounding error that was made before the noise was added.
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
    """A layer of the model mixes examples, so that no gradient belongs to one example."""


def check_opacus_model(model: nn.Module) -> None:
    """Raise :class:`UnsupportedLayerError` with every layer Opacus cannot handle, and the fix."""
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
    """Opacus' optimizer with noise from a cryptographic source, added before anything is rounded.

    The gradient of one example is float32, and its rounding depends on the batch. So the gradients
    of the other examples change a little when one example is removed. The clipping bound is lower
    than ``max_grad_norm`` by as much.
    """

    noise_multiplier: float
    max_grad_norm: float
    expected_batch_size: float

    def __init__(self, optimizer: torch.optim.Optimizer, source: NoiseSource, **kwargs: object):
        super().__init__(optimizer, **kwargs)
        self._source = source
        rounding = 8 * torch.finfo(torch.float32).eps * self.expected_batch_size
        self._bound = self.max_grad_norm * (1 - min(0.01, rounding))

    def clip_and_accumulate(self) -> None:
        """Sum the clipped gradients; an example whose gradient is not finite counts as nothing.

        Stopping with an error would reveal that such an example exists.
        """
        wide = [_wide(gradient) for gradient in self.grad_samples]
        squares = [g.square().reshape(len(g), g[:1].numel()).sum(1).cpu() for g in wide]
        norms = torch.stack(squares).sum(0).sqrt()
        finite = torch.isfinite(norms)
        factors = (self._bound / norms.clamp(min=self._bound)).where(finite, 0.0)
        self._iterations = self.accumulated_iterations
        for parameter, gradient in zip(self.params, wide, strict=True):
            kept = gradient[finite.to(gradient.device)]
            total = torch.einsum("i,i...", factors[finite].to(kept.device), kept)
            before = parameter.summed_grad
            parameter.summed_grad = total if before is None else before + total
            parameter.grad_sample = None  # a second step without a backward pass is an error

    def add_noise(self) -> None:
        """Put the mean of clipped sum plus N(0, (sigma * clip)^2) into every gradient."""
        divisor = self.expected_batch_size * self._iterations
        for parameter in self.params:
            std = self.noise_multiplier * self.max_grad_norm
            noise = torch.from_numpy(self._source.normal(parameter.numel()) * std)
            total = parameter.summed_grad
            noised = total + noise.view_as(total).to(total.device)
            parameter.grad = (noised / divisor).view_as(parameter).to(parameter)

    def scale_grad(self) -> None:
        """Do nothing: the mean is taken before the gradient is rounded."""


def _wide(values: Tensor) -> Tensor:
    """Return float64, on a device that has it."""
    return values.detach().to("cpu" if values.device.type == "mps" else values.device).double()


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
    """Yield ``steps`` batches of indices, each example in a batch with probability ``sample_rate``.

    The accountant assumes this sampling. A batch may be empty and must still be trained on: its
    step is pure noise, and skipping it would reveal that it was empty.
    """
    if not 0 < sample_rate <= 1:
        raise ValueError(f"the sample rate must be in (0, 1], got {sample_rate}")
    for _ in range(steps):
        yield torch.from_numpy((source.uniform(examples) < sample_rate).nonzero()[0])
