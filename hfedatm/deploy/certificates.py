"""Certificates and keys for the links and the nodes.

Every machine gets one folder and nothing else. It holds the authority's certificate ``ca.pem``; if
the machine runs a SuperLink, ``link.pem``/``link.key`` for TLS and ``tasks.key``, which signs tasks
for its nodes; if it runs a SuperNode, ``node``/``node.pub``, its certificate ``node.pem``, and
``tasks.pub``, the key of the tier above, which verifies tasks. The authority's own key stays in the
top folder, with the operator.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import ExtendedKeyUsageOID

from hfedatm.base.trust.enrolment import EnrolmentError, read_certificate
from hfedatm_files import PRIVATE, write_bytes

LIFETIME = timedelta(days=825)  # the longest that TLS libraries accept for a server
AUTHORITY_LIFETIME = timedelta(days=3650)
"""Nodes trust the authority's certificate that they have; a new one must reach all of them."""


def make_authority(folder: Path) -> None:
    """Make a certificate authority (``ca.pem``, ``ca.key``) in `folder`, unless there is one."""
    if (folder / "ca.key").exists():
        return
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _write(folder / "ca.key", _pem(ec.generate_private_key(ec.SECP384R1())))
    renew_authority(folder)


def renew_authority(folder: Path) -> None:
    """Make ``ca.pem`` anew with the same key and name, so that what it has issued stays valid."""
    key = _authority_key(folder)
    name = _name("HFedATM authority")
    certificate = (
        _certificate(name, name, key.public_key(), AUTHORITY_LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    _write(folder / "ca.pem", certificate.public_bytes(serialization.Encoding.PEM), public=True)


def make_link_certificate(authority: Path, folder: Path, hosts: Iterable[str]) -> None:
    """Make ``link.pem`` and ``link.key`` for a SuperLink that has the names `hosts`."""
    issuer = x509.load_pem_x509_certificate((authority / "ca.pem").read_bytes())
    issuer_key = _authority_key(authority)
    hosts = list(dict.fromkeys(hosts))
    key = ec.generate_private_key(ec.SECP384R1())
    certificate = (
        _certificate(_name(hosts[0]), issuer.subject, key.public_key())
        .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
            critical=False,
        )
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(issuer_key, hashes.SHA384())
    )
    _write(folder / "link.key", _pem(key))
    _write(folder / "link.pem", certificate.public_bytes(serialization.Encoding.PEM), public=True)
    _write(folder / "ca.pem", (authority / "ca.pem").read_bytes(), public=True)


def _authority_key(authority: Path) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key((authority / "ca.key").read_bytes(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise TypeError(f"{authority / 'ca.key'} is not a key that hfedatm scaffold makes")
    return key


def hosts_of(certificate: Path) -> set[str]:
    """Return the host names in a link's certificate; none if there is no certificate."""
    if not certificate.exists():
        return set()
    found = x509.load_pem_x509_certificate(certificate.read_bytes())
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {str(name.value) for name in names}


def make_task_key(folder: Path) -> None:
    """Make ``tasks.key``, which signs a link's tasks, unless there is one."""
    if not (folder / "tasks.key").exists():
        key = Ed25519PrivateKey.generate()
        _write(folder / "tasks.key", _pem(key))


def enrol(authority: Path, folder: Path, name: str, above: str, place: int) -> None:
    """Make a node's missing files: its key pair, its certificate, and the key of the tier above.

    Parameters
    ----------
    authority
        Folder of the authority, which holds the folders of all machines.
    folder
        The node's own folder.
    name, above, place
        The node, the machine whose link it works for, and its number there.
    """
    if not (folder / "node").exists():
        make_node_key(authority, folder)
    if _enrolled_as(authority, folder) != (name, above, place):
        issue_node_certificate(authority, folder, name, above, place)
    signer = serialization.load_pem_private_key(
        (authority / above / "tasks.key").read_bytes(), None
    )
    public = signer.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    _write(folder / "tasks.pub", public, public=True)


def _enrolled_as(authority: Path, folder: Path) -> tuple[str, str, int] | None:
    try:
        found = read_certificate(
            (folder / "node.pem").read_bytes(), (authority / "ca.pem").read_bytes()
        )
    except (FileNotFoundError, EnrolmentError):
        return None
    return found.name, found.above, found.place


def make_node_key(authority: Path, folder: Path) -> None:
    """Make ``node`` and ``node.pub``, the key pair that identifies a SuperNode to its link."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    _write(folder / "node", private)
    _write(folder / "node.pub", public + b"\n", public=True)
    _write(folder / "ca.pem", (authority / "ca.pem").read_bytes(), public=True)


def issue_node_certificate(
    authority: Path, folder: Path, name: str, above: str, place: int
) -> None:
    """Make ``node.pem``, in which the authority certifies whose key ``node.pub`` is."""
    issuer = x509.load_pem_x509_certificate((authority / "ca.pem").read_bytes())
    issuer_key = _authority_key(authority)
    key = serialization.load_ssh_public_key((folder / "node.pub").read_bytes())
    subject = x509.Name(
        [
            x509.NameAttribute(x509.NameOID.COMMON_NAME, name[:64]),
            x509.NameAttribute(x509.NameOID.ORGANIZATION_NAME, above[:64]),
            x509.NameAttribute(x509.NameOID.SERIAL_NUMBER, str(place)),
        ]
    )
    certificate = (
        _certificate(subject, issuer.subject, key)  # type: ignore[arg-type]
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .sign(issuer_key, hashes.SHA384())
    )
    _write(folder / "node.pem", certificate.public_bytes(serialization.Encoding.PEM), public=True)


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    lifetime: timedelta | None = None,
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))  # the clocks of two machines differ a little
        .not_valid_after(now + (lifetime or LIFETIME))
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name[:64])])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(**granted: bool) -> x509.KeyUsage:
    names = "digital_signature content_commitment key_encipherment data_encipherment key_agreement"
    names += " key_cert_sign crl_sign encipher_only decipher_only"
    return x509.KeyUsage(**dict.fromkeys(names.split(), False) | granted)


def _pem(key: ec.EllipticCurvePrivateKey | Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _write(path: Path, content: bytes, *, public: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_bytes(path, content, mode=0o644 if public else PRIVATE)
