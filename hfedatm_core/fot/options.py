"""The options of the alignment, one object that is passed from `merge` to the assignment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Solver = Literal["sinkhorn", "exact"]
Scope = Literal["conv", "all"]


@dataclass(frozen=True)
class AlignmentOptions:
    """Options of filter-wise optimal transport.

    Parameters
    ----------
    solver
        ``"sinkhorn"``: assignment on the entropic plan; ``"exact"``: on the cost itself.
    scope
        ``"conv"`` aligns channels of convolutions, ``"all"`` also the hidden units of Linear
        layers.
    reg, iterations
        Sinkhorn's regularisation and number of iterations.
    margin
        A group is permuted only if this lowers its cost by more than this share of ⟨I, D⟩.

    Raises
    ------
    ValueError
        An option is invalid.
    """

    solver: Solver = "sinkhorn"
    scope: Scope = "conv"
    reg: float = 0.05
    iterations: int = 25
    margin: float = 0.0

    def __post_init__(self) -> None:
        """Check the options."""
        for name, value, known in (
            ("solver", self.solver, get_args(Solver)),
            ("scope", self.scope, get_args(Scope)),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")
        if not (self.reg > 0 and self.iterations >= 1 and 0 <= self.margin < 1):
            raise ValueError(
                "reg must be positive, iterations at least 1 and margin in [0, 1), "
                f"not {self.reg}, {self.iterations} and {self.margin}"
            )


DEFAULT = AlignmentOptions()
