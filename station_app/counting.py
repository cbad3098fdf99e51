"""A station's part in counting classes: pass the question on, put the answers together."""

from __future__ import annotations

from flwr.app import ArrayRecord, RecordDict
from flwr.serverapp import Grid

from hfedatm.base.counting import COUNTS, ask_below
from hfedatm.base.errors import UserError
from hfedatm.base.records import BadTask, Task, need_record, record_to_state, state_to_record
from station_app.result import StationResult, grouped


def count(grid: Grid, content: RecordDict, task: Task) -> StationResult:
    """Return the table of this station's clients; raise if none of them answered."""
    shape = record_to_state(need_record(content, COUNTS, ArrayRecord)).get(COUNTS)
    if shape is None or shape.dim() != 2:
        raise BadTask("the message does not say how many classes there are")
    table, failures = ask_below(grid, task, task.level, task.station, shape.shape[1])
    if not bool(table.any()):
        why = "; ".join(grouped(failures)) or "nobody is connected"
        raise UserError(f"no client has told its numbers of examples by class: {why}")
    arrays = {COUNTS: state_to_record({COUNTS: table})}
    return StationResult({"num-examples": int(table.sum())}, arrays, failures)
