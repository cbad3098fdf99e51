"""Sixty rounds in which something is killed all the time: nothing piles up."""

import random
from collections.abc import Callable

import psutil
import pytest
from deployment import wait_until

from .staging import SMALL, helper_of, is_helper, server_app_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

ROUNDS = 60
EVERY = 4
"""Rounds between two kills."""
LONG = SMALL | {"rounds": ROUNDS, "client-timeout": 60, "evaluate-every": ROUNDS}


def test_sixty_rounds_with_random_kills_leave_everything_bounded(deployment):
    chance = random.Random(21)
    run = deployment.submit("sixty", **LONG)
    wait_until(lambda: len(run.rounds()) >= 2, "two rounds are done")
    before = used(deployment)
    killed = []
    for done in range(EVERY, ROUNDS - 1, EVERY):
        wait_until(
            lambda n=done: len(run.rounds()) >= n or run.process.poll() is not None,
            f"round {done} is done",
        )
        assert run.process.poll() is None, run.log
        name = chance.choice(sorted(KILLS))
        KILLS[name](deployment, chance)
        killed.append(name)
    rounds = run.wait()
    assert len(rounds) == ROUNDS
    assert set(killed) == set(KILLS), "this seed tries every fault"
    # A kill costs its round at most; the last round, which nothing disturbs, is whole.
    assert sum(bool(r["failures"]) for r in rounds) <= 2 * len(killed)
    assert rounds[-1]["clients"]["answered"] == 4
    after = used(deployment)
    for what, most in (("processes", 6), ("handles", 60), ("spool files", 6), ("MB", 40)):
        assert after[what] <= before[what] + most, (what, before, after)


def kill_helper(deployment, chance) -> None:
    helper_of(deployment).kill()


def kill_a_task(deployment, chance) -> None:
    """Kill a fork that works on a message, if there is one at this moment."""
    tasks = helper_of(deployment).children(recursive=True)
    if tasks:
        chance.choice(tasks).kill()


def kill_a_station_run(deployment, chance) -> None:
    server_app_of(deployment, chance.choice(["station-1", "station-2"])).kill()


def restart_a_station_link(deployment, chance) -> None:
    name = chance.choice(["station-1-link", "station-2-link"])
    deployment.kill(name)
    deployment.start(name)


def restart_a_gateway(deployment, chance) -> None:
    name = chance.choice(["server-gateway", "station-1-gateway", "station-2-gateway"])
    deployment.kill(name)
    deployment.start(name)


KILLS: dict[str, Callable] = {
    "helper": kill_helper,
    "task": kill_a_task,
    "station run": kill_a_station_run,
    "station link": restart_a_station_link,
    "gateway": restart_a_gateway,
}


def used(deployment) -> dict[str, float]:
    """Return what the deployment takes at this moment."""
    started = deployment.processes.living()
    families = [q for p in started.values() for q in (p, *p.children(recursive=True))]
    families += [p for p in psutil.process_iter(["cmdline"]) if is_helper(p, deployment)]
    files = [path for path in deployment.folder.rglob("*") if path.is_file()]
    return {
        "processes": len(families),
        "handles": sum(process.num_fds() for process in started.values()),
        "spool files": sum(1 for path in files if path.parent.name == "spool"),
        "MB": sum(path.stat().st_size for path in files) / 2**20,
    }
