"""The contract of a client method: a loss, and the hooks around it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from hfedatm_core import forward
from hfedatm_core.channels.index_maps import Follows
from hfedatm_core.data import Batch, Inputs
from hfedatm_core.tasks import CLASSES, LearningTask
from hfedatm_core.tensors import State


@dataclass
class Method:
    """Base of all client methods; on its own it is plain empirical risk minimisation.

    A method is a dataclass: its fields are its hyper-parameters (``client-params``). Override only
    the hooks that differ.
    """

    sharing: ClassVar[Literal["none", "global", "station"]] = "none"
    """Whether clients send arrays before a round (`share`), and which tier averages them."""

    per_example_loss: ClassVar[bool] = False
    """Whether `loss` is a mean over examples of a function of the network's output alone, and no
    gradient is changed; DP-SGD needs this."""

    needs_classes: ClassVar[bool] = False
    """Whether the method can only train classifiers."""

    reveals: ClassVar[tuple[str, ...]] = ()
    """What the method sends besides a trained model, as keys of a policy's section ``privacy``; a
    deployed node refuses it unless its owner has set them to true."""

    client: ClassVar[int] = 0
    """The number of the client that trains; the run sets it."""

    clients: ClassVar[int] = 1
    """The number of all clients; the run sets it."""

    task: ClassVar[LearningTask] = CLASSES
    """The learning task of the run, which sets it (setting ``task``)."""

    def adapt(self, model: nn.Module) -> nn.Module:
        """Return the network this method trains; every tier calls this in the same way."""
        return model

    def share(self, model: nn.Module, batches: Iterable[Batch]) -> State:
        """Return the arrays to average over clients before the round; ``model`` is as received."""
        return {}

    def blend(self, old: State, new: State) -> State:
        """Combine the last shared average with the new one."""
        return new

    def begin(self, model: nn.Module, shared: State, memory: State) -> None:
        """Set up one round: received ``model``, shared average, tensors from `remember`."""

    def parameters(self) -> list[nn.Parameter]:
        """Return parameters that are trained with the model but stay on the client."""
        return []

    def loss(self, model: nn.Module, inputs: Inputs, targets: Tensor) -> Tensor:
        """Return the training loss of a batch; by default the loss of the task."""
        return self.task.loss(forward(model, inputs), targets)

    def correct(self, model: nn.Module) -> None:
        """Change the gradients before a step."""

    def finish(self, model: nn.Module, validation: Iterable[Batch]) -> None:
        """Change the trained model before it is sent.

        ``validation`` has no batch if this client has no validation examples, or if its owner does
        not let scores leave.
        """

    def remember(self) -> State:
        """Return the tensors this client needs in its next round; they never leave the client."""
        return {}

    def follows(self, model: nn.Module) -> Follows:
        """Return which axes of remembered tensors are in the order of which axes of the model.

        If the server moves channels of a station, remembered tensors follow. A tensor that is named
        after one of the model, with any prefix, and has its shape, need not be listed.
        """
        return {}

    def metrics(self) -> dict[str, float]:
        """Return numbers to report with the update."""
        return {}


def snapshot(model: nn.Module) -> State:
    """Return a copy of the trainable parameters."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def mean_loss_gradient(
    model: nn.Module,
    batches: Iterable[Batch],
    parameters: dict[str, nn.Parameter],
    task: LearningTask = CLASSES,
) -> State:
    """Return the gradient of the task's mean loss over all batches, in evaluation mode."""
    model.eval()
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    count = 0
    for inputs, targets in batches:
        loss = task.total_loss(forward(model, inputs), targets)
        for name, g in zip(
            total, torch.autograd.grad(loss, list(parameters.values())), strict=True
        ):
            total[name] += g
        count += len(targets)
    return {name: g / count for name, g in total.items()}
