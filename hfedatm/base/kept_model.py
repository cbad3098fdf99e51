"""A model that goes down the tree once in a round, although several messages need it.

In an exchange of refining and in a second look a node keeps the model that it receives. A later
message of the round then brings only the tensors that have changed since, in the record ``changes``
instead of ``model``. Whoever did not answer the message before, for whatever reason, is sent the
whole model again. For refining a node also keeps the model that its station trained in the round.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from flwr.app import ArrayRecord, RecordDict

from hfedatm.base.building import build_rule
from hfedatm.base.errors import UserError
from hfedatm.base.memory import NodeMemory
from hfedatm.base.records import (
    BadTask,
    Task,
    find_record,
    need_record,
    record_to_state,
    state_to_record,
)
from hfedatm.base.schedule import evaluates
from hfedatm.base.text import printable
from hfedatm_core.tensors import State


@dataclass
class Sending:
    """A model on its way down: its changes to nodes that keep it, all of it to the others."""

    whole: ArrayRecord
    changes: ArrayRecord = field(default_factory=ArrayRecord)
    kept_by: set[int] = field(default_factory=set)
    along: dict[str, ArrayRecord] = field(default_factory=dict)
    """Records that go with the whole model."""

    def to(self, node: int) -> dict[str, ArrayRecord]:
        """Return the records that bring the model to a node."""
        if node in self.kept_by:
            return {"changes": self.changes}
        return {"model": self.whole, **self.along}


class KeptModel:
    """The model that a node keeps from the merge of a round to the end of that round.

    Parameters
    ----------
    task
        Task of the message; it names the run and the round.
    node
        Name of the node, for example ``client-3``.
    root
        Folder of all memories.
    """

    def __init__(self, task: Task, node: str, root: str | Path | None = None) -> None:
        self._task, self._at = task, (task.round, 0)
        self._model = NodeMemory(task.run, f"{node}-look", root, kept=1)
        self._nodes = NodeMemory(task.run, f"{node}-looked", root, kept=1)
        self._own = NodeMemory(task.run, f"{node}-own", root, kept=1)

    def received(self, content: RecordDict) -> State:
        """Return the model that a message brings, whole or as changes of the kept one."""
        changes = find_record(content, "changes", ArrayRecord)
        if changes is None:
            return record_to_state(need_record(content, "model", ArrayRecord))
        if not (model := self._model.at(self._at)):
            raise UserError("this node has not kept the merged model of this round")
        for name, tensor in record_to_state(changes).items():
            if name not in model or model[name].shape != tensor.shape:
                raise BadTask(f"changes: the model has no {printable(name, 60)} of this shape")
            model[name] = tensor
        return model

    def sending(self, content: RecordDict) -> Sending:
        """Return the received model, ready for the nodes below."""
        changes = find_record(content, "changes", ArrayRecord)
        if changes is None:
            return Sending(need_record(content, "model", ArrayRecord))
        kept_by = {int(node) for node in self._nodes.at(self._at)}
        return Sending(state_to_record(self.received(content)), changes, kept_by)

    def keep(self, model: State, kept_by: Iterable[int] = ()) -> None:
        """Keep a model that a later message needs, and which nodes below keep it, too."""
        settings, round = self._task.settings, self._task.round
        more = self._task.kind == "refine" or evaluates(settings, round)
        if not more and build_rule(settings).looks_again(settings, round) < 2:
            return
        self._model.save(self._at, {n: tensor.detach().cpu() for n, tensor in model.items()})
        if kept_by:
            self._nodes.save(self._at, {str(node): torch.ones(1) for node in kept_by})

    def keep_own(self, model: State) -> None:
        """Keep the model that this node's station has trained in the round."""
        self._own.save(self._at, {n: tensor.detach().cpu() for n, tensor in model.items()})

    def own(self) -> State:
        """Return the model that this node's station has trained in the round."""
        if not (model := self._own.at(self._at)):
            raise UserError("this node has not kept the model that its station trained")
        return model
