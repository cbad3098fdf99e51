"""Local training with DP-SGD: the weights, and the loss reported with them, are private."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from client_app.training import Diverged, make_optimizer
from hfedatm.base.batches import Batches
from hfedatm.base.settings import Settings
from hfedatm.contracts import Method
from hfedatm_core import forward
from hfedatm_core.privacy.dpsgd import make_private, poisson_batches
from hfedatm_core.privacy.noise import NoiseSource
from hfedatm_core.tasks import CLASSES, LearningTask

LOSS_BOUND = 10.0
"""An example's loss counts up to this bound, which limits its influence on the reported mean."""


def train_privately(
    model: nn.Module,
    method: Method,
    data: Batches,
    settings: Settings,
    lr: float,
    *,
    sigma: float,
    sample_rate: float,
    steps: int,
    source: NoiseSource,
) -> float:
    """Train for ``steps`` DP-SGD steps and return the noised mean loss afterwards."""
    # Opacus reads the outputs of layers, so no layer may overwrite them in place.
    for module in model.modules():
        if getattr(module, "inplace", False):
            setattr(module, "inplace", False)  # noqa: B010 - torch types attributes as modules
    examples = len(data.domain)
    wrapped, optimizer = make_private(
        model,
        make_optimizer(model.parameters(), settings, lr),
        sigma=sigma,
        clip=settings.dp_sgd_clip,
        expected_batch_size=sample_rate * examples,
        source=source,
    )
    try:
        with warnings.catch_warnings():
            # The first layer's input needs no gradient, and Opacus uses none.
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            for index in poisson_batches(examples, sample_rate, steps, source):
                inputs, targets = data.pick(index)
                optimizer.zero_grad()
                method.loss(wrapped, inputs, targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    finally:
        wrapped.to_standard_module()
        for parameter in model.parameters():
            parameter.grad = None
    if not all(bool(torch.isfinite(p).all()) for p in model.parameters()):
        raise Diverged(f"the weights are not finite after DP-SGD at lr {lr:g}: lower lr")
    return private_loss(model, data, sigma, source, method.task)


@torch.no_grad()
def private_loss(
    model: nn.Module,
    data: Batches,
    sigma: float,
    source: NoiseSource,
    task: LearningTask = CLASSES,
) -> float:
    """Return the mean over all examples of min(loss, bound), noised: one Gaussian release."""
    model.eval()
    total = 0.0
    for inputs, targets in data:
        losses = task.losses(forward(model, inputs), targets).cpu().double()
        # A loss that is not finite counts as the bound, so the sum does not show it.
        total += float(losses.nan_to_num(nan=LOSS_BOUND).clamp(0.0, LOSS_BOUND).sum())
    total += sigma * LOSS_BOUND * float(source.normal(1)[0])
    return max(0.0, total / len(data.domain))
