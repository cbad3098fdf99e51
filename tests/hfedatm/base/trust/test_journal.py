"""A journal forgets a step when its task is out of date, and not a moment before."""

import time

import pytest
from flwr.app import ConfigRecord, RecordDict

from hfedatm.base.trust.journal import KEPT_REPLIES, Journal, SecondTask
from hfedatm.base.trust.origin import _CLOCKS_DIFFER

DAY, HOUR = 24 * 3600.0, 3600.0
ANSWER = RecordDict({"metrics": ConfigRecord({"loss": 1.0})})


class Node:
    """One node with a clock of its own."""

    def __init__(self, folder, monkeypatch, keep):
        self.folder, self.keep, self.now = folder, keep, 1e9
        monkeypatch.setattr(time, "time", lambda: self.now)

    def do(self, key, digest="asked", lasts=HOUR, answer=ANSWER):
        with Journal(self.folder).step(key, digest, self.now + lasts, keep=self.keep) as entry:
            entry.reply = entry.reply or answer

    def fail(self, key):
        with Journal(self.folder).step(key, "asked", self.now + HOUR, keep=self.keep):
            pass  # no reply was made: what went wrong may go well the next time

    def files(self):
        return sorted(path.name for path in self.folder.iterdir() if path.name != "steps.db")


@pytest.fixture(params=[True, False], ids=["client", "station"])
def node(request, tmp_path, monkeypatch):
    return Node(tmp_path, monkeypatch, keep=request.param)


def test_steps_that_are_out_of_date_leave_nothing_behind(node):
    for number in range(30):
        node.do(f"old{number}")
        node.fail(f"failed{number}")
    node.now += HOUR + DAY + 1
    node.do("new")
    assert node.files() == (["new.lock", "new.reply"] if node.keep else ["new.lock"])
    node.do("old3", "something else")  # out of date: whoever verifies tasks refuses it


def test_a_node_that_works_for_a_year_keeps_a_days_worth(node):
    counts = []
    for _ in range(120):
        for number in range(3):
            node.do(f"{node.now}-{number}")
        node.fail(f"{node.now}-failed")
        counts.append(len(node.files()))
        node.now += 3 * 24 * HOUR
    assert max(counts) <= 4 + KEPT_REPLIES


@pytest.mark.parametrize("later", [0.0, HOUR - 1, HOUR + _CLOCKS_DIFFER, DAY])
def test_another_task_for_a_step_is_refused_as_long_as_it_is_valid(node, later):
    node.do("step")
    node.fail("failed")
    node.now += later
    for number in range(5):  # others, which make the journal forget what it may
        node.do(f"other{number}")
    for key in ("step", "failed"):
        with pytest.raises(SecondTask, match="with other content"):
            node.do(key, "something else")


def test_a_clients_reply_that_is_gone_is_not_made_again_while_the_task_is_valid(
    tmp_path, monkeypatch
):
    client = Node(tmp_path, monkeypatch, keep=True)
    client.do("step")
    for number in range(KEPT_REPLIES + 3):
        client.do(f"other{number}")
    client.now += HOUR - 1
    with pytest.raises(SecondTask, match="reply is gone"):
        client.do("step")
