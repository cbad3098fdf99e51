"""The order in which a deployment on one machine ends."""

import sys
import time
from pathlib import Path

import psutil
import pytest

from hfedatm.deploy.machines import Process
from hfedatm.deploy.processes import Processes

TELLS = """
import signal, subprocess, sys, time
name, file = sys.argv[1:]
def end(*_):
    open(file, "a").write(name + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
if name == "link":
    subprocess.Popen([sys.executable, __file__, "run", file])
open(file + "-" + name, "w").close()
while True:
    time.sleep(0.05)
"""


@pytest.fixture
def started(tmp_path):
    script, told = tmp_path / "tells.py", tmp_path / "told"
    script.write_text(TELLS)
    processes = Processes(tmp_path)
    for name in ("link", "gateway", "node"):
        command = [sys.executable, str(script), name, str(told)]
        processes.start(Process(f"server-{name}", command, tmp_path / "home", 0, {}))
    ready = [Path(f"{told}-{name}") for name in ("run", "link", "gateway", "node")]
    while not all(file.exists() for file in ready):
        time.sleep(0.05)
    yield processes, told
    for process in psutil.process_iter(["cmdline"]):
        if str(script) in (process.info["cmdline"] or []):
            process.kill()


def test_runs_end_before_nodes_and_links_last(started):
    """A run that saw its nodes leave would count that as the result of a round."""
    processes, told = started
    assert sorted(processes.down()) == ["server-gateway", "server-link", "server-node"]
    assert told.read_text().split() == ["run", "node", "gateway", "link"]
    assert processes.living() == {}
