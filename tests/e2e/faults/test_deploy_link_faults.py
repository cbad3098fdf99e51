"""Links, disks and whole machines that fail: the run goes on or is resumed, and says what was."""

import subprocess
import sys
import time

import pytest
from deployment import wait_until

from .conftest import SPOOL_MB, in_one_process
from .staging import (
    SMALL,
    assert_same,
    helper_of,
    pause,
    paused,
    reasons,
    release,
    server_app_of,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]

AWAY = 90
"""Seconds for which a SuperLink is stopped: longer than Flower waits for a sign of life."""
LOAD = 20


def test_the_helper_of_all_nodes_killed_in_the_middle_of_a_round(deployment, faults, undisturbed):
    pause(faults, "station-1-client-1")
    run = deployment.submit("helper-killed", **SMALL)
    paused(faults, "station-1-client-1")
    before = helper_of(deployment)
    before.kill()
    release(faults)
    rounds = run.wait()
    assert [r["clients"]["answered"] for r in rounds] == [4, 4]
    assert_same(run, undisturbed)
    assert helper_of(deployment).pid != before.pid


def test_the_server_link_killed_in_the_middle_of_a_round(deployment, faults, undisturbed):
    """Its run ends with it; who submitted the run learns how it goes on."""
    pause(faults, "station-1-client-1", training=2)
    run = deployment.submit("server-link-killed", **SMALL)
    paused(faults, "station-1-client-1")
    deployment.kill("server-link")
    deployment.start("server-link")
    release(faults)
    assert run.process.wait(600) == 1
    assert f"continue with: hfedatm submit resume={run.folder}" in run.log
    rounds = deployment.submit("server-link-killed", resume=run.folder).wait()
    assert [r["round"] for r in rounds] == [1, 2]
    assert rounds[-1]["failures"] == []
    assert_same(run, undisturbed)


def test_a_full_disk_of_a_station_costs_it_its_round_only(deployment, faults):
    spool = deployment.folder / "station-2/spool"
    if not spool.is_mount():
        pytest.skip("this user may not mount a small disk for the station")
    pause(faults, "station-2-client-1")
    run = deployment.submit("disk-full", **SMALL | {"rounds": 3})
    paused(faults, "station-2-client-1")
    filler = spool / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        for _ in range(2 * SPOOL_MB * 1024):
            file.write(bytes(1024))
    release(faults)
    wait_until(lambda: run.rounds(), "the round has gone on without it")
    filler.unlink()
    first, _, last = run.wait()  # the second round may begin before there is space again
    assert "the disk of this station is full: free some space" in reasons(first, "station 1")[0]
    assert [first["stations"]["answered"], last["stations"]["answered"]] == [1, 2]
    assert last["failures"] == []


def test_a_station_link_that_stands_still_for_long_and_goes_on(deployment, faults):
    pause(faults, "station-2-client-1")
    run = deployment.submit("link-stopped", **SMALL)
    paused(faults, "station-2-client-1")
    link = deployment.process("station-2-link")
    link.suspend()
    try:
        time.sleep(AWAY)
    finally:
        link.resume()
    release(faults)
    first, second = run.wait()
    assert {f["node"] for f in first["failures"]} <= {
        "station 1", "station 1, client 2", "station 1, client 3"
    }  # fmt: skip
    assert all("cut off" in f["reason"] or "answered" in f["reason"] for f in first["failures"])
    assert first["clients"]["answered"] >= 2
    assert (second["clients"]["answered"], second["failures"]) == (4, [])


def test_the_whole_stack_stopped_its_files_damaged_started_again_and_resumed(deployment, faults):
    pause(faults, "station-1-client-1", training=3)
    run = deployment.submit("stack-stopped", **SMALL | {"rounds": 3})
    paused(faults, "station-1-client-1")
    deployment.down()
    release(faults)
    last = run.folder / "last.safetensors"
    content = bytearray(last.read_bytes())
    content[-100] ^= 1
    last.write_bytes(content)
    with (run.folder / "rounds.jsonl").open("a") as file:
        file.write('{"round": 3, "secon')

    deployment.up()
    assert run.process.wait(600) == 1
    assert f"continue with: hfedatm submit resume={run.folder}" in run.log
    resumed = deployment.submit("stack-stopped", resume=run.folder)
    assert [r["round"] for r in resumed.wait()] == [1, 2, 3]
    assert "continues after round 1" in resumed.log
    assert last.with_name("last.safetensors.damaged").read_bytes() == bytes(content)
    assert_same(run, in_one_process(deployment, 3))


def test_a_machine_under_load_finishes_the_same_run(deployment, faults):
    """Also a station whose run has to begin under this load."""
    expected = in_one_process(deployment, 1)
    server_app_of(deployment, "station-1").kill()
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(LOAD)]
    try:
        run = deployment.submit("under-load", **SMALL | {"rounds": 1})
        wait_until(lambda: run.rounds() or run.process.poll() is not None, "the round is done")
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    (only,) = run.wait()
    assert (only["clients"]["answered"], only["failures"]) == (4, [])
    assert_same(run, expected)
