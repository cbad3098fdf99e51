"""Shamir's t-of-n sharing of a 32-byte secret."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

PRIME = 2**256 + 297  # the first prime above every 32-byte secret
SECRET_BYTES = 32
SHARE_BYTES = 33


def split(secret: bytes, threshold: int, points: int) -> list[bytes]:
    """Return the shares at x = 1..``points``; any ``threshold`` of them give the secret back.

    The shares are the values of a random polynomial of degree ``threshold - 1`` whose constant
    term is the secret; fewer than ``threshold`` values say nothing about it.
    """
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret has {SECRET_BYTES} bytes, got {len(secret)}")
    if not 1 <= threshold <= points:
        raise ValueError(f"threshold {threshold} must be between 1 and {points}")
    coefficients = [int.from_bytes(secret, "big")]
    coefficients += [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    return [_evaluate(coefficients, x).to_bytes(SHARE_BYTES, "big") for x in range(1, points + 1)]


def combine(shares: Mapping[int, bytes]) -> bytes:
    """Interpolate the secret from shares keyed by their point x (exactly ``threshold`` of them).

    Wrong shares give a wrong secret or a ValueError; the caller checks the secret.
    """
    total = 0
    for x, share in shares.items():
        y = int.from_bytes(share, "big")
        if len(share) != SHARE_BYTES or y >= PRIME:
            raise ValueError(f"the share at point {x} is malformed")
        numerator = denominator = 1
        for other in shares:
            if other != x:
                numerator = numerator * other % PRIME
                denominator = denominator * (other - x) % PRIME
        total = (total + y * numerator * pow(denominator, -1, PRIME)) % PRIME
    if total >> (8 * SECRET_BYTES):
        raise ValueError("the shares do not belong to one secret")
    return total.to_bytes(SECRET_BYTES, "big")


def _evaluate(coefficients: list[int], x: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % PRIME
    return value
