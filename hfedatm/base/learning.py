"""What a run learns, and how its training batches are changed: code that settings name."""

from __future__ import annotations

from typing import Any

import hfedatm_core.augmentations
import hfedatm_core.tasks
from hfedatm.base.errors import UserError
from hfedatm.base.plugins import calling, check_call, find_class, find_function
from hfedatm.base.settings import Settings
from hfedatm.base.text import names_in
from hfedatm_core.augmentations import Augment
from hfedatm_core.data import Batch, DataSpec, Inputs
from hfedatm_core.tasks import LearningTask

AUGMENT = "augment(inputs, targets, generator) -> (inputs, targets)"


def find_task(name: str) -> type[LearningTask]:
    """Return the class of a learning task."""
    found: type[LearningTask] = find_class(
        "task", name, hfedatm_core.tasks, LearningTask, "hfedatm.tasks"
    )
    return found


def build_task(settings: Settings, spec: DataSpec) -> LearningTask:
    """Make the learning task: loss, score, and the form of the targets."""
    with calling("task", settings.task):
        return find_task(settings.task)(spec)


def require_classes(settings: Settings, cls: Any, who: str) -> None:
    """Refuse a method or metric that is defined for classes if the task has none."""
    if cls.needs_classes and not find_task(settings.task).has_classes:
        raise UserError(
            f"{who} is defined for classes, and task = {settings.task!r} has none: choose another, "
            "or task=classification"
        )


def find_augmentations(settings: Settings) -> list[Augment]:
    """Return the changes to training batches, in the order in which they are made."""
    return [_find_augmentation(name) for name in names_in(settings.augment)]


def _find_augmentation(name: str) -> Augment:
    package = hfedatm_core.augmentations
    function = find_function("augment", name, package, "augment", "hfedatm.augmentations")
    check_call("augment", function, AUGMENT, "inputs", "targets", "generator")

    def augment(inputs: Inputs, targets: Any, generator: Any) -> Batch:
        with calling("augment", name):
            changed: Any = function(inputs, targets, generator)
        if not isinstance(changed, tuple) or len(changed) != 2 or len(changed[1]) != len(targets):
            raise UserError(f"augment: {name!r} must be {AUGMENT}, of as many examples")
        return changed

    return augment
