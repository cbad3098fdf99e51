"""How much one SuperLink carries: messages of many simulated nodes, without any training.

A SuperLink and, unless told otherwise, our gateway run as real processes on loopback. One process
plays all nodes: each asks for work as a SuperNode does, fetches its message, and replies. A real
ServerApp sends every node one message per round. Nothing trains, so all that is measured is what
the link does. Nodes, rounds and seconds are bounded.

    python benchmarks/superlink_load.py --nodes 1000 --kilobytes 240
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import tomli_w

from hfedatm.deploy import flower, machines

MOST_NODES, MOST_SECONDS = 2000, 900
IDLE = 15.0
"""Seconds for which the link is watched while its nodes wait for work."""
HERE = Path(__file__).resolve().parent
SERVER = """
import json, time
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


def load(size, number, node):
    # Every message differs from all others, as signed tasks do.
    data = (str(number) + "-" + str(node)).encode().ljust(size, b"x")
    return RecordDict({"load": ArrayRecord({"load": Array("uint8", (size,), "load", data)})})


@app.main()
def main(grid, context):
    config = context.run_config
    until = time.monotonic() + config["seconds"]
    while len(ids := list(grid.get_node_ids())) < config["nodes"] and time.monotonic() < until:
        time.sleep(0.5)
    size = config["kilobytes"] * 1000
    with open(config["file"], "a") as file:
        for number in range(config["rounds"]):
            began = time.time()
            messages = [Message(load(size, number, node), node, "train") for node in ids]
            # One by one, as our tiers do: Flower gives one push 180 seconds, however large it is.
            waiting, good = set(), 0
            for message in messages:
                waiting.update(grid.push_messages([message]))
            while waiting and time.monotonic() < until:
                for reply in grid.pull_messages(list(waiting)):
                    waiting.discard(reply.metadata.reply_to_message_id)
                    good += not reply.has_error()
                time.sleep(0.2)
            said = {"asked": len(ids), "answered": good, "seconds": time.time() - began}
            file.write(json.dumps({"began": began, **said}) + "\\n")
            file.flush()
"""


def free_port() -> int:
    """Return a port that is free now."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_app(folder: Path, config: dict[str, object]) -> Path:
    """Write the Flower app that sends the messages; unlike ours it carries its code."""
    folder.mkdir(parents=True)
    (folder / "load_app.py").write_text(SERVER)
    app = {
        "publisher": "hfedatm",
        "components": {"serverapp": "load_app:app", "clientapp": "load_app:app"},
        "config": config,
    }
    project = {"name": "load", "version": "0.1.0", "license": "Apache-2.0", "description": "load"}
    manifest = {"project": project, "tool": {"flwr": {"app": app}}}
    (folder / "pyproject.toml").write_text(tomli_w.dumps(manifest))
    return folder


def cost(process: psutil.Process) -> tuple[float, float]:
    """Return CPU seconds and memory (MB) of a process without its children."""
    times = process.cpu_times()
    return times.user + times.system, process.memory_info().rss / 1e6


def measure(
    nodes: int, kilobytes: int, rounds: int, seconds: float, *, gateway: bool = True
) -> dict[str, object]:
    """Put the load on a link; return what it did."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        machine = machines.Machine("server", folder / "server", None)
        (folder / "server").mkdir()
        link, entrance = free_port(), free_port()
        started = [machines.link(machine, link)]
        if gateway:
            started.append(machines.gateway(machine, entrance, f"127.0.0.1:{link}"))
        running: list[psutil.Popen] = []
        operator = folder / "operator"
        machines.write_connections(operator, {"server": f"127.0.0.1:{link}"}, None)
        try:
            for process in started:
                process.home.mkdir(parents=True, exist_ok=True)
                running.append(
                    _start(process.command, folder / f"{process.name}.log", process.home)
                )
                _wait_for(process.port)
            empty = cost(running[0])
            told = {"nodes": nodes, "address": entrance if gateway else link, "seconds": seconds}
            player = [sys.executable, str(HERE / "superlink_nodes.py"), json.dumps(told)]
            running.append(_start(player, folder / "nodes.json", folder))
            _wait_for_nodes(nodes, operator, seconds)
            idle, waiting = cost(running[0]), time.monotonic()
            time.sleep(IDLE)  # what the nodes cost while there is no work
            asking = (cost(running[0])[0] - idle[0]) / (time.monotonic() - waiting)
            idle = cost(running[0])
            config = {"nodes": nodes, "kilobytes": kilobytes, "rounds": rounds}
            config |= {"seconds": seconds, "file": str(folder / "rounds.jsonl")}
            app = write_app(folder / "app", config)
            began = time.monotonic()
            run = flower.start_run(app, "server", operator)
            status, most = "", 0.0
            while time.monotonic() - began < seconds + 60 and not status.startswith("finished"):
                time.sleep(5)
                most = max(most, cost(running[0])[1])
                status, details = flower.run_status(run, "server", operator)
            busy = cost(running[0])
            took = time.monotonic() - began
            running[-1].terminate()
            running[-1].wait(60)
            lines = (folder / "rounds.jsonl").read_text().splitlines()
            if not lines:
                raise SystemExit(f"no round was finished: {status} {details}")
            done = [json.loads(line) for line in lines]
            played = json.loads((folder / "nodes.json").read_text().splitlines()[-1])
            answered = sum(each["answered"] for each in done)
            total = sum(each["seconds"] for each in done)
            database = sum(f.stat().st_size for f in (folder / "server").glob("link.db*"))
            return {
                "nodes": nodes,
                "kilobytes": kilobytes,
                "gateway": gateway,
                "rounds": done,
                "messages per second": round(answered / total, 2),
                "seconds per message": round(total / max(1, answered), 4),
                "link CPU seconds per message": round(
                    max(0.0, busy[0] - idle[0] - asking * took) / max(1, answered), 4
                ),
                "link CPU seconds in all": round(busy[0] - idle[0], 2),
                "link CPU share without work": round(asking, 3),
                "link memory MB": {"idle": round(empty[1]), "most": round(most)},
                "memory KB per node": round(1000 * (most - empty[1]) / nodes, 1),
                "database MB": round(database / 1e6, 1),
                "nodes' side": played,
                "cores": os.cpu_count(),
            }
        finally:
            for each in reversed(running):
                if each.is_running():
                    each.terminate()
            psutil.wait_procs(running, timeout=20)
            for each in running:
                if each.is_running():
                    for child in each.children(recursive=True):
                        child.kill()
                    each.kill()


def _wait_for_nodes(nodes: int, operator: Path, seconds: float) -> None:
    until = time.monotonic() + seconds
    while flower.online_nodes("server", operator) < nodes:
        if time.monotonic() > until:
            raise SystemExit(f"{nodes} nodes did not join within {seconds:g} s")
        time.sleep(2)


def _start(command: list[str], log: Path, home: Path) -> psutil.Popen:
    with log.open("wb") as file:
        return psutil.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT if log.suffix == ".log" else subprocess.DEVNULL,
            env=flower.environment(home),
        )


def _wait_for(port: int, patience: float = 120.0) -> None:
    import socket

    until = time.monotonic() + patience
    while time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.3)
    raise SystemExit(f"nobody listens at port {port}")


def main() -> None:
    """Measure what the command line asks for and print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--kilobytes", type=int, default=240, help="of a message: 240 is LeNet-5")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=300, help="most seconds of the load")
    parser.add_argument("--no-gateway", action="store_true", help="nodes ask the link directly")
    parser.add_argument("--output", type=Path, help="a JSON file to write, too")
    asked = parser.parse_args()
    if not (1 <= asked.nodes <= MOST_NODES and 0 < asked.seconds <= MOST_SECONDS):
        parser.error(f"at most {MOST_NODES} nodes and {MOST_SECONDS} seconds")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the processes end with this one
    found = measure(
        asked.nodes, asked.kilobytes, asked.rounds, asked.seconds, gateway=not asked.no_gateway
    )
    text = json.dumps(found, indent=1)
    print(text)
    if asked.output:
        asked.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
