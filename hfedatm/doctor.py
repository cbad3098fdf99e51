"""Examine a machine of a deployment: what would go wrong, and what to do about it."""

from __future__ import annotations

import shutil
import ssl
import stat
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib.metadata import requires, version
from pathlib import Path
from typing import Literal

import psutil
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from packaging.requirements import Requirement

from hfedatm.base.errors import UserError
from hfedatm.base.text import printable
from hfedatm.base.trust.enrolment import EnrolmentError, read_certificate
from hfedatm.base.trust.policy import Policy
from hfedatm.base.versions import HEADER, WrongVersion, check_version
from hfedatm.deploy import container, local
from hfedatm.deploy.processes import Processes

State = Literal["good", "warning", "bad"]
SOON = 30
"""Days before the end of a certificate from which it is worth a warning."""
LEAST_FREE = 2 * 10**9
"""Bytes on a disk below which a run may not end."""
MOST_SKEW = 60.0
"""Seconds that two clocks may differ; a signed task names its time."""
_RENEW = "run `hfedatm renew` where the authority's key is, and bring the new file here"
_ANEW = (
    "remove it and its key, then run `hfedatm scaffold` or `hfedatm up` again where the "
    "authority's key is: they make what is missing"
)
_PRIVATE = ("ca.key", "link.key", "tasks.key", "node")


@dataclass(frozen=True)
class Finding:
    """One thing that was examined: its state, and for all but good ones what to do."""

    state: State
    what: str
    cure: str = ""


@dataclass(frozen=True)
class Patient:
    """One machine: where it keeps its state, secrets and policy, and the addresses it must reach.

    ``secrets`` is None without TLS.
    """

    name: str
    state: Path
    secrets: Path | None
    policy: Path
    reach: tuple[str, ...] = ()


def patients(folder: Path) -> list[Patient]:
    """Return the machines of a deployment that ``hfedatm up`` started in this folder."""
    connections = folder / "operator" / "config.toml"
    if not connections.is_file():
        raise UserError(f"{folder} holds no deployment: start one with `hfedatm up`")
    links = tomllib.loads(connections.read_text(encoding="utf-8")).get("superlink", {})
    living = Processes(folder).living()
    found = []
    for policy in sorted(folder.glob("*/policy.toml")):
        name = policy.parent.name
        reach = [links[name]["address"]] if name in links else []
        if node := living.get(f"{name}-node"):
            command = node.cmdline()
            reach.append(command[command.index("--superlink") + 1])
        secrets = folder / "secrets" / name
        found.append(
            Patient(name, policy.parent, secrets if secrets.is_dir() else None, policy, (*reach,))
        )
    return found


def this_container() -> Patient | None:
    """Return the machine whose container this is; None outside of one."""
    if not container.POLICY.is_file():
        return None
    secrets = container.SECRETS if (container.SECRETS / "ca.pem").is_file() else None
    return Patient("this machine", container.STATE, secrets, container.POLICY, _peers())


def _peers() -> tuple[str, ...]:
    """Return the addresses that the deployed processes on this machine connect to."""
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        for option in ("--superlink", "--upstream"):
            if option in command[:-1]:
                found.add(command[command.index(option) + 1].rpartition("/")[2])
    return tuple(sorted(found))


def processes(folder: Path) -> Iterator[Finding]:
    """Yield which of the processes that ``hfedatm up`` started are alive and answer."""
    known = Processes(folder)
    living, planned = known.living(), local.processes_of(folder)
    ca_file = folder / "secrets" / "ca.pem"
    authority = str(ca_file) if ca_file.is_file() else None
    for name in known.noted():
        cure = f"{folder / name}.log says why; `hfedatm down`, then `up`"
        if name not in living:
            yield Finding("bad", f"{name} is dead", cure)
            continue
        trusted = None if name.endswith("-node") else authority
        if name not in planned or local.healthy(planned[name], trusted):
            yield Finding("good", f"{name} is alive")
        else:
            yield Finding("bad", f"{name} is alive and does not answer", cure)


def examine(patient: Patient) -> Iterator[Finding]:
    """Yield what is good and what is not about one machine."""
    yield from _disk(patient.state)
    yield from _policy(patient.policy)
    if patient.secrets is not None:
        yield from _secrets(patient.secrets)
    for address in patient.reach:
        yield from _reach(address, patient.secrets)


def installation() -> Iterator[Finding]:
    """Yield whether the packages on this machine work together."""
    for text in requires("hfedatm") or []:
        needed = Requirement(text)
        if needed.marker is not None or needed.name not in ("flwr", "torch", "cryptography"):
            continue
        found = version(needed.name)
        good = needed.specifier.contains(found, prereleases=True)
        yield Finding(
            "good" if good else "bad",
            f"{needed.name} {found}",
            "" if good else f"install {needed.name}{needed.specifier}",
        )


def _disk(folder: Path) -> Iterator[Finding]:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        yield Finding("bad", f"{folder}: {error.strerror}", "make the folder, or mount it")
        return
    enough = free >= LEAST_FREE
    said = f"{folder} has {free / 1e9:.1f} GB free"
    yield Finding("good" if enough else "bad", said, "" if enough else "make room on this disk")


def _policy(file: Path) -> Iterator[Finding]:
    try:
        Policy.load(file)
        yield Finding("good", f"policy {file}")
    except (UserError, OSError) as error:
        yield Finding("bad", str(error), f"hfedatm policy check {file}")


def _secrets(folder: Path) -> Iterator[Finding]:
    try:
        authority = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    except (OSError, ValueError) as error:
        yield Finding("bad", f"{folder / 'ca.pem'}: {error}", "copy it from the operator")
        return
    yield from _lifetime(folder / "ca.pem", authority)
    for name, key in (("link.pem", "link.key"), ("node.pem", "node")):
        if (folder / name).exists() or (folder / key).exists():
            yield from _certificate(folder / name, folder / key, authority)
    for name in _PRIVATE:
        file = folder / name
        if file.exists() and stat.S_IMODE(file.stat().st_mode) & 0o077:
            yield Finding("bad", f"{file} can be read by others", f"chmod 600 {file}")


def _certificate(file: Path, key_file: Path, authority: x509.Certificate) -> Iterator[Finding]:
    try:
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
        certificate.verify_directly_issued_by(authority)
        load: Callable[..., object] = (
            serialization.load_ssh_private_key
            if key_file.name == "node"
            else serialization.load_pem_private_key
        )
        own = load(key_file.read_bytes(), None).public_key()  # type: ignore[attr-defined]
        if own != certificate.public_key():
            raise ValueError(f"it belongs to another key than {key_file.name}")
        if file.name == "node.pem":
            ca = authority.public_bytes(serialization.Encoding.PEM)
            place = read_certificate(file.read_bytes(), ca)
            yield Finding("good", f"{file}: {place.name}, number {place.place} of {place.above}")
    except InvalidSignature:
        yield Finding("bad", f"{file} was not issued by the authority in ca.pem", _ANEW)
        return
    except EnrolmentError:  # its time is over; said below
        pass
    except (OSError, ValueError, TypeError) as error:
        yield Finding("bad", f"{file}: {error}", _ANEW)
        return
    yield from _lifetime(file, certificate)


def _lifetime(file: Path, certificate: x509.Certificate) -> Iterator[Finding]:
    now = datetime.now(UTC)
    left = (certificate.not_valid_after_utc - now).days
    if certificate.not_valid_before_utc > now:
        yield Finding("bad", f"{file} is not valid yet", "set this machine's clock")
    elif left < 0:
        yield Finding("bad", f"{file} ended on {certificate.not_valid_after_utc:%Y-%m-%d}", _RENEW)
    elif left < SOON:
        yield Finding("warning", f"{file} ends in {left} days", _RENEW)
    else:
        yield Finding("good", f"{file} is valid for {left} days")


def _reach(address: str, secrets: Path | None) -> Iterator[Finding]:
    scheme, context = "http", None
    if secrets is not None:
        try:
            scheme, context = "https", ssl.create_default_context(cafile=secrets / "ca.pem")
        except (OSError, ssl.SSLError):
            return  # said by `_secrets`
    url = f"{scheme}://{address}/health"
    try:
        with urllib.request.urlopen(url, timeout=10, context=context) as answer:
            yield Finding("good", f"{address} answers")
            date, version_there = answer.headers.get("Date"), answer.headers.get(HEADER)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        yield Finding("bad", f"{address}: {reason}", "is it up, and is its port open from here?")
        return
    if date:
        skew = abs(parsedate_to_datetime(date).timestamp() - time.time())
        good = skew <= MOST_SKEW
        said = f"the clock of {address} differs by {skew:.0f} s"
        yield Finding("good" if good else "bad", said, "" if good else "set both clocks by NTP")
    if version_there:  # a gateway says it, a SuperLink does not
        try:
            check_version(version_there)
            yield Finding("good", f"{address} has hfedatm {printable(version_there, 40)}")
        except WrongVersion as error:
            yield Finding("bad", f"{address}: {error}", "install one version on all machines")
