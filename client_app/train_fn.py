"""Find the user's training function, call it as its signature asks, and check its answer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hfedatm.base.batches import Batches
from hfedatm.base.errors import UserError
from hfedatm.base.plugins import check_call, import_object
from hfedatm.base.settings import Settings
from hfedatm.contracts import TrainingContext
from hfedatm_core.tensors import State

TRAIN_FN = "train(model, batches, received, settings) -> dict of metrics, or with a fifth: context"


def load_train_fn(settings: Settings) -> Callable[..., Any]:
    """Return the user's training function, or say what it must look like."""
    function: Callable[..., Any] = import_object("train-fn", settings.train_fn, "hfedatm.trainers")
    asked = {"context": "context"} if callable(function) and takes_context(function) else {}
    check_call("train-fn", function, TRAIN_FN, "model", "batches", "received", "settings", **asked)
    return function


def takes_context(function: Callable[..., Any]) -> bool:
    """Return whether a training function has a parameter called ``context``."""
    return "context" in inspect.signature(function).parameters


def call_train_fn(
    function: Callable[..., Any],
    model: nn.Module,
    batches: Batches,
    received: State,
    settings: Settings,
    context: TrainingContext,
) -> dict[str, float]:
    """Train with the user's function and return the numbers it reports."""
    asked = {"context": context} if takes_context(function) else {}
    metrics = function(model, batches, received, settings, **asked)
    if not isinstance(metrics, dict) or "loss" not in metrics:
        raise UserError(f"train-fn must return a dict with a 'loss', got {metrics!r}; {TRAIN_FN}")
    for name, value in context.memory.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise UserError(
                f"train-fn: context.memory holds tensors by name; {name!r} is "
                f"{type(value).__name__}: torch.tensor(value) makes one of a number"
            )
    return {name: float(value) for name, value in metrics.items()}
