"""A client's work in forks of a warm process."""

import os
import signal
import threading
import time

import pytest
from flwr.app import ConfigRecord, RecordDict

from client_app.warm import do_in_fork
from hfedatm.handover.spool import HandoverError, Spool


@pytest.fixture
def job(tmp_path):
    return Spool(tmp_path).submit(1, "m", RecordDict({"n": ConfigRecord({"pid": os.getpid()})}))


def test_work_is_done_in_another_process(job):
    do_in_fork(job, lambda asked: RecordDict({"n": ConfigRecord({"pid": os.getpid()})}))
    assert job.answer()["n"]["pid"] != os.getpid()


def test_work_that_is_killed_says_so(job):
    do_in_fork(job, lambda asked: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(HandoverError, match="killed by signal 9"):
        job.answer()


def test_work_that_fails_says_why(job):
    def fail(asked):
        raise ValueError("no data")

    do_in_fork(job, fail)
    with pytest.raises(HandoverError, match="ValueError: no data"):
        job.answer()


def test_withdrawn_work_is_stopped(job):
    withdrawal = threading.Timer(0.3, job.request.unlink)
    withdrawal.start()
    started = time.monotonic()
    do_in_fork(job, lambda asked: time.sleep(60))
    assert time.monotonic() - started < 30
    assert not job.done
