"""The group of edwards25519 (RFC 8032), for commitments against which numbers can be checked.

Nothing here runs in constant time. The secrets live for one sum, on the machine of their owner.
"""

from __future__ import annotations

from functools import cache

from hfedatm_core.secagg.errors import SecureAggregationError

ORDER = 2**252 + 27742317777372353535851937790883648493
"""Order of the base point; secrets and shares are numbers modulo it."""

POINT_BYTES = 32
Point = tuple[int, int, int, int]
"""X, Y, Z and T with x = X/Z, y = Y/Z, xy = T/Z."""

_P = 2**255 - 19
_D = -121665 * pow(121666, -1, _P) % _P
_ROOT = pow(2, (_P - 1) // 4, _P)
ZERO: Point = (0, 1, 1, 0)


def add(one: Point, other: Point) -> Point:
    """Return the sum of two points."""
    x1, y1, z1, t1 = one
    x2, y2, z2, t2 = other
    a, b = (y1 - x1) * (y2 - x2) % _P, (y1 + x1) * (y2 + x2) % _P
    c, d = 2 * t1 * t2 * _D % _P, 2 * z1 * z2 % _P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def multiply(point: Point, number: int) -> Point:
    """Return ``number`` times a point."""
    total = ZERO
    for bit in bin(number)[2:]:
        total = add(total, total)
        if bit == "1":
            total = add(total, point)
    return total


def multiply_base(number: int) -> Point:
    """Return ``number`` times the base point."""
    total = ZERO
    for row, digit in zip(_base_multiples(), (number % ORDER).to_bytes(32, "little"), strict=True):
        total = add(add(total, row[0][digit & 15]), row[1][digit >> 4])
    return total


def equal(one: Point, other: Point) -> bool:
    """Tell whether two points are the same."""
    return not (
        (one[0] * other[2] - other[0] * one[2]) % _P or (one[1] * other[2] - other[1] * one[2]) % _P
    )


def compress(point: Point) -> bytes:
    """Return the 32 bytes of a point."""
    x, y, z, _ = point
    inverse = pow(z, -1, _P)
    x, y = x * inverse % _P, y * inverse % _P
    return (y | (x & 1) << 255).to_bytes(POINT_BYTES, "little")


def decompress(data: bytes, what: str) -> Point:
    """Read 32 bytes; ``what`` names them in an error."""
    number = int.from_bytes(data, "little")
    y, sign = number & ((1 << 255) - 1), number >> 255
    square = (y * y - 1) * pow(_D * y * y + 1, -1, _P) % _P
    x = pow(square, (_P + 3) // 8, _P)
    if (x * x - square) % _P:
        x = x * _ROOT % _P
    if len(data) != POINT_BYTES or y >= _P or (x * x - square) % _P or (x == 0 and sign):
        raise SecureAggregationError(f"{what} is not a point of the curve")
    if x & 1 != sign:
        x = _P - x
    return x, y, 1, x * y % _P


@cache
def _base_multiples() -> list[tuple[list[Point], list[Point]]]:
    """Return, per byte of a number, the base point's multiples for its lower and upper half."""
    y = (4 * pow(5, -1, _P) % _P).to_bytes(POINT_BYTES, "little")
    step, rows = decompress(y, "the base point"), []
    for _ in range(64):
        row = [ZERO]
        for _ in range(15):
            row.append(add(row[-1], step))
        rows.append(row)
        step = add(row[-1], step)
    return list(zip(rows[::2], rows[1::2], strict=True))
