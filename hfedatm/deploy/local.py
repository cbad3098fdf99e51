"""Start all tiers on this machine, for development: the same processes as in containers."""

from __future__ import annotations

import socket
import ssl
import time
import tomllib
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

from hfedatm.base.errors import UserError
from hfedatm.base.text import printable
from hfedatm.base.trust import writing
from hfedatm.base.trust.policy import Policy
from hfedatm.deploy import certificates, flower, machines, node_keys, size, tree
from hfedatm.deploy.machines import Machine, Process
from hfedatm.deploy.processes import Processes
from hfedatm.deploy.registration import Registration

HOST = "127.0.0.1"


class DeploymentError(UserError):
    """The deployment cannot be brought up."""


@dataclass
class Plan:
    """Every process of a deployment; `links` and `gateways` by the machine they run on."""

    sizes: tuple[int, ...] = ()
    """Children per level."""
    links: dict[str, Process] = field(default_factory=dict)
    gateways: dict[str, Process] = field(default_factory=dict)
    nodes: list[tuple[Machine, str, Process]] = field(default_factory=list)  # nodes and their link
    places: list[tuple[Machine, str, int]] = field(default_factory=list)

    @property
    def addresses(self) -> dict[str, str]:
        """The address of each link for the operator."""
        return {name: f"{HOST}:{link.port}" for name, link in self.links.items()}


def plan(folder: Path, *sizes: int, insecure: bool = False, first_port: int = 9500) -> Plan:
    """Lay out a server and the tree below it, on consecutive ports.

    ``sizes`` are the numbers of children per level: stations, perhaps stations of these, clients.
    """

    def machine(name: str) -> Machine:
        secrets = None if insecure else folder / "secrets" / name
        return Machine(name, folder / name, secrets, helper=folder)

    def add_link(name: str) -> None:
        layout.links[name] = machines.link(machine(name), next(ports))
        layout.gateways[name] = machines.gateway(machine(name), next(ports), layout.addresses[name])

    def add_node(node: tree.Node) -> None:
        config: dict[str, str | int] = {"partition-id": node.place}
        if node.is_station:
            config |= {"spool": str(folder / node.name / "spool"), "link": node.name}
        entrance = f"{HOST}:{layout.gateways[node.above].port}"
        process = machines.node(machine(node.name), next(ports), entrance, config)
        layout.nodes.append((machine(node.name), node.above, process))
        layout.places.append((machine(node.name), node.above, node.place))

    layout = Plan(sizes)
    ports = count(first_port)
    add_link(tree.SERVER)
    for node in tree.nodes(sizes):
        if node.is_station:
            add_link(node.name)
        add_node(node)
    return layout


def write_policies(folder: Path, layout: Plan, policy: Path | None = None) -> None:
    """Give every machine its policy: a copy of ``policy``, or a new one where there is none."""
    text = ""
    if policy is not None:
        Policy.load(policy)  # refuse an unreadable policy before anything starts
        text = policy.read_text(encoding="utf-8")
    for name in {*layout.links, *(machine.name for machine, _, _ in layout.nodes)}:
        file = Machine(name, folder / name, None).policy_file
        if text:
            file.unlink(missing_ok=True)
        writing.write(file, text)


def up(
    folder: Path, layout: Plan, *, patience: float = 120.0, policy: Path | None = None
) -> Processes:
    """Start the processes of `layout` and wait until every node is online.

    Every machine gets a copy of ``policy``; without one it keeps its own, or gets a new one.
    Everything is kept in `folder`: secrets, databases, spools, logs, and ``operator``, a Flower
    home in which every link is known by its machine's name.
    """
    processes = Processes(folder)
    if living := processes.living():
        raise DeploymentError(f"already up in {folder}: {', '.join(living)}; `hfedatm down` first")
    _check_ports([*layout.links.values(), *layout.gateways.values(), *(n[2] for n in layout.nodes)])
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_policies(folder, layout, policy)
    secure = layout.nodes[0][0].secrets is not None
    ca_file = make_secrets(folder / "secrets", layout) if secure else None
    admitted = [n for n in layout.nodes if not node_keys.is_revoked(folder / "secrets", n[0].name)]
    operator = folder / "operator"
    machines.write_connections(operator, layout.addresses, ca_file)
    size.note(operator, *layout.sizes)
    for machine, _, node in layout.nodes:
        if machine.name in layout.links:
            own = {machine.name: layout.addresses[machine.name]}
            machines.write_connections(node.home, own, ca_file)

    deadline = time.monotonic() + patience
    for tier in (layout.links, layout.gateways):
        for process in tier.values():
            processes.start(process)
        for process in tier.values():
            _wait(
                f"{process.name} answers",
                partial(healthy, process, ca_file),
                deadline,
                partial(_check_living, processes, [process.name]),
            )
        if tier is layout.links and secure:
            _register(admitted, operator)
    for _, _, process in admitted:
        processes.start(process)
    for link, expected in Counter(above for _, above, _ in admitted).items():
        _wait(
            f"{expected} nodes are online at {link}",
            partial(_online, link, expected, operator),
            deadline,
            partial(
                _check_living, processes, [n.name for _, above, n in admitted if above == link]
            ),
        )
    return processes


def plan_of(folder: Path) -> Plan:
    """Return the plan of a deployment that was started in this folder before."""
    operator = folder / "operator"
    sizes = size.read(operator)
    if sizes is None or not (operator / "config.toml").exists():
        raise DeploymentError(f"{folder} holds no deployment: start one with `hfedatm up`")
    links = tomllib.loads((operator / "config.toml").read_text(encoding="utf-8"))["superlink"]
    first_port = int(links[tree.SERVER]["address"].rpartition(":")[2])
    insecure = not (folder / "secrets").is_dir()
    return plan(folder, *sizes, insecure=insecure, first_port=first_port)


def processes_of(folder: Path) -> dict[str, Process]:
    """Return the planned processes of a deployment by name; none if its plan is not known."""
    if size.read(folder / "operator") is None:
        return {}
    known = plan_of(folder)
    every = [*known.links.values(), *known.gateways.values(), *(node for _, _, node in known.nodes)]
    return {process.name: process for process in every}


def restart_node(folder: Path, name: str, link: str) -> None:
    """Admit the key that a node has now, and start its process with it."""
    [(machine, process)] = [(m, p) for m, _, p in plan_of(folder).nodes if m.name == name]
    Registration(link, folder / "operator").register(Path(machine.secret("node.pub")))
    processes = Processes(folder)
    processes.end(process.name)
    processes.start(process)


def make_secrets(folder: Path, layout: Plan) -> str:
    """Make the machines' missing certificates and keys; return the authority's certificate."""
    certificates.make_authority(folder)
    for name in layout.links:
        if not (folder / name / "link.key").exists():
            certificates.make_link_certificate(folder, folder / name, [name, "localhost", HOST])
        certificates.make_task_key(folder / name)
    for machine, above, place in layout.places:
        certificates.enrol(folder, folder / machine.name, machine.name, above, place)
    return str(folder / "ca.pem")


def _register(nodes: list[tuple[Machine, str, Process]], operator: Path) -> None:
    def register(node: tuple[Machine, str, Process]) -> None:
        machine, above, _ = node
        Registration(above, operator).register(Path(machine.secret("node.pub")))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(register, nodes))


def _check_ports(processes: list[Process]) -> None:
    for process in processes:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, process.port))
            except OSError:
                raise DeploymentError(
                    f"port {process.port}, meant for {process.name}, is taken: "
                    "choose others with --first-port"
                ) from None


def _online(link: str, expected: int, operator: Path) -> bool:
    return flower.online_nodes(link, operator) >= expected


def healthy(process: Process, ca_file: str | None) -> bool:
    """Return whether a process answers; a node does so in plain text, on its own machine only."""
    scheme = "http" if ca_file is None else "https"
    context = None if ca_file is None else ssl.create_default_context(cafile=ca_file)
    try:
        url = f"{scheme}://{HOST}:{process.port}/health"
        with urllib.request.urlopen(url, timeout=5, context=context) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _check_living(processes: Processes, names: list[str]) -> None:
    """Raise if one of the processes has ended: nobody need wait for it."""
    living = processes.living()
    for name in names:
        if name not in living:
            log = processes.folder / f"{name}.log"
            last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            said = f"; its last line: {printable(last[0], 200)}" if last else ""
            raise DeploymentError(f"{name} has ended; {log} says why{said}")


def _wait(
    what: str,
    condition: Callable[[], bool],
    deadline: float,
    check: Callable[[], None] = lambda: None,
) -> None:
    while not condition():
        check()
        if time.monotonic() > deadline:
            raise DeploymentError(f"waited too long until {what}; the logs say why")
        time.sleep(0.3)
