"""The few public Flower commands that deployment needs, with errors that say what failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tomli_w

from hfedatm.base.errors import UserError
from hfedatm.deploy import prefork

# An app names one ServerApp and one ClientApp, so each of the two links of the hierarchy, server to
# stations and station to clients, has an app of its own. A deployed node runs its installed
# ClientApp, so a station whose nodes are stations needs no third app.
COMPONENTS = {
    "server": {"serverapp": "server_app.app:app", "clientapp": "station_app.app:client"},
    "station": {"serverapp": "station_app.app:server", "clientapp": "client_app.app:app"},
}

ENDED = {
    "Task failed with unknown error.": "its process was ended",
    "No heartbeat received from the task": "its process has ended, or stood still for a minute",
}
"""Our words for Flower's about a run that did not end by itself."""


def environment(home: Path | None = None) -> dict[str, str]:
    """Return the environment for a Flower command that keeps its files in `home`."""
    # Flower starts its helpers by name: one is our own, the others are beside this Python.
    places = [str(prefork.COMMANDS), str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    settings = {
        "PATH": os.pathsep.join(places),
        # Nodes run their installed code: Flower fetches and reports nothing at run time.
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }
    return os.environ | settings | ({"FLWR_HOME": str(home)} if home else {})


class FlowerError(UserError):
    """A Flower command failed."""


def write_app(folder: Path, tier: str, config: Mapping[str, str | int | float | bool]) -> Path:
    """Write a Flower App that contains only the names of the components of `tier`.

    The app carries no code, so each node runs its installed code.
    """
    app = {"publisher": "hfedatm", "components": COMPONENTS[tier], "config": dict(config)}
    project = {"name": f"hfedatm-{tier}", "version": version("hfedatm"), "license": "Apache-2.0"}
    project["description"] = f"The {tier}'s run; its code is installed on the nodes"
    manifest = {"project": project, "tool": {"flwr": {"app": app}}}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(tomli_w.dumps(manifest), encoding="utf-8")
    return folder


def start_run(app: Path, link: str, home: Path | None = None) -> int:
    """Start the app on the SuperLink that Flower's configuration calls `link`; return its id."""
    return int(_flwr(["run", str(app), link], home)["run-id"])


def run_status(run_id: int, link: str, home: Path | None = None) -> tuple[str, str]:
    """Return a run's status, such as ``finished:completed``, and details about it."""
    run = _flwr(["list", link, "--run-id", str(run_id)], home)["runs"][0]
    return run["status"], ENDED.get(run["status-details"], run["status-details"])


def list_runs(link: str, home: Path | None = None) -> list[dict[str, Any]]:
    """Return all runs of a SuperLink, the newest first."""
    found: list[dict[str, Any]] = _flwr(["list", link], home)["runs"]
    return sorted(found, key=lambda run: str(run.get("pending-at", "")), reverse=True)


def stop_run(run_id: int, link: str, home: Path | None = None) -> None:
    """End a run that goes on."""
    _flwr(["stop", str(run_id), link], home)


def follow(
    run_id: int, link: str, home: Path | None = None, patience: float = 120.0
) -> tuple[str, str]:
    """Show the log of a run's ServerApp until the run ends; return how it ended.

    A SuperLink that does not answer may be starting again: it is given up after ``patience``
    seconds.
    """
    heard = time.monotonic()
    while True:
        subprocess.run(["flwr", "log", str(run_id), link, "--stream"], env=environment(home))
        try:
            status, details = run_status(run_id, link, home)
            heard = time.monotonic()
        except FlowerError as error:
            if time.monotonic() - heard > patience:
                raise FlowerError(
                    f"the SuperLink {link} has not answered for {patience:g} s; run {run_id} may "
                    f"go on there: {error}"
                ) from None
            status = details = ""
        if status.startswith("finished"):
            return status, details
        time.sleep(1)  # the stream broke, or ended shortly before the run


def register_node(public_key: Path, link: str, home: Path | None = None) -> int | None:
    """Register the node that holds the private key and return its number.

    Registering it again is no error; the number is then not told.
    """
    try:
        return int(_flwr(["supernode", "register", str(public_key), link], home)["node-id"])
    except FlowerError as error:
        if "already" not in str(error):
            raise
        return None


def unregister_node(number: int, link: str, home: Path | None = None) -> None:
    """Forget a node; one that is not known is no error."""
    try:
        _flwr(["supernode", "unregister", str(number), link], home)
    except FlowerError as error:
        if "not found" not in str(error).lower():
            raise


def online_nodes(link: str, home: Path | None = None) -> int:
    """Return how many nodes are connected to the SuperLink."""
    nodes = _flwr(["supernode", "list", link], home)["nodes"]
    return sum(node["status"] == "online" for node in nodes)


def _flwr(arguments: list[str], home: Path | None) -> dict[str, Any]:
    """Run ``flwr`` and return its JSON answer."""
    command = ["flwr", *arguments, "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(home))
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        answer = {"success": False, "error-message": done.stderr or done.stdout}
    if not answer.get("success"):
        reason = str(answer.get("error-message", answer)).strip()
        raise FlowerError(f"`flwr {' '.join(arguments)}` failed: {reason}")
    return answer
