"""A client's numbers of examples by class, for whoever plans a deployment (EARA)."""

from __future__ import annotations

import torch
from flwr.app import Context, MetricRecord, RecordDict

from client_app.data import client_data
from hfedatm.base.counting import COUNTS, require_askable
from hfedatm.base.records import Task, state_to_record


def count(content: RecordDict, context: Context) -> RecordDict:
    """Return the numbers of this client's examples by class; nothing is trained."""
    task = Task.from_record(content["task"])
    settings = task.settings
    require_askable(settings)
    data = client_data(settings, task.client, context.node_config)
    targets = torch.cat([part.targets for part in (data.train, *data.validation)])
    table = targets.bincount(minlength=data.spec.num_classes)[None].long()
    metrics = MetricRecord({"num-examples": int(table.sum())})
    return RecordDict({COUNTS: state_to_record({COUNTS: table}), "metrics": metrics})
