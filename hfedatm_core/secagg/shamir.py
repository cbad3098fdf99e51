"""Shamir's t-of-n sharing of a number, with Feldman's commitments: every share can be checked.

A dealer publishes its polynomial's coefficients times the base point of edwards25519. The holder of
a share, and anyone who sees the share later, can check whether it lies on that polynomial. A dealer
that sends false shares and a holder that returns a false share are therefore identified, and the
others still recover the secret.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hfedatm_core.secagg.edwards import (
    ORDER,
    POINT_BYTES,
    ZERO,
    Point,
    add,
    compress,
    decompress,
    equal,
    multiply,
    multiply_base,
)

SECRET_BYTES = 32
SHARE_BYTES = 32


def new_secret() -> bytes:
    """Return a random secret that :func:`split` can share."""
    return (secrets.randbelow(ORDER - 1) + 1).to_bytes(SECRET_BYTES, "big")


def public(secret: bytes) -> bytes:
    """Return the point that commits to a secret without revealing it."""
    return compress(multiply_base(int.from_bytes(secret, "big")))


@dataclass(frozen=True)
class Commitments:
    """A dealer's commitments to the coefficients of its polynomial."""

    points: tuple[Point, ...]

    @classmethod
    def from_bytes(cls, data: bytes, threshold: int, what: str) -> Commitments:
        """Read one point per coefficient; ``what`` names them in an error."""
        size = POINT_BYTES
        parts = [data[i * size : (i + 1) * size] for i in range(threshold)]
        return cls(tuple(decompress(part, f"{what}: commitment") for part in parts))

    def allow(self, share: bytes, x: int) -> bool:
        """Tell whether ``share`` is the value of the dealer's polynomial at ``x``."""
        number = int.from_bytes(share, "big")
        if len(share) != SHARE_BYTES or number >= ORDER:
            return False
        expected = ZERO
        for point in reversed(self.points):
            expected = add(multiply(expected, x), point)
        return equal(multiply_base(number), expected)

    def are_of(self, secret: bytes) -> bool:
        """Tell whether ``secret`` is the number that the dealer shared."""
        # Both sides are multiplied by eight, so that a point of small order that a dealer may
        # have added makes no difference.
        own = multiply_base(int.from_bytes(secret, "big"))
        return equal(multiply(own, 8), multiply(self.points[0], 8))


def split(secret: bytes, threshold: int, points: int) -> tuple[list[bytes], bytes]:
    """Return the shares at x = 1..``points`` and the commitments to them.

    The shares are the values of a random polynomial of degree ``threshold - 1`` whose constant
    term is the secret; fewer than ``threshold`` values say nothing about it.
    """
    number = int.from_bytes(secret, "big")
    if len(secret) != SECRET_BYTES or not 0 < number < ORDER:
        raise ValueError("a secret is a number below the order of the curve")
    if not 1 <= threshold <= points:
        raise ValueError(f"threshold {threshold} must be between 1 and {points}")
    coefficients = [number, *(secrets.randbelow(ORDER) for _ in range(threshold - 1))]
    shares = [_evaluate(coefficients, x).to_bytes(SHARE_BYTES, "big") for x in range(1, points + 1)]
    return shares, b"".join(compress(multiply_base(c)) for c in coefficients)


def combine(shares: Mapping[int, bytes]) -> bytes:
    """Interpolate the secret from shares keyed by their point x (exactly ``threshold`` of them).

    Wrong shares give a wrong secret; the caller checks it.
    """
    total = 0
    for x, share in shares.items():
        numerator = denominator = 1
        for other in shares:
            if other != x:
                numerator = numerator * other % ORDER
                denominator = denominator * (other - x) % ORDER
        total += int.from_bytes(share, "big") * numerator * pow(denominator, -1, ORDER)
    return (total % ORDER).to_bytes(SECRET_BYTES, "big")


def _evaluate(coefficients: Sequence[int], x: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % ORDER
    return value
