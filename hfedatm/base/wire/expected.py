"""The required content of a reply, and the size limit that follows from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from hfedatm.base.class_profiles import ProfileShapes
from hfedatm.base.settings import Settings
from hfedatm_core.tensors import State

Tier = Literal["client", "station"]

ALLOWANCE = 256_000
"""Most bytes of a reply besides its arrays: numbers, names, failures of a station's clients."""
PER_ARRAY = 256
"""Most bytes of an array besides its numbers: the header, its name."""
MOST_ROWS = 2**40
"""Most layer inputs in one client's Gram; the sum over a million clients fits 64 bits."""
_GRAM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


def lowered(most_bytes: int, settings: Settings) -> int:
    """Return the lower of a limit and the limit in the settings."""
    given = settings.max_reply_mb
    return int(min(most_bytes, given * 1e6)) if given else most_bytes


def _nothing(metrics: Mapping[str, float]) -> None:
    return None


@dataclass(frozen=True)
class Expected:
    """The required content of a reply; other content is refused before it takes memory.

    Parameters
    ----------
    settings
        The run's settings.
    tier
        The tier that replies.
    arrays
        Names, shapes and types of the tensors; empty when the reply has none.
    record
        The name of the record that holds these tensors.
    layers
        Layers whose Gram the reply must have, with their widths.
    needed
        Numbers that the reply must report.
    check
        Raises ``ValueError`` for reported numbers that cannot be true.
    together
        Most clients that the reply may combine: those of a station, or of a secure sum.
    secure
        Whether the reply is a secure sum, which reports its clients and their bytes as numbers.
    shrunk
        Whether a station has shrunk its Grams.
    height
        Levels of stations up to the sender: 1 for a station with clients. Every level rounds Grams.
    profiles
        The class profiles that the reply must have.
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
    shrunk: bool = True
    height: int = 1
    profiles: ProfileShapes | None = None

    @property
    def most_examples(self) -> int:
        """Most examples that the reply may claim."""
        return self.settings.max_examples * self.together

    @property
    def graded(self) -> bool:
        """Whether an evaluation adds up scores between 0 and 1 instead of right answers."""
        return self.settings.task != "classification"

    @property
    def most_rows(self) -> int:
        """Most layer inputs that a Gram of the reply may claim to be the mean of."""
        return MOST_ROWS * self.together

    @property
    def gram_dtype(self) -> str:
        """Type of the Grams; the Grams of a secure sum are written by the station itself."""
        return "float32" if self.secure else self.settings.gram_dtype

    @property
    def alpha(self) -> float:
        """Shrinkage of a Gram on arrival: a station shrinks the mean of its clients."""
        return self.settings.alpha if self.tier == "station" and self.shrunk else 1.0

    @property
    def most_bytes(self) -> int:
        """Most bytes of an honest reply; ``max-reply-mb`` may lower the limit."""
        profiles = self.profiles.template() if self.profiles else {}
        arrays = sum(
            t.numel() * t.element_size() + PER_ARRAY + len(n)
            for some in (self.arrays, profiles)
            for n, t in some.items()
        )
        grams = sum(self._gram(width) + len(name) for name, width in self.layers.items())
        return lowered(arrays + grams + ALLOWANCE, self.settings)

    def _gram(self, width: int) -> int:
        each = _GRAM_BYTES[self.gram_dtype]
        if width > self.settings.gram_max_dim:
            return self.settings.gram_rank * width * each + 8 * width + 5 * PER_ARRAY
        return width * (width + 1) // 2 * each + 3 * PER_ARRAY
