"""The optional argument ``context`` of a training function."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hfedatm.base.batches import Batches
from hfedatm_core.tasks import CLASSES, LearningTask
from hfedatm_core.tensors import State


@dataclass(frozen=True)
class TrainingContext:
    """Context for a training function that has a parameter called ``context``.

    Attributes
    ----------
    round, station_round
        Which global round this is, and which station round within it; both count from 1.
    lr
        The learning rate of this station round: ``lr`` after the ``schedule``.
    validation
        This client's validation examples in batches; no batch where ``validation-fraction`` is 0.
    device
        Where the model and all batches are.
    memory
        Tensors by name that this client kept in its last round, empty at first. Tensors that are in
        it when the function returns are there again in this client's next round; they never leave
        the client.
    task
        The learning task: ``task.loss(outputs, targets)`` is the loss of whatever is learned.
    """

    round: int
    station_round: int
    lr: float
    validation: Batches
    device: torch.device
    memory: State = field(default_factory=dict)
    task: LearningTask = CLASSES
