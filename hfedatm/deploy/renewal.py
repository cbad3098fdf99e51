"""Renew certificates before they end. Keys of nodes stay; a link gets a new key.

The authority keeps its key and its name, so old and new certificates of both kinds verify each
other: machines can be given their renewed files one after the other, in any order.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from hfedatm.base.errors import UserError
from hfedatm.deploy import certificates
from hfedatm_files import write_bytes


def renew(secrets: Path, within: timedelta) -> Iterator[Path]:
    """Renew every certificate that ends ``within`` this time; yield the files that changed."""
    if not (secrets / "ca.key").exists():
        raise UserError(f"{secrets}: the authority's key is not here; run this at the operator's")
    if _ends(secrets / "ca.pem", within):
        certificates.renew_authority(secrets)
        yield secrets / "ca.pem"
    authority = (secrets / "ca.pem").read_bytes()
    for folder in sorted(file.parent for file in secrets.glob("*/ca.pem")):
        if (folder / "ca.pem").read_bytes() != authority:
            write_bytes(folder / "ca.pem", authority, mode=0o644)
            yield folder / "ca.pem"
        if (folder / "link.pem").exists() and _ends(folder / "link.pem", within):
            hosts = certificates.hosts_of(folder / "link.pem")
            first = [folder.name] if folder.name in hosts else []
            certificates.make_link_certificate(secrets, folder, first + sorted(hosts))
            yield folder / "link.pem"
        if (folder / "node.pem").exists() and _ends(folder / "node.pem", within):
            certificates.issue_node_certificate(secrets, folder, *_place(folder / "node.pem"))
            yield folder / "node.pem"


def _ends(file: Path, within: timedelta) -> bool:
    found = x509.load_pem_x509_certificate(file.read_bytes())
    return found.not_valid_after_utc - datetime.now(UTC) <= within


def _place(file: Path) -> tuple[str, str, int]:
    """Return name, link and place in a node's certificate, which may have ended already."""
    subject = x509.load_pem_x509_certificate(file.read_bytes()).subject
    name, above, place = (
        str(subject.get_attributes_for_oid(oid)[0].value)
        for oid in (
            x509.NameOID.COMMON_NAME,
            x509.NameOID.ORGANIZATION_NAME,
            x509.NameOID.SERIAL_NUMBER,
        )
    )
    return name, above, int(place)
