"""sFedHP (Liu et al., 2023): a sparse model for every client, station and the whole federation.

Client ``j`` of station ``i`` keeps a personal model ``theta_ij`` near the model ``phi_i`` of its
station, which stays near the global model ``w``:

    min_w   mean_i [ min_phi_i  mean_j F_ij(phi_i) + lam2/2 |phi_i - w|^2 ] + sparse s(w),
    F_ij(phi) = min_theta  loss_ij(theta) + lam/2 |theta - phi|^2 + sparse s(theta),

with the smoothed l1 norm ``s(x) = rho sum_n log cosh(x_n / rho)``, whose gradient is
``tanh(x / rho)``. Each inner minimum is a proximal mapping. A client takes ``inner`` steps along
the gradient of ``F`` at ``theta`` and then one step of its own copy of ``phi``,

    phi <- phi - rate (phi - theta),

and sends that copy; ``theta`` never leaves it. The station averages the copies by examples. With
the mean ``phi`` of the stations, the server takes one step of ``w``:

    w <- w - step (w - phi) - sparse lr tanh(w / rho).

Left open, or different here:

- *Steps.* The publication has a learning rate per tier; here ``rate`` and ``step`` are the products
  of those rates with ``lam`` and ``lam2``. ``lr`` in the step of ``w`` is that of the clients.
- *What is sparse.* The weights of layers; biases and normalisations are not pulled to zero.
- *Starts.* A station's model starts every global round from the global one. A personal model goes
  on from the client's last round, and in its first round from the received model.
- *More tiers.* The ``phi_i`` are the models of the stations with clients. A station of stations has
  no term of its own: it passes up their mean by examples, and so ``w`` takes the step that it takes
  if all these stations are the server's.
- *BatchNorm.* Running statistics are averaged as in other rules; only parameters are personal.
- *Bytes.* Models are sent whole. ``near-zero`` reports the share of personal weights below
  1e-3, which a sparse format could leave out.
- *Personal models* are scored on the client's validation examples after its training; the mean is
  ``personal-accuracy`` in the round's record. An unseen domain has no personal model; it gets the
  global one.

Liu, Wang, Shao and Li, "Sparse Federated Learning with Hierarchical Personalization Models",
arXiv:2203.13517.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hfedatm.base.errors import UserError
from hfedatm.base.schedule import learning_rate
from hfedatm.base.settings import Settings
from hfedatm.base.tiers import local_rounds
from hfedatm.contracts import (
    Batch,
    Inputs,
    Method,
    Rule,
    Situation,
    State,
    Update,
    Wrapper,
    forward,
    option,
    snapshot,
)
from hfedatm_core import Merged, merge

NEAR_ZERO = 1e-3
"""A weight below this size counts as zero in the reported share."""


def smooth_l1(x: Tensor, rho: float) -> Tensor:
    """Return ``rho sum log cosh(x / rho)``: the l1 norm up to ``rho log 2`` per entry."""
    z = (x / rho).abs()
    return rho * (z + F.softplus(-2 * z) - math.log(2)).sum()


def smooth_l1_gradient(x: Tensor, rho: float) -> Tensor:
    """Return the gradient of `smooth_l1`."""
    return torch.tanh(x / rho)


class Personal(Wrapper):
    """A client method that trains a personal model beside its copy of the station's model."""

    prefix: ClassVar[str] = "sfedhp."
    rule: SFedHP

    def begin(self, model: nn.Module, shared: State, memory: State) -> None:
        """Take the station's model, and go on from the personal model."""
        super().begin(model, shared, memory)
        self._phi, self._steps = snapshot(model), 0
        kept = self.own(memory)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name in kept and p.requires_grad:
                    p.copy_(kept[name])
        self._personal: dict[str, float] = {}

    def loss(self, model: nn.Module, inputs: Inputs, targets: Tensor) -> Tensor:
        """Return the loss, the distance to the station's model, and the smoothed l1 norm."""
        if self._steps and self._steps % self.rule.inner == 0:
            self._step_phi(model)
        self._steps += 1
        total = super().loss(model, inputs, targets)
        for name, p in model.named_parameters():
            if p.requires_grad:
                total = total + 0.5 * self.rule.lam * (p - self._phi[name]).square().sum()
                if p.ndim > 1:
                    total = total + self.rule.sparse * smooth_l1(p, self.rule.rho)
        return total

    @torch.no_grad()
    def _step_phi(self, model: nn.Module) -> None:
        """Move the copy of the station's model towards the personal model."""
        for name, p in model.named_parameters():
            if p.requires_grad:
                self._phi[name].lerp_(p, self.rule.rate)

    @torch.no_grad()
    def finish(self, model: nn.Module, validation: Iterable[Batch]) -> None:
        """Score and keep the personal model; leave the copy of the station's model to be sent."""
        super().finish(model, validation)
        self._step_phi(model)
        self._theta = snapshot(model)
        weights = torch.cat([p.flatten() for p in self._theta.values() if p.ndim > 1])
        self._personal = {"near-zero": float((weights.abs() < NEAR_ZERO).float().mean())}
        model.eval()
        right, count = 0.0, 0
        for inputs, targets in validation:
            right += float(self.task.scores(forward(model, inputs), targets).sum())
            count += len(targets)
        if count:
            self._personal["personal-accuracy"] = right / count
        for name, p in model.named_parameters():
            if name in self._phi:
                p.copy_(self._phi[name])

    def remember(self) -> State:
        """Keep the personal model."""
        return {**super().remember(), **self.marked(self._theta)}

    def metrics(self) -> dict[str, float]:
        """Report how good and how sparse the personal model is."""
        return {**super().metrics(), **self._personal}


@dataclass
class SFedHP(Rule):
    """Sparse personal models around station models around a global model."""

    any_depth: ClassVar[bool] = True

    lam: float = option(1.0, "pull between a personal model and the station's", gt=0, le=1e6)
    inner: int = option(1, "steps of the personal model per step of the station's", ge=1, le=10_000)
    rate: float = option(
        0.2, "how far a step takes the station's model to the personal", gt=0, le=1
    )
    sparse: float = option(1e-4, "weight of the smoothed l1 norm", ge=0, le=1e3)
    rho: float = option(1e-2, "width within which the l1 norm is smoothed", gt=0, le=1e3)
    step: float = option(1.0, "how far the global model goes to the mean station", gt=0, le=1)

    def check(self, settings: Settings) -> None:
        """Refuse a training loop without personal models, and DP-SGD, which has another loss."""
        for key in ("train_fn", "dp_sgd"):
            if getattr(settings, key):
                raise UserError(
                    "server-rule sfedhp needs the plain training loop: remove "
                    f"{key.replace('_', '-')}"
                )

    def on_client(self, method: Method) -> Method:
        """Train a personal model on every client."""
        wrapped = Personal(method)
        wrapped.rule = self
        return wrapped

    def merge(self, updates: Iterable[Update], situation: Situation) -> Merged:
        """Take one step from the global model to the mean of the stations' models."""
        merged = merge(updates, fot=False, regmean=False)
        settings = situation.settings
        lr = learning_rate(settings, situation.round, local_rounds(settings))
        for name, old in situation.previous.items():
            new = merged.state[name]
            if new.is_floating_point():
                new.copy_(old + self.step * (new - old))
                if new.ndim > 1:
                    new -= self.sparse * lr * smooth_l1_gradient(old, self.rho)
        return merged
