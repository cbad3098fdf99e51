"""The primitives: X25519, HKDF, ChaCha20 and Ed25519 of `cryptography`, and mask keys.

Shares are encrypted under X25519 keys. Two clients agree on a mask key in the group edwards25519
itself, in which the shares of a key can be checked; see :mod:`hfedatm_core.secagg.shamir`.
"""

from __future__ import annotations

import hashlib
import os

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from hfedatm_core.privacy.keystream import Keystream
from hfedatm_core.secagg.edwards import ZERO, compress, decompress, equal, multiply
from hfedatm_core.secagg.errors import SecureAggregationError
from hfedatm_core.secagg.fixed_point import Ring

SIGNATURE_BYTES = 64
_NONCE_BYTES = 12
_TAG_BYTES = 16
_CHUNK = 1 << 19


def new_private_key() -> bytes:
    """Return a fresh X25519 private key."""
    return X25519PrivateKey.generate().private_bytes(
        serialization.Encoding.Raw,
        serialization.PrivateFormat.Raw,
        serialization.NoEncryption(),
    )


def public_key(private: bytes) -> bytes:
    """Return the public key of an X25519 private key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, public: bytes, session: bytes, peer: int) -> bytes:
    """Return the 32-byte key under which two clients exchange shares in one session."""
    try:
        secret = X25519PrivateKey.from_private_bytes(private).exchange(
            X25519PublicKey.from_public_bytes(public)
        )
    except ValueError as error:
        raise SecureAggregationError(f"the share key of client {peer} is not valid") from error
    return _derive(secret, "share", session)


def agree_on_mask(secret: bytes, public: bytes, session: bytes, peer: int) -> bytes:
    """Return the 32-byte key of the mask that two clients share in one session."""
    point = decompress(public, f"the mask key of client {peer}")
    # The factor eight removes a component of small order from the result.
    common = multiply(point, 8 * int.from_bytes(secret, "big"))
    if equal(common, ZERO):
        raise SecureAggregationError(f"the mask key of client {peer} is not valid")
    return _derive(compress(common), "mask", session)


def self_mask(secret: bytes, session: bytes) -> bytes:
    """Return the 32-byte key of a client's own mask."""
    return _derive(secret, "self", session)


def _derive(secret: bytes, purpose: str, session: bytes) -> bytes:
    info = f"hfedatm/secure-aggregation/{purpose}/".encode() + session
    return HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=info).derive(secret)


def seal(key: bytes, plain: bytes, context: bytes) -> bytes:
    """Encrypt and authenticate bytes for one context: sender, recipient and session."""
    nonce = os.urandom(_NONCE_BYTES)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, plain, context)


def sealed_bytes(plain: int) -> int:
    """Return the length of ``plain`` bytes after :func:`seal`."""
    return _NONCE_BYTES + plain + _TAG_BYTES


def unseal(key: bytes, sealed: bytes, context: bytes) -> bytes | None:
    """Decrypt the output of :func:`seal`; None if it was altered or is for another context."""
    try:
        return ChaCha20Poly1305(key).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], context)
    except (InvalidTag, ValueError):
        return None


def new_signing_key() -> bytes:
    """Return a fresh Ed25519 private key."""
    return Ed25519PrivateKey.generate().private_bytes_raw()


def signing_public_key(private: bytes) -> bytes:
    """Return the key that checks signatures made with ``private``."""
    return Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def sign(private: bytes, statement: bytes) -> bytes:
    """Sign a statement."""
    return Ed25519PrivateKey.from_private_bytes(private).sign(statement)


def is_signed(public: bytes, signature: bytes, statement: bytes) -> bool:
    """Tell whether the owner of a key signed a statement."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, statement)
    except (InvalidSignature, ValueError):
        return False
    return True


def digest(data: bytes) -> bytes:
    """Return the SHA-256 of a message."""
    return hashlib.sha256(data).digest()


def apply_mask(total: Ring, key: bytes, sign: int) -> None:
    """Add (``sign = 1``) or subtract (``-1``) the mask of ``key``, in place and in the ring."""
    stream = Keystream(key)
    bits = total.dtype.itemsize * 8
    for start in range(0, total.size, _CHUNK):
        part = total[start : start + _CHUNK]
        if sign > 0:
            part += stream.words(part.size, bits)
        else:
            part -= stream.words(part.size, bits)


def pair_sign(client: int, peer: int) -> int:
    """Return 1 if ``client`` adds the pair's common mask (it has the smaller id), -1 if not."""
    return 1 if client < peer else -1
