"""Write Compose files and secrets for any number of stations and clients, and any machines."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from hfedatm.base.errors import UserError
from hfedatm.base.trust import writing
from hfedatm.deploy import certificates, node_keys, size
from hfedatm.deploy.tree import SERVER, Node, nodes

FILES = ("docker-compose.yml", "docker-compose.insecure.yml", "docker-compose.gpu.yml")
CONTAINER_USER = 1000


@dataclass(frozen=True)
class Deployment:
    """The machines of a deployment; other machines reach the server's gateway at ``host``."""

    stations: int
    clients: int
    host: str = ""
    port: int = 9443
    only: str = ""
    tiers: tuple[int, ...] = ()
    """Children per level of a tree with more than one level of stations."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Children per level."""
        return self.tiers or (self.stations, self.clients)

    @property
    def nodes(self) -> dict[str, Node]:
        """All stations and clients by name."""
        return {node.name: node for node in nodes(self.sizes)}

    @property
    def links(self) -> dict[str, list[str]]:
        """Each link's nodes, by machine name."""
        found: dict[str, list[str]] = {SERVER: []}
        for node in self.nodes.values():
            found[node.above].append(node.name)
            if node.is_station:
                found[node.name] = []
        return found

    @property
    def shown(self) -> list[str]:
        """The links that run on this machine."""
        if self.only and self.only not in self.links:
            raise UserError(f"only: got {self.only!r}; must be one of {', '.join(self.links)}")
        if self.only in self.nodes and self.nodes[self.only].above != SERVER:
            raise UserError(
                f"only: got {self.only!r}; a station of a station runs on its machine: give one of "
                f"{', '.join(self.links[SERVER])}, which brings all stations below it"
            )
        below = [name for name in self.links if name.startswith(f"{self.only}-")]
        return [self.only, *below] if self.only else list(self.links)

    @property
    def services(self) -> list[str]:
        """The services of the Compose file."""
        services = []
        for name in self.shown:
            services += [name, f"{name}-gateway"]
            if name != SERVER:
                clients = [node for node in self.links[name] if node not in self.links]
                services += [f"{name}-node", *clients]
        return services


def write_compose(folder: Path, deployment: Deployment) -> list[Path]:
    """Write the Compose file and its overrides; return their paths."""
    templates = Environment(
        loader=PackageLoader("hfedatm", "templates/compose"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    extra = f" --host {deployment.host} --port {deployment.port}" if deployment.host else ""
    extra += f" --only {deployment.only}" if deployment.only else ""
    server = "server-gateway:8000"
    if deployment.host and SERVER not in deployment.shown:
        server = f"{deployment.host}:{deployment.port}"
    size = f"--stations {deployment.stations} --clients {deployment.clients}"
    if deployment.tiers:
        size = f"--tiers {'x'.join(map(str, deployment.tiers))}"
    for name in FILES:
        text = templates.get_template(f"{name}.j2").render(
            size=size,
            nodes=deployment.nodes,
            links=deployment.links,
            shown=deployment.shown,
            services=deployment.services,
            host=deployment.host,
            port=deployment.port,
            server=server,
            extra=extra,
        )
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in FILES]


def write_secrets(folder: Path, deployment: Deployment) -> None:
    """Make the certificates and keys that are missing; existing ones stay."""
    certificates.make_authority(folder)
    for link in deployment.links:
        certificates.make_task_key(folder / link)
    size.note(folder / SERVER, *deployment.sizes)
    for link, below in deployment.links.items():
        hosts = [link, f"{link}-gateway", "localhost", "127.0.0.1"]
        if link == "server" and deployment.host:
            hosts.append(deployment.host)
        if certificates.hosts_of(folder / link / "link.pem") != set(hosts):
            certificates.make_link_certificate(folder, folder / link, hosts)
        known = folder / link / "nodes"
        known.mkdir(mode=0o700, exist_ok=True)
        for node in below:
            certificates.enrol(folder, folder / node, node, link, deployment.nodes[node].place)
            if not node_keys.is_revoked(folder, node):
                shutil.copyfile(folder / node / "node.pub", known / f"{node}.pub")
        for key in known.glob("*.pub"):
            if key.stem not in below:
                key.unlink()
    if os.getuid() == 0:  # containers do not run as root, and only their owner can read the keys
        for path in [folder, *folder.rglob("*")]:
            if path.name != "ca.key":
                os.chown(path, CONTAINER_USER, CONTAINER_USER)


def write_policies(folder: Path, deployment: Deployment) -> list[Path]:
    """Write the missing policies of the machines in this part; existing ones stay."""
    names = [name for link in deployment.shown for name in (link, *deployment.links[link])]
    shown = [n for n in names if n not in deployment.links or n in deployment.shown]
    files = [folder / f"{name}.toml" for name in dict.fromkeys(shown)]
    return [file for file in files if writing.write(file)]


def write_user(folder: Path) -> None:
    """Make the containers run as the user who owns the secrets."""
    if os.getuid() not in (0, CONTAINER_USER):
        owner = f"HFEDATM_UID={os.getuid()}\nHFEDATM_GID={os.getgid()}\n"
        (folder / ".env").write_text(owner, encoding="utf-8")
