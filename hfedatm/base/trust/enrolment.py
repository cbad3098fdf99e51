"""A node's identity: the operator's certificate for its key, and proofs made with that key.

A certificate names the node, the tier above it and the node's place there. Nobody can take another
node's place without that node's key, and a client can tell its real peers from invented ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from hfedatm.base.trust import revocation
from hfedatm.base.trust.secrets import secrets_folder

LONGEST_CERTIFICATE = 8192
"""Most bytes of a certificate; a node's certificate has about 900."""


class EnrolmentError(ValueError):
    """A node cannot prove that the operator enrolled it; the text says why."""


@dataclass(frozen=True)
class Enrolled:
    """The operator's statement about a node.

    Attributes
    ----------
    name
        The node's name, for example ``station-1-client-2``.
    above
        The tier it works for: ``server`` or a station's name.
    place
        Its number in that tier, from 0.
    """

    name: str
    above: str
    place: int
    key: ec.EllipticCurvePublicKey

    def check(self, signature: bytes, data: bytes) -> None:
        """Raise `EnrolmentError` unless the node's key signed ``data``."""
        try:
            self.key.verify(signature, data, ec.ECDSA(hashes.SHA384()))
        except InvalidSignature:
            raise EnrolmentError(f"{self.name}: its key did not sign this") from None


@dataclass(frozen=True)
class Identity:
    """A node's own certificate and key."""

    name: str
    above: str
    place: int
    certificate: bytes
    _key: ec.EllipticCurvePrivateKey

    @classmethod
    def load(cls) -> Identity | None:
        """Return this process's identity; None if there are no secrets, as in a simulation."""
        folder = secrets_folder()
        if folder is None:
            return None
        certificate = (folder / "node.pem").read_bytes()
        key = serialization.load_ssh_private_key((folder / "node").read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        own = read_certificate(certificate)
        return cls(own.name, own.above, own.place, certificate, key)

    def sign(self, data: bytes) -> bytes:
        """Return a signature that `verify` accepts."""
        return self._key.sign(data, ec.ECDSA(hashes.SHA384()))


def verify(certificate: bytes, signature: bytes, data: bytes, ca: bytes | None = None) -> str:
    """Return the enrolled name of the node that signed ``data``.

    Raises
    ------
    EnrolmentError
        If the operator did not issue the certificate or its key did not sign the data.
    """
    enrolled = read_certificate(certificate, ca)
    enrolled.check(signature, data)
    return enrolled.name


def read_certificate(certificate: bytes, ca: bytes | None = None) -> Enrolled:
    """Return the statement in a certificate, if the authority issued it and it is valid today.

    Parameters
    ----------
    certificate
        PEM.
    ca
        The authority's certificate, PEM; by default the one among this machine's secrets.
    """
    authority = x509.load_pem_x509_certificate(ca or _own_authority())
    try:
        if len(certificate) > LONGEST_CERTIFICATE:
            raise ValueError("it is too long")
        found = x509.load_pem_x509_certificate(certificate)
        found.verify_directly_issued_by(authority)
        now = datetime.now(UTC)
        if not found.not_valid_before_utc <= now <= found.not_valid_after_utc:
            raise ValueError(f"it is valid until {found.not_valid_after_utc:%Y-%m-%d} only")
        key = found.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError("it is not a node's certificate")
        if (own := secrets_folder()) and revocation.fingerprint(key) in revocation.revoked(own):
            raise ValueError("the operator has revoked its key")
        name, above, place = (
            _only(found.subject, oid)
            for oid in (
                x509.NameOID.COMMON_NAME,
                x509.NameOID.ORGANIZATION_NAME,
                x509.NameOID.SERIAL_NUMBER,
            )
        )
        return Enrolled(name, above, int(place), key)
    except InvalidSignature:
        raise EnrolmentError("the certificate was not issued by the operator") from None
    except (ValueError, TypeError) as error:
        raise EnrolmentError(f"the certificate cannot be used: {error}") from None


def _own_authority() -> bytes:
    folder = secrets_folder()
    if folder is None:
        raise EnrolmentError("this machine has no secrets, so nobody can prove anything to it")
    return (folder / "ca.pem").read_bytes()


def _only(subject: x509.Name, oid: x509.ObjectIdentifier) -> str:
    values = subject.get_attributes_for_oid(oid)
    if len(values) != 1:
        raise ValueError("it is not a node's certificate")
    return str(values[0].value)
