"""The keys that the operator has withdrawn: a file ``revoked`` among a machine's secrets.

A line of the file is the fingerprint of a key, the name of its node and the day. Whoever meets one
of these keys refuses it: the gateway any request that it signs, every tier its certificate.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes

from hfedatm_files import write_text

FILE = "revoked"


def fingerprint(key: PublicKeyTypes) -> str:
    """Return the SHA-256 of a public key, in hexadecimal."""
    return hashlib.sha256(
        key.public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    ).hexdigest()


def fingerprint_of(public_key: Path) -> str:
    """Return the fingerprint of the key in ``node.pub``."""
    return fingerprint(serialization.load_ssh_public_key(public_key.read_bytes()))


def revoked(folder: Path) -> dict[str, str]:
    """Return the withdrawn keys that this machine knows: fingerprint to the node's name."""
    try:
        lines = (folder / FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    return {found[0]: found[1] for line in lines if len(found := line.split()) >= 2}


def add(folder: Path, key: str, name: str) -> None:
    """Withdraw a key; one that is withdrawn already stays as it is."""
    if key in revoked(folder):
        return
    file = folder / FILE
    before = file.read_text(encoding="utf-8") if file.exists() else ""
    write_text(file, f"{before}{key} {name} {datetime.now(UTC):%Y-%m-%d}\n")
