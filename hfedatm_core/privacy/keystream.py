"""ChaCha20 as a source of cryptographic pseudo-random bytes.

Noise for differential privacy and masks for secure aggregation both need a stream that nobody can
predict from its other parts, which the generators of numpy and torch do not promise.
"""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

KEY_BYTES = 32


class Keystream:
    """The ChaCha20 keystream of a 32-byte key, read front to back.

    Parameters
    ----------
    key
        32 bytes; drawn from the operating system when not given. Never use a key for two purposes:
        the stream always starts at the same place.
    """

    def __init__(self, key: bytes | None = None) -> None:
        key = os.urandom(KEY_BYTES) if key is None else key
        if len(key) != KEY_BYTES:
            raise ValueError(f"a ChaCha20 key has {KEY_BYTES} bytes, got {len(key)}")
        self._encryptor = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()

    def read(self, size: int) -> bytes:
        """Return the next ``size`` bytes."""
        return self._encryptor.update(bytes(size))

    def words(self, count: int, bits: int = 64) -> npt.NDArray[np.unsignedinteger]:
        """Return the next ``count`` uniform integers modulo ``2**bits`` (32 or 64)."""
        return np.frombuffer(self.read(count * bits // 8), dtype=f"<u{bits // 8}")
