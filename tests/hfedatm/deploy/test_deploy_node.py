"""A node is one process; its helper comes with it and goes when there is no work."""

import ctypes
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from hfedatm.base.environment import PRELOAD
from hfedatm.deploy import flower, machines, tasks
from hfedatm.deploy import node as node_module
from hfedatm.deploy.machines import Machine

MOST_MB = 250


@pytest.fixture
def node(tmp_path):
    """A client's node whose SuperLink does not answer, and its family."""
    machine = Machine("client", tmp_path / "state", None, helper=tmp_path)
    process = machines.node(machine, free_port(), "127.0.0.1:9", {"partition-id": 0})
    process.home.mkdir(parents=True)
    machine.policy_file.write_text("[limits]\nidle-seconds = 3\n")
    environment = flower.environment(process.home) | dict(process.environment) | {PRELOAD: "json"}
    with (tmp_path / "log").open("w") as log:
        started = subprocess.Popen(process.command, env=environment, stdout=log, stderr=log)
    yield started, tmp_path
    started.kill()
    started.wait()
    wait_for(lambda: not helpers(tmp_path), "its helper ends with the node")


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def helpers(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "hfedatm.deploy.prefork" in command and str(folder) in command:
            found.append(process)
    return found


def wait_for(condition, what):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, f"waited too long until {what}"
        time.sleep(0.05)


def test_the_helper_begins_with_the_node_and_gives_its_memory_back_when_idle(node):
    process, folder = node
    wait_for(lambda: helpers(folder), "the helper has begun")
    wait_for(lambda: "Uvicorn running" in (folder / "log").read_text(), "the node listens")
    wait_for(lambda: not helpers(folder), "the idle helper has ended")
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    assert len(family) == 1, family
    assert family[0].memory_info().rss / 1e6 < MOST_MB


@pytest.fixture
def ends(monkeypatch):
    """Let the SuperNode end in some way; return the commands that begin it again."""
    begun = []
    monkeypatch.setattr(node_module.sys, "argv", ["node", "--superlink", "x"])
    monkeypatch.setattr("hfedatm.deploy.serving.prepare", lambda: None)
    monkeypatch.setattr(node_module, "AGAIN", 0.0)
    monkeypatch.setattr(node_module.os, "execv", lambda _, command: begun.append(command[1:]))
    monkeypatch.setenv(node_module.FIRST, str(time.time()))

    def run(how):
        monkeypatch.setattr("hfedatm.flower_internals.supernode_command", lambda idle: how)
        node_module.main()
        return begun

    return run


def leave(code):
    raise SystemExit(code)


def test_a_node_whose_loop_ends_begins_again(ends):
    """Flower's loop ends with an error that it does not expect, and leaves an idle process."""
    assert ends(lambda: None) == [["-m", "hfedatm.deploy.node", "--superlink", "x"]]


def test_a_node_that_is_not_admitted_yet_tries_again_for_a_minute(ends, monkeypatch):
    assert len(ends(lambda: leave(1))) == 1
    with pytest.raises(SystemExit):  # it was told to end
        ends(lambda: leave(0))
    monkeypatch.setenv(node_module.FIRST, str(time.time() - 2 * node_module.ADMISSION))
    with pytest.raises(SystemExit):
        ends(lambda: leave(1))


FRAGMENTS = """
import psutil
from hfedatm.deploy.node import _give_memory_back
blocks = [bytes(4000) for _ in range(50_000)]
kept = blocks[::1000]
del blocks
before = psutil.Process().memory_info().rss
_give_memory_back()
print((before - psutil.Process().memory_info().rss) / 1e6)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library")
def test_memory_between_what_is_kept_goes_back_to_the_system():
    """200 MB are free, but the C library keeps them below the last block that is in use."""
    said = subprocess.run([sys.executable, "-c", FRAGMENTS], check=True, capture_output=True)
    assert float(said.stdout) > 150


def test_the_node_of_a_station_starts_its_run_and_that_of_a_client_none(tmp_path):
    spool = tmp_path / "a folder"
    assert node_module._station_run("partition-id=0") is None
    run = node_module._station_run(f'partition-id=0 spool="{spool}" link="station-1"')
    assert (run.spool.folder, run.link) == (spool, "station-1")


def test_tasks_are_started_again_after_an_error(monkeypatch):
    """A node that starts no tasks would look alive and do no work."""
    calls, enough = [], threading.Event()

    def start(address, ca_file, shown):
        calls.append(address)
        if len(calls) == 3:
            enough.set()
            threading.Event().wait()
        raise RuntimeError("anything")

    class Listening:
        def close(self):
            pass

    monkeypatch.setattr(tasks, "start_tasks", start)
    monkeypatch.setattr(tasks.socket, "create_connection", lambda _: Listening())
    monkeypatch.setattr(tasks, "AGAIN", 0.0)
    tasks.begin(7)
    assert enough.wait(30)
    assert calls == ["127.0.0.1:7"] * 3
