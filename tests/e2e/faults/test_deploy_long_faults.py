"""Sixty rounds in which something is killed again and again: the run goes on, nothing piles up."""

import random
import time
from collections.abc import Callable

import psutil
import pytest
from deployment import wait_until

from .staging import SMALL, helper_of, is_helper, server_app_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]

ROUNDS, EVERY = 60, 5
"""Rounds of the run, and from one kill to the next."""
LOOK = (20, 40)
"""Rounds after which is counted what the deployment takes, beside the second and the last."""
MOST_MORE = {"processes": 6, "handles": 30, "spool files": 6, "MB": 20}
"""How much more that may be than after two rounds; every round moves 2.5 MB up and as much down."""
LONG = SMALL | {"rounds": ROUNDS, "client-timeout": 60, "evaluate-every": ROUNDS}


def test_sixty_rounds_with_random_kills_leave_everything_bounded(deployment):
    chance = random.Random(21)
    plan = [*QUICK, *QUICK, *SLOW]
    chance.shuffle(plan)
    run = deployment.submit("sixty", **LONG)
    wait_until(lambda: len(run.rounds()) >= 2, "two rounds are done")
    before, taken, killed = used(deployment), {}, {}
    for done in range(EVERY, ROUNDS, EVERY):
        wait_until(
            lambda n=done: len(run.rounds()) >= n or run.process.poll() is not None,
            f"round {done} is done after kills of {killed}",
        )
        assert run.process.poll() is None, run.log
        if done in LOOK:
            taken[done] = used(deployment)
        if plan:
            time.sleep(chance.uniform(0, 3))  # anywhere in a round
            kill = plan.pop()
            killed[done + 1] = kill.__name__
            kill(deployment, chance)
    rounds = run.wait()
    taken[ROUNDS] = used(deployment)
    print(killed, before, taken)
    assert [r["round"] for r in rounds] == [*range(1, ROUNDS + 1)]
    assert not plan, "every fault was tried"
    for record in rounds:  # a kill costs two rounds at most
        disturbed = {k + late for k in killed for late in range(3)}
        assert not record["failures"] or record["round"] in disturbed, record
    assert (rounds[-1]["clients"]["answered"], rounds[-1]["failures"]) == (4, [])
    for done, found in taken.items():
        for what, more in MOST_MORE.items():
            assert found[what] <= before[what] + more, (what, done, before, taken)


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
    restart(deployment, chance.choice(["station-1-link", "station-2-link"]))


def restart_a_gateway(deployment, chance) -> None:
    gateways = ["server-gateway", "station-1-gateway", "station-2-gateway"]
    restart(deployment, chance.choice(gateways))


def restart_a_node(deployment, chance) -> None:
    """Its SuperLink admits it again when it has missed it: within a minute or so."""
    nodes = sorted(process.name for _, _, process in deployment.layout.nodes)
    restart(deployment, chance.choice(nodes))


def restart(deployment, name: str) -> None:
    """Kill a process and start it again, as systemd or a container engine would."""
    deployment.kill(name)
    deployment.start(name)


QUICK: list[Callable] = [
    kill_helper,
    kill_a_station_run,
    restart_a_station_link,
    restart_a_gateway,
]
SLOW: list[Callable] = [kill_a_task, restart_a_node]
"""Faults that are noticed after a minute."""


def used(deployment) -> dict[str, float]:
    """Return what the deployment takes at this moment."""
    started = deployment.processes.living()
    families = [q for p in started.values() for q in (p, *p.children(recursive=True))]
    families += [p for p in psutil.process_iter(["cmdline"]) if is_helper(p, deployment)]
    files = [path for path in deployment.folder.rglob("*") if path.is_file()]
    return {
        "processes": len(families),
        "handles": sum(process.num_fds() for process in started.values()),
        "spool files": sum("spool" in path.parts for path in files),
        "MB": sum(path.stat().st_size for path in files) / 2**20,
    }
