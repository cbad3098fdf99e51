"""The classes that plug-ins extend and use, in one import line.

    from hfedatm.contracts import Method, Rule, DomainData

A client method extends `Method`, a server rule `Rule`, a metric `Metric`, a learning task
`LearningTask`, a tracker `Tracker`. A data set is a function that returns a `DomainData`, a model
one that takes a `DataSpec` and returns a network. A training function takes a network, `Batches`,
the received `State` and the `Settings`, and if it has a parameter called ``context`` a
`TrainingContext`.
"""

import warnings
from typing import Any

from hfedatm.base.batches import Batches
from hfedatm.base.errors import UserError
from hfedatm.base.options import option
from hfedatm.base.settings import Settings
from hfedatm.contracts.method import Method, mean_loss_gradient, snapshot
from hfedatm.contracts.paced import Paced
from hfedatm.contracts.rule import Rule, Situation, StationRule
from hfedatm.contracts.tracker import Tracker
from hfedatm.contracts.training import TrainingContext
from hfedatm.contracts.wrapper import Wrapper
from hfedatm_core import Merged, MergeReport, Update, forward
from hfedatm_core.data import Batch, DataSpec, Domain, DomainData, Inputs
from hfedatm_core.data.adapting import domain_of
from hfedatm_core.metrics import Metric
from hfedatm_core.tasks import BadTargets, LearningTask
from hfedatm_core.tensors import State

__all__ = [
    "BadTargets",
    "Batch",
    "Batches",
    "DataSpec",
    "Domain",
    "DomainData",
    "Inputs",
    "LearningTask",
    "MergeReport",
    "Merged",
    "Method",
    "Metric",
    "Paced",
    "Rule",
    "Settings",
    "Situation",
    "State",
    "StationRule",
    "Tracker",
    "TrainingContext",
    "Update",
    "UserError",
    "Wrapper",
    "domain_of",
    "forward",
    "mean_loss_gradient",
    "option",
    "snapshot",
]


def __getattr__(name: str) -> Any:
    """Return a class under its old name, with a deprecation notice."""
    if name != "StationSide":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    notice = f"{__name__}.StationSide is deprecated; it is called StationRule"
    warnings.warn(notice, DeprecationWarning, stacklevel=2)
    return StationRule
