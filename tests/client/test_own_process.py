"""A deployed client's work in a fork."""

import os
import signal
import time

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from client_app.own_process import in_own_process
from hfedatm.base.environment import PRELOAD


@pytest.fixture(autouse=True)
def deployed(monkeypatch):
    monkeypatch.setenv(PRELOAD, "client_app.client")
    # Flower tells a process who it is before it may make a message; here that is us.
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 7


def ask(work, ttl=60.0, kind="train"):
    message = Message(RecordDict(), 1, kind, ttl=ttl)
    message.metadata.__dict__["_message_id"] = "m"
    return in_own_process(message, Context(7, 1, {}, RecordDict(), {}), work).content


def who(message, context):
    return Message(RecordDict({"n": ConfigRecord({"pid": os.getpid()})}), reply_to=message)


def test_work_is_done_in_another_process():
    assert ask(who)["n"]["pid"] != os.getpid()


def test_a_question_is_answered_at_once(monkeypatch):
    assert ask(who, kind="query")["n"]["pid"] == os.getpid()


def test_a_node_that_is_not_deployed_by_us_has_one_process(monkeypatch):
    monkeypatch.delenv(PRELOAD)
    assert ask(who)["n"]["pid"] == os.getpid()


def test_work_that_is_killed_says_so():
    reply = ask(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    assert "killed by signal 9" in reply["failure"]["reason"]


def test_work_that_ends_says_so():
    assert "ended with code 3" in ask(lambda *_: os._exit(3))["failure"]["reason"]


def test_work_is_stopped_when_nobody_waits_for_it_any_more(tmp_path):
    def slow(message, context):
        (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(60)

    reply = ask(slow, ttl=2.0)
    assert "longer than the station waits" in reply["failure"]["reason"]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_fork_ends_with_the_process_that_waits_for_it(tmp_path):
    def orphaned(message, context):
        (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(60)

    if not (waiting := os.fork()):
        ask(orphaned)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.05)
    os.kill(waiting, signal.SIGKILL)
    os.waitpid(waiting, 0)
    orphan = int((tmp_path / "pid").read_text())
    while _runs(orphan):  # the time limit of all tests ends this one if the fork stays
        time.sleep(0.1)


def _runs(pid):
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# --- what the owner limits


def test_work_beyond_the_owners_seconds_is_ended(policy, tmp_path):
    def slow(message, context):
        (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(60)

    policy(limits={"seconds": 1.0})
    reason = ask(slow)["failure"]["reason"]
    assert "longer than 1 s" in reason and "limits.seconds" in reason
    assert not _runs(int((tmp_path / "pid").read_text()))


def test_work_beyond_the_owners_memory_is_ended(policy, tmp_path):
    import psutil

    def greedy(message, context):
        (tmp_path / "pid").write_text(str(os.getpid()))
        taken = [bytearray(b"x" * 2**20) for _ in range(int(used) + 400)]
        time.sleep(60)
        return taken

    # A fork has mapped at most what its parent has, and needs not have mapped any of it.
    used = psutil.Process().memory_info().rss / 2**20
    policy(limits={"memory-mb": used + 100})
    reason = ask(greedy)["failure"]["reason"]
    assert "more than" in reason and "limits.memory-mb" in reason
    assert not _runs(int((tmp_path / "pid").read_text()))


def test_limits_hold_on_a_node_that_somebody_else_started(policy, monkeypatch):
    monkeypatch.delenv(PRELOAD)
    policy(limits={"seconds": 60.0, "memory-mb": 1e6})
    assert ask(who)["n"]["pid"] != os.getpid()


def test_work_within_the_limits_is_not_disturbed(policy):
    policy(limits={"seconds": 60.0, "memory-mb": 1e6})
    assert "n" in ask(who)


def test_nothing_is_forked_for_a_broken_policy(policy):
    policy().unlink()
    assert "does no work" in ask(lambda *_: pytest.fail("it worked"))["failure"]["reason"]
