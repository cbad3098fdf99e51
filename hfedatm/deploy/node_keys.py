"""Withdraw a node's key, or give the node a new one, while everything else runs."""

from __future__ import annotations

import shutil
from pathlib import Path

from hfedatm.base.errors import UserError
from hfedatm.base.trust import revocation
from hfedatm.base.trust.enrolment import Enrolled, EnrolmentError, read_certificate
from hfedatm.deploy import certificates


def find(secrets: Path, name: str) -> Enrolled:
    """Return what the authority has certified about a node."""
    if not (secrets / "ca.key").exists():
        raise UserError(f"{secrets}: the authority's key is not here; run this at the operator's")
    file = secrets / name / "node.pem"
    if not file.exists():
        known = ", ".join(sorted(f.parent.name for f in secrets.glob("*/node.pem"))) or "none"
        raise UserError(f"{name} is no node of {secrets}: known nodes: {known}")
    try:
        return read_certificate(file.read_bytes(), (secrets / "ca.pem").read_bytes())
    except EnrolmentError as error:
        raise UserError(f"{file}: {error}") from None


def revoke(secrets: Path, name: str) -> tuple[str, str]:
    """Withdraw a node's key everywhere in ``secrets``; return its fingerprint and its link."""
    node = find(secrets, name)
    key = revocation.fingerprint(node.key)
    for folder in (secrets, *_machines(secrets)):
        revocation.add(folder, key, name)
    (secrets / node.above / "nodes" / f"{name}.pub").unlink(missing_ok=True)
    return key, node.above


def replace(secrets: Path, name: str) -> tuple[str, str]:
    """Give a node a new key in its old place and withdraw the old one; return as `revoke` does."""
    node = find(secrets, name)
    old, above = revoke(secrets, name)
    certificates.make_node_key(secrets, secrets / name)
    certificates.issue_node_certificate(secrets, secrets / name, name, above, node.place)
    known = secrets / above / "nodes"
    if known.is_dir():
        shutil.copyfile(secrets / name / "node.pub", known / f"{name}.pub")
    return old, above


def is_revoked(secrets: Path, name: str) -> bool:
    """Return whether the key that a node has now was withdrawn."""
    public = secrets / name / "node.pub"
    return public.exists() and revocation.fingerprint_of(public) in revocation.revoked(secrets)


def _machines(secrets: Path) -> list[Path]:
    return sorted(file.parent for file in secrets.glob("*/ca.pem"))
