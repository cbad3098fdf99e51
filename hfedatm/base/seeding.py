"""Random numbers that depend on what is computed, never on when or where.

Every random choice of a run is drawn from a seed made of the run's seed and the names of the thing
decided (round, station, client). Results are then the same whatever order nodes are served in.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch


def derive(seed: int, *parts: int | str) -> int:
    """Return a 32-bit seed for one purpose."""
    words = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in parts]
    state = np.random.SeedSequence([seed, *words]).generate_state(1, np.uint32)
    return int(state[0])


def generator(seed: int, *parts: int | str) -> torch.Generator:
    """Return a CPU generator for one purpose."""
    return torch.Generator().manual_seed(derive(seed, *parts))


def seed_torch(seed: int, device: torch.device | None = None) -> None:
    """Seed torch's global generator, and that of the device unless it is the CPU.

    ``torch.manual_seed`` also prepares every kind of device for a seed to come, which costs a small
    client more than all its other messages together.
    """
    if device is None or device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
