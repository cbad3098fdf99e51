"""Entry point of the image's containers: ``link NAME``, ``gateway NAME`` or ``node NAME``.

A container has its machine's secrets in ``/secrets``, its owner's policy in ``/policy.toml`` (it
does no work without one) and keeps its state in ``/state``. It runs the same commands as any other
deployment (:mod:`hfedatm.deploy.machines`).
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
ENROLLED = Path("/tmp/enrolled")


def main() -> None:
    """Run one process of a deployment in this container."""
    parser = argparse.ArgumentParser(prog="hfedatm-container", description=__doc__)
    parser.add_argument("kind", choices=["link", "gateway", "node", "healthy"])
    parser.add_argument("name", help="the machine, such as station-1; healthy: the kind")
    parser.add_argument("--above", help="node: address of the gateway of the tier above")
    parser.add_argument("--link", default="", help="node of a station: its own SuperLink")
    parser.add_argument("--config", nargs="*", default=[], help="node: more KEY=VALUE")
    parser.add_argument("--isolation", help="link: 'process' if a SuperExec elsewhere runs tasks")
    parser.add_argument("--superexec-secret", help="link: file with that SuperExec's secret")
    parser.add_argument("--insecure", action="store_true", help="no TLS, no node keys")
    asked = parser.parse_args()
    insecure = asked.insecure or bool(os.environ.get("HFEDATM_INSECURE"))
    machine = Machine(asked.name, STATE, None if insecure else SECRETS, POLICY)
    if asked.kind == "healthy":
        sys.exit(0 if healthy(machine, asked.name) else 1)
    os.environ["FLWR_HOME"] = str(STATE / f"{asked.kind}-home")
    if asked.kind == "link":
        sys.exit(run_link(machine, asked.isolation, asked.superexec_secret))
    if asked.kind == "gateway":
        _become(machines.gateway(machine, PORT, f"{asked.name}:{PORT}", "0.0.0.0"))
    _become(node(machine, asked.above, asked.link, asked.config))


def node(machine: Machine, above: str, link: str, given: list[str]) -> Process:
    """Return the SuperNode of a client, or of the station whose SuperLink is called ``link``."""
    config: dict[str, str | int] = {}
    if link:
        config |= {"spool": str(STATE / "spool"), "link": link}
        _write_connection(machine, link, Path(os.environ["FLWR_HOME"]))
    for assignment in given:
        key, _, value = assignment.partition("=")
        config[key] = int(value) if value.isdigit() else value
    return machines.node(machine, PORT, above, config)


def run_link(machine: Machine, isolation: str | None, superexec_secret: str | None) -> int:
    """Run a SuperLink; once it answers, register the keys of its nodes."""
    process = machines.link(machine, PORT, "0.0.0.0")
    if isolation:
        process.command.extend(["--isolation", isolation])
    if superexec_secret:
        process.command.extend(["--superexec-auth-secret-file", superexec_secret])
    _write_connection(machine, machine.name, Path(os.environ["FLWR_HOME"]))
    _write_connection(machine, machine.name, STATE / ".hfedatm/operator")  # for `hfedatm submit`
    ENROLLED.unlink(missing_ok=True)
    environment = flower.environment() | dict(process.environment)
    link = subprocess.Popen(process.command, env=environment)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda caught, _: link.send_signal(caught))
    while link.poll() is None and not healthy(machine, "gateway"):
        time.sleep(0.3)
    enrolled: set[_Key] = set()
    while link.poll() is None:
        if _enrol(machine, enrolled):
            ENROLLED.touch()
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
    for key, fingerprint in sorted(keys - enrolled):
        try:
            _registration(machine).register(key)
            enrolled.add(_Key(key, fingerprint))
        except flower.FlowerError as error:
            print(f"{key.name} could not be registered: {error}", file=sys.stderr)
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


def healthy(machine: Machine, kind: str) -> bool:
    """Return whether the process in this container answers; a link must also know its nodes."""
    if kind == "link" and not ENROLLED.exists():
        return False
    scheme, context = "http", None
    if machine.secrets is not None and kind != "node":  # a node answers only its own machine
        scheme, context = "https", ssl.create_default_context(cafile=machine.secret("ca.pem"))
    try:
        url = f"{scheme}://localhost:{PORT}/health"
        with urllib.request.urlopen(url, timeout=5, context=context) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _write_connection(machine: Machine, link: str, home: Path) -> None:
    ca_file = None if machine.secrets is None else machine.secret("ca.pem")
    machines.write_connections(home, {link: f"{link}:{PORT}"}, ca_file)


def _become(process: Process) -> None:
    environment = flower.environment() | dict(process.environment)
    os.execvpe(process.command[0], process.command, environment)


if __name__ == "__main__":
    main()
