"""The primitives, all from `cryptography`: X25519, HKDF-SHA256, ChaCha20-Poly1305, ChaCha20."""

from __future__ import annotations

import hashlib
import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from hfedatm_core.privacy.keystream import Keystream
from hfedatm_core.secagg.errors import SecureAggregationError
from hfedatm_core.secagg.fixed_point import Ring

_NONCE_BYTES = 12
_CHUNK = 1 << 19


def new_private_key() -> bytes:
    """Return a fresh X25519 private key."""
    return X25519PrivateKey.generate().private_bytes(
        serialization.Encoding.Raw,
        serialization.PrivateFormat.Raw,
        serialization.NoEncryption(),
    )


def public_key(private: bytes) -> bytes:
    """Return the public key of a private key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, public: bytes, purpose: str, session: bytes, peer: int) -> bytes:
    """Return the 32-byte key two clients share for one purpose of one session."""
    try:
        secret = X25519PrivateKey.from_private_bytes(private).exchange(
            X25519PublicKey.from_public_bytes(public)
        )
    except ValueError as error:
        raise SecureAggregationError(f"the public key of client {peer} is not valid") from error
    info = f"hfedatm/secure-aggregation/{purpose}/".encode() + session
    return HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=info).derive(secret)


def seal(key: bytes, plain: bytes, context: bytes) -> bytes:
    """Encrypt and authenticate, bound to its context (who sends it to whom, in which session)."""
    nonce = os.urandom(_NONCE_BYTES)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, plain, context)


def unseal(key: bytes, sealed: bytes, context: bytes, sender: int) -> bytes:
    """Decrypt what :func:`seal` made; anything altered on the way is refused."""
    try:
        return ChaCha20Poly1305(key).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], context)
    except (InvalidTag, ValueError) as error:
        raise SecureAggregationError(
            f"the encrypted share from client {sender} was altered or meant for somebody else"
        ) from error


def commitment(seed: bytes, session: bytes, client: int) -> bytes:
    """Bind a client to its self-mask seed without telling it (the seed is 32 random bytes)."""
    return hashlib.sha256(f"hfedatm/seed/{client}/".encode() + session + seed).digest()


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
    """Of two clients the one with the smaller id adds their common mask, the other subtracts it."""
    return 1 if client < peer else -1
