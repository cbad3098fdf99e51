"""Refuse numbers that no Gram can have."""


def require_positive(value: int, what: str) -> int:
    """Return ``value``, a count; refuse one below 1."""
    if value < 1:
        raise ValueError(f"{what} of a Gram must be at least 1, got {value}")
    return int(value)


def require_nonnegative(factor: float) -> float:
    """Return ``factor``, a multiplier of a Gram; refuse one that is negative or not finite."""
    if not 0.0 <= factor < float("inf"):
        raise ValueError(f"a Gram can be scaled by a finite factor ≥ 0 only, got {factor}")
    return float(factor)


def require_unit(alpha: float) -> float:
    """Return ``alpha``, a share; refuse one outside [0, 1]."""
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha must lie in [0, 1], got {alpha}")
    return float(alpha)
