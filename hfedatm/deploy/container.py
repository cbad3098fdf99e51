"""One process of a machine: ``link NAME``, ``gateway NAME`` or ``node NAME``; the image's entry.

A container has its machine's secrets in ``/secrets``, its owner's policy in ``/policy.toml`` (it
does no work without one) and keeps its state in ``/state``; a service of systemd names other
places. The commands are those of any other deployment (:mod:`hfedatm.deploy.machines`).
"""

from __future__ import annotations

import argparse
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

from hfedatm.base.trust.revocation import fingerprint_of, revoked
from hfedatm.deploy import flower, machines
from hfedatm.deploy.machines import Machine, Process
from hfedatm.deploy.registration import Registration

STATE, SECRETS, POLICY = Path("/state"), Path("/secrets"), Path("/policy.toml")
PORT = 8000


def arguments() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    parser = argparse.ArgumentParser(prog="hfedatm-container", description=__doc__)
    parser.add_argument("kind", choices=["link", "gateway", "node", "healthy"])
    parser.add_argument("name", help="the machine, such as station-1; healthy: the kind")
    parser.add_argument("--above", help="node: address of the gateway of the tier above")
    parser.add_argument("--link", default="", help="node of a station: its own SuperLink")
    parser.add_argument("--config", nargs="*", default=[], help="node: more KEY=VALUE")
    parser.add_argument("--isolation", help="link: 'process' if a SuperExec elsewhere runs tasks")
    parser.add_argument("--superexec-secret", help="link: file with that SuperExec's secret")
    parser.add_argument("--insecure", action="store_true", help="no TLS, no node keys")
    parser.add_argument("--state", type=Path, default=STATE)
    parser.add_argument("--secrets", type=Path, default=SECRETS)
    parser.add_argument("--policy", type=Path, default=POLICY)
    parser.add_argument("--host", default="0.0.0.0", help="link, gateway: where to listen")
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument("--link-address", help="the machine's SuperLink; default: NAME:8000")
    return parser


def main() -> None:
    """Run one process of a machine, in place of this one."""
    asked = arguments().parse_args()
    insecure = asked.insecure or bool(os.environ.get("HFEDATM_INSECURE"))
    machine = Machine(asked.name, asked.state, None if insecure else asked.secrets, asked.policy)
    if asked.kind == "healthy":
        sys.exit(0 if healthy(machine, asked.name, asked.port) else 1)
    address = asked.link_address or f"{asked.link or asked.name}:{PORT}"
    home = asked.state / f"{asked.kind}-home"
    os.environ["FLWR_HOME"] = str(home)
    if asked.kind == "link":
        process = machines.link(machine, asked.port, asked.host)
        if asked.isolation:
            process.command.extend(["--isolation", asked.isolation])
        if asked.superexec_secret:
            process.command.extend(["--superexec-auth-secret-file", asked.superexec_secret])
        for place in (home, asked.state / ".hfedatm/operator"):  # the second: for `hfedatm submit`
            _write_connection(machine, machine.name, address, place)
        sys.exit(run_link(machine, process))
    if asked.kind == "gateway":
        _become(machines.gateway(machine, asked.port, address, asked.host))
    if asked.link:
        _write_connection(machine, asked.link, address, home)
    _become(node(machine, asked.above, asked.link, asked.config, asked.port))


def node(machine: Machine, above: str, link: str, given: list[str], port: int = PORT) -> Process:
    """Return the SuperNode of a client, or of the station whose SuperLink is called ``link``."""
    config: dict[str, str | int] = {}
    if link:
        config |= {"spool": str(machine.state / "spool"), "link": link}
    for assignment in given:
        key, _, value = assignment.partition("=")
        config[key] = int(value) if value.isdigit() else value
    return machines.node(machine, port, above, config)


def run_link(machine: Machine, process: Process) -> int:
    """Run a SuperLink; once it answers, register the keys of its nodes."""
    _enrolled(machine).unlink(missing_ok=True)
    environment = flower.environment() | dict(process.environment)
    link = subprocess.Popen(process.command, env=environment)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda caught, _: link.send_signal(caught))
    while link.poll() is None and not healthy(machine, "gateway", process.port):
        time.sleep(0.3)
    enrolled: set[_Key] = set()
    while link.poll() is None:
        if _enrol(machine, enrolled):
            _enrolled(machine).touch()
        _withdraw(machine)
        time.sleep(1)  # `hfedatm scaffold` and `revoke` may add and withdraw keys at any time
    return link.wait()


class _Key(NamedTuple):
    file: Path
    fingerprint: str


def _enrol(machine: Machine, enrolled: set[_Key]) -> bool:
    """Register keys that are not in ``enrolled`` with the link; return whether all are known."""
    folders = [] if machine.secrets is None else [machine.secrets / "nodes", Path("/nodes")]
    # Kubernetes has them in /nodes. A replaced key has the same name as the old one.
    keys = {_Key(key, fingerprint_of(key)) for folder in folders for key in folder.glob("*.pub")}
    for key in sorted(keys - enrolled):
        try:
            _registration(machine).register(key.file)
            enrolled.add(key)
        except flower.FlowerError as error:
            print(f"{key.file.name} could not be registered: {error}", file=sys.stderr)
    return keys <= enrolled


def _withdraw(machine: Machine) -> None:
    """Unregister the nodes whose keys the operator has revoked."""
    if machine.secrets is None:
        return
    registration = _registration(machine)
    for key in revoked(machine.secrets).keys() & registration.numbers().keys():
        try:
            registration.withdraw(key)
        except flower.FlowerError as error:
            print(f"a revoked key could not be withdrawn: {error}", file=sys.stderr)


def _registration(machine: Machine) -> Registration:
    return Registration(machine.name, Path(os.environ["FLWR_HOME"]))


def _enrolled(machine: Machine) -> Path:
    """Return the file that is there while a link knows all its nodes."""
    return machine.state / "enrolled"


def healthy(machine: Machine, kind: str, port: int = PORT) -> bool:
    """Return whether the process here answers; a link must also know its nodes."""
    if kind == "link" and not _enrolled(machine).exists():
        return False
    scheme, context = "http", None
    if machine.secrets is not None and kind != "node":  # a node answers only its own machine
        scheme, context = "https", ssl.create_default_context(cafile=machine.secret("ca.pem"))
    try:
        url = f"{scheme}://localhost:{port}/health"
        with urllib.request.urlopen(url, timeout=5, context=context) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _write_connection(machine: Machine, link: str, address: str, home: Path) -> None:
    ca_file = None if machine.secrets is None else machine.secret("ca.pem")
    machines.write_connections(home, {link: address}, ca_file)


def _become(process: Process) -> None:
    environment = flower.environment() | dict(process.environment)
    os.execvpe(process.command[0], process.command, environment)


if __name__ == "__main__":
    main()
