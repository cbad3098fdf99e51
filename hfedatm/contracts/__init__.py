"""What a plug-in author writes against, in one import line.

    from hfedatm.contracts import Method, Rule, DomainData

A client method extends `Method`, a server rule `Rule`, a tracker `Tracker`. A data set is a
function that returns a `DomainData`, a model one that takes a `DataSpec` and returns a network. A
training function takes a network, `Batches`, the received `State` and the `Settings`.
"""

from hfedatm.base.batches import Batches
from hfedatm.base.errors import UserError
from hfedatm.base.settings import Settings
from hfedatm.base.state import State
from hfedatm.contracts.method import Method, mean_loss_gradient, snapshot
from hfedatm.contracts.rule import Rule, Situation, StationSide
from hfedatm.contracts.tracker import Tracker
from hfedatm.contracts.wrapper import Wrapper
from hfedatm_core import Merged, MergeReport, Update, forward
from hfedatm_core.data import Batch, DataSpec, Domain, DomainData, Inputs

__all__ = [
    "Batch",
    "Batches",
    "DataSpec",
    "Domain",
    "DomainData",
    "Inputs",
    "MergeReport",
    "Merged",
    "Method",
    "Rule",
    "Settings",
    "Situation",
    "State",
    "StationSide",
    "Tracker",
    "Update",
    "UserError",
    "Wrapper",
    "forward",
    "mean_loss_gradient",
    "snapshot",
]
