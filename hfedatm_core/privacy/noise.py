"""Gaussian noise for symmetric matrices, from a cryptographic source."""

from __future__ import annotations

import hashlib
import logging
import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hfedatm_core.privacy.keystream import Keystream

_LOGGER = logging.getLogger(__name__)
_CHUNK = 1 << 20


class NoiseSource:
    """Standard normal numbers that cannot be predicted or replayed.

    The bytes come from ChaCha20 under a key of the operating system's generator; Box-Muller turns
    them into normal numbers in float64. Each number is the scaled sum of four, which removes the
    gaps between floating-point normals that a precise attacker could exploit (Holohan and Braghin
    2021).

    Parameters
    ----------
    insecure_dp_seed
        Makes the noise reproducible. Anyone who knows the seed can subtract the noise, so this
        protects nobody; it is for tests and reproductions only, and a warning is logged.
    context
        Names the sender and the release, for example ``"client-3/round-7"``. It only matters with
        a seed: the difference of two releases with the same noise would contain no noise.
    """

    def __init__(self, insecure_dp_seed: int | None = None, context: str = "") -> None:
        if insecure_dp_seed is None:
            self._stream = Keystream()
        else:
            _LOGGER.warning(
                "insecure-dp-seed = %d: the privacy noise can be computed by anyone who knows the "
                "seed. Never use it with data that needs protection.",
                insecure_dp_seed,
            )
            text = f"hfedatm-dp-noise/{insecure_dp_seed}/{context}"
            self._stream = Keystream(hashlib.sha256(text.encode()).digest())

    def normal(self, count: int) -> npt.NDArray[np.float64]:
        """Return ``count`` independent N(0, 1) numbers."""
        out = np.empty(count)
        for start in range(0, count, _CHUNK):
            part = out[start : start + _CHUNK]
            four = self._box_muller(4 * part.size).reshape(4, part.size)
            part[:] = four.sum(axis=0) / 2
        return out

    def uniform(self, count: int) -> npt.NDArray[np.float64]:
        """Return ``count`` independent uniform numbers in (0, 1)."""
        bits = self._stream.words(count) >> np.uint64(12)
        return np.asarray((bits + 0.5) * 2.0**-52, dtype=np.float64)

    def _box_muller(self, count: int) -> npt.NDArray[np.float64]:
        pairs = (count + 1) // 2
        uniform = self.uniform(2 * pairs)
        radius = np.sqrt(-2 * np.log(uniform[:pairs]))
        angle = 2 * np.pi * uniform[pairs:]
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def triangle_noise(dim: int, std: float, source: NoiseSource) -> Tensor:
    """Return N(0, std^2) for the entries on and above the diagonal, packed row by row (float64).

    These entries determine a symmetric matrix, and as a vector they are never longer than the
    matrix in Frobenius norm. Noising exactly these with the Frobenius sensitivity is therefore a
    Gaussian mechanism; mirroring them below the diagonal is post-processing.
    """
    if not (math.isfinite(std) and std >= 0):
        raise ValueError(f"the noise's standard deviation must be finite and >= 0, got {std}")
    return torch.from_numpy(source.normal(dim * (dim + 1) // 2) * std)


def shared_noise_std(std: float, honest_survivors: int) -> float:
    r"""Return the noise level per client that gives a secure sum noise of at least ``std``.

    Independent noise of :math:`std/\sqrt{t}` from :math:`t` clients sums to ``std``. Count only the
    clients that are sure to be honest *and* to survive the round: the threshold of the secure
    aggregation less the clients that may collude with the station, which could subtract their own
    noise. More survivors only add noise. If fewer clients are honest, the guarantee weakens in the
    same proportion.
    """
    if honest_survivors < 1:
        raise ValueError(f"at least one honest client must survive, got {honest_survivors}")
    return std / math.sqrt(honest_survivors)
