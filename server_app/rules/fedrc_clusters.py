"""FedRC (Guo, Tang and Lin, 2023): several models, each for the clients of one concept.

The rule of Kou et al. with the same name is ``fedrc-weights``.

Every node holds ``K`` cluster models. An example ``(x, y)`` of client ``i`` belongs to cluster
``k`` by the weight

    gamma_k = omega_ik I_k(x, y) / sum_n omega_in I_n(x, y),    I_k(x, y) = p_k(y | x) / C_yk,

where ``p_k`` are the class probabilities of model ``k``, ``omega_i`` is the mean of ``gamma`` over
the client's examples in its last round (uniform at first), and ``C_yk`` is the share of class ``y``
among all examples of cluster ``k``. Dividing by it keeps clients apart that disagree about *what an
input means*, and not clients whose classes differ. The client then minimises
``sum_k mean gamma_k loss_k`` with ``gamma`` held fixed. Stations and server average every cluster
model by examples, and the shares of classes, ``mean gamma_k 1[y = c]``, likewise.

The paper leaves open, for a tree and for a domain that nobody has seen:

- *The start.* All cluster models but the first get new random classifiers (the last Linear layer),
  so that they differ and a pretrained network stays one. The authors' code draws every layer anew.
- *An input without a label* has no ``gamma``. The published network answers by the mixture
  ``sum_k pi_k p_k(y | x)``, where ``pi_k`` is the share of all examples in cluster ``k``. Clients
  validate this mixture, too, since it is what the run publishes.
- *Changed examples.* ``gamma`` is computed from the received models, as in the paper, at the
  augmented examples that are trained on.

Guo, Tang and Lin, "FedRC: Tackling Diverse Distribution Shifts Challenge in Federated Learning by
Robust Clustering", arXiv:2301.12379.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from hfedatm.base.errors import UserError
from hfedatm.base.learning import find_task
from hfedatm.base.settings import Settings
from hfedatm.contracts import (
    Inputs,
    Method,
    Rule,
    Situation,
    State,
    Update,
    Wrapper,
    forward,
    option,
)
from hfedatm_core import Merged, merge
from hfedatm_core.models.base import head_name

LEAST_SHARE = 1e-6
"""Smallest share of a class in a cluster; shares are means of replies, which may be anything."""


class ClusterModels(nn.Module):
    """Copies of a network, one per cluster, that answer together."""

    shares: Tensor
    """Share of all examples by cluster and class; its entries add up to one."""

    def __init__(self, model: nn.Module, clusters: int) -> None:
        super().__init__()
        self.models = nn.ModuleList([model, *(deepcopy(model) for _ in range(clusters - 1))])
        name = head_name(model)
        for other in list(self.models)[1:]:
            other.get_submodule(name).reset_parameters()  # type: ignore[operator]
        head = model.get_submodule(name)
        assert isinstance(head, nn.Linear), "head_name returns a Linear layer"
        cells = clusters * head.out_features
        self.register_buffer("shares", torch.full((clusters, head.out_features), 1.0 / cells))

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        """Return the logarithms of the mixture's class probabilities."""
        logs = torch.stack([model(*inputs, **named).log_softmax(-1) for model in self.models])
        return torch.logsumexp(logs + self.sizes().log()[:, None, None], 0)

    def sizes(self) -> Tensor:
        """Return the share of all examples that each cluster has."""
        totals = self.shares.clamp_min(LEAST_SHARE).sum(1)
        return totals / totals.sum()

    def class_shares(self) -> Tensor:
        """Return the share of each class within each cluster."""
        kept = self.shares.clamp_min(LEAST_SHARE)
        return kept / kept.sum(1, keepdim=True)


def memberships(losses: Tensor, omega: Tensor, class_shares: Tensor, targets: Tensor) -> Tensor:
    """Return ``gamma``: the share of every example (column) that each cluster (row) gets.

    Parameters
    ----------
    losses
        Cross-entropy by cluster and example.
    omega
        The client's shares of the clusters.
    class_shares
        ``C``, the share of each class (column) within each cluster (row).
    targets
        The class of each example.
    """
    scores = omega.clamp_min(LEAST_SHARE).log()[:, None] - losses - class_shares[:, targets].log()
    return torch.softmax(scores, 0)


class Clustered(Wrapper):
    """Plain training of several models, by the share of each example that they get."""

    prefix: ClassVar[str] = "fedrc-clusters."
    own_reveals: ClassVar[tuple[str, ...]] = ("class-counts",)
    clusters: int = 2

    def adapt(self, model: nn.Module) -> nn.Module:
        """Make a model for each cluster."""
        return ClusterModels(super().adapt(model), self.clusters)

    def begin(self, model: nn.Module, shared: State, memory: State) -> None:
        """Keep the received models, which decide who belongs to which cluster."""
        super().begin(model, shared, memory)
        assert isinstance(model, ClusterModels)
        self._received = deepcopy(model).eval()
        uniform = torch.full((self.clusters,), 1 / self.clusters)
        self._omega = self.own(memory).get("omega", uniform).to(model.shares.device)
        self._sums, self._count = torch.zeros_like(model.shares), 0

    def loss(self, model: nn.Module, inputs: Inputs, targets: Tensor) -> Tensor:
        """Return the models' losses, weighted by example and cluster."""
        assert isinstance(model, ClusterModels)
        with torch.no_grad():
            losses = torch.stack([self._losses(m, inputs, targets) for m in self._received.models])
            gamma = memberships(losses, self._omega, self._received.class_shares(), targets)
            self._sums.index_add_(1, targets, gamma)
            self._count += len(targets)
            model.shares.copy_(self._sums / self._count)
        own = torch.stack([self._losses(m, inputs, targets) for m in model.models])
        return (gamma * own).sum(0).mean()

    def _losses(self, model: nn.Module, inputs: Inputs, targets: Tensor) -> Tensor:
        return self.task.losses(forward(model, inputs), targets)

    def _new_omega(self) -> Tensor:
        return self._sums.sum(1) / self._count

    def remember(self) -> State:
        """Keep the client's shares of the clusters."""
        return {**super().remember(), **self.marked({"omega": self._new_omega().cpu()})}

    def metrics(self) -> dict[str, float]:
        """Report the client's shares of the clusters."""
        omega = self._new_omega().tolist()
        return {**super().metrics(), **{f"cluster-{k}": share for k, share in enumerate(omega)}}


@dataclass
class FedRCClusters(Rule):
    """The example-weighted mean of every cluster model."""

    any_depth: ClassVar[bool] = True

    clusters: int = option(2, "number of models, each for the clients of one concept", ge=1, le=16)

    def check(self, settings: Settings) -> None:
        """Refuse a training loop without clusters, and what needs no class counts."""
        if settings.train_fn:
            raise UserError(
                "server-rule fedrc-clusters needs the project's training loop: remove train-fn"
            )
        if settings.dp_sgd:
            raise UserError(
                "server-rule fedrc-clusters sends exact shares of classes, which DP-SGD does not "
                "cover: remove dp-sgd"
            )
        if not find_task(settings.task).has_classes:
            raise UserError(
                f"server-rule fedrc-clusters needs classes, and task = {settings.task!r} has none: "
                "choose another rule, or task=classification"
            )

    def on_client(self, method: Method) -> Method:
        """Train a model for each cluster."""
        if type(method).loss is not Method.loss or method.sharing != "none":
            raise UserError(
                "server-rule fedrc-clusters weighs the loss of every example, and this client "
                "method has a loss of its own: set client-method=fedavg"
            )
        wrapped = Clustered(method)
        wrapped.clusters = self.clusters
        return wrapped

    def merge(self, updates: Iterable[Update], situation: Situation) -> Merged:
        """Average the cluster models, and the shares of classes in them."""
        return merge(updates, fot=False, regmean=False)
