"""What a reply must be made of, and so how large it can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from hfedatm.base.settings import Settings
from hfedatm_core.tensors import State

Tier = Literal["client", "station"]

ALLOWANCE = 256_000
"""Bytes of a reply besides its arrays: numbers, names, the failures of a station's clients."""
PER_ARRAY = 256
"""Bytes of an array besides its numbers: the header, its name."""
MOST_ROWS = 2**40
"""Layer inputs that one client's Gram can be the mean of; the sum over a million fits 64 bits."""
_GRAM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


def lowered(most_bytes: int, settings: Settings) -> int:
    """Return a limit, or the one the settings give if that is lower."""
    given = settings.max_reply_mb
    return int(min(most_bytes, given * 1e6)) if given else most_bytes


def _nothing(metrics: Mapping[str, float]) -> None:
    return None


@dataclass(frozen=True)
class Expected:
    """What a reply must be made of; whatever differs is refused before it takes memory.

    Parameters
    ----------
    settings
        The run's settings.
    tier
        Who replies.
    arrays
        Names, shapes and types of the tensors; empty when the reply has none.
    record
        The name these tensors travel under.
    layers
        Layers whose Gram the reply must have, with their widths.
    needed
        Numbers it must report.
    check
        Raises ``ValueError`` for reported numbers that cannot be true.
    together
        Clients that the reply may stand for: those of a station, or of a secure sum.
    secure
        Whether it is a secure sum, which tells its clients and their bytes among its numbers.
    """

    settings: Settings
    tier: Tier
    arrays: State = field(default_factory=dict)
    record: str = "model"
    layers: Mapping[str, int] = field(default_factory=dict)
    needed: tuple[str, ...] = ()
    check: Callable[[Mapping[str, float]], None] = _nothing
    together: int = 1
    secure: bool = False

    @property
    def most_examples(self) -> int:
        """Examples that the reply may claim."""
        return self.settings.max_examples * self.together

    @property
    def most_rows(self) -> int:
        """Layer inputs that a Gram of it may claim to be the mean of."""
        return MOST_ROWS * self.together

    @property
    def gram_dtype(self) -> str:
        """Type of the Grams; a station writes those of a secure sum itself."""
        return "float32" if self.secure else self.settings.gram_dtype

    @property
    def most_bytes(self) -> int:
        """Bytes that an honest reply can have; ``max-reply-mb`` may lower it."""
        arrays = sum(
            t.numel() * t.element_size() + PER_ARRAY + len(n) for n, t in self.arrays.items()
        )
        grams = sum(self._gram(width) + len(name) for name, width in self.layers.items())
        return lowered(arrays + grams + ALLOWANCE, self.settings)

    def _gram(self, width: int) -> int:
        each = _GRAM_BYTES[self.gram_dtype]
        if width > self.settings.gram_max_dim:
            return self.settings.gram_rank * width * each + 8 * width + 5 * PER_ARRAY
        return width * (width + 1) // 2 * each + 3 * PER_ARRAY
