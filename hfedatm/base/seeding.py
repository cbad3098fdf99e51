"""Random numbers that depend on the purpose of a computation, never on its time or machine.

Every random choice of a run is drawn from a seed made of the run's seed and the names that identify
the choice (round, station, client). Results then do not depend on the order in which nodes are
served.
"""

from __future__ import annotations

import zlib
from threading import Lock

import numpy as np
import torch

torch_turn = Lock()
"""Lock for threads that draw from torch's random state, which is global."""


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

    ``torch.manual_seed`` also prepares every kind of device for seeding, which costs a small client
    more than all its other messages together.
    """
    if device is None or device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
