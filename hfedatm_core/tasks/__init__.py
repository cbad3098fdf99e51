"""Learning tasks: what a network learns from targets, and how good it is. One file each."""

from hfedatm_core.tasks.base import BadTargets, LearningTask
from hfedatm_core.tasks.classification import CLASSES, Classification

__all__ = ["CLASSES", "BadTargets", "Classification", "LearningTask"]
