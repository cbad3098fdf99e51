import errno
import multiprocessing
import os
import threading
import time

import pytest
from flwr.app import ConfigRecord, RecordDict

from hfedatm.base.handover import recordfile
from hfedatm.base.handover.service import do, hand_over, serve
from hfedatm.base.handover.spool import HandoverError, Job, Spool
from hfedatm.deploy.flower import FlowerError

QUICK = {"poll": 0.01}


def content(number):
    return RecordDict({"config": ConfigRecord({"number": number})})


def number_of(answer):
    return answer["config"]["number"]


def double(job):
    return content(2 * number_of(job))


def serve_in_process(folder, work):
    serve(Spool(folder), lambda job: do(job, work), poll=0.01, wanted=lambda idle: idle < 20)


def die_at_first(folder):
    """Return work that kills its own process once, and then succeeds."""

    def work(job):
        marker = folder / "died"
        if not marker.exists():
            marker.touch()
            os._exit(9)
        return double(job)

    return work


class ProcessRun:
    """A worker in a process of its own, so that its death is a real one."""

    what = "station run"

    def __init__(self, folder, work=double):
        self.spool = Spool(folder)
        self.work = work
        self.processes = []

    def start(self):
        process = multiprocessing.get_context("fork").Process(
            target=serve_in_process, args=(self.spool.folder, self.work)
        )
        process.start()
        self.processes.append(process)

    def ended(self):
        process = self.processes[-1]
        return "" if process.is_alive() else f"exit code {process.exitcode}"

    def stop(self):
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture
def station(tmp_path):
    made = []

    def make(work=double):
        made.append(ProcessRun(tmp_path / "spool", work))
        return made[-1]

    yield make
    for run in made:
        run.stop()


def test_a_job_is_done_by_a_run_started_on_demand(station):
    run = station()
    assert number_of(hand_over(content(21), 1, "m", run, **QUICK)) == 42
    assert number_of(hand_over(content(4), 1, "n", run, **QUICK)) == 8
    assert len(run.processes) == 1


def test_a_duplicate_is_answered_from_the_result(station):
    run = station()
    hand_over(content(21), 1, "m", run, **QUICK)
    run.stop()
    assert number_of(hand_over(content(0), 1, "m", run, **QUICK)) == 42
    assert len(run.processes) == 1
    assert number_of(hand_over(content(1), 2, "m", run, **QUICK)) == 2  # another run's job


def test_a_station_run_that_dies_is_started_again_and_the_job_done(station, tmp_path):
    run = station(die_at_first(tmp_path))
    assert number_of(hand_over(content(3), 1, "m", run, **QUICK)) == 6
    assert len(run.processes) == 2


def test_a_job_that_kills_every_run_is_given_up(station):
    run = station(lambda *_: os._exit(9))
    # Which of the two is known depends on whether the lease was seen in the instant it was held.
    reason = "(it ended before the job was done|exit code 9)"
    with pytest.raises(HandoverError, match=f"tried 3 station runs for this job: {reason}"):
        hand_over(content(3), 1, "m", run, **QUICK)
    assert len(run.processes) == 3


def test_an_exception_reaches_the_server_and_the_run_lives_on(station):
    def fails_on_odd(job):
        if number_of(job) % 2:
            raise ValueError(f"{number_of(job)} is odd")
        return double(job)

    run = station(fails_on_odd)
    with pytest.raises(HandoverError, match="ValueError: 3 is odd"):
        hand_over(content(3), 1, "m", run, **QUICK)
    assert number_of(hand_over(content(4), 1, "n", run, **QUICK)) == 8
    assert len(run.processes) == 1


def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device", "/the/owners/folder")


def test_a_full_disk_is_named_and_the_run_lives_on(station, monkeypatch):
    run = station(lambda job: double(job) if number_of(job) else full_disk())
    monkeypatch.setattr(Job, "finish", full_disk)
    with pytest.raises(HandoverError, match="^the disk of this station is full: free some space"):
        hand_over(content(3), 1, "m", run, **QUICK)
    monkeypatch.undo()
    with monkeypatch.context() as patch:
        patch.setattr(recordfile, "save", full_disk)
        with pytest.raises(HandoverError, match="^the disk of this station is full"):
            hand_over(content(3), 1, "n", run, **QUICK)


def test_the_request_makes_room_for_the_reason(tmp_path, monkeypatch):
    """The disk has room for a short text only after the long request has gone."""
    spool = Spool(tmp_path)
    with spool.submit(1, "m", content(3)) as job:

        def write(path, text):
            if job.request.stat().st_size:
                full_disk()
            path.write_text(text)

        monkeypatch.setattr("hfedatm.base.handover.spool.write_text", write)
        do(job, lambda _: full_disk())
        assert job.error.read_text().startswith("OSError: [Errno 28]")
        assert not job.request.exists()


def test_who_asked_does_not_wait_for_an_answer_that_cannot_be_written(station, monkeypatch):
    monkeypatch.setattr("hfedatm.base.handover.spool.write_text", full_disk)
    monkeypatch.setattr(Job, "finish", full_disk)
    run = station()
    with pytest.raises(HandoverError, match="the station run could not write its answer"):
        hand_over(content(3), 1, "m", run, **QUICK)


def test_only_one_of_two_processes_starts_a_run(station):
    run = station()
    with run.spool.starting() as ours:
        assert ours
        asking = threading.Thread(
            target=lambda: hand_over(content(1), 1, "m", run, **QUICK), daemon=True
        )
        asking.start()
        with run.spool.starting() as others:
            assert not others
        assert not run.processes
    asking.join(60)
    assert len(run.processes) == 1 and not asking.is_alive()


def test_a_run_that_cannot_be_submitted_yet_is_submitted_later(station):
    run = station()
    start, failures = run.start, [FlowerError("no SuperLink"), FlowerError("no SuperLink")]

    def start_at_third():
        if failures:
            raise failures.pop()
        start()

    run.start = start_at_third
    assert number_of(hand_over(content(5), 1, "m", run, **QUICK)) == 10


def test_a_run_that_never_begins_names_the_reason(station):
    run = station()

    def refuse():
        raise FlowerError("no SuperLink at 127.0.0.1")

    run.start = refuse
    with pytest.raises(HandoverError, match="no sign of a station run for 0.1 s: no SuperLink at"):
        hand_over(content(5), 1, "m", run, poll=0.01, silence=0.1)


def test_a_slow_run_is_waited_for_as_long_as_its_link_knows_it(station):
    """On a busy machine a run may take minutes to begin; only silence is a reason to give up."""
    run = station()
    start, asked = run.start, []

    def ended():
        asked.append(True)
        if len(asked) == 3:
            start()
        return ""

    run.start, run.ended = lambda: None, ended
    assert number_of(hand_over(content(5), 1, "m", run, poll=0.001, silence=0.0)) == 10
    assert len(asked) >= 3


def test_jobs_of_two_runs_queue(station):
    """A run's job does not withdraw that of another run."""
    slow = station(lambda job: time.sleep(0.2) or double(job))
    answers = {}

    def ask(number):
        run = ProcessRun(slow.spool.folder)
        run.start, run.ended = slow.start, slow.ended
        answers[number] = number_of(hand_over(content(number), number, "m", run, **QUICK))

    slow.start()
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(1, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == {number: 2 * number for number in range(1, 6)}


def test_a_job_nobody_waits_for_is_not_done(tmp_path):
    spool = Spool(tmp_path)
    context = multiprocessing.get_context("fork")

    def ask():
        with spool.submit(1, "m", content(1)):
            os._exit(9)  # killed while it waits

    asking = context.Process(target=ask)
    asking.start()
    asking.join()
    assert list(tmp_path.glob("*.request"))
    assert spool.waiting() is None
    assert not list(tmp_path.glob("1-*"))


def test_asking_while_another_looks_never_loses_the_request(tmp_path):
    """Whoever asks is never withdrawn, whenever the other side looks."""
    spool, stop = Spool(tmp_path), threading.Event()

    def look():
        while not stop.is_set():
            spool.waiting()
            spool.forget()

    looker = threading.Thread(target=look)
    looker.start()
    try:
        for number in range(200):
            with spool.submit(1, f"m{number % 3}", content(number)) as job:
                for _ in range(3):
                    assert job.request.exists()
    finally:
        stop.set()
        looker.join()


def test_the_server_does_not_wait_for_ever(station):
    run = station(lambda *_: time.sleep(60))
    with pytest.raises(HandoverError, match="within 0.5 s"):
        hand_over(content(5), 1, "m", run, timeout=0.5, **QUICK)


def test_two_runs_never_serve_one_spool(tmp_path):
    first, second = Spool(tmp_path), Spool(tmp_path)
    with first.lease() as held:
        assert held
        assert second.served
        with second.lease() as also_held:
            assert not also_held
    assert not second.served


def test_looking_at_the_lease_does_not_turn_away_a_new_run(tmp_path):
    spool, stop = Spool(tmp_path), threading.Event()
    threads = [threading.Thread(target=lambda: _look(spool, stop)) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            with Spool(tmp_path).lease() as held:
                assert held
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _look(spool, stop):
    while not stop.is_set():
        _ = spool.served
        time.sleep(0.001)


def test_old_answers_are_forgotten_and_abandoned_requests_withdrawn(tmp_path):
    spool = Spool(tmp_path)
    for number in range(5):
        with spool.submit(1, f"m{number}", content(number)) as job:
            job.finish(content(number))
        os.utime(sorted(tmp_path.glob("*.result"), key=os.path.getmtime)[-1], (number, number))
    spool.forget(keep=2)
    assert len(list(tmp_path.glob("*.result"))) == 2
    with spool.submit(1, "abandoned", content(6)):
        pass
    with spool.submit(1, "newest", content(7)) as newest:
        assert [spool.waiting(), len(list(tmp_path.glob("*.request")))] == [newest, 1]
    assert len(list(tmp_path.glob("*.asking"))) == 3  # of two answers and the newest


def test_an_answer_that_somebody_waits_for_is_kept(tmp_path):
    spool = Spool(tmp_path)
    with spool.submit(1, "first", content(1)) as first:
        first.finish(content(2))
        for number in range(5):
            with spool.submit(2, f"m{number}", content(number)) as job:
                job.finish(content(number))
                os.utime(job.result, (10**9 + number, 10**9 + number))
        os.utime(first.result, (0, 0))
        spool.forget(keep=1)
        assert number_of(first.answer()) == 2
    spool.forget(keep=1)
    assert len(list(tmp_path.glob("*.result"))) == 1


def test_a_message_id_cannot_leave_the_spool(tmp_path):
    spool = Spool(tmp_path / "spool")
    with spool.submit(1, "../../outside", content(1)):
        pass
    assert [file.name for file in tmp_path.iterdir()] == ["spool"]


def broken_job(tmp_path):
    Spool(tmp_path)
    return Job(tmp_path / "1-job")


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 a zip", bytes(100), b"HFEDREC\x01" + bytes(8)])
def test_a_request_that_cannot_be_read_fails_the_job_and_nothing_else(tmp_path, data):
    job = broken_job(tmp_path)
    job.request.write_bytes(data)
    do(job, double)
    assert job.done and not job.request.exists()
    with pytest.raises(HandoverError, match="BadRecords"):
        job.answer()


def test_a_folder_in_the_place_of_a_request_fails_the_job(tmp_path):
    job = broken_job(tmp_path)
    (job.request / "inside").mkdir(parents=True)
    do(job, double)
    assert job.done and not job.request.exists()


@pytest.mark.parametrize("data", [b"", b"\x80\x04pickle", bytes(50)])
def test_a_result_that_cannot_be_read_is_said(tmp_path, data):
    job = broken_job(tmp_path)
    job.result.write_bytes(data)
    with pytest.raises(HandoverError, match="the answer cannot be read"):
        job.answer()


def test_an_endless_error_of_any_bytes_is_cut(tmp_path):
    job = broken_job(tmp_path)
    job.error.write_bytes(b"\xff\xfe\x1b" * 10**6)
    with pytest.raises(HandoverError) as caught:
        job.answer()
    assert len(str(caught.value)) <= 4000


def test_an_error_with_text_that_no_file_can_hold_is_an_error_like_any_other(tmp_path):
    def fails(content):
        raise ValueError("\ud800\x1b[2J\n")

    job = broken_job(tmp_path)
    recordfile.save(content(1), job.request)
    do(job, fails)
    with pytest.raises(HandoverError, match=r"ValueError: \\ud800\\x1b"):
        job.answer()
