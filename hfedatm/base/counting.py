"""Ask the nodes below for their clients' examples by class (station-assignment=suggest).

The answer of a node is a table: a row for each place of a client below it, a column for each class.
The row of a client that did not answer is zero. Tables of stations are put together to that of
their parent, so this works in trees of any depth.
"""

from __future__ import annotations

import torch
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from hfedatm.base.errors import UserError
from hfedatm.base.learning import find_task
from hfedatm.base.privacy_settings import why_not_exact
from hfedatm.base.records import BadReply, Task, state_to_record
from hfedatm.base.round_record import Failure
from hfedatm.base.settings import Settings
from hfedatm.base.tiers import clients_below, levels, patience, places
from hfedatm.base.wire import Expected, NodeUpdate, checked, read_update

COUNTS = "counts"


def require_countable(settings: Settings) -> None:
    """Refuse a task without classes."""
    if not find_task(settings.task).has_classes:
        raise UserError(
            f"station-assignment: {settings.station_assignment} counts classes, and task = "
            f"{settings.task!r} has none: set station-assignment=mixed"
        )


def require_askable(settings: Settings) -> None:
    """Refuse to ask for class counts, which are exact, in a run that is to protect examples."""
    require_countable(settings)
    if why := why_not_exact(settings):
        raise UserError(f"station-assignment: suggest asks for exact class counts, but {why}")


def ask_below(
    grid: Grid, task: Task, level: int, node: int, classes: int
) -> tuple[Tensor, list[Failure]]:
    """Ask the children of a node; return the node's table, and who did not answer.

    Parameters
    ----------
    grid
        The children.
    task
        The task that this node was given; the server's own task if ``level`` is 0.
    level, node
        The node's place in the tree.
    classes
        Number of classes.
    """
    s, to_clients = task.settings, level == levels(task.settings)
    each, below = clients_below(s, level + 1), places(s, level, node)
    table = torch.zeros(len(below) * each, classes, dtype=torch.int64)
    empty = {COUNTS: torch.zeros(each, classes, dtype=torch.int64)}
    tier = "client" if to_clients else "station"
    expected = Expected(s, tier, arrays=empty, record=COUNTS, together=each)  # type: ignore[arg-type]

    def asked(child: int) -> Message:
        own = task.but(client=child) if to_clients else task.but(level=level + 1, station=child)
        shape = {COUNTS: torch.zeros(1, classes, dtype=torch.int64)}
        content = RecordDict({"task": own.to_record(), COUNTS: state_to_record(shape)})
        return Message(content, child, "train.count")

    def read(reply: Message) -> NodeUpdate:
        update = read_update(reply, expected)
        if update.node not in below:
            raise BadReply("it has no place in the tree of this run")
        found = update.state[COUNTS]
        if bool((found < 0).any()) or int(found.sum()) != update.examples:
            raise BadReply("counts: they are no numbers of examples by class")
        return update

    failures: list[Failure] = []
    messages = [asked(child) for child in sorted(grid.get_node_ids())]
    timeout = s.client_timeout if to_clients else patience(s, level)
    replies = grid.send_and_receive(messages, timeout=timeout)
    for update in checked(replies, read, expected.tier, failures.append):
        first = (update.node - below.start) * each
        table[first : first + each] = update.state[COUNTS]
        failures += [
            Failure(node=f"{update.name}, {f.node}", reason=f.reason) for f in update.failures
        ]
    return table, failures
