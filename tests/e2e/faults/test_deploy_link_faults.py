"""Helpers, links and disks that fail: the run goes on or is resumed, and says what was."""

import pytest
from deployment import wait_until

from .conftest import SPOOL_MB
from .staging import SMALL, assert_same, helper_of, pause, paused, reasons, release

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]


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
