"""The processes of the three tiers as plain data: one function per kind of process.

The commands are the same on one machine, in containers and on many machines; only addresses and
folders differ.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import tomli_w

from hfedatm.base.environment import APP, HELPER, POLICY, PRELOAD
from hfedatm.base.logs import PROCESS
from hfedatm.base.trust import secrets

# Modules that the two kinds of nodes import before any message arrives. Torch imports `_dynamo`
# with the first optimizer.
_STATION_WORK = "station_app.app"
_CLIENT_WORK = "client_app.app client_app.client client_app.secure torch._dynamo"


@dataclass(frozen=True)
class Process:
    """A long-lived process: its name, its command, its address."""

    name: str
    command: list[str]
    home: Path
    port: int
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Machine:
    """The folders in which one machine of the hierarchy keeps its state and its secrets.

    ``secrets`` is None if the links are plain text and nodes are not authenticated. The owner's
    ``policy`` is in the state folder unless another path is given. A node has a helper process of
    its own unless ``helper`` names the folder of one that several nodes share.
    """

    name: str
    state: Path
    secrets: Path | None
    policy: Path | None = None
    helper: Path | None = None

    @property
    def policy_file(self) -> Path:
        """The path of the owner's policy for this machine."""
        return self.policy or self.state / "policy.toml"

    def secret(self, file: str) -> str:
        """Return the path of one of this machine's secrets."""
        assert self.secrets is not None, "without TLS nobody asks for secrets"
        return str(self.secrets / file)


def link(machine: Machine, port: int, host: str = "127.0.0.1") -> Process:
    """Return a SuperLink. Only its operator and its gateway must be able to reach it."""
    command = [sys.executable, "-m", "hfedatm.deploy.link", "--host", host, "--port", str(port)]
    command += ["--database", str(machine.state / "link.db")]
    command += ["--disable-runtime-dependency-installation"]
    if machine.secrets is None:
        command += ["--insecure"]
    else:
        command += ["--enable-supernode-auth", "--ssl-ca-certfile", machine.secret("ca.pem")]
        command += ["--ssl-certfile", machine.secret("link.pem")]
        command += ["--ssl-keyfile", machine.secret("link.key")]
    return _process(machine, "link", command, port)


def gateway(machine: Machine, port: int, link_address: str, host: str = "127.0.0.1") -> Process:
    """Return the gateway through which nodes reach the SuperLink at `link_address`."""
    scheme = "http" if machine.secrets is None else "https"
    command = [sys.executable, "-m", "hfedatm.deploy.gateway", "--host", host, "--port", str(port)]
    command += ["--upstream", f"{scheme}://{link_address}"]
    command += ["--state", str(machine.state / "deliveries.db")]
    if machine.secrets is not None:
        command += ["--ca", machine.secret("ca.pem"), "--cert", machine.secret("link.pem")]
        command += ["--key", machine.secret("link.key")]
    return _process(machine, "gateway", command, port)


def node(
    machine: Machine, port: int, gateway_address: str, config: Mapping[str, str | int]
) -> Process:
    """Return a SuperNode that works for the tier above it (`hfedatm.deploy.node`)."""
    values = " ".join(
        f"{key}={value}" if isinstance(value, int) else f'{key}="{value}"'
        for key, value in config.items()
    )
    command = [sys.executable, "-m", "hfedatm.deploy.node", "--port", str(port)]
    command += ["--superlink", gateway_address, "--node-config", values]
    if machine.secrets is None:
        command += ["--insecure"]
    else:
        command += ["--root-certificates", machine.secret("ca.pem")]
        command += ["--auth-supernode-private-key", machine.secret("node")]
    process = _process(machine, "node", command, port)
    environment = {
        **process.environment,
        PRELOAD: _STATION_WORK if "link" in config else _CLIENT_WORK,
        HELPER: str(machine.helper or process.home),
        APP: "station_app.app:client" if "link" in config else "client_app.app:app",
        # A process must not fork after it has looked for GPUs in any other way.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    return replace(process, environment=environment)


def _process(machine: Machine, kind: str, command: list[str], port: int) -> Process:
    # A node's memory from round to round is part of its machine's state.
    name = f"{machine.name}-{kind}"
    own = {"HFEDATM_STATE": str(machine.state / "memory"), POLICY: str(machine.policy_file)}
    own[PROCESS] = name
    if machine.secrets is not None:
        own[secrets.FOLDER] = str(machine.secrets)
    return Process(name, command, machine.state / f"{kind}-home", port, own)


def write_connections(home: Path, addresses: Mapping[str, str], ca_file: str | None) -> None:
    """Tell Flower's command line, when its home is `home`, how to reach SuperLinks by name."""
    trust = {"insecure": True} if ca_file is None else {"root-certificates": ca_file}
    links = {name: {"address": address, **trust} for name, address in addresses.items()}
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.toml").write_text(tomli_w.dumps({"superlink": links}), encoding="utf-8")
