"""Write Compose files and secrets for any number of stations and clients, and any machines."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from hfedatm.base.errors import UserError
from hfedatm.base.trust import writing
from hfedatm.deploy import certificates, size

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

    @property
    def links(self) -> dict[str, list[str]]:
        """Each link's nodes, by machine name."""
        names = [f"station-{number + 1}" for number in range(self.stations)]
        below = {
            name: [f"{name}-client-{number + 1}" for number in range(self.clients)]
            for name in names
        }
        return {"server": names, **below}

    @property
    def shown(self) -> list[str]:
        """The links that run on this machine."""
        if self.only and self.only not in self.links:
            raise UserError(f"only: got {self.only!r}; must be one of {', '.join(self.links)}")
        return [self.only] if self.only else list(self.links)

    @property
    def services(self) -> list[str]:
        """The services of the Compose file."""
        services = []
        for name in self.shown:
            services += [name, f"{name}-gateway"]
            if name != "server":
                services += [f"{name}-node", *self.links[name]]
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
    above = "server-gateway:8000"
    if deployment.host and "server" not in deployment.shown:
        above = f"{deployment.host}:{deployment.port}"
    for name in FILES:
        text = templates.get_template(f"{name}.j2").render(
            stations=deployment.stations,
            clients=deployment.clients,
            shown=deployment.shown,
            services=deployment.services,
            host=deployment.host,
            port=deployment.port,
            above=above,
            extra=extra,
        )
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in FILES]


def write_secrets(folder: Path, deployment: Deployment) -> None:
    """Make the certificates and keys that are missing; existing ones stay."""
    certificates.make_authority(folder)
    for link in deployment.links:
        certificates.make_task_key(folder / link)
    size.note(folder / "server", deployment.stations, deployment.clients)
    for link, nodes in deployment.links.items():
        hosts = [link, f"{link}-gateway", "localhost", "127.0.0.1"]
        if link == "server" and deployment.host:
            hosts.append(deployment.host)
        if certificates.hosts_of(folder / link / "link.pem") != set(hosts):
            certificates.make_link_certificate(folder, folder / link, hosts)
        known = folder / link / "nodes"
        known.mkdir(mode=0o700, exist_ok=True)
        first = (
            0 if link == "server" else (list(deployment.links).index(link) - 1) * deployment.clients
        )
        for place, node in enumerate(nodes, start=first):  # a node's place is its partition-id
            certificates.enrol(folder, folder / node, node, link, place)
            shutil.copyfile(folder / node / "node.pub", known / f"{node}.pub")
        for key in known.glob("*.pub"):
            if key.stem not in nodes:
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
